"""A prompt of 7,500 tokens in the demo model's 8,192: the same text with a draft, and the memory that was predicted."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastdecode import load
from fastdecode.benchmark_measure import text_of_length
from fastdecode.drafting import DraftOptions
from fastdecode.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
N_PROMPT, NEW_TOKENS, LIMIT = 7500, 32, 8192


@pytest.fixture(scope="module")
def prompt(demo_model_path) -> str:
    tokenizer = load_tokenizer(demo_model_path)
    source = (ROOT / "quantize" / "evaluation.txt").read_text(encoding="utf-8")
    text = text_of_length(N_PROMPT, source, lambda part: len(tokenizer.encode(part)))
    assert text is not None
    return text


@pytest.fixture(scope="module")
def plain():
    decoder = load("smollm2-135m", device="cpu", draft="none", compile=False, max_seq_len=LIMIT)
    assert decoder.max_seq_len == LIMIT
    return decoder


@pytest.fixture(scope="module")
def answer(plain, prompt):
    result = plain.generate(prompt, raw=True, max_new_tokens=NEW_TOKENS)
    assert result.stats["prompt_tokens"] == N_PROMPT and len(result.token_ids) == NEW_TOKENS
    return result.token_ids


@pytest.mark.parametrize("draft", ["ngram", "auto"])  # auto: a head that was trained on texts of 512 tokens
def test_drafting_behind_a_long_prompt_says_the_same(plain, prompt, answer, draft, demo_model_path):
    plan = DraftOptions.parse(draft, "chain:3", None).plan(plain.model.config, plain.tokenizer, demo_model_path)
    assert plan.drafts
    result = plain.with_drafter(plan).generate(prompt, raw=True, max_new_tokens=NEW_TOKENS)
    assert result.token_ids == answer
    assert result.stats["tau"] > 1.1  # something is accepted: positions beyond the training length still work


def test_the_answer_ends_where_the_context_does(plain, prompt):
    tail = plain.tokenizer.encode(prompt)[-(LIMIT - N_PROMPT - 20) :]
    longer = prompt + plain.tokenizer.decode(tail)
    n_prompt = len(plain.encode(longer, raw=True))
    assert LIMIT - 40 < n_prompt < LIMIT
    result = plain.generate(longer, raw=True, max_new_tokens=100)
    assert result.finish_reason == "length" and n_prompt + len(result.token_ids) == LIMIT


def test_memory_is_what_explain_predicts_and_an_int8_cache_takes_half(plain, prompt, tmp_path):
    """A parent that holds much must not show in a child's peak, so this one holds 2 GB. In float32, where the cache is
    largest beside what the products of a chunk hold for a while, which differs by tens of MB between kinds of CPU."""
    predicted, peak, cache = {}, {}, {}
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"turns": [prompt]}))
    held = bytearray(b"x" * 2_000_000_000)
    for kind in ("auto", "int8"):
        command = [sys.executable, str(ROOT / "generate.py"), "--prompts", str(tmp_path / "prompts.jsonl"), "--raw"]
        command += ["--draft", "none", "--no-compile", "--explain", "--max-new-tokens", "4", "--kv-cache", kind]
        command += ["--max-seq-len", str(LIMIT), "--dtype", "float32"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        figures = " ".join(done.stderr.split()).replace(",", "")
        assert f"{N_PROMPT} tokens" in figures
        predicted[kind] = float(re.search(r"predicted memory (\d+) MB", figures).group(1))
        peak[kind] = float(re.search(r"peak memory (\d+) MB", figures).group(1))
        cache[kind] = float(re.search(r"cache \w+ (\d+) MB", figures).group(1))
    del held
    values = sum(b.numel() for b in plain.cache.buffers() if b.is_floating_point())
    assert cache["auto"] == pytest.approx(4 * values / 1e6, abs=1)
    assert cache["int8"] == pytest.approx(cache["auto"] * (64 + 4) / (4 * 64), abs=1)
    for kind in predicted:  # "beside the program itself": Python, torch, and a chunk's activations
        assert 200 < peak[kind] - predicted[kind] < 900
    assert peak["auto"] - peak["int8"] == pytest.approx(predicted["auto"] - predicted["int8"], rel=0.25)
