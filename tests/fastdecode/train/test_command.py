"""The command line of training: a tiny head learns its target's answers by heart and drafts them; bad input."""

import csv
import json

import pytest
from tiny_checkpoint import tiny_checkpoint

from checkpoints.checkpoint import read_config
from checkpoints.fingerprint import target_fingerprint
from fastdecode.loading import load
from fastdecode.options import run_command
from fastdecode.train.__main__ import main
from fastdecode.train.batches import split
from fastdecode.train.data import DataOptions, answer_file
from fastdecode.train.store import ConversationStore

WORDS = ["one", "two", "three", "four"]
LENGTH = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_checkpoint(folder, hidden_size=96, intermediate_size=192)
    return folder


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    """A store of the target's greedy answers to WORDS, and the answers."""
    folder = tmp_path_factory.mktemp("data")
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Say {word}."}) + "\n" for word in WORDS))
    decoder = load(str(target), draft="none", batch=4, compile=False, dtype="float32", device="cpu", max_seq_len=256)
    store = ConversationStore(folder / "store", target_fingerprint(target, read_config(target)))
    answer_file(decoder, store, file, None, DataOptions(answer_tokens=LENGTH, greedy_share=1.0))
    assert len(store) == len(WORDS)
    return folder / "store"


def train(target, data, out, *options: str) -> int:
    (out / "training").mkdir(parents=True, exist_ok=True)
    if not (out / "training" / "data").exists():
        (out / "training" / "data").symlink_to(data)
    fixed = ["--conversations", str(len(WORDS)), "--device", "cpu", "--no-autocast", "--batch-tokens", "400"]
    return run_command(main, ["--target", str(target), "-o", str(out), *fixed, *options])


def tau_on_trained_text(target, data, out) -> float:
    """Tokens a round over the prompts that were trained on, all but the one held out."""
    store = ConversationStore(data, target_fingerprint(target, read_config(target)))
    trained, held_out = split(store, 2048, 0.02, 0)
    assert len(held_out) == 1
    decoder = load(
        str(target), draft=str(out), tree="chain:5", compile=False, dtype="float32", device="cpu", max_seq_len=256
    )
    results = decoder.generate([f"Say {WORDS[i]}." for i in trained], max_new_tokens=LENGTH)
    return sum(len(r.token_ids) for r in results) / sum(r.stats["rounds"] for r in results)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_a_head_that_learns_its_targets_text_by_heart_drafts_it_in_real_rounds(target, data, tmp_path, capsys, kind):
    out = tmp_path / "head"
    options = ["--kind", kind, "--ttt-steps", "5", "--epochs", "200", "--lr", "4e-3", "--keep-features"]
    options += ["--draft-vocab", "300"]
    assert train(target, data, out, *options) == 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed and "expected tau" in printed
    last = list(csv.DictReader((out / "training" / "curve.csv").open()))[-2]
    assert last["split"] == "train" and float(last["accuracy_0"]) > 0.8
    tau = tau_on_trained_text(target, data, out)
    assert tau > 3
    # A chain of 5 commits what training says it would, but for where answers end.
    assert tau == pytest.approx(float(last["tau"]), rel=0.15)


BAD = {
    "--kind eagle9": "--kind should be",
    "--kind eagle1 --layout speculators": "--layout speculators is for EAGLE-3",
    "--kind eagle1 --fc-norm": "are for EAGLE-3 heads",
    "--optimizer sgd": "--optimizer should be adamw or muon",
    "--lr nought": "should be a number",
    "--lr 0": "--lr should be above 0",
    "--hours -1": "--hours should be above 0",
    "--epochs 0": "--epochs should be 1 or more",
    "--conversations 1": "--conversations should be 2 or more",
    "--eval-share 0.9": "--eval-share should be",
    "--layers 2,x": "--layers should be layers such as",
    "--layers 2,7": "--layers should be different, ascending layers from 1 to 2",
    "--keep-features lots": "--keep-features should be a number of GB",
    "--init nowhere/at/all": "nowhere/at/all",
    "--answer-tokens 0": "--answer-tokens should be 1 or more",
    "--greedy-share 1.5": "--greedy-share should be from 0 to 1",
    "--answer-temperature 0": "--answer-temperature should be above 0",
    "--keep-answers": "--keep-answers is for the answers of a file",
    "--beginnings nowhere.jsonl": "nowhere.jsonl: cannot be read",
    "--beginnings begun.jsonl --data some.jsonl": "--beginnings is for prompts that the target makes up",
    "--data nowhere.jsonl --conversations 99": "cannot be read",
}


@pytest.mark.parametrize("options", BAD)
def test_bad_input_is_one_sentence(target, tmp_path, capsys, options):
    command = ["--target", str(target), "-o", str(tmp_path / "head"), "--device", "cpu", *options.split()]
    assert run_command(main, command) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ") and BAD[options] in said


def test_answers_are_made_as_asked_and_other_runs_data_is_trained_on_too(target, data, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "head"
    answered = [{"from": "human", "value": "Say five."}, {"from": "gpt", "value": "five it is"}]
    prompts.write_text(json.dumps({"conversations": answered}) + "\n" + json.dumps({"prompt": "Say six."}) + "\n")
    fixed = ["--target", str(target), "--device", "cpu", "--no-autocast", "--draft-vocab", "50", "--ttt-steps", "1"]
    fixed += ["--data", str(prompts), "--epochs", "1", "--max-length", "256"]
    options = ["--answer-tokens", "7", "--greedy-share", "0", "--answer-temperature", "1.3", "--also", str(data)]
    assert run_command(main, [*fixed, "-o", str(out), *options]) == 0
    fingerprint = target_fingerprint(target, read_config(target))
    made = ConversationStore(out / "training" / "data", fingerprint)
    assert len(made) == 2 and all(0 < c.answer.sum() <= 8 for c in made)
    assert f"{len(WORDS) + 1} conversations to train on" in " ".join(capsys.readouterr().err.split())

    assert run_command(main, [*fixed, "-o", str(tmp_path / "kept"), "--keep-answers", "--also", str(data)]) == 0
    kept = ConversationStore(tmp_path / "kept" / "training" / "data", fingerprint)
    decoder = load(str(target), draft="none", compile=False, dtype="float32", device="cpu", max_seq_len=256)
    assert len(kept) == 1
    assert decoder.tokenizer.decode(kept[0].token_ids[kept[0].answer].tolist()).strip() == "five it is"
    assert run_command(main, [*fixed, "-o", str(tmp_path / "none"), "--also", str(tmp_path)]) == 2
    assert "holds no conversations" in capsys.readouterr().err


def test_a_finished_run_is_not_begun_again_by_accident_and_can_be_made_longer(target, data, tmp_path, capsys):
    out = tmp_path / "head"
    assert train(target, data, out, "--epochs", "1", "--draft-vocab", "50", "--ttt-steps", "2") == 0
    assert train(target, data, out, "--epochs", "2", "--draft-vocab", "50", "--ttt-steps", "2") == 2
    assert "--resume" in capsys.readouterr().err
    assert train(target, data, out, "--epochs", "2", "--draft-vocab", "50", "--ttt-steps", "2", "--resume") == 0
    rows = list(csv.DictReader((out / "training" / "curve.csv").open()))
    assert [row["step"] for row in rows if row["split"] == "validation"] == ["1", "2"]
    config = json.loads((out / "config.json").read_text())
    assert config["draft_vocab_size"] == 50 and 0 < config["draft_vocab_coverage"] <= 1
    assert config["target_fingerprint"] == target_fingerprint(target, read_config(target))


@pytest.mark.parametrize("layout", ["safeai", "speculators"])
def test_training_goes_on_from_an_existing_head(target, data, tmp_path, layout):
    first, second = tmp_path / "first", tmp_path / "second"
    options = ["--draft-vocab", "50", "--ttt-steps", "2", "--layout", layout]
    assert train(target, data, first, *options, "--epochs", "15", "--lr", "3e-3") == 0
    assert train(target, data, second, *options, "--epochs", "1", "--lr", "1e-6", "--init", str(first)) == 0
    curves = [csv.DictReader((out / "training" / "curve.csv").open()) for out in (first, second)]
    losses = [[float(row["loss"]) for row in curve] for curve in curves]
    assert losses[1][0] < losses[0][0] - 0.2
    assert losses[1][-1] == pytest.approx(losses[0][-1], rel=0.02)  # saved as bfloat16 in between
