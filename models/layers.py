"""The parts of a decoder layer: attention over a static cache, SwiGLU, sparse experts.

Parameter names are the checkpoint's, with q/k/v and gate/up fused into one matmul each.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.cache import dequantize, write_layer
from models.config import ModelConfig
from models.rope import rotate
from operators import attention

FEW_ROWS = attention.MOST_ROWS  # above it, attention is a library kernel


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None
) -> Tensor:
    """Grouped-query attention: `q [B, H, N, D]` over `k, v [B, H_kv, S, D]`, H any multiple of H_kv -> `[B, H, N, D]`.

    `mask [B, N, S]` is True where a query may look. A query that may look nowhere gets zero. The few-rows form sums
    each query's products in one order whatever stands beside it, and rows beyond a query's own add exact zeros: on CPUs
    by an operator of our own (operators/attention.py), elsewhere as products and sums that the compiler fuses.
    `k_scale, v_scale [B, H_kv, S]`: where k and v are int8 codes, what they are to be multiplied by. The few-rows form
    multiplies scores and weights instead, which are fewer, so that no key or value is ever written out in float.
    """
    dtype = q.dtype
    batch, n_heads, n, head_dim = q.shape
    n_kv_heads = k.shape[1]
    group = n_heads // n_kv_heads
    if n > FEW_ROWS:
        if k_scale is not None:
            k, v = dequantize(k, k_scale, dtype), dequantize(v, v_scale, dtype)
        if q.is_cuda:  # the kernels that take a mask there do not take groups
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
    if attention.takes(q, k, v):
        return attention.attend(q, k, v, mask, k_scale, v_scale)
    q = q.reshape(batch, n_kv_heads, group, n, head_dim).float() * head_dim**-0.5
    scores = (q[..., None, :] * k[:, :, None, None].float()).sum(-1)  # [B, H_kv, G, N, S]
    if k_scale is not None:
        scores = scores * k_scale[:, :, None, None]
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if v_scale is not None:
        weights = weights * v_scale[:, :, None, None]
    mixed = (weights[..., None] * v[:, :, None, None].float()).sum(-2) / total.clamp_min(1e-30)
    return mixed.reshape(batch, n_heads, n, head_dim).to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [..., K]` times `weight [M, K]` transposed, plus `bias`: `[..., M]`.

    A row's sum should not depend on how many rows stand beside it, so that a verified draft is what plain decoding says
    to the last bit. On CPUs oneDNN keeps one order from 2 to 32 rows but takes another way for a single low-precision
    row, which is therefore run as two.
    """
    if x.numel() == x.shape[-1] and x.device.type == "cpu" and x.dtype != torch.float32:
        two = F.linear(x.reshape(1, -1).repeat(2, 1), weight, bias)
        return two[:1].reshape(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """nn.Linear whose rows do not depend on their number; see `linear`."""

    operator_name = None  # of what multiplies by it on the CPU, for weights that have one: see quantize/linear.py

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., K]` -> `[..., M]`."""
        return linear(x, self.weight, self.bias)

    def surrounded(
        self, x: Tensor, norm: nn.Module | None = None, gate: bool = False, residual: Tensor | None = None
    ) -> Tensor:
        """See `surrounded`. Layers on quantized weights, which stand here as well, make one operator of it."""
        return surrounded(self, x, norm, gate, residual)


def surrounded(linear: nn.Module, x: Tensor, norm: nn.Module | None, gate: bool, residual: Tensor | None) -> Tensor:
    """`linear`, of `norm(x)`, or of `silu(x's first half) * second half` for `gate`; added to `residual`, if any."""
    if norm is not None:
        x = norm(x)
    if gate:
        gates, ups = x.chunk(2, dim=-1)
        x = F.silu(gates) * ups
    y = linear(x)
    return y if residual is None else residual + y


class Embedding(nn.Embedding):
    """A table of tokens' vectors, `weight [vocab, h]`, that can be the lm_head as well."""

    def project(self, hidden: Tensor) -> Tensor:
        """`hidden [..., h]` -> logits `[..., vocab]`."""
        return linear(hidden, self.weight)


class Attention(nn.Module):
    """Self-attention with rotary positions; optional bias (Qwen2) and per-head norms on q and k (Qwen3).

    `input_size`: width of what it reads, where that is not the hidden size: in EAGLE-3's first layer, which no compiled
    region holds, so that few new rows are turned, stored and attended by one operator, where there is one.
    """

    def __init__(self, config: ModelConfig, input_size: int | None = None):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        width = (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
        self.qkv_proj = Linear(input_size or config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = Linear(self.n_heads * self.head_dim, config.hidden_size, bias=config.o_bias)
        self.norms_heads, self.in_region = config.qk_norm, input_size is None
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        norm: nn.Module | None,
        residual: Tensor,
        rows: Tensor,
        mask: Tensor,
        cos: Tensor,
        sin: Tensor,
        *cache: Tensor,
    ) -> Tensor:
        """`residual [B, N, h]` plus attention of `norm(x)`; writes the new keys and values, then reads S rows.

        `x [B, N, h]` (or `input_size` wide). `rows [B, N]` int64: cache rows to write. `mask [B, N, S]` bool: which of
        the first S rows (the bucket) each query attends. `cos, sin [B, 1, N, D]` fp32. `cache`: what KVCache.layer
        gives, 2 tensors or 4.
        """
        batch, n, _ = x.shape
        qkv = self.qkv_proj.surrounded(x, norm)
        if not self.in_region and not self.norms_heads and attention.takes_new(qkv, *cache):
            return self.o_proj.surrounded(attention.attend_new(qkv, cos, sin, rows, mask, *cache), residual=residual)
        heads = qkv.view(batch, n, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=1)
        q = rotate(self.q_norm(q), cos, sin)
        k = rotate(self.k_norm(k), cos, sin)
        write_layer(cache, rows, k, v)
        k, v, *scales = (part[:, :, : mask.shape[-1]] for part in cache)
        y = attend(q, k, v, mask, *scales)
        return self.o_proj.surrounded(y.transpose(1, 2).reshape(batch, n, -1), residual=residual)


class SwiGLU(nn.Module):
    """`down(silu(gate x) * up x)`, gate and up as one matmul."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, norm: nn.Module) -> Tensor:
        """`x [B, N, h]` plus this of `norm(x)`."""
        return self.down_proj.surrounded(self.gate_up_proj.surrounded(x, norm), gate=True, residual=x)


class Experts(nn.Module):
    """The weights of all experts of a layer, stacked: `gate_up_proj [E, 2I, h]`, `down_proj [E, h, I]`."""

    def __init__(self, n_experts: int, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(n_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(n_experts, hidden_size, intermediate_size))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """`x [T, h]`, `chosen [T, K]` expert ids, `weights [T, K]` -> `[T, h]`.

        Few tokens read only the experts that they chose; many run through all of them, since between them they need
        most. Neither form has a shape that depends on the choice.
        """
        if x.shape[0] * chosen.shape[1] <= max(FEW_ROWS, self.down_proj.shape[0] // 2):
            gate_up = torch.einsum("th,tkih->tki", x, self.gate_up_proj[chosen])
            gate, up = gate_up.chunk(2, dim=-1)
            y = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.down_proj[chosen])
            return (y * weights[..., None].to(y.dtype)).sum(1)
        n_experts = self.down_proj.shape[0]
        gate, up = torch.einsum("th,eih->eti", x, self.gate_up_proj).chunk(2, dim=-1)
        y = torch.einsum("eti,ehi->eth", F.silu(gate) * up, self.down_proj)
        share = torch.zeros(x.shape[0], n_experts, dtype=weights.dtype, device=x.device).scatter(1, chosen, weights)
        return (y * share.t()[..., None].to(y.dtype)).sum(0)


class SparseExperts(nn.Module):
    """Mixture of experts (Mixtral, Qwen3-MoE): a router picks K experts per token; softmax over all, in fp32."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.per_token, self.normalise = config.n_experts_per_token, config.norm_topk_prob
        self.gate = Linear(config.hidden_size, config.n_experts, bias=False)
        self.experts = Experts(config.n_experts, config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: Tensor, norm: nn.Module) -> Tensor:
        """`x [B, N, h]` plus this of `norm(x)`."""
        tokens = norm(x).reshape(-1, x.shape[-1])
        weights, chosen = self.gate(tokens).float().softmax(-1).topk(self.per_token, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return x + self.experts(tokens, chosen, weights).view_as(x)


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer: attention, then a dense or sparse feed-forward network."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.slides = config.sliding_window is not None and config.sliding_layers[index]
        self.self_attn = Attention(config)
        self.mlp = SparseExperts(config) if config.moe_layers[index] else SwiGLU(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rows: Tensor, mask: Tensor, cos: Tensor, sin: Tensor, *cache: Tensor) -> Tensor:
        """`x [B, N, h]` -> `[B, N, h]`. Arguments as for `Attention`."""
        return through([self], x, rows, mask, cos, sin, [cache])

    @property
    def linears(self) -> list[nn.Module]:
        """The four products of a dense layer, in order."""
        return [self.self_attn.qkv_proj, self.self_attn.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj]

    @property
    def by_operators(self) -> bool:
        """Whether few rows may go through one operator, of which the compiler sees nothing but the call."""
        norms = isinstance(self.input_layernorm, nn.RMSNorm) and not self.self_attn.norms_heads
        return norms and isinstance(self.mlp, SwiGLU) and all(linear.operator_name for linear in self.linears)

    # Layers of one shape are compiled once and stamped out. Plain tensors as arguments keep the matching cheap. (What
    # writes into a cache and is no operator of torch's own cannot be in such a region: torch 2.13.)
    @torch.compiler.nested_compile_region
    def compute_in_region(self, x: Tensor, *arguments: Tensor) -> Tensor:
        """As `forward`, which it is but for `DecoderLayer.by_operators`."""
        return self.mlp(self.self_attn(x, self.input_layernorm, x, *arguments), self.post_attention_layernorm)


def through(
    layers: Sequence[DecoderLayer],
    x: Tensor,
    rows: Tensor,
    mask: Tensor,
    cos: Tensor,
    sin: Tensor,
    caches: Sequence[tuple[Tensor, ...]],
) -> Tensor:
    """`x [B, N, h]` -> `[B, N, h]` after all `layers`, one operator where `DecoderLayer.by_operators` says so of each.

    Arguments as for `Attention`; `caches`: what KVCache.layer gives, of each layer.
    """
    together = all(layer.by_operators and layer.eps == layers[0].eps for layer in layers)
    if not (together and attention.takes_new(x, *caches[0])):
        for layer, cache in zip(layers, caches, strict=True):
            x = layer.compute_in_region(x, rows, mask, cos, sin, *cache)
        return x
    weights, names = [], []
    for layer in layers:
        weights += [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
        weights += [linear.data for linear in layer.linears]
        names += [linear.operator_name for linear in layer.linears]
    parts = [part for cache in caches for part in cache]
    return torch.ops.fastdecode.decoder_layers(x, rows, mask, cos, sin, parts, weights, names, layers[0].eps)
