"""Linear layers on int4 and int8 weights on a CUDA device: one Triton kernel, and PyTorch's tinygemm beside it.

`linear(x, packed)` multiplies fp16 or bf16 rows by weights that stay packed until they are in registers. A row's result
depends neither on the rows beside it nor on how many they are: blocks along the columns (`STEP`, `splits_for`) are a
function of the matrix's shape alone, partial sums are added in a fixed order, and only the number of rows that one
program takes may follow the batch. Nothing is tuned at run time, because then results would depend on timing.

Triton is imported when a kernel is first needed: a machine without it can still pack, and use `linear_reference`.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from models.errors import InputError
from quantize.storage import Quantized

STEP = 128  # columns that one turn of the kernel's loop takes; groups of 32, 64 and 128 divide it
BLOCK_N = 64  # outputs of one program: four warps of the tensor core's 16
PROGRAMS = 256  # enough to fill any card: about three for each of the RTX 3090's 82 multiprocessors
MOST_SPLITS = 16
LEAST_STEPS = 4  # a split shorter than this spends its time filling the pipeline

# Depth of the loop's pipeline by rows of a block (it keeps one buffer less): what lets two to three programs share a
# multiprocessor's shared memory, which is 100 KB on the 3090 and the 4090, 164 KB on the A100, 228 KB on the H100.
STAGES = {(8, 6): {16: 4, 32: 3, 64: 3}, (8, 9): {16: 4, 32: 3, 64: 3}}
STAGES_LARGE = {16: 5, 32: 4, 64: 4}


@dataclass(frozen=True)
class Packed:
    """A matrix `[N, K]` as the kernel reads it; K is padded with zeros to a multiple of `STEP`.

    `weight`: int32 `[K / STEP, N padded to BLOCK_N, STEP * bits / 32]`. Within a step, field f (bits `f * bits` and up)
    of word j is column `f * STEP * bits / 32 + j`: the fields of a tile of words are tiles of consecutive columns, in
    order. 8-bit numbers are stored with 128 added.
    `scales`: `[K / group, N]`. 4 bits: scale and minimum side by side, scale in the lower half, both as they came:
    int32 with two fp16, int64 with two fp32. 8 bits: fp32.

    Bits, group and sizes follow from these shapes, so that an operator on the two tensors needs no integers, which
    `torch.compiler.nested_compile_region` would turn into inputs.
    """

    weight: Tensor
    scales: Tensor

    def __post_init__(self):
        if importlib.util.find_spec("triton") is not None:
            register_operator()  # here, because torch.compile cannot trace a registration


def pack(quantized: Quantized) -> Packed:
    """Arrange a matrix for the kernel. A scale per output (a group of K) is repeated for every `STEP` columns."""
    q, bits, group = quantized.values(), quantized.bits, quantized.group_size
    n_out, n_columns = q.shape
    scale, minimum = quantized.scale, quantized.minimum
    if group == n_columns and group not in (32, 64, 128):
        group = STEP
        scale = scale.expand(n_out, -(-n_columns // STEP))
        minimum = None if minimum is None else minimum.expand_as(scale)
    if STEP % group or group < 32:
        raise InputError(f"groups of {group} columns: the CUDA kernel takes 32, 64, 128 or all; quantize again.")
    n_steps = -(-n_columns // STEP)
    words, fields = STEP * bits // 32, 32 // bits
    q = q if bits == 4 else q.view(torch.uint8) ^ 128
    q = F.pad(q, (0, n_steps * STEP - n_columns, 0, -n_out % BLOCK_N)).view(-1, n_steps, fields, words)
    if bits == 4:
        q = q[:, :, 0::2] | (q[:, :, 1::2] << 4)
    weight = q.permute(1, 0, 3, 2).contiguous().view(torch.int32).squeeze(-1)  # four bytes a word, the lowest first

    def by_group(numbers: Tensor) -> Tensor:  # [N, groups] -> [padded groups, N]
        return F.pad(numbers, (0, n_steps * STEP // group - numbers.shape[1])).t()

    if bits == 8:
        scales = by_group(scale.float())
    else:
        pair = torch.stack((by_group(scale), by_group(minimum)), dim=-1)
        whole = torch.int32 if pair.dtype == torch.float16 else torch.int64
        scales = (pair if whole == torch.int32 else pair.float()).contiguous().view(whole).squeeze(-1)
    return Packed(weight, scales.contiguous())


def bits_and_group(weight: Tensor, scales: Tensor) -> tuple[int, int]:
    """What the shapes of a `Packed` say."""
    return weight.shape[2] * 32 // STEP, weight.shape[0] * STEP // scales.shape[0]


def splits_for(n_out: int, n_steps: int) -> int:
    """Into how many parts the columns are cut. Of the shape alone: how a row is summed must not follow the batch."""
    return max(1, min(MOST_SPLITS, -(-PROGRAMS // -(-n_out // BLOCK_N)), n_steps // LEAST_STEPS))


def unpack(packed: Packed, n_columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix `[N, n_columns]` that the kernel multiplies by, in fp32: `dtype` is that of the rows, to which the
    kernel rounds a 4-bit weight (an 8-bit one stays exact, its scale comes after the sum)."""
    return _unpack(packed.weight, packed.scales, n_columns, dtype)


def unpack_rows(weight: Tensor, scales: Tensor, n_columns: int, rows: Tensor) -> Tensor:
    """Rows `[T]` (int64) of the matrix whose `Packed` has these tensors, in fp32: `[T, n_columns]`."""
    return _unpack(weight[:, rows], scales[:, rows], n_columns, torch.float32)


def _unpack(weight: Tensor, scales: Tensor, n_columns: int, dtype: torch.dtype) -> Tensor:
    bits, group = bits_and_group(weight, scales)
    shifts = torch.arange(0, 32, bits, device=weight.device).view(-1, 1)
    words = weight.transpose(0, 1)[: scales.shape[1]]  # [N, steps, words]
    q = (words[:, :, None] >> shifts) & (2**bits - 1)  # [N, steps, fields, words]
    q = q.reshape(q.shape[0], -1, group).float()
    if bits == 8:
        w = (q - 128) * scales.t()[..., None]
    else:
        half = torch.float16 if scales.dtype == torch.int32 else torch.float32
        scale, minimum = scales.t().contiguous()[..., None].view(half).float().unbind(-1)
        w = (q * scale[..., None] + minimum[..., None]).to(dtype).float()
    return w.reshape(w.shape[0], -1)[:, :n_columns]


def linear_reference(x: Tensor, packed: Packed) -> Tensor:
    """What the kernel computes, in plain PyTorch: `x [..., K]` -> `[..., N]`, summed in fp32.

    The scales are applied to the weights in fp32. Written the cheaper way, as a product in bf16 and then bf16 scales,
    Inductor would replace it by `aten._weight_int8pack_mm`, whose CUDA kernel has one thread an output.
    """
    return F.linear(x.float(), unpack(packed, x.shape[-1], x.dtype)).to(x.dtype)


def available(device: torch.device) -> bool:
    """Whether the kernel runs on this device: CUDA, compute capability 8.0 or more, Triton installed."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def linear(x: Tensor, packed: Packed) -> Tensor:
    """`x [..., K]` fp16 or bf16 -> `[..., N]` of the same dtype, by the Triton kernel, where it is `available`."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise InputError(f"the CUDA kernel takes fp16 or bf16 activations, not {x.dtype}; choose another --dtype.")
    return torch.ops.fastdecode.quantized_linear(x, packed.weight, packed.scales)


@functools.cache
def register_operator() -> None:
    """Register `fastdecode::quantized_linear(x, weight, scales)`, once: a `triton_op`, which torch.compile sees
    through to the two kernels, and whose fake implementation is the function itself."""

    @torch.library.triton_op("fastdecode::quantized_linear", mutates_args={})
    def quantized_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        missing = weight.shape[0] * STEP - x.shape[-1]
        # Small models have such columns. A mask in the kernel instead costs the larger blocks their last registers.
        rows = F.pad(rows, (0, missing)) if missing else rows.contiguous()
        return launch(rows, weight, scales, torch.library.wrap_triton).view(*x.shape[:-1], scales.shape[1])


def block_rows(n_rows: int, group: int) -> int:
    """Rows of one program: 16, 32 or 64; with groups of 32, where 64 would not fit into the registers, 16 or 32."""
    return 16 if n_rows <= 16 else 32 if n_rows <= 32 or group == 32 else 64


def stages_for(device: torch.device, rows: int) -> int:
    """Depth of the pipeline, which changes speed only."""
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (8, 6)
    return STAGES.get(capability, STAGES_LARGE)[rows]


def launch(x: Tensor, weight: Tensor, scales: Tensor, wrap: Callable[[Any], Any]) -> Tensor:
    """`x [M, padded K]`, contiguous -> `[M, N]`. `wrap` is what makes a kernel traceable."""
    n_rows = x.shape[0]
    n_steps, n_padded, _ = weight.shape
    n_out = scales.shape[1]
    bits, group = bits_and_group(weight, scales)
    splits, rows = splits_for(n_out, n_steps), block_rows(n_rows, group)
    out = x.new_empty(n_rows, n_out)
    if n_rows == 0:
        return out
    # A single split writes the result itself.
    partial = out if splits == 1 else x.new_empty(splits, n_rows, n_out, dtype=torch.float32)
    multiply, add = kernels()
    # Row blocks come first: programs that run side by side then read the same weights, all but one from the cache.
    grid = (-(-n_rows // rows), -(-n_out // BLOCK_N), splits)
    wrap(multiply)[grid](
        x, weight, scales, partial, n_rows, n_out, n_padded, n_steps, -(-n_steps // splits),
        BITS=bits, GROUP=group, STEP=STEP, BLOCK_M=rows, BLOCK_N=BLOCK_N, STAGES=stages_for(x.device, rows),
    )  # fmt: skip
    if splits > 1:
        n_elements = n_rows * n_out
        wrap(add)[(-(-n_elements // 512),)](partial, out, n_elements, SPLITS=splits, BLOCK=512)
    return out


@functools.cache
def kernels() -> tuple[Any, Any]:
    """The two Triton kernels. They look `tl` up among this module's globals, so it becomes one here."""
    global tl
    import triton
    import triton.language as tl

    # Not specialized: a kernel of its own for M = 1 would be one more to compile, and one more to agree with.
    @triton.jit(do_not_specialize=["M", "n_steps", "steps_of_split"])
    def multiply(
        x, weight, scales, out, M, N, n_padded, n_steps, steps_of_split,
        BITS: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        STAGES: tl.constexpr,
    ):  # fmt: skip
        """x `[M, padded K]` times weight -> out `[splits, M, N]`. Tiles are `[outputs, rows]`: weights are the tensor
        core's first operand, so that the instruction it uses does not depend on how many rows there are.

        A field becomes a number without a conversion, which the card does at a fraction of its speed: moved into the
        mantissa of a float whose other bits are those of 16.0 or 2**23, it makes 16 + q or 2**23 + q.
        """
        SIXTEEN: tl.constexpr = 0x41800000
        TWO_TO_23: tl.constexpr = 0x4B000000
        WORDS: tl.constexpr = STEP * BITS // 32
        FIELDS: tl.constexpr = 32 // BITS
        PER_GROUP: tl.constexpr = GROUP // WORDS  # fields
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        split = tl.program_id(2)
        j = tl.arange(0, WORDS)
        in_m, in_n = (m < M)[None, :], n < N
        x_tile = x + m[None, :] * n_steps * STEP + j[:, None]
        weight_tile = weight + n[:, None] * WORDS + j[None, :]
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        first = split * steps_of_split
        for step in tl.range(first, tl.minimum(first + steps_of_split, n_steps), num_stages=STAGES):
            words = tl.load(weight_tile + step * n_padded * WORDS)
            for f in tl.static_range(FIELDS):
                if f % PER_GROUP == 0:
                    group = step * (STEP // GROUP) + f // PER_GROUP
                    pair = tl.load(scales + group * N + n, mask=in_n, other=0)
                    if BITS == 8:
                        in_group = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                    elif scales.dtype.element_ty == tl.int32:
                        scale = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                        minimum = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                    else:
                        scale = (pair & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
                        minimum = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
                    if BITS == 4:
                        # Adds 0, which the compiler cannot know: between two constants, `a & mask | sixteen` would be
                        # two instructions for every weight, with one in a register it is one.
                        above = (SIXTEEN + (scale != scale).to(tl.int32))[:, None]
                        minimum = (minimum - 16 * scale)[:, None]
                        scale = scale[:, None]
                x_field = tl.load(x_tile + step * STEP + f * WORDS, mask=in_m, other=0.0)  # [words, rows]
                if BITS == 4:
                    # To bits 19 to 22, the mantissa's first four; the minimum takes the 16 back.
                    bits = words << (19 - 4 * f) if f < 5 else words >> (4 * f - 19)
                    q = ((bits & 0x780000) | above).to(tl.float32, bitcast=True)
                    total = tl.dot((q * scale + minimum).to(x.dtype.element_ty), x_field, total)
                else:
                    # Whole numbers up to 128 are exact in bf16, so the scale can wait for the group's sum.
                    q = (((words >> (8 * f)) & 0xFF) | TWO_TO_23).to(tl.float32, bitcast=True) - 8388736.0
                    in_group = tl.dot(q.to(x.dtype.element_ty), x_field, in_group)
                    if f % PER_GROUP == PER_GROUP - 1:
                        total += in_group * pair[:, None]
        target = out + split * M * N + m[None, :] * N + n[:, None]
        tl.store(target, total.to(out.dtype.element_ty), mask=in_m & in_n[:, None])

    @triton.jit
    def add(partial, out, n_elements, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
        """partial `[splits, n_elements]` -> out `[n_elements]`, first split first."""
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < n_elements
        total = tl.load(partial + i, mask=inside)
        for split in tl.static_range(1, SPLITS):
            total += tl.load(partial + split * n_elements + i, mask=inside)
        tl.store(out + i, total.to(out.dtype.element_ty), mask=inside)

    return multiply, add


@dataclass(frozen=True)
class TinygemmPacked:
    """A 4-bit matrix for `aten._weight_int4pack_mm`. `scales_and_zeros`: bf16 `[K / group, N, 2]`."""

    weight: Tensor
    scales_and_zeros: Tensor
    group_size: int
    relative_error: float  # by which bf16 scales and zeros change the weights: norm of the change over their norm


def pack_tinygemm(quantized: Quantized) -> TinygemmPacked:
    """Pack a 4-bit matrix that lies on a CUDA device for tinygemm: `(q - 8) * scale + zero`, both bf16.

    Fast at one to four rows; it reads all weights again for every 16. Raises InputError for shapes it does not take.
    """
    n_out, n_columns = quantized.shape
    tiles = next((t for t in (8, 4, 2) if n_columns % (t * 16) == 0), None)
    if quantized.bits != 4 or tiles is None or n_out % 8:
        raise InputError(
            f"tinygemm takes 4-bit matrices with columns a multiple of 32 and outputs a multiple of 8, "
            f"not {quantized.bits} bits, {n_columns} columns, {n_out} outputs; use the Triton kernel."
        )
    pair, error = tinygemm_scales(quantized)
    swapped = (quantized.q >> 4) | (quantized.q << 4)  # its even columns are in the high nibble
    weight = torch.ops.aten._convert_weight_to_int4pack(swapped, tiles)
    return TinygemmPacked(weight, pair.transpose(0, 1).contiguous(), quantized.group_size, error)


def tinygemm_scales(quantized: Quantized) -> tuple[Tensor, float]:
    """Scales and zeros `[N, K / group, 2]` in bf16, and the relative error that their rounding makes."""
    scale = quantized.scale.float()
    pair = torch.stack((scale, quantized.minimum.float() + 8 * scale), dim=-1).to(torch.bfloat16)
    rounded_scale, zero = pair.float().unbind(-1)
    q = quantized.values().view(*scale.shape, -1).float()
    w = quantized.dequantize()
    rounded = ((q - 8) * rounded_scale[..., None] + zero[..., None]).view_as(w)
    return pair, float((rounded - w).norm() / w.norm())


def tinygemm_linear(x: Tensor, packed: TinygemmPacked) -> Tensor:
    """`x [..., K]` bf16 -> `[..., N]` by tinygemm."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.ops.aten._weight_int4pack_mm(rows, packed.weight, packed.group_size, packed.scales_and_zeros)
    return out.view(*x.shape[:-1], -1)
