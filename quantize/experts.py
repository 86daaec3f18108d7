"""Sparse experts on quantized weights: stacked as they are stored, unpacked where they are used.

There is no operator for a choice of experts, so this saves memory and not time: what a few tokens chose is gathered in
4 or 8 bits and multiplied as floats.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers import FEW_ROWS
from quantize.linear import concatenated
from quantize.storage import Quantized


class QuantizedStack(nn.Module):
    """The same matrix `[out, in]` of every expert: fields of a `Quantized`, each with a first dimension `[E]`."""

    def __init__(self, experts: list[Quantized], device: torch.device):
        super().__init__()
        first, whole = experts[0], concatenated(experts)
        self.bits, self.group_size = first.bits, first.group_size
        for name in ("q", "scale", "minimum"):
            part = getattr(whole, name)
            if part is not None:
                part = nn.Parameter(part.view(len(experts), -1, part.shape[1]).to(device), requires_grad=False)
            self.register_parameter(name, part)

    def chosen(self, experts: Tensor, dtype: torch.dtype) -> Tensor:
        """The matrices of `experts [...]` (int64) in `dtype`: `[..., out, in]`."""
        shape = experts.shape
        minimum = None if self.minimum is None else self.minimum[experts].flatten(0, -2)
        q, scale = self.q[experts].flatten(0, -2), self.scale[experts].flatten(0, -2)
        w = Quantized(self.bits, self.group_size, q, scale, minimum).dequantize(dtype)
        return w.view(*shape, -1, w.shape[-1])


class QuantizedExperts(nn.Module):
    """`models.layers.Experts` on two stacks."""

    def __init__(self, gate_up: QuantizedStack, down: QuantizedStack):
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """`x [T, h]`, `chosen [T, K]` expert ids, `weights [T, K]` -> `[T, h]`, as in `Experts.forward`."""
        n_experts = self.down_proj.q.shape[0]
        if x.shape[0] * chosen.shape[1] <= max(FEW_ROWS, n_experts // 2):
            gate_up = torch.einsum("th,tkih->tki", x, self.gate_up_proj.chosen(chosen, x.dtype))
            gate, up = gate_up.chunk(2, dim=-1)
            y = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.down_proj.chosen(chosen, x.dtype))
            return (y * weights[..., None].to(y.dtype)).sum(1)
        share = torch.zeros(x.shape[0], n_experts, dtype=weights.dtype, device=x.device).scatter(1, chosen, weights)
        total = torch.zeros_like(x)
        for expert in torch.arange(n_experts, device=x.device):  # one at a time, since as floats they are large
            gate, up = F.linear(x, self.gate_up_proj.chosen(expert, x.dtype)).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down_proj.chosen(expert, x.dtype))
            total = total + y * share[:, expert, None].to(y.dtype)
        return total
