"""Training-time test (EAGLE-3, arXiv 2503.01840): run a head on its own outputs for several steps, all rows at once.

Row i at step 0 is the pair (feature i, token i+1); at step j it is (what the head fed back at row i, token i+1+j), at
rotary position i+j. It attends the rows up to i of step 0, and of every later step row i alone: what a chain drafted
after pair i attends. A mask would be mostly zeros, so the later steps' scores are products of single rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fastdecode.train.features import at_least_rotary
from models.eagle import DraftHead, Eagle3Layer
from models.layers import Attention
from models.rope import rotate


def shifted(values: Tensor, by: int) -> Tensor:
    """`values [B, T]` moved `by` columns to the left; zeros or False come in."""
    return torch.cat((values[:, by:], torch.zeros_like(values[:, :by])), dim=1)


def unroll(head: DraftHead, next_ids: Tensor, features: Tensor, n_steps: int) -> Iterator[Tensor]:
    """Yield, for each step, the states that the head's lm_head reads, `[B, T, h]`.

    `next_ids [B, T]` int64: the token after each feature. `features [B, T, h]`: what `head.fuse` gives. At step j rows
    from T-j on lack a token and mean nothing. Gradients flow back through the steps.
    """
    length = next_ids.shape[1]
    at_least_rotary(head, length + n_steps)
    seen = [([], []) for _ in head.layers]  # keys and values of every layer, one of each per step
    state = features
    for step in range(n_steps):
        rotary = head.cos[step : step + length], head.sin[step : step + length]
        embedded = head.embed_tokens(shifted(next_ids, step))
        if not isinstance(head.layers[0], Eagle3Layer):
            state = head.fc(torch.cat((embedded, state.to(embedded.dtype)), dim=-1))
        for layer, keys_values in zip(head.layers, seen, strict=True):
            state = _run_layer(layer, embedded, state, rotary, keys_values)
        for_logits = state
        if hasattr(head, "norm"):
            for_logits = head.norm(state)
            state = for_logits if head.config.norm_output else state
        yield for_logits


def _run_layer(layer, embedded: Tensor, state: Tensor, rotary: tuple[Tensor, Tensor], seen: tuple[list, list]):
    """What the layer's own forward does, with another attention."""
    if isinstance(layer, Eagle3Layer):
        normed = layer.hidden_norm(state)
        x = torch.cat((layer.input_layernorm(embedded), normed), dim=-1)
        state = normed if layer.norm_before_residual else state
    else:
        x = layer.input_layernorm(state)
    state = state + _attention(layer.self_attn, x, rotary, *seen)
    return state + layer.mlp(layer.post_attention_layernorm(state))


def _attention(attention: Attention, x: Tensor, rotary: tuple[Tensor, Tensor], keys: list, values: list) -> Tensor:
    batch, length, _ = x.shape
    heads = attention.qkv_proj(x).view(batch, length, -1, attention.head_dim).transpose(1, 2)
    q, k, v = heads.split([attention.n_heads, attention.n_kv_heads, attention.n_kv_heads], dim=1)
    q = rotate(attention.q_norm(q), *rotary)
    keys.append(rotate(attention.k_norm(k), *rotary))
    values.append(v)
    y = attend_steps(q, keys, values)
    return attention.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


def attend_steps(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of the newest step: `q [B, H, T, D]` over one `[B, H_kv, T, D]` of keys and of values for each step.

    Causal over the first step, row i alone in the others; H any multiple of H_kv. Returns `[B, H, T, D]`.
    """
    batch, n_heads, length, head_dim = q.shape
    n_kv_heads = keys[0].shape[1]
    # The queries of a group lie one after another, so that one matmul serves them all and no key is repeated.
    q = (q * head_dim**-0.5).reshape(batch, n_kv_heads, -1, head_dim)  # [B, H_kv, G*T, D]
    by_row = (batch, n_kv_heads, -1, length, head_dim)
    future = q.new_full((length, length), float("-inf")).triu(1)
    scores = [(q @ keys[0].transpose(2, 3)).view(batch, n_kv_heads, -1, length, length) + future]
    scores += [(q.view(by_row) * k[:, :, None]).sum(-1, keepdim=True) for k in keys[1:]]
    weights = torch.cat(scores, dim=-1).softmax(-1).to(values[0].dtype)  # [B, H_kv, G, T, T + steps - 1]
    first, *others = weights.split([length] + [1] * (len(keys) - 1), dim=-1)
    y = (first.flatten(2, 3) @ values[0]).view(by_row)
    for weight, v in zip(others, values[1:], strict=True):
        y = y + weight * v[:, :, None]
    return y.reshape(batch, n_heads, length, head_dim)
