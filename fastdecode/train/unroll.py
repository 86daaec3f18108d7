"""Training-time test (EAGLE-3, arXiv 2503.01840): run a head on its own outputs for several steps, all rows at once.

Row i at step 0 is the pair (feature i, token i+1); at step j it is (what the head fed back at row i, token i+1+j), at
rotary position i+j. It attends the rows up to i of step 0, and of every later step row i alone: what a chain drafted
after pair i attends. A mask would be mostly zeros, so the later steps' scores are products of single rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fastdecode.train.features import at_least_rotary
from models.eagle import DraftHead, Eagle3Layer
from models.layers import Attention
from models.rope import rotate


def shifted(values: Tensor, by: int) -> Tensor:
    """`values [B, T]` moved `by` columns to the left; zeros or False come in."""
    return torch.cat((values[:, by:], torch.zeros_like(values[:, :by])), dim=1)


def unroll(head: DraftHead, next_ids: Tensor, features: Tensor, n_steps: int, rows: Tensor) -> Iterator[Tensor]:
    """Yield, for each step, the states at `rows` that the head's lm_head reads, `[n, h]`.

    `next_ids [B, T]` int64: the token after each feature. `features [B, T, h]`: what `head.fuse` gives. `rows [n]`
    int64: row i of sequence b is b * T + i; of the others only step 0's keys and values are made, and what those need,
    since no row sees another's later steps. At step j rows i from T-j on lack a token and mean nothing. Gradients flow
    back through the steps.
    """
    batch, length = next_ids.shape
    at_least_rotary(head, length + n_steps)
    seen = [([], []) for _ in head.layers]  # keys and values of every layer, one of each per step
    state, come = features.flatten(0, 1), None  # rows that come into a layer; None: all
    for step in range(n_steps):
        rotary = head.cos[step : step + length], head.sin[step : step + length]
        ids = shifted(next_ids, step).flatten()
        embedded = head.embed_tokens(ids if come is None else ids[come])
        if not isinstance(head.layers[0], Eagle3Layer):
            state = head.fc(torch.cat((embedded, state.to(embedded.dtype)), dim=-1))
        for i, (layer, (keys, values)) in enumerate(zip(head.layers, seen, strict=True)):
            x, state = _before_attention(layer, embedded, state)
            y = _attention(layer.self_attn, x, (batch, length), come, rotary, keys, values)
            if come is None and i + 1 == len(head.layers):
                state, y, come = state.index_select(0, rows), y.index_select(0, rows), rows
            elif come is not None:
                y = y.index_select(0, rows)
            state = state + layer.self_attn.o_proj(y)
            state = layer.mlp(state, layer.post_attention_layernorm)
        for_logits = state
        if hasattr(head, "norm"):
            for_logits = head.norm(state)
            state = for_logits if head.config.norm_output else state
        yield for_logits


def _before_attention(layer: nn.Module, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer's attention reads, and what its output is added to; as the layer's own forward has it."""
    if not isinstance(layer, Eagle3Layer):
        return layer.input_layernorm(state), state
    normed = layer.hidden_norm(state)
    both = torch.cat((layer.input_layernorm(embedded), normed), dim=-1)
    return both, (normed if layer.norm_before_residual else state)


def _attention(
    attention: Attention,
    x: Tensor,
    shape: tuple[int, int],
    rows: Tensor | None,
    rotary: tuple[Tensor, Tensor],
    keys: list[Tensor],
    values: list[Tensor],
) -> Tensor:
    """`x [n, width]` at `rows` of `shape` (B, T) -> `[B*T, H*D]`, before o_proj. Adds to `keys` and `values`."""
    batch, length = shape
    qkv = attention.qkv_proj(x)
    if rows is not None:
        qkv = qkv.new_zeros(batch * length, qkv.shape[1]).index_copy(0, rows, qkv)
    heads = qkv.view(batch, length, -1, attention.head_dim).transpose(1, 2)
    q, k, v = heads.split([attention.n_heads, attention.n_kv_heads, attention.n_kv_heads], dim=1)
    q = rotate(attention.q_norm(q), *rotary)
    keys.append(rotate(attention.k_norm(k), *rotary))
    values.append(v)
    return attend_steps(q, keys, values).transpose(1, 2).reshape(batch * length, -1)


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
