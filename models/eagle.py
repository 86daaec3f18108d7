"""EAGLE draft heads: one or a few decoder layers that continue the target's hidden states.

A head reads pairs (feature f_i, token t_{i+1}) at rotary position i and answers with a state that stands for f_{i+1}
and with logits for t_{i+2}. EagleHead: EAGLE-1 (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858), which has the same
network. Eagle3Head: EAGLE-3 (arXiv 2503.01840) and the variants that vLLM speculators trains.
"""

import torch
from torch import Tensor, nn

from models.cache import KVCache
from models.config import ModelConfig
from models.head_config import HeadConfig
from models.layers import Attention, DecoderLayer, Embedding, Linear, SwiGLU
from models.rope import rotary_table
from models.transformer import Hidden


class TiedHead(nn.Module):
    """The target's embedding as lm_head, where the target's own is tied to it."""

    def __init__(self, embedding: nn.Module):
        super().__init__()
        self.embedding = embedding

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden [B, N, h]` -> `[B, N, vocab]`."""
        return self.embedding.project(hidden)


class DraftHead(nn.Module):
    """What both heads share. Build it on `meta`, fill it (head_checkpoint.load_head), then call `set_rotary`.

    `drafted [draft_vocab]` int64: the target's id of each row of lm_head; None where they are the same.
    """

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.layer.vocab_size, config.layer.hidden_size)
        self.lm_head = Linear(config.layer.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("drafted", None, persistent=False)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose entering states `fuse` needs."""
        return self.config.feature_layers or ()

    def set_rotary(self, max_seq_len: int) -> None:
        """Make the rotary tables for positions below `max_seq_len`: any number, whatever the head was trained on."""
        layer, place = self.config.layer, self.layers[0].post_attention_layernorm.weight.device
        cos, sin = rotary_table(layer.rope, layer.head_dim, max_seq_len)
        self.register_buffer("cos", cos.to(place), persistent=False)
        self.register_buffer("sin", sin.to(place), persistent=False)

    def new_cache(self, batch: int, rows: int) -> KVCache:
        """A cache of `rows` rows (the last one is the bin) for `batch` sequences, in the weights' dtype and place."""
        c, w = self.config.layer, self.layers[0].post_attention_layernorm.weight
        return KVCache(c.n_layers, batch, c.n_kv_heads, rows, c.head_dim, w.dtype, w.device)

    def step(self, positions: Tensor, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the layers of one pass share: rows, mask, cos, sin; see `forward` for the shapes."""
        return rows, mask, self.cos[positions][:, None], self.sin[positions][:, None]

    def fuse(self, hidden: Hidden) -> Tensor:
        """The target's states at N positions, tapped at `feature_layers` -> the head's features, `[B, N, h]`."""
        raise NotImplementedError

    def forward(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, rows: Tensor, mask: Tensor, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """Run pairs: `features [B, N, h]` and the tokens after them, `token_ids [B, N]`, at the features' `positions`.

        Keys and values go to cache `rows [B, N]` (int64); `mask [B, N, S]` bool says which of the first S rows each
        pair attends, its own included. Returns `fed_back [B, N, h]`, the features of the next step, and
        `for_logits [B, N, h]`, which `logits` reads.
        """
        raise NotImplementedError

    def logits(self, for_logits: Tensor) -> Tensor:
        """`[B, N, h]` -> `[B, N, draft_vocab]` in the weights' dtype."""
        return self.lm_head(for_logits)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary (int64, any shape) -> ids of the target's."""
        return draft_ids if self.drafted is None else self.drafted[draft_ids]

    def at_drafted(self, values: Tensor) -> Tensor:
        """Read `values [..., V]`, which the target's ids index, at the drafted ids: `[..., draft_vocab]`."""
        return values if self.drafted is None else values[..., self.drafted]


class EagleHead(DraftHead):
    """EAGLE-1/2: `x = fc(cat(embed(t), f))`, then a Llama layer without its first norm; no norm at the end.

    The feature is the target's state after its final norm, and the output is a guess at the next one, so lm_head is the
    target's unless the checkpoint has its own.
    """

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        layer = config.layer
        self.fc = Linear(2 * layer.hidden_size, layer.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(DecoderLayer(layer, i) for i in range(layer.n_layers))
        self.layers[0].input_layernorm = nn.Identity()

    def fuse(self, hidden: Hidden) -> Tensor:
        return hidden.last

    def forward(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, rows: Tensor, mask: Tensor, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        step = self.step(positions, rows, mask)
        x = self.fc(torch.cat((self.embed_tokens(token_ids), features), dim=-1))
        for i, layer in enumerate(self.layers):
            x = layer(x, *step, *cache.layer(i))
        return x, x


class Eagle3Layer(nn.Module):
    """EAGLE-3's first layer: attention reads the token's embedding and the state side by side, each normed."""

    def __init__(self, config: ModelConfig, norm_before_residual: bool):
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = Attention(config, input_size=2 * config.hidden_size)
        self.mlp = SwiGLU(config)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, embedded: Tensor, state: Tensor, rows: Tensor, mask: Tensor, cos: Tensor, sin: Tensor, *cache: Tensor
    ) -> Tensor:
        """`embedded, state [B, N, h]` -> the next state `[B, N, h]`."""
        normed = self.hidden_norm(state)
        both = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        state = normed if self.norm_before_residual else state
        state = self.self_attn(both, None, state, rows, mask, cos, sin, *cache)
        return self.mlp(state, self.post_attention_layernorm)


class Eagle3Head(DraftHead):
    """EAGLE-3: features are states entering several target layers, fused by `fc`; lm_head is the head's own.

    Layers after the first are ordinary decoder layers. The state before the last norm is fed back (after it, where
    `norm_output` is set). `config.feature_layers` must be known.
    """

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        layer, n_features = config.layer, len(config.feature_layers)
        eps = layer.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.feature_size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps) for _ in range(n_features))
        self.fc = Linear(config.feature_size, layer.hidden_size, bias=config.fc_bias)
        first = Eagle3Layer(layer, config.norm_before_residual)
        self.layers = nn.ModuleList([first, *(DecoderLayer(layer, i) for i in range(1, layer.n_layers))])
        self.norm = nn.RMSNorm(layer.hidden_size, eps)

    def fuse(self, hidden: Hidden) -> Tensor:
        states = hidden.entering
        if self.config.fc_norm:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        features = torch.cat(tuple(states), dim=-1)  # [B, N, F]
        return self.fc(self.input_norm(features) if self.config.norm_before_fc else features)

    def forward(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, rows: Tensor, mask: Tensor, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        step = self.step(positions, rows, mask)
        first, *others = self.layers
        x = first(self.embed_tokens(token_ids), features, *step, *cache.layer(0))
        for i, layer in enumerate(others, start=1):
            x = layer(x, *step, *cache.layer(i))
        normed = self.norm(x)
        return (normed if self.config.norm_output else x), normed
