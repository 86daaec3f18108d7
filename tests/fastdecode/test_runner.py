"""Compiled rounds: the same tokens as uncompiled ones, compiled once, and never a look at the host."""

import pytest
import torch
from test_decoder import forget_stop_tokens, plain_decoder, text_of
from tiny_checkpoint import tiny_checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastdecode import load
from fastdecode.runner import bucket_sizes, compiled
from fastdecode.sampling import SamplingOptions

HOST_READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select")


class NoHostCalls(TorchFunctionMode):
    """Raises on Python calls that read a tensor: some of them, like tolist, never reach the dispatcher."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("tolist", "item", "numpy", "__bool__", "__int__", "__float__"):
            raise AssertionError(f"host read: {function.__name__}")
        return function(*args, **(kwargs or {}))


class NoHostReads(TorchDispatchMode):
    """Raises where a tensor's value, or a shape that depends on values, would reach the host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in HOST_READS:
            raise AssertionError(f"host read: {function}")
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder, num_hidden_layers=2)
    return folder


@pytest.fixture(scope="module")
def compiled_decoder(folder):
    decoder = load(str(folder), dtype="float32", device="cpu", compile_cache=False)
    forget_stop_tokens(decoder)
    return decoder


def test_compiled_rounds_over_40_lengths_and_other_options_compile_nothing_new(folder, compiled_decoder):
    plain = plain_decoder(folder)
    sampling = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 1}
    for options in ({}, sampling):
        compiled_decoder.generate("warm", raw=True, max_new_tokens=2, **options)
    lengths = [1, 2, 31, 32, 33, 250, 254, 255, 256, 257, 511, 513, *range(5, 61, 2)]
    assert len(lengths) == 40
    with torch.compiler.set_stance("fail_on_recompile"):
        for n in lengths:
            options = {"raw": True, "max_new_tokens": 4}
            compiled = compiled_decoder.generate(text_of(n), **options)
            assert compiled.token_ids == plain.generate(text_of(n), **options).token_ids
        changes = {"temperature": 1.3, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 9, "repetition_penalty": 1.2}
        for changed in ({}, *({name: value} for name, value in changes.items())):
            options = {"raw": True, "max_new_tokens": 12, **sampling, **changed}
            compiled = compiled_decoder.generate("hello", **options)
            assert compiled.token_ids == plain.generate("hello", **options).token_ids


def test_compiled_answers_cross_buckets(folder, compiled_decoder):
    plain = plain_decoder(folder)
    compiled = compiled_decoder.generate(text_of(250), raw=True, max_new_tokens=300)
    assert compiled.token_ids == plain.generate(text_of(250), raw=True, max_new_tokens=300).token_ids


def test_a_second_start_compiles_nothing_and_says_the_same(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    options = {"raw": True, "max_new_tokens": 40}

    def answers():
        decoder = load(str(folder), dtype="float32", device="cpu")
        forget_stop_tokens(decoder)
        return [decoder.generate(text_of(n), **options).token_ids for n in (5, 240, 600)]

    first = answers()
    monkeypatch.setattr(torch, "compile", None)
    assert answers() == first
    plain = plain_decoder(folder)
    assert first == [plain.generate(text_of(n), **options).token_ids for n in (5, 240, 600)]


@pytest.mark.parametrize("stored", [True, False])
def test_decoders_of_two_models_compile_in_one_process(folder, tmp_path, monkeypatch, stored):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    tiny_checkpoint(tmp_path / "other", "llama-9-heads-on-3", rms_norm_eps=3e-5, num_hidden_layers=2)
    for model in (folder, tmp_path / "other", folder):
        decoder = load(str(model), dtype="float32", device="cpu", compile_cache=stored, max_seq_len=600)
        forget_stop_tokens(decoder)
        options = {"raw": True, "max_new_tokens": 12}
        expected = plain_decoder(model).generate("hello", **options).token_ids
        assert decoder.generate("hello", **options).token_ids == expected


def test_a_tenth_decoder_in_one_process_still_compiles():
    # torch.compile gives up on a function after 8 variants, unless each decoder's are kept apart.
    class Program:
        def __init__(self, n):
            self.shift = torch.ones(n)

        def run(self, x):
            return x + self.shift

    for n in range(2, 12):
        program = compiled(Program(n).run)
        with torch.compiler.set_stance("default"):
            assert torch.equal(program(torch.zeros(n)), torch.ones(n))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.2}])
def test_a_round_reads_nothing_back_to_the_host(folder, options):
    decoder = plain_decoder(folder)
    decoder.generate("hello", raw=True, max_new_tokens=2, **options)
    program = "greedy" if SamplingOptions(**options).plain_greedy else "sampled"
    decoder.state.done.fill_(False)
    decoder.state.limit.fill_(100)
    with NoHostCalls(), NoHostReads():
        decoder.runner.programs[program](decoder.runner.cache_rows[256])
    assert decoder.state.length.item() > 3


PLANTED = {
    "item": lambda state: state.length.sum().item(),
    "tolist": lambda state: state.length.tolist(),
    "nonzero": lambda state: state.tokens.nonzero(),
    "if tensor": lambda state: 1 if state.done.any() else 0,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_host_read_fails_one_of_the_two_checks(folder, name):
    decoder = plain_decoder(folder)
    round_ = decoder.runner.round
    rows = decoder.runner.cache_rows[256]

    def spoiled(cache_rows):
        PLANTED[name](decoder.state)
        return round_.greedy(cache_rows)

    failures = 0
    try:
        with NoHostCalls(), NoHostReads():
            spoiled(rows)
    except AssertionError:
        failures += 1
    try:
        torch.compile(spoiled, fullgraph=True, backend="eager")(rows)
    except Exception:
        failures += 1
    assert failures >= 1
    with NoHostCalls(), NoHostReads():  # and without the plant both pass
        round_.greedy(rows)
    torch.compile(round_.greedy, fullgraph=True, backend="eager")(rows)


def test_a_round_on_finished_texts_changes_nothing(folder):
    decoder = plain_decoder(folder)
    decoder.generate("hello", raw=True, max_new_tokens=5)
    before = {name: b.clone() for name, b in decoder.state.named_buffers()}
    cached = {name: b[:, :, :-1].clone() for name, b in decoder.cache.named_buffers()}
    decoder.runner.programs["greedy"](decoder.runner.cache_rows[256])
    for name, b in decoder.state.named_buffers():
        keep = slice(0, -1) if name == "tokens" else slice(None)  # the last column is a bin
        assert torch.equal(b[..., keep], before[name][..., keep]), name
    assert all(torch.equal(b[:, :, :-1], cached[name]) for name, b in decoder.cache.named_buffers())


def test_buckets_double_up_to_the_whole_cache():
    assert bucket_sizes(2048 + 64) == [256, 512, 1024, 2048, 2112]
    assert bucket_sizes(256) == [256]
    assert bucket_sizes(64) == [64]
