"""What a head got right, counted over many batches and processes."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Score:
    """`accuracy[d]`: how often the head's token at depth d is the target's, after the target's own tokens. `tau`: what
    a round would commit with a chain of as many drafts as there are depths, the target's own token included."""

    loss: float
    accuracy: tuple[float, ...]
    tau: float


class Tally:
    """Sums over batches, one fp64 vector, so that one reduction adds up processes and a checkpoint keeps it whole."""

    def __init__(self, n_depths: int, device: torch.device | str = "cpu"):
        self.n_depths = n_depths
        self.values = torch.zeros(2 + 3 * n_depths, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, correct: Tensor, counted: Tensor, survived: Tensor) -> None:
        """A batch: its mean loss, and per depth (tensors `[n_depths]`) its counts."""
        weight = counted[:1].double()
        parts = (loss.detach().double().reshape(1) * weight, weight, correct, counted, survived)
        self.values += torch.cat([part.detach().to(self.values) for part in parts])

    def clear(self) -> None:
        self.values.zero_()

    def score(self) -> Score:
        """The score so far; zeros when nothing was counted."""
        loss, weight, *counts = self.values.tolist()
        n = self.n_depths
        correct, counted, survived = counts[:n], counts[n : 2 * n], counts[2 * n :]
        shares = [s / c if c else 0.0 for s, c in zip(survived, counted, strict=True)]
        accuracy = tuple(k / c if c else 0.0 for k, c in zip(correct, counted, strict=True))
        return Score(loss / weight if weight else 0.0, accuracy, 1 + sum(shares))
