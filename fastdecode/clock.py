"""Where a round's time goes: an operator that writes the time of day into a tensor, from inside a compiled round.

On the CPU only: a captured CUDA graph runs no host code, so there the parts of a round are not told apart.
"""

import functools
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from operators import attention


class Spent:
    """Seconds that rounds took, in all and by part: drafting, verifying, the rest. `parts` is None where unknown."""

    def __init__(self):
        self.rounds = 0
        self.parts: list[float] | None = None

    def add(self, parts: tuple[float, float, float] | None) -> None:
        """Count one round."""
        self.rounds += 1
        if parts is not None:
            self.parts = [a + b for a, b in zip(self.parts or (0.0, 0.0, 0.0), parts, strict=True)]

    def milliseconds(self) -> tuple[float | None, float | None, float | None]:
        """Milliseconds a round in drafting, verifying and the rest."""
        if self.parts is None:
            return None, None, None
        draft, verify, rest = (1e3 * seconds / self.rounds for seconds in self.parts)
        return draft, verify, rest


@functools.cache
def stamp_operator() -> Callable[[Tensor, int, Tensor], None]:
    """`stamp(times, index, after)`: set `times[index]` (int64, on the CPU) to the nanoseconds of `perf_counter`.

    It runs once `after` is computed and before anything that uses `after`, which it claims to change. In C++
    (operators/stamp.h) where that could be built.
    """
    if sys.platform == "linux" and attention.available():  # elsewhere clocks of C++ and Python may differ
        return torch.ops.fastdecode.stamp

    @torch.library.custom_op("fastdecode::stamp_from_python", mutates_args=("times", "after"))
    def stamp(times: Tensor, index: int, after: Tensor) -> None:
        times[index] = time.perf_counter_ns()

    @stamp.register_fake
    def _(times: Tensor, index: int, after: Tensor) -> None:
        pass

    return stamp
