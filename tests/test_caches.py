"""Caches that processes share: killed while writing, on a full disk, two at once, written by another torch."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fastdecode import program_cache, tree_choice
from fastdecode.tree_choice import Choice, read_choice, store_choice
from fastdecode.tuner import Expectation
from operators import native

ROOT = Path(__file__).resolve().parents[1]
KEY = {"model": "a"}
CHOICE = Choice("chain:2", (Expectation("plain", 1, 1.0, 0.0, 2.0), Expectation("chain:2", 3, 2.0, 0.1, 2.0)))

# Stores programs, or choices, again and again until it is killed; says when the first one is there.
VICTIM = """
import sys
from pathlib import Path
from fastdecode import program_cache, tree_choice
from fastdecode.tuner import Expectation
kind, folder = sys.argv[1], Path(sys.argv[2])
class Program:
    def save_compiled_function(self, file):
        with open(file, "wb") as out:
            for _ in range(200):
                out.write(b"x" * 5000)
                out.flush()
rows = (Expectation("plain", 1, 1.0, 0.0, 2.0), Expectation("chain:2", 3, 2.0, 0.1, 2.0))
while True:
    if kind == "programs":
        program_cache._store(Program(), folder / "program")
    else:
        tree_choice.store_choice(folder, {"model": "a"}, tree_choice.Choice("chain:2", rows))
    print("stored", flush=True)
"""


def start(kind: str, folder: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", VICTIM, kind, str(folder)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kind", ["programs", "choices"])
def test_two_processes_that_are_killed_while_they_store_leave_whole_files(tmp_path, kind):
    both = [start(kind, tmp_path), start(kind, tmp_path)]
    for process in both:
        assert process.stdout.readline() == "stored\n"
    time.sleep(0.05)
    for process in both:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    if kind == "programs":
        assert (tmp_path / "program").read_bytes() == b"x" * 1_000_000
    else:
        assert read_choice(tmp_path, KEY) == CHOICE
    store_choice(tmp_path, KEY, CHOICE)  # what they left behind is in nobody's way
    assert read_choice(tmp_path, KEY) == CHOICE


class FullDisk:
    """A program that does not fit on the disk."""

    def save_compiled_function(self, file):
        Path(file).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_program_that_was_there(tmp_path):
    (tmp_path / "program").write_bytes(b"whole")
    program_cache._store(FullDisk(), tmp_path / "program")
    assert [p.name for p in tmp_path.iterdir()] == ["program"]
    assert (tmp_path / "program").read_bytes() == b"whole"


def test_a_full_disk_leaves_the_choice_that_was_there(tmp_path, monkeypatch):
    store_choice(tmp_path, KEY, CHOICE)

    def full(self, text, **options):
        with open(self, "w") as file:
            file.write(text[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tree_choice.Path, "write_text", full)
    store_choice(tmp_path, KEY, Choice("plain", CHOICE.rows))
    monkeypatch.undo()
    assert read_choice(tmp_path, KEY) == CHOICE and len(list(tmp_path.iterdir())) == 1


def test_a_library_that_the_disk_has_no_room_for_is_none_and_is_built_later(tmp_path):
    source = tmp_path / "tiny.cpp"
    source.write_text("")
    folder = tmp_path / "library"

    def command(script: str) -> list[str]:
        return ["sh", "-c", f"ulimit -f 1; {script}", "sh"]  # blocks of 512 or 1024 bytes

    library = folder / "tiny.so"
    with pytest.raises(subprocess.CalledProcessError):
        native.build(command('head -c 100000 /dev/zero > "$2"'), library)
    assert list(folder.iterdir()) == []
    native.build(command('echo whole > "$2"'), library)
    assert native.intact(library) and [p.name for p in folder.iterdir()] == ["tiny.so"]


class Weight(torch.nn.Module):
    def forward(self, rows):
        return rows


def test_another_torch_reads_neither_programs_nor_libraries_of_this_one(tmp_path, monkeypatch):
    source = ROOT / "quantize" / "cpu.cpp"
    ours = (
        program_cache.program_key(Weight(), "forward", torch.zeros(1)),
        native.library_name([source], ["g++"]),
    )
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    theirs = (
        program_cache.program_key(Weight(), "forward", torch.zeros(1)),
        native.library_name([source], ["g++"]),
    )
    assert not set(ours) & set(theirs)


def test_a_choice_under_the_right_name_but_made_by_another_torch_is_none(tmp_path):
    key = {"model": "a", "torch": "2.13.0"}
    store_choice(tmp_path, key, CHOICE)
    (file,) = tmp_path.iterdir()
    stored = json.loads(file.read_text())
    stored["key"]["torch"] = "2.99.0"
    file.write_text(json.dumps(stored))
    assert read_choice(tmp_path, key) is None
    store_choice(tmp_path, key, CHOICE)
    assert read_choice(tmp_path, key) == CHOICE
