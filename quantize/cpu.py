"""Linear layers with 4- and 8-bit weights on the CPU: the operator of cpu.cpp, built on first use.

`pack` lays a matrix out for it once, at load, and `linear` multiplies by it. A row's result is bitwise the same at any
number of rows, beside any others, and at any thread count. Without a C++ compiler `linear` is plain torch.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from operators import native
from quantize.storage import Quantized

SHARED = (*map(Path(__file__).with_name, ("packed.h", "surround.h")), native.EACH_CPU)
SOURCES = (*map(Path(__file__).with_name, ("cpu.cpp", "cpu_path.h")), *SHARED)  # the first includes the rest
PATHS = ("plain", "avx2", "avx512", "bf16", "amx")  # as in cpu.cpp; each CPU has the first few
BLOCK = 32  # outputs


class PackedCPU(NamedTuple):
    """A matrix as cpu.cpp reads it: `data` uint8 `[blocks, groups, bytes]`, of which `out_features` outputs count."""

    data: Tensor
    bits: int
    out_features: int
    group_size: int


def pack(weight: Quantized) -> PackedCPU:
    """Lay `weight [N, K]` out for `linear`, on the CPU. Nothing is rounded: scales and minimums keep their dtype.

    Raises ValueError for bits, groups or dtypes that the operator does not know. N need not be a multiple of anything.
    """
    out, n_columns = weight.shape
    bits, group = weight.bits, weight.group_size
    constants = [weight.scale] if bits == 8 else [weight.scale, weight.minimum]
    complete = all(part is not None for part in constants)
    if bits not in (4, 8) or group not in (32, 64, 128) or n_columns % group or not complete:
        raise ValueError(
            f"got {bits} bits in groups of {group} over {n_columns} columns; it takes 4 bits (with minimums) or 8, and "
            "groups of 32, 64 or 128 that the columns are a multiple of"
        )
    dtypes = {part.dtype for part in constants}
    if not dtypes <= {torch.float16, torch.float32} or (weight.minimum is not None) != (bits == 4):
        raise ValueError(f"scales and minimums are fp16 or fp32, with minimums for 4 bits only; got {dtypes}")
    n_blocks, n_groups = -(-out // BLOCK), n_columns // group
    dtype = torch.float16 if dtypes == {torch.float16} else torch.float32
    pad = (0, 0, 0, n_blocks * BLOCK - out)
    parts = []
    for part in constants:
        part = F.pad(part.to(dtype), pad).view(n_blocks, BLOCK, n_groups).transpose(1, 2).contiguous()
        parts.append(part.view(torch.uint8))
    q = F.pad(weight.values().view(torch.uint8), pad).view(n_blocks, 2, 16, n_groups, -1, 32 // bits)
    q = q.permute(0, 3, 1, 4, 2, 5)  # [blocks, groups, halves, vectors, outputs, columns of a vector]
    if bits == 4:  # column 2j + i of eight -> bits 4j of the lane's half i
        q = q.unflatten(-1, (2, 2, 2)).movedim(-1, -3)  # [..., i, j / 2, j % 2]
        q = q[..., 0] | q[..., 1] << 4
    parts.append(q.reshape(n_blocks, n_groups, -1))
    return PackedCPU(torch.cat(parts, dim=-1), bits, out, group)


def unpack(packed: PackedCPU) -> Tensor:
    """The inverse of `pack`: the matrix `[N, K]` in fp32, as `Quantized.dequantize` makes it."""
    n_blocks, n_groups, n_bytes = packed.data.shape
    bits, group = packed.bits, packed.group_size
    n_constants = n_bytes - BLOCK * group * bits // 8
    constants, q = packed.data.split([n_constants, n_bytes - n_constants], dim=-1)
    dtype = torch.float16 if n_constants == BLOCK * 2 * (2 if bits == 4 else 1) else torch.float32
    constants = constants.contiguous().view(dtype).float().view(n_blocks, n_groups, -1, BLOCK)
    if bits == 4:
        q = q.reshape(n_blocks, n_groups, 2, -1, 16, 2, 2)  # [..., vectors, outputs, i, j / 2]
        q = torch.stack((q & 15, q >> 4), dim=-1).movedim(-3, -1).flatten(-3)
    else:
        q = q.contiguous().view(torch.int8).view(n_blocks, n_groups, 2, -1, 16, 4)
    q = q.permute(0, 2, 4, 1, 3, 5).reshape(n_blocks, BLOCK, n_groups, group)
    scale, *minimum = constants.permute(2, 0, 3, 1)[..., None]
    w = q.float() * scale
    if minimum:
        w = w + minimum[0]
    return w.reshape(n_blocks * BLOCK, n_groups * group)[: packed.out_features]


def unpack_rows(packed: PackedCPU, rows: Tensor) -> Tensor:
    """Rows `[T]` (int64) of the matrix, in fp32: `[T, K]`."""
    bits, group = packed.bits, packed.group_size
    found = packed.data[rows // BLOCK]  # [T, groups, bytes]: the row's whole block
    lane, token = rows % BLOCK, torch.arange(len(rows), device=rows.device)
    n_constants = found.shape[-1] - BLOCK * group * bits // 8
    dtype = torch.float16 if n_constants == BLOCK * 2 * (2 if bits == 4 else 1) else torch.float32
    constants, q = found.split([n_constants, found.shape[-1] - n_constants], dim=-1)
    constants = constants.contiguous().view(dtype).float().unflatten(-1, (-1, BLOCK))[token, :, :, lane]
    if bits == 4:
        q = q.unflatten(-1, (2, -1, 16, 2, 2))[token, :, lane // 16, :, lane % 16]  # [T, groups, vectors, i, j / 2]
        q = torch.stack((q & 15, q >> 4), dim=-1).movedim(-3, -1).flatten(-3)
    else:
        q = q.contiguous().view(torch.int8).unflatten(-1, (2, -1, 16, 4))[token, :, lane // 16, :, lane % 16]
    w = q.flatten(2).float() * constants[..., :1]
    if bits == 4:
        w = w + constants[..., 1:]
    return w.flatten(1)


def linear_reference(x: Tensor, packed: PackedCPU) -> Tensor:
    """What `linear` computes, in plain torch: products and sums in fp32, then x's dtype."""
    return F.linear(x.float(), unpack(packed)).to(x.dtype)


def linear(x: Tensor, packed: PackedCPU) -> Tensor:
    """`x [..., K]`, bf16 or fp32 -> `[..., N]` of the same dtype: `x @ w.T`, summed in fp32.

    Call `operators()` before a stored program that contains this is loaded. RuntimeError where K differs.
    """
    if not available():
        return linear_reference(x, packed)
    y = operator(packed.bits)(x, packed.data)
    return y if y.shape[-1] == packed.out_features else y[..., : packed.out_features]


def operator(bits: int) -> torch._ops.OpOverloadPacket:
    """The operator for weights of `bits`, once it is loaded: of x, packed weights, and what surrounds the product
    (`models.layers.surrounded`): a norm's weight and eps, whether x is gated, the residual."""
    return torch.ops.fastdecode.linear_int4 if bits == 4 else torch.ops.fastdecode.linear_int8


@torch.compiler.assume_constant_result  # else the compiler would trace into building it
def available() -> bool:
    """Whether the C++ operator is there; the first call builds it."""
    return operators() is not None


@functools.cache
def operators() -> Path | None:
    """Build, where it is not in the user's cache, and load cpu.cpp; its library, or None where that cannot be done."""
    library = loaded(SOURCES, ("linear_int4", "linear_int8"))
    if library is not None:
        torch.library.register_fake("fastdecode::norm", lambda x, weight, eps: x.new_empty(x.shape))
    return library


def loaded(sources: Sequence[Path], names: Sequence[str]) -> Path | None:
    """Build where needed, and load, a library of operators on packed weights; its file, or None where that cannot be
    done. Also tells torch.compile the shape of what the operators, `names`, return."""
    library = native.load(sources)
    if library is not None:
        for name in names:
            torch.library.register_fake(f"fastdecode::{name}", _output_like)
    return library


def _output_like(x: Tensor, packed: Tensor, *surrounding: object, **named: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0] * BLOCK)
