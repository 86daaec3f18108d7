"""What only a CUDA device can show: captured rounds say what uncompiled ones say, and never wait for the host."""

import pytest
import torch
from test_decoder import forget_stop_tokens, text_of
from tiny_checkpoint import tiny_checkpoint

from fastdecode import load
from fastdecode.sampling import SamplingOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SAMPLED = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder, num_hidden_layers=2)
    return folder


def decoder_on(folder, device, compile, **options):
    decoder = load(str(folder), dtype="float32", device=device, compile=compile, **options)
    forget_stop_tokens(decoder)
    return decoder


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_captured_rounds_equal_uncompiled_ones_on_the_cpu(folder, options):
    captured, plain = decoder_on(folder, "cuda", True), decoder_on(folder, "cpu", False)
    for n in (1, 5, 240, 600):
        arguments = {"raw": True, "max_new_tokens": 40, **options}
        assert captured.generate(text_of(n), **arguments).token_ids == plain.generate(text_of(n), **arguments).token_ids


def test_a_batch_that_is_refilled_survives_reading_one_round_late(folder):
    captured, plain = decoder_on(folder, "cuda", True, batch=3), decoder_on(folder, "cpu", False)
    prompts = [text_of(n, seed=n) for n in (5, 33, 1, 60, 300, 2, 18)]
    expected = [plain.generate(p, raw=True, max_new_tokens=24).token_ids for p in prompts]
    assert [r.token_ids for r in captured.generate(prompts, raw=True, max_new_tokens=24)] == expected


def test_replayed_rounds_never_synchronize(folder):
    decoder = decoder_on(folder, "cuda", True)
    decoder.generate("hello", raw=True, max_new_tokens=4)
    decoder.warm_up(SamplingOptions())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            decoder.runner.graphs["greedy", 256][0].replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
