"""Quantization that is killed, or runs out of disk: the output is whole or as it was, and the next run works."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoint import tiny_checkpoint

from fastdecode.options import run_command
from quantize.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}

# The quantization script with a limit on the size of a file, if any, that kills itself in mid-file if asked to.
SCRIPT = """
import os, resource, signal, sys
limit, die = int(sys.argv[1]), sys.argv[2] == "die"
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from fastdecode.options import run_command
from quantize import __main__ as script
from quantize import pipeline
quantize, count = pipeline.quantize_matrix, 0
def counting(*args):
    global count
    count += 1
    if die and count == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return quantize(*args)
pipeline.quantize_matrix = counting
sys.exit(run_command(script.main, sys.argv[3:]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder, **SIZES)
    return folder


def in_process(folder, out, limit=0, die=False):
    command = [sys.executable, "-c", SCRIPT, str(limit), "die" if die else "live", str(folder), "-o", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, "--method", "rtn"], capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.parametrize("before", [False, True], ids=["new", "over an older one"])
def test_killed_in_the_middle_the_output_is_as_it_was_and_the_next_run_sweeps_up(folder, tmp_path, before):
    out = tmp_path / "out"
    if before:
        assert run_command(main, [str(folder), "-o", str(out), "--bits", "8", "--method", "rtn"]) == 0
    content = {file.name: file.read_bytes() for file in out.iterdir()} if before else None
    assert in_process(folder, out, die=True).returncode == -signal.SIGKILL
    assert (content is None and not out.exists()) or content == {f.name: f.read_bytes() for f in out.iterdir()}
    assert run_command(main, [str(folder), "-o", str(out), "--method", "rtn"]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(folder, tmp_path):
    ran = in_process(folder, tmp_path / "out", limit=30_000)
    assert ran.returncode == 2 and ran.stdout == "" and "Traceback" not in ran.stderr
    assert "cannot be written" in ran.stderr.strip().splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
    assert in_process(folder, tmp_path / "out").returncode == 0
