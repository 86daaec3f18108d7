"""Quantization without data: a matrix to whole numbers and the scale (and minimum) of each group of columns.

rtn: the range of each group, then round to nearest. als: alternating least squares, from several clipped ranges. hqq:
half-quadratic quantization (mobiusml.github.io/hqq_blog), which moves the zero point only. Scales and minima are
rounded to their stored dtype first, and whole numbers are then fitted to what is stored.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from models.errors import InputError
from quantize.storage import Quantized, check_group_size, pack_nibbles

METHODS = ("rtn", "als", "hqq")
LEVELS = {4: (0, 15), 8: (-127, 127)}  # bits -> least and greatest whole number

CHUNK = 1 << 20  # weights worked on at a time: 4 MB in fp32, and there are a few copies
STARTS = {4: (1.0, 0.88, 0.76), 8: (1.0,)}  # bits -> shares of a group's range; clipping 8 bits is no use
ALS_STEPS = 20
HQQ_STEPS, HQQ_POWER, HQQ_BETA, HQQ_KAPPA = 20, 0.7, 10.0, 1.01


class Grid(NamedTuple):
    """What each group's whole numbers stand for, `w = scale * q + minimum`: both fp32 `[G, 1]` and holding only
    values that the stored dtype has. `minimum` is zero for 8 bits, where it is not stored."""

    scale: Tensor
    minimum: Tensor


@torch.no_grad()
def quantize_matrix(weight: Tensor, bits: int, group_size: int, method: str = "als", name: str = "weight") -> Quantized:
    """`weight [out, in]`, of any float dtype and on any device, in groups of `group_size` columns.

    Rows are worked on a chunk at a time: beyond the result it takes some 10 MB. `name` is the layer's, for errors.
    Raises InputError for a method or number of bits that does not exist, a group size that does not fit, and weights
    that are not finite.
    """
    if method not in METHODS:
        raise InputError(f"--method {method}: expected one of {', '.join(METHODS)}.")
    check_matrix(weight, bits, group_size, name)
    if method == "hqq" and bits == 8:
        raise InputError("--method hqq moves zero points, which 8 bits do not have; use als or rtn, or --bits 4.")
    dtype = parameter_dtype(weight, bits, group_size)
    n_groups = weight.shape[1] // group_size
    q, scales, minima = [], [], []
    for groups in row_groups(weight, group_size):
        grid = fit(groups, bits, dtype, method)
        q.append(pack(round_to(groups, grid, bits).view(-1, weight.shape[1]), bits))
        scales.append(grid.scale.view(-1, n_groups).to(dtype))
        minima.append(grid.minimum.view(-1, n_groups).to(dtype))
    return Quantized(bits, group_size, torch.cat(q), torch.cat(scales), torch.cat(minima) if bits == 4 else None)


@torch.no_grad()
def relative_error(weight: Tensor, quantized: Quantized) -> float:
    """`|W - W'|² / |W|²` for `weight [out, in]` and what stands for it: squared, so 0.006 is 7.7 % of the length."""
    difference = length = 0.0
    n_rows = rows_at_a_time(weight)
    for start in range(0, weight.shape[0], n_rows):
        rows = slice(start, start + n_rows)
        minimum = None if quantized.minimum is None else quantized.minimum[rows]
        part = Quantized(quantized.bits, quantized.group_size, quantized.q[rows], quantized.scale[rows], minimum)
        w = weight[rows].double()
        difference += (w - part.dequantize()).square().sum().item()
        length += w.square().sum().item()
    return difference / length if length else difference


def check_matrix(weight: Tensor, bits: int, group_size: int, name: str) -> None:
    """Raise InputError, naming the layer, for what no method can quantize."""
    if bits not in LEVELS:
        raise InputError(f"--bits {bits}: expected one of {', '.join(map(str, LEVELS))}.")
    if weight.dim() != 2 or weight.numel() == 0:
        raise InputError(f"{name}: expected a matrix, found shape {list(weight.shape)}; --skip leaves it as it is.")
    check_group_size(weight.shape[1], group_size, name)
    if not all(rows.isfinite().all() for rows in weight.split(rows_at_a_time(weight))):
        raise InputError(f"{name}: has weights that are infinite or not a number; fetch the checkpoint again.")


def parameter_dtype(weight: Tensor, bits: int, group_size: int) -> torch.dtype:
    """The dtype in which the scales and minima of a matrix are stored: fp16, or fp32 where that would cost quality.

    fp16 overflows above 65504, has few digits left below 1e-6, and cannot place a narrow range far from zero. Each of
    these misplaces the ends of a group's range; where the squares of that come to over 1 % of the rounding error of
    the whole matrix, it is fp32. (A few tiny groups beside others change nothing, and stay fp16.)
    """
    low, high = LEVELS[bits]
    misplaced = rounding = 0.0
    for groups in row_groups(weight, group_size):
        exact = Grid(*(part.double() for part in range_of(groups, bits)))
        scale_error, minimum_error = (part.half().double() - part for part in exact)
        for end in (low, high):
            misplaced += (end * scale_error + minimum_error).square().sum().item()
        rounding += exact.scale.square().sum().item() * group_size / 12
    return torch.float16 if misplaced <= 0.01 * rounding else torch.float32  # not a number, after overflow: fp32


def fit(groups: Tensor, bits: int, dtype: torch.dtype, method: str) -> Grid:
    """The grid of each group of `groups [G, g]` (fp32), in values that `dtype` has."""
    if method == "als":
        return _least_squares(groups, bits, dtype)
    start = _stored(range_of(groups, bits), dtype)
    return _half_quadratic(groups, bits, dtype, start) if method == "hqq" else start


def round_to(groups: Tensor, grid: Grid, bits: int) -> Tensor:
    """The whole numbers (as floats, shaped as `groups [G, g]`) whose values are nearest; 0 where the scale is 0."""
    step = grid.scale.masked_fill(grid.scale == 0, torch.inf)
    return groups.sub(grid.minimum).div_(step).round_().clamp_(*LEVELS[bits])


def pack(q: Tensor, bits: int) -> Tensor:
    """Whole numbers (as floats) `[out, in]` -> `q` of a `Quantized`."""
    return pack_nibbles(q.to(torch.uint8)) if bits == 4 else q.to(torch.int8)


def range_of(groups: Tensor, bits: int) -> Grid:
    """The grid from the least to the greatest weight of each group; for 8 bits, as wide on both sides of zero."""
    high = LEVELS[bits][1]
    if bits == 8:
        scale = groups.abs().amax(-1, keepdim=True) / high
        return Grid(scale, torch.zeros_like(scale))
    least, greatest = groups.aminmax(dim=-1, keepdim=True)
    return Grid(greatest / high - least / high, least)  # divided first: the difference of two floats may overflow


def rows_at_a_time(weight: Tensor) -> int:
    return max(1, CHUNK // weight.shape[1])


def row_groups(weight: Tensor, group_size: int) -> Iterator[Tensor]:
    """The groups of `weight [out, in]`, row by row, `[G, group_size]` in fp32, of some whole rows at a time."""
    for rows in weight.split(rows_at_a_time(weight)):
        yield rows.float().reshape(-1, group_size)


def _stored(grid: Grid, dtype: torch.dtype) -> Grid:
    limit = torch.finfo(dtype).max
    return Grid(*(part.clamp(-limit, limit).to(dtype).float() for part in grid))


def _squared_error(groups: Tensor, q: Tensor, grid: Grid) -> Tensor:
    return torch.addcmul(grid.minimum, q, grid.scale).sub_(groups).square_().sum(-1, keepdim=True)


def _least_squares(groups: Tensor, bits: int, dtype: torch.dtype) -> Grid:
    """The best of several alternations, one from the range of each group and others from narrower ones.

    Most weights are small: finer steps for them are worth more than the few large ones that are cut. Alternation ends
    in a local minimum, and starts from one range or another end in different ones.
    """
    low, high = LEVELS[bits]
    whole = range_of(groups, bits)
    best, least = None, None
    for ratio in STARTS[bits]:
        margin = whole.scale * ((low + high) / 2 * (1 - ratio))  # about the same middle, which for 8 bits is zero
        start = _stored(Grid(whole.scale * ratio, whole.minimum + margin), dtype)
        grid, error = _alternate(groups, bits, dtype, start)
        if best is None:
            best, least = grid, error
        better = error < least
        least = torch.where(better, error, least)
        best = Grid(*(torch.where(better, new, old) for new, old in zip(grid, best, strict=True)))
    return best


def _alternate(groups: Tensor, bits: int, dtype: torch.dtype, grid: Grid) -> tuple[Grid, Tensor]:
    """Alternating least squares: round to the grid, fit scale and minimum to the whole numbers in closed form, again.

    A group goes on only while its squared error falls, so that rounding to `dtype` cannot harm, and work is spent only
    on those that do. Returns the grid and its squared error, all `[G, 1]`.
    """
    q = round_to(groups, grid, bits)
    error = _squared_error(groups, q, grid)
    best, least = Grid(grid.scale.clone(), grid.minimum.clone()), error.clone()
    going = torch.arange(len(groups), device=groups.device)
    mean = groups.mean(-1, keepdim=True) if bits == 4 else torch.zeros_like(error)  # 8 bits: a line through zero
    for _ in range(ALS_STEPS):
        q_mean = q.mean(-1, keepdim=True) if bits == 4 else torch.zeros_like(mean)
        q_offset = q - q_mean
        spread = q_offset.square().sum(-1, keepdim=True)
        scale = q_offset.mul_(groups - mean).sum(-1, keepdim=True) / spread  # not a number if all q are alike: ends
        scale = _stored(Grid(scale, mean), dtype).scale
        grid = _stored(Grid(scale, mean - scale * q_mean), dtype)  # the minimum for the scale as it is stored
        q = round_to(groups, grid, bits)
        error_before, error = error, _squared_error(groups, q, grid)
        fell = (error < error_before).squeeze(-1).nonzero().squeeze(-1)
        if len(fell) == 0:
            break
        going, groups, mean, q, error = going[fell], groups[fell], mean[fell], q[fell], error[fell]
        best.scale[going], best.minimum[going], least[going] = grid.scale[fell], grid.minimum[fell], error
    return best, least


def _half_quadratic(groups: Tensor, bits: int, dtype: torch.dtype, grid: Grid) -> Grid:
    """HQQ from `grid`: the zero point (in steps, `w = (q - zero) * scale`) that fits best where outliers count less.

    Half-quadratic splitting of `|W - W'|_p`, p 0.7: a shrunk error W_e takes up what is far off, and the zero is the
    mean of `q - (W - W_e) / scale`. A group keeps the zero of least absolute error, the published code's measure.
    """
    scale, minimum, best, least = *grid, grid.minimum, torch.full_like(grid.scale, torch.inf)
    for step in range(HQQ_STEPS + 1):
        q = round_to(groups, Grid(scale, minimum), bits)
        values = torch.addcmul(minimum, q, scale)
        error = groups - values
        size = error.abs()
        total = size.sum(-1, keepdim=True)
        better = total < least
        least, best = torch.where(better, total, least), torch.where(better, minimum, best)
        threshold = size.pow(HQQ_POWER - 1).div_(HQQ_BETA * HQQ_KAPPA**step)
        shrunk = size.sub_(threshold).relu_().copysign_(error)
        zero = (q - (groups - shrunk) / scale).mean(-1, keepdim=True)
        minimum = _stored(Grid(scale, -zero * scale), dtype).minimum  # not a number if scale is 0: never better
    return Grid(scale, best)
