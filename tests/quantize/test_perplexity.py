"""Perplexity is the reference library's, window for window."""

import math

import pytest
import torch
from tiny import reference_model, save_checkpoint

from checkpoints.checkpoint import load_weights, read_config
from models.errors import InputError
from models.transformer import Transformer
from quantize import perplexity as module
from quantize.perplexity import perplexity


def our_model(reference, folder):
    save_checkpoint(reference, folder)
    config = read_config(folder)
    with torch.device("meta"):
        model = Transformer(config)
    load_weights(model, folder, config, "cpu", torch.float32)
    model.set_rotary(256)
    return model


def random_ids(n):
    return torch.randint(3, 199, (n,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def straightforward(reference, ids, context, stride):
    """Each window whole, its logits whole; of each, the tokens that no window before it had."""
    losses, end = [], 0
    for start in range(0, len(ids), stride):
        window = ids[start : start + context]
        log_p = reference(window[None]).logits[0].float().log_softmax(-1)
        for i in range(1, len(window)):
            if start + i >= end:
                losses.append(-log_p[i - 1, window[i]].item())
        end = start + len(window)
        if end == len(ids):
            break
    return math.exp(sum(losses) / len(losses)), len(losses)


@pytest.mark.parametrize("chunks", [(512, 128), (24, 7), (32, 32)])
@pytest.mark.parametrize("family", ["llama-tied", "mistral-window", "qwen3-moe"])
def test_it_is_the_reference_librarys(family, chunks, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunks[0])
    monkeypatch.setattr(module, "LOGIT_ROWS", chunks[1])
    reference = reference_model(family, initializer_range=0.1)
    model = our_model(reference, tmp_path)
    ids = random_ids(107)
    for context, stride in ((64, None), (64, 64), (64, 16), (90, 1), (50, 33), (256, None), (107, 107), (106, 106)):
        expected, n_scored = straightforward(reference, ids, context, stride or context)
        assert perplexity(model, ids, context, stride) == pytest.approx(expected, rel=1e-4)
        assert n_scored == 107 - (math.ceil(107 / context) if stride in (None, context) else 1)


def test_a_model_that_knows_nothing_is_as_perplexed_as_its_vocabulary_is_large(tmp_path):
    reference = reference_model("llama")
    with torch.no_grad():
        reference.lm_head.weight.zero_()
    assert perplexity(our_model(reference, tmp_path), random_ids(100), context=40) == pytest.approx(199, rel=1e-5)


def test_logits_are_made_of_no_more_tokens_at_a_time_than_stated(tmp_path, monkeypatch):
    model = our_model(reference_model("llama"), tmp_path)
    seen, logits = [], model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: seen.append(hidden.shape[1]) or logits(hidden))
    perplexity(model, random_ids(251), context=256)
    assert seen == [128, 122]
    seen.clear()
    forward, n_runs = model.forward, []
    monkeypatch.setattr(model, "forward", lambda *args: n_runs.append(1) or forward(*args))
    perplexity(model, random_ids(200), context=128, stride=36)
    assert seen == [127, 36, 36] and len(n_runs) == 3  # nothing is run for tokens that are not scored


@pytest.mark.parametrize(
    ("ids", "context", "stride", "said"),
    [
        (torch.tensor([5]), 64, None, "2 tokens or more"),
        (torch.zeros(2, 20, dtype=torch.long), 64, None, r"\[2, 20\]"),
        (torch.arange(20), 257, None, "2 to 256"),
        (torch.arange(20), 1, None, "2 to 256"),
        (torch.arange(20), 64, 65, "1 to 64"),
        (torch.arange(20), 64, 0, "1 to 64"),
    ],
)
def test_what_cannot_be_measured_is_refused(ids, context, stride, said, tmp_path):
    model = our_model(reference_model("llama"), tmp_path)
    with pytest.raises(InputError, match=said):
        perplexity(model, ids, context, stride)
