"""Quantized matrices as they are stored: portable, the same for every device and every method."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.errors import InputError

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Quantized:
    """A matrix `[out, in]` in groups of `group_size` columns.

    4 bits: `w = scale * q + minimum`, q in 0..15, `q` uint8 `[out, in / 2]` with column 2j in the low nibble and 2j + 1
    in the high one. 8 bits: `w = scale * q`, `q` int8 `[out, in]`, `minimum` None. `scale`, `minimum`:
    `[out, in / group_size]`, fp16, or fp32 where an import needs it.
    """

    bits: int
    group_size: int
    q: Tensor
    scale: Tensor
    minimum: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)` of the matrix that this stands for."""
        return self.q.shape[0], self.q.shape[1] * (2 if self.bits == 4 else 1)

    @property
    def n_bytes(self) -> int:
        """What it takes in memory and on disk."""
        parts = (self.q, self.scale, self.minimum)
        return sum(part.numel() * part.itemsize for part in parts if part is not None)

    def values(self) -> Tensor:
        """The whole numbers q, one a byte: `[out, in]`, uint8 for 4 bits and int8 for 8."""
        return unpack_nibbles(self.q) if self.bits == 4 else self.q

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix `[out, in]`: computed in fp32, then rounded to `dtype`."""
        out, n_columns = self.shape
        groups = self.values().view(out, n_columns // self.group_size, self.group_size).float()
        w = groups * self.scale.float()[..., None]
        if self.minimum is not None:
            w = w + self.minimum.float()[..., None]
        return w.view(out, n_columns).to(dtype)


def pack_nibbles(q: Tensor) -> Tensor:
    """`q [..., K]` uint8 of 0..15, K even -> `[..., K / 2]`: column 2j in the low nibble, 2j + 1 in the high one."""
    low, high = q[..., 0::2], q[..., 1::2]
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def check_group_size(in_features: int, group_size: int, name: str, sizes: Iterable[int] = GROUP_SIZES) -> None:
    """Raise InputError, listing the groups that fit, when `in_features` of the layer `name` is no multiple of
    `group_size`."""
    if in_features % group_size == 0:
        return
    fitting = [str(size) for size in sizes if in_features % size == 0]
    advice = f"groups of {' or '.join(fitting)} fit" if fitting else "no group size fits; --skip leaves it as it is"
    raise InputError(f"{name}: {in_features} columns are no multiple of --group-size {group_size}; {advice}.")
