"""The course of a training run: rows of a CSV file, and a picture of them where matplotlib is installed."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastdecode.train.checkpoint import write_atomically
from fastdecode.train.tally import Score

Row = dict[str, float | int | str]


def curve_row(split: str, step: int, seconds: float, tokens: int, lr: float, score: Score) -> Row:
    """One row: `split` is train (the steps since the last such row) or validation."""
    depths = {f"accuracy_{d}": round(value, 6) for d, value in enumerate(score.accuracy)}
    row: Row = {"split": split, "step": step, "seconds": round(seconds, 1), "tokens": tokens, "lr": lr}
    return row | {"loss": round(score.loss, 6), "tau": round(score.tau, 6)} | depths


def write_csv(path: Path, rows: Sequence[Mapping[str, float | int | str]]) -> None:
    """Write `rows`, all of the same columns, at once. Raises OSError."""
    if not rows:
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def draw(path: Path, rows: Sequence[Row]) -> str | None:
    """Draw loss, accuracies and tau over the steps into a PNG file; returns why not, where it cannot be done."""
    try:
        from matplotlib.figure import Figure  # no pyplot: nothing global, no display
    except ImportError:
        return f"No {path.name}: matplotlib is not installed (pip install matplotlib); the CSV has all figures."
    if not rows:
        return None
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    tau = right.twinx()
    for split, style in (("train", "-"), ("validation", "o--")):
        found = [row for row in rows if row["split"] == split]
        steps = [row["step"] for row in found]
        left.plot(steps, [row["loss"] for row in found], style, label=split)
        tau.plot(steps, [row["tau"] for row in found], style, color="black", label=f"tau, {split}")
        if split == "validation":
            for column in (name for name in rows[0] if name.startswith("accuracy_")):
                depth = column.removeprefix("accuracy_")
                right.plot(steps, [row[column] for row in found], ".-", label=f"depth {depth}")
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel="accuracy, validation", ylim=(0, 1))
    tau.set(ylabel="tau")
    left.legend()
    right.legend(loc="lower right", fontsize="small")
    tau.legend(loc="upper left", fontsize="small")
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))
    return None
