"""Programs on disk: a second start uses the first one's, and a damaged or foreign file is never trusted."""

import pytest
import torch
from torch import nn

from fastdecode import program_cache
from fastdecode.program_cache import available, compile_or_load, program_key

pytestmark = pytest.mark.skipif(not available(), reason="this torch cannot store compiled programs")


class Scale(nn.Module):
    def __init__(self, factor: float = 3.0, size: int = 4):
        super().__init__()
        self.factor = factor
        self.register_buffer("weight", torch.arange(float(size)))

    def run(self, rows):
        return self.weight.sum() * self.factor + rows.sum()


@pytest.fixture
def compiles(monkeypatch):
    """Counts compilations."""
    counted = []
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: (counted.append(1), compile_(*args, **kwargs))[1])
    return counted


def rows(n=8):
    example = torch.arange(n)
    torch._dynamo.mark_dynamic(example, 0)
    return example


def test_a_stored_program_is_used_and_sees_the_present_tensors(tmp_path, compiles):
    first = compile_or_load(Scale().run, rows(), tmp_path)
    assert first(rows()).item() == 18 + 28 and len(compiles) == 1
    module = Scale()
    module.weight.fill_(1.0)
    second = compile_or_load(module.run, rows(), tmp_path)
    assert len(compiles) == 1
    assert second(rows(8)).item() == 12 + 28 and second(rows(100)).item() == 12 + 4950
    module.weight.fill_(2.0)
    assert second(rows(8)).item() == 24 + 28
    assert [p.name for p in tmp_path.iterdir()] == [program_key(module, "run", rows())]


@pytest.mark.parametrize("content", [b"", b"not a pickle", None])
def test_a_damaged_file_is_replaced(tmp_path, compiles, content):
    compile_or_load(Scale().run, rows(), tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    program = compile_or_load(Scale().run, rows(), tmp_path)
    assert program(rows()).item() == 46 and len(compiles) == 2
    assert len(file.read_bytes()) > len(whole) // 2
    compile_or_load(Scale().run, rows(), tmp_path)
    assert len(compiles) == 2


def test_the_key_changes_with_everything_that_the_code_depends_on(monkeypatch):
    keys = [program_key(Scale(), "run", rows())]
    keys.append(program_key(Scale(factor=2.0), "run", rows()))
    keys.append(program_key(Scale(size=5), "run", rows()))
    keys.append(program_key(Scale().double(), "run", rows()))
    keys.append(program_key(Scale(), "other", rows()))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9")
        keys.append(program_key(Scale(), "run", rows()))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        keys.append(program_key(Scale(), "run", rows()))
    assert len(set(keys)) == len(keys)
    assert program_key(Scale(), "run", rows()) == keys[0]


def test_values_of_tensors_do_not_change_the_key():
    module = Scale()
    before = program_key(module, "run", rows())
    module.weight.fill_(9.0)
    assert program_key(module, "run", rows()) == before


def test_a_folder_that_cannot_be_written_is_only_slower(tmp_path, compiles):
    (tmp_path / "file").write_text("in the way")
    program = compile_or_load(Scale().run, rows(), tmp_path / "file" / "programs")
    assert program(rows()).item() == 46


def test_nothing_half_written_stays_when_saving_fails(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(program_cache.os, "replace", fail)
    program = compile_or_load(Scale().run, rows(), tmp_path)
    assert program(rows()).item() == 46
    assert list(tmp_path.iterdir()) == []
