"""Hessians of one decoder layer at a time, from texts that run through the layers before it, quantized already.

    calibration = LayerwiseCalibration(model.config, model.embed_tokens, token_ids)
    for i, layer in enumerate(model.layers):
        for name, hessian in calibration.layer(i, layer).items():
            ...  # replace the weight `name` of this layer by what its quantized form stands for
        calibration.advance(layer)

Held at any time: the states that enter one layer, and the Hessians of its four matrices. Layers may be made, filled
and freed one by one: none is needed before its turn or after.
"""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.errors import InputError
from models.layers import DecoderLayer, Experts
from models.rope import rotary_table

BATCH_TOKENS = 2048  # tokens that run through a layer at a time


class SecondMoment:
    """The running sum `Σ (2/n) x xᵀ` over n inputs x of one matrix."""

    def __init__(self, size: int, device: torch.device):
        self.total = torch.zeros(size, size, device=device)
        self.n = 0

    def add(self, x: Tensor) -> None:
        """Inputs `x [..., size]`, of any dtype."""
        x = x.reshape(-1, self.total.shape[0]).float()
        self.total.addmm_(x.t(), x)
        self.n += x.shape[0]

    def mean(self) -> Tensor:
        """fp32 `[size, size]`; zeros if nothing came."""
        return self.total * (2 / max(1, self.n))


class LayerwiseCalibration:
    """Runs `token_ids [n, length]` (each row a text of its own, from position 0) through decoder layers in turn.

    The states `[n, length, h]` stay where the embedding is, in its dtype, and go to a layer's device in batches.
    """

    @torch.no_grad()
    def __init__(self, config: ModelConfig, embed_tokens: nn.Embedding, token_ids: Tensor):
        """Raises InputError for token ids that are no `[n, length]` of the vocabulary's."""
        if token_ids.dim() != 2 or token_ids.numel() == 0:
            raise InputError(f"calibration: expected token ids [texts, length], found {list(token_ids.shape)}.")
        if token_ids.min() < 0 or token_ids.max() >= config.vocab_size:
            raise InputError(f"calibration: found token ids outside 0..{config.vocab_size - 1}.")
        self.config = config
        self.next_layer = 0
        length = token_ids.shape[1]
        token_ids = token_ids.to(embed_tokens.weight.device)
        self.batches = [embed_tokens(ids) for ids in token_ids.split(max(1, BATCH_TOKENS // length))]
        self.cos, self.sin = rotary_table(config.rope, config.head_dim, length)

    @torch.no_grad()
    def layer(self, index: int, layer: DecoderLayer, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """The Hessian `Σ (2/n) x xᵀ`, fp32 `[in, in]`, of each matrix of the next layer, by its name in the layer.

        `self_attn.qkv_proj`, `self_attn.o_proj`, `mlp.gate_up_proj`, `mlp.down_proj`; with experts, instead of the
        last two, `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`, each one Hessian for all experts: of every
        token that enters them, and of every token's states inside the experts chosen for it. A stack `[E, out, in]`
        is then one matrix of `E * out` rows. The router has none; leave it as it is.

        All come from one pass through `layer` as it is: a matrix does not see the rounding of those before it in the
        same layer. To have that, too, call this again for the later `names` (all, if None) once the earlier are
        replaced; each call is one more pass. (On small trained models that changed the final states' error by 1 %.)
        """
        if index != self.next_layer:
            raise ValueError(f"layer {index} out of turn: layer {self.next_layer} comes next, after advance().")
        moments: dict[str, SecondMoment] = {}
        handles = []
        for name, module in layer.named_modules():
            if isinstance(module, Experts):
                handles.append(module.register_forward_pre_hook(_expert_hook(moments, name)))
            elif isinstance(module, nn.Linear) and name != "mlp.gate" and (names is None or name in names):
                handles.append(module.register_forward_pre_hook(_linear_hook(moments, name)))
        try:
            for x in self.batches:
                self._run(layer, x)
        finally:
            for handle in handles:
                handle.remove()
        return {name: moment.mean() for name, moment in moments.items() if names is None or name in names}

    @torch.no_grad()
    def advance(self, layer: DecoderLayer) -> None:
        """Run all texts through `layer`, with its quantized weights in place: what comes out enters the next layer."""
        for i, x in enumerate(self.batches):
            self.batches[i] = self._run(layer, x).to(x.device)
        self.next_layer += 1

    def _run(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        """One batch `[B, N, h]` through one layer, each token looking at those before it in its text."""
        weight = layer.input_layernorm.weight
        x = x.to(weight.device, weight.dtype)
        batch, length, _ = x.shape
        positions = torch.arange(length, device=x.device)
        distance = positions[:, None] - positions
        mask = distance >= 0
        if layer.slides:
            mask = mask & (distance < self.config.sliding_window)
        cos, sin = (table.to(x.device)[None, None] for table in (self.cos, self.sin))
        k, v = (x.new_zeros(batch, self.config.n_kv_heads, length, self.config.head_dim) for _ in range(2))
        return layer(x, positions.expand(batch, -1), mask.expand(batch, -1, -1), cos, sin, k, v)


def _linear_hook(moments: dict[str, SecondMoment], name: str):
    def hook(module: nn.Linear, args: tuple) -> None:
        x = args[0]
        moments.setdefault(name, SecondMoment(x.shape[-1], x.device)).add(x)

    return hook


def _expert_hook(moments: dict[str, SecondMoment], name: str):
    """`Experts` are no modules of their own, so what is inside them is computed once more."""

    def hook(module: Experts, args: tuple) -> None:
        x, chosen, _ = args
        size = module.down_proj.shape[-1]
        outer = moments.setdefault(f"{name}.gate_up_proj", SecondMoment(x.shape[-1], x.device))
        inner = moments.setdefault(f"{name}.down_proj", SecondMoment(size, x.device))
        outer.add(x)
        for expert, gate_up_proj in enumerate(module.gate_up_proj):
            routed = x[(chosen == expert).any(-1)]
            gate, up = F.linear(routed, gate_up_proj).chunk(2, dim=-1)
            inner.add(F.silu(gate) * up)

    return hook
