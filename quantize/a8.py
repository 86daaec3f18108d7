"""Linear layers with 8-bit activations on the CPU (w4a8, w8a8): the operator of a8.cpp, built on first use.

Each row of the input is rounded to 8 bits, in the weights' groups, and multiplied in whole numbers: less work than
`cpu.linear`, so that several rows cost little more than one, for a small error that depends on the row alone. A row's
result is bitwise the same at any number of rows, beside any others, at any thread count and on any CPU.
"""

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from quantize.cpu import SHARED, PackedCPU, loaded, unpack

PATHS = ("plain", "avx2", "avx512", "vnni")  # as in a8.cpp; each CPU has the first few
SOURCES = (*map(Path(__file__).with_name, ("a8.cpp", "a8_path.h")), *SHARED)  # the first includes the rest
LEAST = 1e-30  # a group of inputs below it counts as zeros, as in a8.cpp


def rounded(x: Tensor, group_size: int) -> Tensor:
    """`x [..., K]` as the operator sees it, fp32: 127 steps on either side of 0 for each group of columns of a row."""
    groups = x.float().unflatten(-1, (-1, group_size))
    largest = groups.abs().amax(-1, keepdim=True)
    nothing = largest < LEAST
    inverse = torch.full_like(largest, 127.0) / largest  # not 127.0 / largest, which is 127 times the reciprocal
    steps = (groups * torch.where(nothing, 0.0, inverse)).round()
    return (steps * torch.where(nothing, 0.0, largest / 127.0)).flatten(-2)


def linear_reference(x: Tensor, packed: PackedCPU) -> Tensor:
    """What `linear` computes, in plain torch: rounded, then products and sums in fp32, then x's dtype."""
    return F.linear(rounded(x, packed.group_size), unpack(packed)).to(x.dtype)


def linear(x: Tensor, packed: PackedCPU) -> Tensor:
    """`x [..., K]`, bf16 or fp32 -> `[..., N]` of the same dtype: `x` rounded to 8 bits, times `w.T`.

    Call `operators()` before a stored program that contains this is loaded. RuntimeError where K differs.
    """
    if not available():
        return linear_reference(x, packed)
    y = operator(packed.bits)(x, packed.data)
    return y if y.shape[-1] == packed.out_features else y[..., : packed.out_features]


def operator(bits: int) -> torch._ops.OpOverloadPacket:
    """As `cpu.operator`; what is rounded to 8 bits is the product's input."""
    return torch.ops.fastdecode.linear_int4_a8 if bits == 4 else torch.ops.fastdecode.linear_int8_a8


@torch.compiler.assume_constant_result  # else the compiler would trace into building it
def available() -> bool:
    """Whether the C++ operator is there; the first call builds it."""
    return operators() is not None


@functools.cache
def operators() -> Path | None:
    """Build, where it is not in the user's cache, and load a8.cpp; its library, or None where that cannot be done."""
    return loaded(SOURCES, ("linear_int4_a8", "linear_int8_a8"))


def fast() -> bool:
    """Whether the operator multiplies bytes at once here (AVX2 and newer); elsewhere it is right, and slow."""
    return available() and torch.ops.fastdecode.a8_paths() > 1
