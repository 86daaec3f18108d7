"""The acceptance script: every draft, tree and temperature once, right shares, and nothing that cannot be measured."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from eagle_fixtures import random_head
from tiny_checkpoint import tiny_checkpoint

from checkpoints.checkpoint import read_config
from fastdecode import acceptance
from fastdecode.options import run_command
from fastdecode.train.output import write_head

EAGER = ("--dtype", "float32", "--device", "cpu", "--no-compile", "--max-seq-len", "300")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder)
    config = read_config(folder)
    write_head(random_head("eagle1", config.vocab_size, config.hidden_size, 0), folder / "head", "safeai")
    (folder / "prompts.txt").write_text("one\ntwo words\nand three words\n")
    return folder


def run(model: Path, *arguments) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(acceptance.main, ["--model", str(model), *EAGER, *map(str, arguments)])
    return code, out.getvalue(), err.getvalue()


def test_every_draft_tree_temperature_and_noise_has_one_row(model):
    code, out, err = run(
        model, "--drafts", "ngram", model / "head", model, "--trees", "chain:2", "dynamic:2,2,4", "--temperatures", "0",
        "1", "--noise", "scores", "ranks", "none", "--prompts", model / "prompts.txt", "--limit", "3",
        "--max-new-tokens", "12", "--batch", "2",
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out.splitlines()[-1])
    key_of = lambda r: (Path(r["draft"]).name, r["tree"], r["lookup"], r["temperature"], r["noise"])  # noqa: E731
    rows = {key_of(r): r for r in report["rows"]}
    assert len(rows) == len(report["rows"])
    sampled = ((0.0, None), (1.0, "scores"), (1.0, "none"))
    chain = {("chain:2", lookup, *how) for lookup in (0, 2) for how in sampled}
    bush = {("dynamic:2,2,4", 0, 0.0, None), *(("dynamic:2,2,4", 0, 1.0, how) for how in acceptance.NOISE)}
    by_draft = {"head": chain | bush, "ngram": {("chain:2", None, 0.0, None), ("chain:2", None, 1.0, "none")}}
    by_draft[model.name] = by_draft["ngram"]
    assert set(rows) == {(draft, *rest) for draft, wanted in by_draft.items() for rest in wanted}
    assert all(row["matched"] == report["prompts"] == 3 for row in rows.values())  # fp32: nothing changes the answers
    # The model as its own draft is right at every depth, but in last rounds, which the budget of 12 cuts to 12 = 4 x 3.
    own = rows[model.name, "chain:2", None, 0.0, None]
    assert (own["tau"], own["accept_by_depth"]) == (3.0, [1.0, 1.0])
    for row in rows.values():
        assert row["tau"] == pytest.approx(1 + sum(row["accept_by_depth"]))
    # each row was shown as soon as it was known, in the table's order
    shown = [line.split("  ") for line in err.splitlines() if "  3/3  " in line]
    assert [(Path(s[0]).name, s[1], float(s[3])) for s in shown] == [
        (Path(r["draft"]).name, r["tree"], r["temperature"]) for r in report["rows"]
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "--drafts"),
        (("--drafts", "none"), "plain decoding is measured anyway"),
        (("--drafts", "ngram", "--trees", "bush"), "bush"),
        (("--drafts", "ngram", "--noise", "loud"), "found 'loud'"),
        (("--drafts", "ngram", "--temperatures", "-1"), "temperature"),
        (("--drafts", "ngram", "--limit", "0"), "--limit should be at least 1"),
        (("--drafts", "ngram", "--tree", "chain:2"), "leave --draft, --tree and --lookup out"),
        (("--drafts", "ngram", "--lookup", "2"), "leave --draft, --tree and --lookup out"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence_and_exit_code_2(model, arguments, sentence):
    code, out, err = run(model, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err and len(err.strip().splitlines()) == 1
