"""Layers on quantized weights: what stands in a network where a float matrix stood.

Their parameters are packed for one device at load and never written back; a file is always the portable form.
"""

import torch
from torch import Tensor, nn

from models.layers import surrounded
from quantize import a8, cpu, kernels
from quantize.storage import Quantized


class QuantizedLinear(nn.Module):
    """`y = x wᵀ + bias` with `w [out, in]` in 4 or 8 bits, packed for `device`; see `operators_available`.

    `column_order [in]` int64: the columns of `w` are these of the layer's own (act-order files); None: in order.
    """

    def __init__(
        self, weight: Quantized, device: torch.device, bias: Tensor | None = None, column_order: Tensor | None = None
    ):
        super().__init__()
        self.bits, self.group_size = weight.bits, weight.group_size
        self.out_features, self.in_features = weight.shape
        self.on_cuda = device.type == "cuda"
        self.rounds_input = False  # whether activations are 8 bits, too: see round_inputs
        if self.on_cuda:
            packed = kernels.pack(on_device(weight, device))
            self.data = nn.Parameter(packed.weight, requires_grad=False)
            self.scales = nn.Parameter(packed.scales, requires_grad=False)
        else:
            self.data = nn.Parameter(cpu.pack(weight).data, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_buffer("column_order", column_order, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., in]` -> `[..., out]` of the same dtype; each row's sum in an order of its own, whatever stands
        beside it."""
        if self.column_order is not None:
            x = x[..., self.column_order]
        if self.on_cuda:
            y = torch.ops.fastdecode.quantized_linear(x, self.data, self.scales)
        else:
            linear = a8.linear if self.rounds_input else cpu.linear
            # float16 is not one of the operators' dtypes
            y = linear(x.float(), self.packed).to(x.dtype) if x.dtype == torch.float16 else linear(x, self.packed)
        return y if self.bias is None else y + self.bias

    def surrounded(
        self, x: Tensor, norm: nn.Module | None = None, gate: bool = False, residual: Tensor | None = None
    ) -> Tensor:
        """As `models.layers.surrounded` says; on the CPU one operator, which rounds between them less often."""
        linear = a8 if self.rounds_input else cpu
        known = x.dtype in (torch.float32, torch.bfloat16) and (norm is None or isinstance(norm, nn.RMSNorm))
        if not (self.operator_name and known):
            return surrounded(self, x, norm, gate, residual)
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return linear.operator(self.bits)(x, self.data, weight, eps, gate, residual)

    @property
    def operator_name(self) -> str | None:
        """The operator that computes this and what surrounds it, if one can; see `models.layers.DecoderLayer`."""
        linear = a8 if self.rounds_input else cpu
        whole = self.bias is None and self.column_order is None and self.out_features % cpu.BLOCK == 0
        possible = whole and not self.on_cuda and linear.available()
        return f"fastdecode::{linear.operator(self.bits).__name__}" if possible else None

    @property
    def packed(self) -> cpu.PackedCPU:
        """The matrix as the CPU's operator takes it."""
        return cpu.PackedCPU(self.data, self.bits, self.out_features, self.group_size)

    def dequantize(self) -> Tensor:
        """The matrix that this stands for, fp32 `[out, in]`, its columns in the layer's own order."""
        if self.on_cuda:
            w = kernels.unpack(kernels.Packed(self.data, self.scales), self.in_features)
        else:
            w = cpu.unpack(self.packed)
        return w if self.column_order is None else w[:, self.column_order.argsort()]

    @property
    def scheme(self) -> str:
        """Bits and groups in a word: "int4-g32", and "int4-g32-a8" where activations are 8 bits, too."""
        return f"int{self.bits}-g{self.group_size}{'-a8' if self.rounds_input else ''}"

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, {self.scheme}"


class QuantizedEmbedding(nn.Module):
    """Rows of an int8 (or int4) table `[vocab, h]`, looked up in `dtype`; tied, it is the lm_head as well.

    One packed matrix serves both: a row is unpacked where it is looked up.
    """

    def __init__(self, weight: Quantized, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.table = QuantizedLinear(weight, device)
        self.dtype = dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        """`token_ids [B, N]` int64 -> `[B, N, h]`."""
        table = self.table
        if table.on_cuda:
            rows = kernels.unpack_rows(table.data, table.scales, table.in_features, token_ids.flatten())
        else:
            rows = cpu.unpack_rows(table.packed, token_ids.flatten())
        return rows.to(self.dtype).view(*token_ids.shape, -1)

    def project(self, hidden: Tensor) -> Tensor:
        """`hidden [..., h]` -> `[..., vocab]`: the table as lm_head."""
        return self.table(hidden)


class Norm(nn.RMSNorm):
    """An RMS norm that has the same bits compiled or not, and whatever stands beside a row: the sums and roundings of
    those in the operators. `of`: the norm whose weight it takes over."""

    def __init__(self, of: nn.RMSNorm):
        super().__init__(of.normalized_shape, of.eps, device="meta")
        self.weight = of.weight

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., h]` -> `[..., h]`."""
        known = x.dtype in (torch.float32, torch.bfloat16) and x.dtype == self.weight.dtype
        if known and x.device.type == "cpu" and cpu.available():
            return torch.ops.fastdecode.norm(x, self.weight, self.eps)
        return super().forward(x)


def round_inputs(network: nn.Module, owner: nn.Module | None = None) -> None:
    """From now on `network`'s quantized layers, on the CPU, round inputs to 8 bits (quantize/a8.py), but for those that
    it borrows from `owner`. Experts of a mixture do not."""
    borrowed = set() if owner is None else set(owner.modules())
    a8.available()  # built and loaded before a stored program calls it by name
    for module in network.modules():
        if isinstance(module, QuantizedLinear) and module not in borrowed:
            module.rounds_input = not module.on_cuda


def on_device(weight: Quantized, device: torch.device) -> Quantized:
    """The same matrix on `device`."""
    minimum = None if weight.minimum is None else weight.minimum.to(device)
    return Quantized(weight.bits, weight.group_size, weight.q.to(device), weight.scale.to(device), minimum)


def operators_available(device: torch.device) -> bool:
    """Whether `device` has an operator for quantized weights; the first call on a CPU builds it."""
    return kernels.available(device) if device.type == "cuda" else cpu.available()


def concatenated(parts: list[Quantized]) -> Quantized:
    """Matrices `[out_i, in]` of the same bits and groups, one below the other."""
    first = parts[0]
    minimum = None if first.minimum is None else torch.cat([part.minimum for part in parts])
    q, scale = torch.cat([part.q for part in parts]), torch.cat([part.scale for part in parts])
    return Quantized(first.bits, first.group_size, q, scale, minimum)
