"""What quantization did, as numbers and as text."""

from dataclasses import dataclass, replace
from itertools import groupby

MOST_NAMES = 20  # of matrices left alone that are listed; a layer of experts has hundreds


@dataclass(frozen=True)
class MatrixResult:
    """One quantized matrix. `parameter`: the network's, whose layer it is in. `error`: `|W - W'|² / |W|²`; `length`:
    `|W|²`; `n_bytes`: what q, scales and minima take."""

    name: str
    parameter: str
    error: float
    length: float
    n_weights: int
    n_bytes: int

    def within(self, place: str) -> "MatrixResult":
        return replace(self, name=place + self.name, parameter=place + self.parameter)

    @property
    def layer(self) -> str:
        """`layers.3`, `draft/layers.0`, or the matrix's own name."""
        place, slash, parameter = self.parameter.rpartition("/")
        parts = parameter.split(".")
        return place + slash + (".".join(parts[:2]) if parts[0] == "layers" else parts[0])


@dataclass(frozen=True)
class Report:
    """A finished run. `kept`: matrices left as they are; `dropped`: sentences; bytes of weights before and after."""

    matrices: tuple[MatrixResult, ...]
    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    seconds: float

    @property
    def bits_per_weight(self) -> float:
        """Of the quantized matrices, scales and minima included."""
        n_weights = sum(m.n_weights for m in self.matrices)
        return 8 * sum(m.n_bytes for m in self.matrices) / n_weights if n_weights else 0.0

    def text(self) -> str:
        """A line a layer, what was left alone, and the totals."""
        lines = []
        if self.matrices:
            lines.append("relative error |W - W'|²/|W|² of each layer, and its worst matrix")
        for layer, group in groupby(self.matrices, key=lambda m: m.layer):
            matrices = list(group)
            worst = max(matrices, key=lambda m: m.error)
            line = f"  {layer:<20} {mean_error(matrices):.2e}"
            lines.append(line + (f"   {worst.error:.2e} {worst.name}" if len(matrices) > 1 else ""))
        lines += [f"left as it is: {name}" for name in self.kept[:MOST_NAMES]]
        if len(self.kept) > MOST_NAMES:
            lines.append(f"left as it is: {len(self.kept) - MOST_NAMES} more")
        lines += [f"left out: {sentence}" for sentence in self.dropped]
        lines.append(
            f"{self.bits_per_weight:.2f} bits per quantized weight; {_megabytes(self.bytes_before)} before, "
            f"{_megabytes(self.bytes_after)} after; {self.seconds:.1f} s"
        )
        return "\n".join(lines)


def mean_error(matrices: list[MatrixResult]) -> float:
    """The relative error of all of them together."""
    length = sum(m.length for m in matrices)
    return sum(m.error * (m.length or 1) for m in matrices) / (length or 1)


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.2f} MB"
