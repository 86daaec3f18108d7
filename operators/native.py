"""C++ operators of our own: built on first use by the compiler that torch.compile calls, kept, and loaded into torch.

A library is named by all that it depends on, ends with a checksum, and appears whole or not at all, so that processes
may share the folder and one that is killed leaves nothing behind.
"""

import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

DIGEST_BYTES = 32
EACH_CPU = Path(__file__).with_name("each_cpu.h")  # what operators of other packages may include, too


def cache_folder() -> Path:
    """Where built libraries are kept: in torch's compile cache (TORCHINDUCTOR_CACHE_DIR), beside compiled programs."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "fastdecode"


def load(sources: Sequence[Path], folder: Path | None = None) -> Path | None:
    """Load the library of `sources` (the first includes the rest) into torch, built first if it is missing or damaged.

    Returns its file in `folder` (None: the user's cache), or None where it cannot be built or loaded. To be called once
    in a process: torch ends one that registers an operator twice, which a copy in another folder would do.
    """
    library = built(sources, folder)
    try:
        if library is not None:
            torch.ops.load_library(library)
    except OSError:  # a library that does not fit
        return None
    return library


def built(sources: Sequence[Path], folder: Path | None = None) -> Path | None:
    """The library's file, built if it is missing or damaged; None where that cannot be done. Loads nothing."""
    command = build_command(sources[0])
    if command is None:
        return None
    library = (folder or cache_folder()) / library_name(sources, command)
    try:
        if not intact(library):
            build(command, library)
    except (OSError, subprocess.SubprocessError):  # no such folder, a compiler that cannot
        return None
    return library


def library_name(sources: Sequence[Path], command: list[str]) -> str:
    """The name of what `command` builds, by a SHA-256 over what that depends on: compiler, sources, torch, CPU."""
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sources]
    key = hashlib.sha256(repr((command, torch.__version__, platform.machine(), digests)).encode())
    return f"{sources[0].stem}-{key.hexdigest()[:32]}.so"


def build_command(source: Path) -> list[str] | None:
    """The compiler that torch.compile would call, and its arguments up to `-o`; None if there is none."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        compiler = get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError, OSError):
        return None
    torch_folder = Path(torch.__file__).parent
    flags = ["-O3", "-std=c++17", "-ffp-contract=fast", "-fPIC", "-shared", "-w"]
    link = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu"]
    return [compiler, *flags, f"-I{torch_folder / 'include'}", str(source.resolve()), *link]


def build(command: list[str], library: Path) -> None:
    """Run `command`, and put what it makes at `library`, whole or not at all. Several processes may do so at once."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        draft = Path(scratch) / library.name
        subprocess.run([*command, "-o", str(draft)], check=True, capture_output=True)
        with open(draft, "r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
        os.replace(draft, library)


def intact(library: Path) -> bool:
    """Whether `library` is there, and ends with the SHA-256 of what comes before. Loading half a library can crash."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]
