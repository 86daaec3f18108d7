"""Perplexity of a model on a text: what quantization costs, in one number."""

import math

import torch
from torch import Tensor

from models.cache import KVCache
from models.errors import InputError
from models.transformer import Transformer

CHUNK = 512  # tokens that run through the model at a time
LOGIT_ROWS = 128  # tokens whose logits stand in memory at a time: 25 MB in fp32 for a vocabulary of 49152


@torch.inference_mode()
def perplexity(model: Transformer, token_ids: Tensor, context: int = 1024, stride: int | None = None) -> float:
    """exp of the mean of `-log p(token | tokens before it)` over `token_ids [T]`, log-probabilities in fp32.

    Windows of `context` tokens start every `stride` (default: `context`, windows side by side, the usual way); each
    token is scored once, in the first window that holds it, so that it sees at least `context - stride` tokens before
    it. The first token of all has none and is not scored; nor, side by side, is that of any window.
    The model's rotary tables must reach `context`.
    Raises InputError for fewer than two tokens, and a context or stride that does not fit.
    """
    stride = context if stride is None else stride
    if token_ids.dim() != 1 or len(token_ids) < 2:
        raise InputError(f"perplexity: expected a list of 2 tokens or more, found shape {list(token_ids.shape)}.")
    if not 2 <= context <= model.cos.shape[0]:
        raise InputError(f"perplexity: context {context}: expected 2 to {model.cos.shape[0]}, the model's positions.")
    if not 1 <= stride <= context:
        raise InputError(f"perplexity: stride {stride}: expected 1 to {context}, the context.")
    token_ids = token_ids.to(model.norm.weight.device)
    cache = model.new_cache(1, context + 1)
    loss, n_scored, end = 0.0, 0, 0
    for start in range(0, len(token_ids), stride):
        window = token_ids[start : start + context]
        first = max(1, end - start)  # `end`: that of the window before
        loss += window_loss(model, cache, window, first)
        n_scored += len(window) - first
        end = start + len(window)
        if end == len(token_ids):
            break
    mean = loss / n_scored
    return math.exp(mean) if mean < 700 else math.inf


def window_loss(model: Transformer, cache: KVCache, window: Tensor, first: int) -> float:
    """Sum of `-log p` of `window[first:]` (first >= 1), each given all tokens of `window [N]` before it.

    The cache is filled from row 0; what was there before is not seen.
    """
    loss = torch.zeros((), dtype=torch.float64, device=window.device)
    for start in range(0, len(window) - 1, CHUNK):  # the last token predicts nothing here
        ids = window[start : min(start + CHUNK, len(window) - 1)][None]
        cache_rows = torch.arange(start + ids.shape[1], device=window.device)
        positions = cache_rows[None, start:]
        mask = cache_rows <= positions[:, :, None]
        hidden = model(ids, positions, positions, mask, cache_rows[None], cache).last
        for at in range(max(start, first - 1), start + ids.shape[1], LOGIT_ROWS):
            part = hidden[:, at - start : at - start + LOGIT_ROWS]
            targets = window[at + 1 : at + 1 + part.shape[1]]
            log_p = model.logits(part)[0].float().log_softmax(-1)
            loss -= log_p.gather(1, targets[:, None]).sum(dtype=torch.float64)
    return loss.item()
