"""Rows of the benchmark's report, worked out from the answers that programs gave."""

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import torch

from fastdecode.benchmark_report import SHORT_DTYPE
from fastdecode.decoder import Decoder, common_prefix
from fastdecode.memory import bytes_per_round
from fastdecode.prompts import PromptLine
from fastdecode.request import Result
from models.transformer import Transformer
from quantize.linear import QuantizedLinear


def decoder_row(decoder: Decoder, results: list[Result], lines: list[PromptLine], bandwidth: float) -> dict[str, Any]:
    """The fields of one of our own rows that come from its answers to the prompts. `bandwidth` in bytes/s."""
    rates = rate_fields([result.stats["decode_tokens_per_s"] for result in results])
    tau, int8_cache = tau_of(results), decoder.cache.quantized
    drafter, cached = decoder.runner.round.drafter, mean_length(results) * decoder.batch
    per_round = round(bytes_per_round(decoder.model, drafter, cached, int8_cache))
    rate = rates["decode_tokens_per_s"]
    categories = {line.category: [] for line in lines if line.category is not None}
    for line, result in zip(lines, results, strict=True):
        if line.category is not None:
            categories[line.category].append(result)
    return {
        **rates,
        "program": "fastdecode",
        "weights": weights_name(decoder.model),
        "kv_cache": "int8" if int8_cache else SHORT_DTYPE[decoder.model.norm.weight.dtype],
        "batch": decoder.batch,
        "prompts": len(results),
        "new_tokens": sum(result.stats["new_tokens"] for result in results),
        "tau": tau,
        "accept_by_depth": accept_by_depth(results),
        **{key: mean_by_round(results, key) for key in ("draft_ms", "verify_ms", "rest_ms")},
        "bytes_per_round": per_round,
        "bandwidth_share": None if rate is None else rate / tau * per_round / bandwidth,
        "tau_by_category": {category: tau_of(found) for category, found in categories.items()},
    }


def weights_name(model: Transformer) -> str:
    """How the linear layers' weights are stored: "int4-g32", say, or "bf16"."""
    for layer in model.layers.modules():
        if isinstance(layer, QuantizedLinear):
            return layer.scheme
    return SHORT_DTYPE[model.norm.weight.dtype]


def comparison(
    decoder: Decoder, plain: Sequence[Result], drafted: Sequence[Result], prompts: Sequence[list[int]], greedy: bool
) -> dict[str, Any]:
    """Whether drafting changed what plain decoding says: prompts with the same tokens, and for each other one, where
    decoding is `greedy`, by how much the likeliest token led where the two part."""
    margins, matched = [], 0
    for ids, ours, theirs in zip(prompts, plain, drafted, strict=True):
        if (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason):
            matched += 1
        elif greedy:
            before = ids + ours.token_ids[: common_prefix(ours.token_ids, theirs.token_ids)]
            margins.append(margin(decoder.model, before, decoder.cache.quantized))
    return {"matched": matched, "first_difference_margins": tuple(margins)}


@torch.inference_mode()
def margin(model: Transformer, ids: list[int], int8_cache: bool) -> float:
    """By how much the likeliest next token's logit leads the second's, after `ids`."""
    device = model.norm.weight.device
    rows = torch.arange(len(ids), device=device)
    cache = model.new_cache(1, len(ids) + 1, int8_cache)
    mask = rows <= rows[:, None]
    token_ids = torch.tensor([ids], device=device)
    hidden = model(token_ids, rows[None], rows[None], mask[None], rows[None], cache)
    best = model.logits(hidden.last[:, -1:])[0, 0].float().topk(2).values
    return (best[0] - best[1]).item()


def first_difference(ours: Result, theirs: list[int], stop_ids: tuple[int, ...]) -> int | None:
    """Index of the first generated token at which two answers part, a stop token counted; None if they do not."""
    for i, (a, b) in enumerate(zip(ours.token_ids, theirs, strict=False)):
        if a != b:
            return i
    length = len(ours.token_ids)
    return length if ours.finish_reason == "stop" and theirs[length] not in stop_ids else None


def committed(result: Result) -> int:
    """Tokens that were decoded: those of the answer, and the stop token that ended it."""
    return result.stats["new_tokens"] + (result.finish_reason == "stop")


def tau_of(results: Sequence[Result]) -> float:
    """Tokens committed per round, over all rounds."""
    rounds = sum(result.stats["rounds"] for result in results)
    return sum(result.stats["tau"] * result.stats["rounds"] for result in results) / rounds


def rate_fields(rates: Sequence[float | None]) -> dict[str, float | None]:
    """Median and extremes of tokens/s; None: an answer too short for a rate."""
    known = [rate for rate in rates if rate is not None]
    return {
        "decode_tokens_per_s": median_of(known),
        "decode_tokens_per_s_min": min(known, default=None),
        "decode_tokens_per_s_max": max(known, default=None),
    }


def median_of(values: Sequence[float]) -> float | None:
    """The median, or None of nothing."""
    return median(values) if values else None


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b, or None where one is missing or b is 0."""
    return a / b if a is not None and b else None


def mean_length(results: Sequence[Result]) -> float:
    """Tokens in the cache, on average over the answers and their rounds."""
    return mean(result.stats["prompt_tokens"] + result.stats["new_tokens"] / 2 for result in results)


def accept_by_depth(results: Sequence[Result]) -> tuple[float, ...]:
    """Entry d: the share of all rounds that accepted more than d drafts."""
    rounds = sum(result.stats["rounds"] for result in results)
    depth = max((len(result.stats["accept_by_depth"]) for result in results), default=0)
    shares = [[*r.stats["accept_by_depth"], *[0.0] * depth][:depth] for r in results]
    counts = [[share * r.stats["rounds"] for share in found] for found, r in zip(shares, results, strict=True)]
    return tuple(sum(column) / rounds for column in zip(*counts, strict=True))


def mean_by_round(results: Sequence[Result], key: str) -> float | None:
    """The mean over all rounds of a figure that each answer states a round; None where one does not know it."""
    if any(result.stats[key] is None for result in results):
        return None
    return sum(r.stats[key] * r.stats["rounds"] for r in results) / sum(r.stats["rounds"] for r in results)
