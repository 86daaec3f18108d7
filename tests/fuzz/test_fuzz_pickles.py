"""pytorch_model.bin of a head is read as tensors and nothing else: no byte of it runs code or gets past a sentence."""

import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutations import damaged, inputs, tally  # noqa: F401 - a fixture

from checkpoints.head_checkpoint import PICKLE, tensors_of
from models.errors import InputError

WEIGHTS = {"fc.weight": torch.zeros(4, 8), "layers.0.mlp.down_proj.weight": torch.ones(4, 4, dtype=torch.bfloat16)}


def saved(value, **options) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def use(folder):
    for tensor in tensors_of(folder).values():
        if tensor.decode:
            tensor.copy_to(torch.empty(tensor.shape))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_other_bytes(tmp_path, tally, zipped):  # noqa: F811
    raw = saved(WEIGHTS, _use_new_zipfile_serialization=zipped)

    @inputs(300)
    @given(st.one_of(damaged(raw), damaged(raw, 600)))
    def run(content):
        (tmp_path / PICKLE).write_bytes(content)
        tally.check(lambda: use(tmp_path))

    run()


class Malicious:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize("inner", [False, True])
def test_a_pickle_that_would_run_code_runs_none(tmp_path, inner):
    import os

    victim = tmp_path / "victim"
    for bomb in (Malicious(os.mkdir, str(victim)), Malicious(eval, f"__import__('os').mkdir({str(victim)!r})")):
        for content in (saved({"fc.weight": bomb} if inner else bomb), pickle.dumps({"fc.weight": bomb})):
            (tmp_path / PICKLE).write_bytes(content)
            with pytest.raises(InputError, match="holds more than tensors"):
                tensors_of(tmp_path)
            assert not victim.exists()


@pytest.mark.parametrize(
    "value",
    [torch.zeros(4, 8).to_sparse(), torch.zeros(4, 8, device="meta"),
     torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8), [torch.zeros(1)], 1, "x"],
    ids=["sparse", "meta", "quantized", "list", "number", "text"],
)  # fmt: skip
def test_what_is_no_plain_tensor_is_refused(tmp_path, value):
    (tmp_path / PICKLE).write_bytes(saved({"fc.weight": value}))
    with pytest.raises(InputError):
        tensors_of(tmp_path)
