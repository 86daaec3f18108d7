"""The curve of a run: a CSV file and a picture."""

import csv
import sys

import pytest
import torch

from fastdecode.train.curves import curve_row, draw, write_csv
from fastdecode.train.tally import Score, Tally


def rows():
    return [
        curve_row(split, step, 1.5 * step, 100 * step, 1e-4, Score(3.0 / step, (0.5, 0.25), 1.6))
        for step in (1, 2, 3)
        for split in ("train", "validation")
    ]


def test_the_csv_holds_every_row_and_replaces_the_one_before(tmp_path):
    write_csv(tmp_path / "curve.csv", rows()[:2])
    write_csv(tmp_path / "curve.csv", rows())
    found = list(csv.DictReader((tmp_path / "curve.csv").open()))
    assert [(row["split"], row["step"]) for row in found] == [(row["split"], str(row["step"])) for row in rows()]
    assert float(found[-1]["accuracy_1"]) == 0.25 and float(found[-1]["loss"]) == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["curve.csv"]


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    assert draw(tmp_path / "curve.png", rows()) is None
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in draw(tmp_path / "curve.png", rows())
    assert not (tmp_path / "curve.png").exists()


def test_a_tally_weighs_batches_by_their_positions_and_tau_counts_chains():
    tally = Tally(2)
    tally.add(torch.tensor(2.0), torch.tensor([3.0, 1.0]), torch.tensor([4.0, 2.0]), torch.tensor([3.0, 1.0]))
    tally.add(torch.tensor(5.0), torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0]), torch.tensor([1.0, 0.0]))
    score = tally.score()
    assert score.loss == pytest.approx((2 * 4 + 5 * 2) / 6)
    assert score.accuracy == pytest.approx((4 / 6, 2 / 4))
    assert score.tau == pytest.approx(1 + 4 / 6 + 1 / 4)
