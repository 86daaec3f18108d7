"""A first answer that does not wait for the compiler says what later ones say, and the program is there for them."""

import shutil

import pytest
import torch
from tiny_checkpoint import tiny_checkpoint

from fastdecode import load
from fastdecode.background_compile import compile_in_background, same_bits
from fastdecode.sampling import SamplingOptions
from operators import native
from quantize import cpu

ARGUMENTS = {"model": "smollm2-135m", "draft": "none", "max_seq_len": 256}
PROMPT = "Why is the sky blue?"


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A compile cache that holds nothing but the operators."""
    if cpu.operators() is None:
        pytest.skip("no C++ compiler")
    built = list(native.cache_folder().glob("*.so"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "fastdecode").mkdir()
    for library in built:
        shutil.copy(library, tmp_path / "fastdecode")
    return tmp_path / "fastdecode"


@pytest.mark.slow
def test_the_first_answer_is_uncompiled_and_the_next_one_compiled_and_the_same(empty_cache):
    decoder = load(**ARGUMENTS)
    compiler = compile_in_background(decoder, SamplingOptions(), ARGUMENTS)
    assert compiler.postpones("greedy") and not compiler.postpones("sampled")
    first = decoder.generate(PROMPT, max_new_tokens=48)
    assert "greedy" not in decoder.compile_seconds
    assert compiler.wait()
    assert [file.name.split("-")[0] for file in empty_cache.iterdir() if file.suffix not in (".so", ".lock")] == [
        "greedy"
    ]
    second = decoder.generate(PROMPT, max_new_tokens=48)
    assert "greedy" in decoder.runner.warm and second.token_ids == first.token_ids
    assert compile_in_background(decoder, SamplingOptions(), ARGUMENTS) is None  # nothing is left to do


@pytest.mark.slow
def test_where_the_other_process_fails_answers_go_on_uncompiled(empty_cache):
    decoder = load(**ARGUMENTS)
    compiler = compile_in_background(decoder, SamplingOptions(), ARGUMENTS | {"model": "no/such/folder"})
    assert not compiler.wait() and compiler.postpones("greedy")
    assert decoder.generate(PROMPT, max_new_tokens=4).stats["new_tokens"] == 4
    assert not decoder.compile_seconds and not list(empty_cache.glob("greedy*[0-9a-f]"))


@pytest.mark.slow
def test_what_would_not_have_the_same_bits_is_compiled_first(empty_cache):
    decoder = load(**ARGUMENTS)
    assert compile_in_background(decoder, SamplingOptions(temperature=1.0), ARGUMENTS) is None
    assert not decoder.postpones("sampled") and not decoder.postpones("greedy")


def test_floats_are_not_the_same_bits(tmp_path):
    tiny_checkpoint(tmp_path, "llama")
    assert not same_bits(load(tmp_path, dtype="float32", device="cpu", compile=False, draft="none").model)


def test_a_norm_of_packed_networks_is_the_library_s_but_for_its_last_bits():
    from quantize.linear import Norm

    if cpu.operators() is None:
        pytest.skip("no C++ compiler")
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        norm = torch.nn.RMSNorm(80, 1e-5).to(dtype)
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
        x = torch.randn(2, 3, 80).to(dtype)
        with torch.no_grad():
            y = Norm(norm)(x)
            assert torch.allclose(y, norm(x), rtol=tolerance, atol=tolerance) and y.dtype == dtype
            assert torch.equal(Norm(norm)(x[:1, 1:2]), y[:1, 1:2])  # each row stands alone
            assert torch.equal(torch.compile(Norm(norm))(x), y)
        half = torch.randn(2, 80).half()
        assert torch.equal(Norm(norm.half())(half), norm.half()(half))  # no operator of float16
