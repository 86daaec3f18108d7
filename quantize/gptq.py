"""GPTQ (arXiv 2210.17323): rounding one column at a time, with the columns after it making up for the error.

What counts is the layer's output on real inputs X: `|(W - W') X|²`, a quadratic form in `H = Σ (2/n) X Xᵀ`. Group
parameters are those of `methods.py`. With act-order the columns with the largest inputs come first, while nothing has
been shifted onto them yet; groups stay groups of neighbours ("static groups"), so that the result is stored in the
order of the checkpoint and costs nothing extra at run time.
"""

import torch
from torch import Tensor

from models.errors import InputError
from quantize.methods import Grid, check_matrix, fit, pack, parameter_dtype, round_to
from quantize.storage import Quantized

BLOCK = 128  # columns whose corrections are applied to the later ones in one product
DAMPING = 0.01  # of the mean diagonal


@torch.no_grad()
def gptq_matrix(
    weight: Tensor,
    hessian: Tensor,
    bits: int,
    group_size: int,
    act_order: bool = True,
    name: str = "weight",
    method: str = "als",
) -> Quantized:
    """`weight [out, in]` rounded for inputs of which `hessian [in, in]` is the second moment, at any scale.

    `act_order`: columns in falling order of their inputs' size, group parameters from the original weights. Without
    it: in their own order, each group's parameters from weights that earlier columns have corrected already. `method`
    fits the parameters. Takes about five times `hessian` and three times `weight` in fp32, and leaves both as they are.
    Raises InputError as `quantize_matrix` does, and for a Hessian that is not finite.
    """
    check_matrix(weight, bits, group_size, name)
    n_columns = weight.shape[1]
    hessian = hessian.to(device=weight.device, dtype=torch.float32, copy=True)
    if hessian.shape != (n_columns, n_columns) or not hessian.isfinite().all():
        raise InputError(f"{name}: calibration gave no finite {n_columns} x {n_columns} Hessian; use --method als.")
    # [in, out]: a column of the matrix is then contiguous
    w = weight.t().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    dead = hessian.diagonal() <= 0  # these inputs are always zero
    if not dead.all():
        hessian /= hessian.diagonal()[~dead].mean()  # so that the next line's 1 is neither much nor little
    hessian.diagonal()[dead] = 1
    w[dead] = 0
    dtype = parameter_dtype(weight, bits, group_size)

    static = _fit_all(w, bits, group_size, dtype, method) if act_order else None
    group = torch.arange(n_columns, device=w.device) // group_size
    if act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
        w, hessian, group = w[order], hessian[order][:, order], group[order]
    inverse = _inverse_factor(hessian, name)
    block = BLOCK if BLOCK % group_size == 0 else group_size  # groups never straddle two blocks

    q = torch.empty_like(w)
    grids = list(static) if static else []
    for start in range(0, n_columns, block):
        here = slice(start, min(start + block, n_columns))
        columns, errors = w[here], torch.empty_like(w[here])  # columns is a view: corrections stay within the block
        factor = inverse[here, here]
        for i, g in enumerate(group[here].tolist()):
            if not static and (start + i) % group_size == 0:
                grids.append(fit(columns[i : i + group_size].t().contiguous(), bits, dtype, method))
            scale, minimum = (part[:, 0] for part in grids[g])
            rounded = round_to(columns[i], Grid(scale, minimum), bits)
            q[start + i] = rounded
            errors[i] = (columns[i] - torch.addcmul(minimum, rounded, scale)) / factor[i, i]
            columns[i:].addr_(factor[i, i:], errors[i], alpha=-1)
        w[here.stop :].addmm_(inverse[here, here.stop :].t(), errors, alpha=-1)
    if act_order:
        q = q[order.argsort()]
    scales, minima = (torch.cat(parts, 1).to(dtype) for parts in zip(*grids, strict=True))
    return Quantized(bits, group_size, pack(q.t().contiguous(), bits), scales, minima if bits == 4 else None)


@torch.no_grad()
def output_error(weight: Tensor, quantized: Quantized, hessian: Tensor) -> float:
    """`|(W - W') X|² / |W X|²` from `hessian [in, in]`: what the layer's outputs lose, where `relative_error` says
    what its weights do."""
    w, hessian = weight.float(), hessian.to(weight.device).float()
    difference = w - quantized.dequantize()
    lost, whole = (((part @ hessian) * part).sum(dtype=torch.float64).item() for part in (difference, w))
    return lost / whole if whole else lost


def _fit_all(w: Tensor, bits: int, group_size: int, dtype: torch.dtype, method: str) -> list[Grid]:
    """One grid `[out, 1]` for each group of columns of `w [in, out]`."""
    return [fit(columns.t().contiguous(), bits, dtype, method) for columns in w.split(group_size)]


def _inverse_factor(hessian: Tensor, name: str) -> Tensor:
    """Upper triangular U with `Uᵀ U = (H + damping)⁻¹`: row i holds how an error in column i is spread over the later
    ones. Damping grows until the factorisation, in fp32, succeeds."""
    mean = hessian.diagonal().mean()
    for damping in (DAMPING, 10 * DAMPING, 100 * DAMPING):
        damped = hessian.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper
    raise InputError(f"{name}: its Hessian cannot be inverted; calibrate with more text, or use --method als.")
