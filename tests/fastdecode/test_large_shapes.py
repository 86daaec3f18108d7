"""Rounds of known shapes on the CPU: what was asked for is measured, and what cannot be is said."""

import json

import pytest
from test_benchmark_gpu import TINY

from fastdecode import benchmark_gpu_models
from fastdecode.large_shapes import main
from models.errors import InputError


def test_each_precision_and_tree_has_its_row(monkeypatch, capsys):
    monkeypatch.setattr(benchmark_gpu_models, "LLAMA_2_7B", TINY)
    arguments = ["--precisions", "w4a8", "--trees", "none", "chain:3", "--group-size", "32"]
    main([*arguments, "--context", "20", "--rounds", "3"])
    *table, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert report["group_size"] == 32 and report["machine"]["device"] == "cpu" and len(table) == 3
    kinds = [(row["precision"], row["tree"], row["nodes"]) for row in report["rows"]]
    assert kinds == [("w4a8", "none", 1), ("w4a8", "chain:3", 4)]
    for row in report["rows"]:
        least = row["bytes_per_round"] / row["bandwidth_gb_s"] / 1e6  # milliseconds
        assert row["bandwidth_share"] == pytest.approx(least / row["ms_per_round"], rel=1e-6)
        assert row["of_bytes_at_goal"] == pytest.approx(report["goal"] / row["bandwidth_share"], rel=1e-6)


@pytest.mark.parametrize("arguments", [["--trees", "bush"], ["--rounds", "0"]])
def test_what_cannot_be_measured_is_said(arguments):
    with pytest.raises(InputError):
        main(arguments)
