"""Cross-entropy with a distribution in place of a label, a few rows at a time, its gradient made on the way.

A row has as many numbers as the vocabulary has ids. Taken whole, logits, probabilities and their gradients go through
memory many times over; a few rows of them stay in the processor's cache.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 64


def soft_cross_entropy(logits: Tensor, probabilities: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over rows of the cross-entropy of `logits [n, V]` with `probabilities[index]`, `[m, V]` at `[n]`; each row's
    argmax, `[n]` int64. Computed in fp32."""
    return _OfLogits.apply(logits, probabilities, index)


def cross_entropy_of_states(states: Tensor, wanted: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same between what a frozen `lm_head [V, h]` says of `states` and of `wanted`, `[n, h]` both.

    Returns the sum, and the argmax of each row of `states` and of `wanted`. Never has all logits in memory.
    """
    return _OfStates.apply(states, wanted, lm_head)


def _rows(logits: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy (a sum), argmaxes, and the gradient by `logits [n, V]` (fp32)."""
    top, best = logits.max(-1)
    softmax = logits.softmax(-1)
    # log sum exp z = z_v - log softmax(z)_v for every v; at the largest nothing is lost
    log_sum = top - softmax.gather(-1, best[:, None])[:, 0].log()
    loss = (log_sum * probabilities.sum(-1)).sum() - torch.dot(probabilities.flatten(), logits.flatten())
    return loss, best, softmax.sub_(probabilities)


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, probabilities: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(logits)
        best = torch.empty_like(index)
        loss = torch.zeros((), device=logits.device)
        for part, of, guess, out in zip(*(x.split(ROWS) for x in (logits, index, best, gradient)), strict=True):
            more, guess[:], slope = _rows(part.float(), probabilities[of])
            loss += more
            out.copy_(slope)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * scale, None, None


class _OfStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, wanted: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(states)
        best, choices = torch.empty(2, len(states), dtype=torch.int64, device=states.device)
        loss = torch.zeros((), device=states.device)
        for first in range(0, len(states), ROWS):
            part = slice(first, first + ROWS)
            logits = F.linear(states[part].to(lm_head.dtype), lm_head).float()
            given = F.linear(wanted[part].to(lm_head.dtype), lm_head).float()
            choices[part] = given.argmax(-1)
            more, best[part], slope = _rows(logits, given.softmax(-1))
            loss += more
            gradient[part] = (slope.to(lm_head.dtype) @ lm_head).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best, choices)
        return loss, best, choices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * scale, None, None
