"""The target network: token ids to hidden states and logits over a static KV cache.

Llama 1/2/3/3.x, Vicuna, SmolLM2, Mistral, Mixtral, Qwen2/2.5, Qwen3 and Qwen3-MoE are one class: ModelConfig says
which parts a family has.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.cache import KVCache
from models.config import ModelConfig
from models.layers import FEW_ROWS, DecoderLayer, Embedding, Linear, through
from models.rope import rotary_table


class Hidden(NamedTuple):
    """`last [B, N, h]`: after the final norm (what lm_head reads; EAGLE's feature). `entering`: one `[B, N, h]` per
    tapped layer, the states that enter it (EAGLE-3's features)."""

    last: Tensor
    entering: tuple[Tensor, ...]


class Transformer(nn.Module):
    """A decoder-only transformer. Build it on `meta`, fill it with `load_weights`, then call `set_rotary`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.n_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def set_rotary(self, max_seq_len: int) -> None:
        """Make the rotary tables for positions below `max_seq_len`; tables of that length stay where they are."""
        if getattr(self, "cos", None) is not None and len(self.cos) == max_seq_len:
            return
        cos, sin = rotary_table(self.config.rope, self.config.head_dim, max_seq_len)
        self.register_buffer("cos", cos.to(self.norm.weight.device), persistent=False)
        self.register_buffer("sin", sin.to(self.norm.weight.device), persistent=False)

    def new_cache(self, batch: int, rows: int, quantized: bool = False) -> KVCache:
        """A cache of `rows` rows (the last one is the bin) for `batch` sequences, where the weights are; in their
        dtype, or `quantized` to int8."""
        c, w = self.config, self.norm.weight
        return KVCache(c.n_layers, batch, c.n_kv_heads, rows, c.head_dim, w.dtype, w.device, quantized)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        mask: Tensor,
        key_positions: Tensor,
        cache: KVCache,
        tap_layers: Sequence[int] = (),
    ) -> Hidden:
        """Run `token_ids [B, N]` at `positions [B, N]`, writing cache `rows [B, N]` (all int64).

        `mask [B, N, S]` bool: which of the first S cache rows each token attends (its own row included); S is the
        bucket. `key_positions [B, S]`: the position that each cache row holds, for sliding windows, which compare
        positions and not rows. `tap_layers`: layers whose entering states are returned.
        """
        window_mask = mask
        if self.config.sliding_window is not None:
            distance = positions[:, :, None] - key_positions[:, None, :]
            window_mask = mask & (distance < self.config.sliding_window)
        if token_ids.shape[1] > FEW_ROWS:  # the library's kernel adds its mask; make it once, not in every layer
            mask, window_mask = (_additive(m, self.norm.weight.dtype) for m in (mask, window_mask))
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = self.embed_tokens(token_ids)
        entering = {}
        layers = list(self.layers)
        start = 0
        while start < len(layers):
            entering[start] = x
            slides = layers[start].slides
            stop = start + 1
            while stop < len(layers) and stop not in tap_layers and layers[stop].slides == slides:
                stop += 1
            caches = [cache.layer(i) for i in range(start, stop)]
            x = through(layers[start:stop], x, rows, window_mask if slides else mask, cos, sin, caches)
            start = stop
        return Hidden(self.norm(x), tuple(entering[i] for i in tap_layers))

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden [B, N, h]` after the final norm -> `[B, N, V]` in the weights' dtype."""
        return self.embed_tokens.project(hidden) if self.config.tie_word_embeddings else self.lm_head(hidden)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(mask, 0.0, float("-inf")).to(dtype)
