"""What a user waits for after typing the command is measured in a process of its own."""

import argparse
from pathlib import Path

import pytest
from tiny_checkpoint import tiny_checkpoint

from fastdecode import benchmark
from fastdecode.startup import measure_startup
from models.errors import InputError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder)
    return folder


def arguments(checkpoint: Path, *options: str) -> argparse.Namespace:
    return benchmark.parse(["--model", str(checkpoint), "--dtype=float32", "--threads=1", *options])


def test_a_fresh_process_is_measured_to_its_first_token(checkpoint):
    stages = measure_startup(arguments(checkpoint, "--no-compile"), checkpoint)
    assert list(stages) == ["load_s", "compile_s", "first_token_s", "total_s"]
    assert stages["total_s"] > stages["load_s"] + stages["first_token_s"] > 0


def test_what_a_fresh_process_refuses_is_said_in_its_words(checkpoint, tmp_path):
    with pytest.raises(InputError, match="^--dtype should be auto"):
        measure_startup(arguments(checkpoint, "--dtype=int3", "--no-compile"), tmp_path)


@pytest.mark.slow
def test_compilation_starts_from_the_empty_cache_that_was_given(checkpoint, tmp_path):
    stages = measure_startup(arguments(checkpoint), tmp_path)
    assert list(stages) == ["load_s", "compile_s", "first_token_s", "total_s"]
    assert stages["total_s"] > stages["load_s"] + stages["compile_s"] + stages["first_token_s"] > 0
    assert any(tmp_path.rglob("*.so"))


def test_a_process_that_breaks_down_is_named_with_its_last_words(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise SystemError('torch is broken here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InputError, match="exit code 1 .*torch is broken here.*--no-startup"):
        measure_startup(arguments(checkpoint, "--no-compile"), tmp_path)
