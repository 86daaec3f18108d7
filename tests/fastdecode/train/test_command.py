"""The command line of training: a tiny head learns its target's answers by heart and drafts them; bad input."""

import csv
import json

import pytest
from tiny_checkpoint import tiny_checkpoint

from fastdecode.loading import load
from fastdecode.options import run_command
from fastdecode.train.__main__ import main
from fastdecode.train.data import DataOptions, answer_file
from fastdecode.train.store import ConversationStore
from models.checkpoint import read_config
from models.fingerprint import target_fingerprint

WORDS = "one two three four five six seven eight".split()
LENGTH = 60


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_checkpoint(folder)
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


def tau_on_trained_text(target, out) -> float:
    """Tokens a round, over all prompts, one of which was held out."""
    decoder = load(
        str(target), draft=str(out), tree="chain:5", compile=False, dtype="float32", device="cpu", max_seq_len=256
    )
    results = decoder.generate([f"Say {word}." for word in WORDS], max_new_tokens=LENGTH)
    return sum(r.stats["new_tokens"] for r in results) / sum(r.stats["rounds"] for r in results)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_a_head_that_learns_its_targets_text_by_heart_drafts_it_in_real_rounds(target, data, tmp_path, capsys, kind):
    out = tmp_path / "head"
    options = ["--kind", kind, "--ttt-steps", "5", "--epochs", "90", "--lr", "4e-3", "--keep-features"]
    options += ["--draft-vocab", "300"]
    assert train(target, data, out, *options) == 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed and "expected tau" in printed
    print(tau_on_trained_text(target, out))
    assert tau_on_trained_text(target, out) > 3
