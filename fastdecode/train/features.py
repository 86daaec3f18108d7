"""What a draft head learns from: a batch of conversations and what the target says of it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.transformer import Hidden, Transformer

CHUNK = 512  # positions whose logits over the whole vocabulary are in memory at once


class Batch(NamedTuple):
    """Conversations, padded on the right. `token_ids [B, T]` int64, 0 where padded; `answer [B, T]` bool: tokens to
    train on; `real [B, T]` bool: False where padded."""

    token_ids: Tensor
    answer: Tensor
    real: Tensor


@torch.no_grad()
def target_states(target: Transformer, batch: Batch, tap_layers: Sequence[int]) -> Hidden:
    """The target's states at every position, `[B, T, h]` each, tapped at `tap_layers`; padding gets finite numbers."""
    n_rows, length = batch.token_ids.shape
    at_least_rotary(target, length)
    positions = torch.arange(length, device=batch.token_ids.device).expand(n_rows, -1)
    causal = positions[:, None, :] <= positions[:, :, None]  # padding is on the right, so nothing real attends it
    cache = target.new_cache(n_rows, length)
    return target(batch.token_ids, positions, positions, causal, positions, cache, tuple(tap_layers))


@torch.no_grad()
def target_choices(target: Transformer, last: Tensor, chunk: int = CHUNK) -> Tensor:
    """The target's argmax after states `last [..., h]` (Hidden.last): int64 `[...]`, `chunk` positions at a time."""
    states = last.reshape(-1, last.shape[-1])
    # On CPUs max takes less than half of the time that argmax takes for bf16; both give the first of equals.
    parts = [target.logits(part[None])[0].max(-1).indices for part in states.split(chunk)]
    return torch.cat(parts).view(last.shape[:-1])


def lm_head_rows(target: Transformer, ids: Tensor | None) -> Tensor:
    """Rows `ids` of the weight of the target's lm_head, which may not be quantized: `[n, h]`; None: all of them."""
    weight = target.embed_tokens.weight if target.config.tie_word_embeddings else target.lm_head.weight
    return weight.detach() if ids is None else weight.detach()[ids]


def at_least_rotary(network: nn.Module, length: int) -> None:
    """Make the rotary tables of a target or a head reach `length` positions."""
    if getattr(network, "cos", None) is None or len(network.cos) < length:
        network.set_rotary(length)
