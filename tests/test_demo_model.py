"""The demo model, real weights: its greedy answers are the reference library's, token for token."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastdecode import load
from fastdecode.benchmark_peers import TransformersPeer
from quantize.linear import QuantizedLinear

pytestmark = pytest.mark.slow

PROMPTS = [
    "Why is the sky blue?",
    "Write a short poem about a lighthouse.",
    "What is 17 times 23? Explain each step.",
    "Write a Python function that reverses a list.",
    "Fasse in einem Satz zusammen, was Photosynthese ist.",
]
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def plain_decoder():
    return load("smollm2-135m", dtype="float32", device="cpu", compile=False, quantize="none", draft="none")


@pytest.fixture(scope="module")
def plain_answers(plain_decoder):
    return [plain_decoder.generate(prompt, max_new_tokens=NEW_TOKENS).token_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def peer(plain_decoder, demo_model_path):
    return TransformersPeer(plain_decoder.model, demo_model_path)


def test_uncompiled_answers_equal_the_reference(plain_decoder, plain_answers, peer):
    assert all(plain_answers)
    for prompt, answer in zip(PROMPTS, plain_answers, strict=True):
        expected = peer.generate(plain_decoder.encode(prompt), len(answer))
        assert answer == list(expected.token_ids)


def test_compiled_answers_equal_the_uncompiled_ones_greedy_and_sampled(plain_decoder, plain_answers):
    compiled = load("smollm2-135m", dtype="float32", device="cpu", quantize="none", draft="none")
    answers = [compiled.generate(prompt, max_new_tokens=NEW_TOKENS).token_ids for prompt in PROMPTS]
    assert answers == plain_answers
    options = {"max_new_tokens": 24, "temperature": 0.7, "top_p": 0.9, "seed": 4}
    sampled = compiled.generate(PROMPTS[0], **options)
    assert sampled.token_ids == plain_decoder.generate(PROMPTS[0], **options).token_ids != answers[0][:24]


def test_the_weights_as_they_are_stored_say_the_same_as_dequantized(plain_answers):
    quantized = load("smollm2-135m", dtype="float32", device="cpu", compile=False, draft="none")
    assert isinstance(quantized.model.layers[0].mlp.down_proj, QuantizedLinear)
    answers = [quantized.generate(prompt, max_new_tokens=NEW_TOKENS).token_ids for prompt in PROMPTS]
    assert answers == plain_answers


def test_its_own_copy_as_a_draft_changes_nothing_and_is_always_right(plain_decoder, plain_answers):
    drafted = load("smollm2-135m", dtype="float32", device="cpu", draft="smollm2-135m", tree="chain:3")
    results = [drafted.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
    assert [r.token_ids for r in results] == plain_answers
    for result in results:
        committed = result.stats["new_tokens"] + (result.finish_reason == "stop")
        assert result.stats["rounds"] == -(-committed // 4)


@pytest.mark.parametrize("tree", ["chain:3", "dynamic:4,4,12"])
def test_the_shipped_head_is_the_default_and_changes_nothing_but_the_rounds(plain_decoder, plain_answers, tree):
    drafted = load("smollm2-135m", dtype="float32", device="cpu", tree=tree)
    assert drafted.plan.path.name == "smollm2-135m-eagle3"
    results = [drafted.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
    assert [r.token_ids for r in results] == plain_answers
    assert sum(map(len, plain_answers)) > 1.5 * sum(r.stats["rounds"] for r in results)
    options = {"max_new_tokens": 24, "temperature": 0.7, "top_p": 0.9, "seed": 4}
    sampled = drafted.generate(PROMPTS[0], **options)
    assert sampled.token_ids == plain_decoder.generate(PROMPTS[0], **options).token_ids


def test_lookup_drafts_change_nothing_but_the_rounds(plain_answers):
    drafted = load("smollm2-135m", dtype="float32", device="cpu", draft="ngram", tree="chain:3")
    results = [drafted.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
    assert [r.token_ids for r in results] == plain_answers
    assert sum(r.stats["rounds"] for r in results) < sum(map(len, plain_answers))


def test_weights_equal_the_reference_library_s_own_reading_of_the_file(plain_decoder, demo_model_path):
    import gguf

    reader = gguf.GGUFReader(demo_model_path)
    stored = {t.name: t for t in reader.tensors}
    parameters = dict(plain_decoder.model.named_parameters())
    for ours, theirs in (
        ("embed_tokens.weight", "token_embd.weight"),
        ("layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
        ("layers.29.self_attn.o_proj.weight", "blk.29.attn_output.weight"),
    ):
        tensor = stored[theirs]
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(parameters[ours], expected)


def test_the_readme_s_first_command_answers(demo_model_path):
    root = Path(__file__).resolve().parents[1]
    command = next(line for line in (root / "README.md").read_text().splitlines() if "&& python generate.py" in line)
    question = command.split('"')[1]
    done = subprocess.run(
        [sys.executable, "generate.py", question, "--max-new-tokens", "20"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "sky" in done.stdout
    assert "tokens/s" in done.stderr
