"""Decoding with an int8 cache: the tokens of the reference library with keys and values rounded by the definition,
whatever is drafted, batched, compiled or kept from an earlier turn."""

import re

import pytest
import torch
import transformers
from stub_drafters import Oracle
from test_decoder import forget_stop_tokens, plain_decoder, reference_tokens, text_of
from test_drafting import LIMIT, SAMPLED, drafter_of, drafting
from tiny_checkpoint import tiny_checkpoint
from torch._inductor.utils import run_and_get_code
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from fastdecode import load
from fastdecode.memory import cache_bytes_per_token, weight_bytes
from fastdecode.tree import DraftTree
from models.errors import InputError

FAMILIES = ["llama", "llama-9-heads-on-3", "mistral-window", "qwen2-window", "qwen3", "mixtral", "qwen3-moe-mixed"]
DRAFTS = [("eagle1", "chain:4"), ("eagle3", "dynamic:3,4,16"), ("eagle1", "static"), ("ngram", ""), ("model", "")]


def rounded(x):
    """`x [B, H_kv, S, D]` in 127 steps to either side of zero, a step for each token and head."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(step == 0, torch.zeros_like(x), torch.round(x / step) * step)


def attention_over_rounded(module, query, key, value, attention_mask, **options):
    return eager_attention_forward(module, query, rounded(key), rounded(value), attention_mask, **options)


transformers.AttentionInterface.register("rounded", attention_over_rounded)
transformers.AttentionMaskInterface.register("rounded", eager_mask)


def checkpoint(folder, family="llama", **changes):
    """Write a tiny checkpoint; returns the reference model, which rounds keys and values before it attends."""
    reference = tiny_checkpoint(folder, family, **changes)
    reference.set_attn_implementation("rounded")
    return reference


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder, its reference model, and an uncompiled decoder with an int8 cache."""
    folder = tmp_path_factory.mktemp("tiny")
    reference = checkpoint(folder, hidden_size=48)
    return folder, reference, plain_decoder(folder, kv_cache="int8", max_seq_len=LIMIT)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_reference_with_rounded_keys_and_values(family, tmp_path):
    reference = checkpoint(tmp_path, family, **({"hidden_size": 72} if family == "llama-9-heads-on-3" else {}))
    decoder, exact = plain_decoder(tmp_path, kv_cache="int8"), plain_decoder(tmp_path)
    differ = 0
    for n in (1, 3, 33, 70, 257):
        answer = decoder.generate(text_of(n), raw=True, max_new_tokens=40).token_ids
        assert answer == reference_tokens(reference, decoder, text_of(n), 40)
        differ += answer != exact.generate(text_of(n), raw=True, max_new_tokens=40).token_ids
    assert differ  # else a float cache would have passed, too


def test_a_batch_gives_each_prompt_the_answer_that_it_has_alone(tiny):
    folder, reference, single = tiny
    prompts = [text_of(n, seed=n) for n in (5, 33, 1, 60, 300, 2, 18)]
    batched = plain_decoder(folder, kv_cache="int8", batch=3, max_seq_len=LIMIT)
    for i, result in enumerate(batched.generate(prompts, raw=True, max_new_tokens=24)):
        assert result.token_ids == reference_tokens(reference, single, prompts[i], 24)
    for i, result in enumerate(batched.generate(prompts, raw=True, max_new_tokens=24, temperature=1.0, seed=5)):
        alone = {"temperature": 1.0, "seed": 5 + i}
        assert result.token_ids == single.generate(prompts[i], raw=True, max_new_tokens=24, **alone).token_ids


@pytest.mark.parametrize(("kind", "tree"), DRAFTS)
@pytest.mark.parametrize("options", [{}, SAMPLED, {**SAMPLED, "repetition_penalty": 1.3}])
def test_drafting_changes_nothing(tiny, kind, tree, options):
    plain = tiny[2]
    drafted = drafting(plain, drafter_of(kind, plain, tree or "chain:4"))
    assert drafted.cache.quantized
    caches = [part.cache for part in drafted.runner.round.drafter.modules() if hasattr(part, "cache")]
    assert not any(cache.quantized for cache in caches) and (caches or kind == "ngram")
    for n in (1, 2, 33, 257):
        arguments = {"raw": True, "max_new_tokens": 32, **options}
        assert drafted.generate(text_of(n), **arguments).token_ids == plain.generate(text_of(n), **arguments).token_ids


@pytest.mark.parametrize(("kind", "tree"), DRAFTS)
def test_rows_of_a_drafted_batch_are_refilled_and_say_the_same(tiny, kind, tree):
    plain, prompts = tiny[2], [text_of(n, seed=n) for n in (5, 33, 1, 60, 300)]
    drafted = drafting(plain, drafter_of(kind, plain, tree or "chain:4", batch=3), batch=3)
    for i, result in enumerate(drafted.generate(prompts, raw=True, max_new_tokens=24)):
        assert result.token_ids == plain.generate(prompts[i], raw=True, max_new_tokens=24).token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_drafting_changes_nothing_in_other_families(family, tmp_path):
    checkpoint(tmp_path, family, **({"hidden_size": 72} if family == "llama-9-heads-on-3" else {}))
    plain = plain_decoder(tmp_path, kv_cache="int8", max_seq_len=LIMIT)
    for kind, tree in (("eagle1", "chain:4"), ("eagle3", "dynamic:3,4,16")):
        drafted = drafting(plain, drafter_of(kind, plain, tree or "chain:4"))
        for n, options in ((1, {}), (40, SAMPLED), (256, {})):
            arguments = {"raw": True, "max_new_tokens": 32, **options}
            expected = plain.generate(text_of(n), **arguments).token_ids
            assert drafted.generate(text_of(n), **arguments).token_ids == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n_tokens", [1, 4, 8])
def test_a_verified_draft_leaves_the_codes_and_scales_that_plain_decoding_leaves(tiny, dtype, n_tokens):
    if dtype == "bfloat16" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("only CPUs with bfloat16 instructions decode in it")
    plain = plain_decoder(tiny[0], kv_cache="int8", max_seq_len=LIMIT, dtype=dtype)
    options = {"raw": True, "max_new_tokens": 60}
    answer = plain.generate("hello", **options).token_ids
    text = plain.encode("hello", raw=True) + answer
    drafted = drafting(plain, Oracle(n_tokens, torch.tensor([text]), lambda positions: positions % 7 == 0))
    assert drafted.generate("hello", **options).token_ids == answer
    for (name, buffer), others in zip(drafted.cache.named_buffers(), plain.cache.buffers(), strict=True):
        ours, theirs = buffer[:, :, : len(text) - 1].float(), others[:, :, : len(text) - 1].float()
        if dtype == "bfloat16":
            assert torch.equal(ours, theirs), name
        elif "scale" in name:  # in fp32, one row's product and many rows' differ in the last bit
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        else:
            assert (ours - theirs).abs().max() <= 1 and (ours != theirs).float().mean() < 0.01, name


class SecondIsRight(Oracle):
    """Two children of the root, of which the second is what the target says: its row moves."""

    chain = False

    def __init__(self, answers):
        super().__init__(1, answers)
        self.n_nodes = 3

    def draft(self, text, root, cache_rows, context):
        tokens = super().draft(text, root, cache_rows, context).tokens
        tokens = torch.cat((tokens[:, :1], (tokens[:, 1:] + 1) % 50, tokens[:, 1:]), dim=1)
        return DraftTree(tokens, torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool))


def test_accepted_rows_of_a_tree_move_with_their_scales(tiny):
    plain, options = tiny[2], {"raw": True, "max_new_tokens": 60}
    answer = plain.generate("hello", **options).token_ids
    drafted = drafting(plain, SecondIsRight(torch.tensor([plain.encode("hello", raw=True) + answer])))
    result = drafted.generate("hello", **options)
    assert result.token_ids == answer and result.stats["tau"] == 2


@pytest.mark.parametrize("kind", ["", "ngram", "eagle3"])
def test_a_second_turn_equals_a_fresh_decoder_given_the_whole_conversation(tiny, kind):
    plain, messages = tiny[2], []
    chatting = drafting(plain, drafter_of(kind, plain) if kind else None)
    for turn in ("hello there", "and then?", "why"):
        messages.append({"role": "user", "content": turn})
        kept = chatting.generate(list(messages), max_new_tokens=30, keep_prefix=True)
        fresh = plain.generate(list(messages), max_new_tokens=30)
        assert kept.token_ids == fresh.token_ids
        messages.append({"role": "assistant", "content": kept.text})


def test_the_bucket_does_not_matter(tiny):
    folder, _, single = tiny
    wide = plain_decoder(folder, kv_cache="int8", max_seq_len=LIMIT)
    wide.runner.bucket_for = lambda length: wide.runner.buckets[-1]
    for n in (1, 40, 250):
        options = {"raw": True, "max_new_tokens": 40}
        assert wide.generate(text_of(n), **options).token_ids == single.generate(text_of(n), **options).token_ids


@pytest.mark.parametrize("kind", ["", "eagle3", "ngram"])
@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_compiled_rounds_say_the_same_and_compile_nothing_new(tiny, kind, options):
    plain = tiny[2]
    compiled = drafting(plain, drafter_of(kind, plain) if kind else None, compile=True)
    compiled.generate("warm", raw=True, max_new_tokens=2, **options)
    with torch.compiler.set_stance("fail_on_recompile"):
        for n in (1, 2, 5, 31, 33, 250, 257, 600):
            arguments = {"raw": True, "max_new_tokens": 20, **options}
            expected = plain.generate(text_of(n), **arguments).token_ids
            assert compiled.generate(text_of(n), **arguments).token_ids == expected


def test_a_compiled_round_writes_no_key_or_value_out_in_float(tiny):
    decoder = drafting(tiny[2], drafter_of("ngram", tiny[2]), compile=True)  # 5 rows
    with torch._inductor.config.patch(fx_graph_cache=False), torch.inference_mode():
        _, (code,) = run_and_get_code(decoder.runner.programs["greedy"], decoder.runner.cache_rows[256])
    buffers = re.findall(r"= empty_strided_cpu\(\((.*?)\), .*, (torch[.]\w+)\)", code)
    assert any(re.fullmatch(r".*, s\d+", size) and dtype == "torch.float32" for size, dtype in buffers)  # scores
    assert not [size for size, dtype in buffers if re.search(r"s\d+, 8$", size) and "float" in dtype]


def test_stored_programs_of_both_caches_live_side_by_side(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def answers(kv_cache):
        decoder = load(str(tiny[0]), dtype="float32", device="cpu", kv_cache=kv_cache, max_seq_len=LIMIT)
        forget_stop_tokens(decoder)
        return [decoder.generate(text_of(n), raw=True, max_new_tokens=40).token_ids for n in (5, 240)]

    first = {kind: answers(kind) for kind in ("int8", "auto")}
    assert first["int8"] == [tiny[2].generate(text_of(n), raw=True, max_new_tokens=40).token_ids for n in (5, 240)]
    assert first["int8"] != first["auto"]
    programs = [file for file in (tmp_path / "fastdecode").iterdir() if file.suffix != ".so"]  # those are operators
    assert len(programs) == 2
    monkeypatch.setattr(torch, "compile", None)
    assert {kind: answers(kind) for kind in ("auto", "int8")} == first


def test_the_same_memory_holds_longer_texts(tiny, monkeypatch):
    config, kv = tiny[2].model.config, {"kv_cache": "int8"}
    tokens = 400 * cache_bytes_per_token(config, torch.float32) // cache_bytes_per_token(config, torch.float32, True)
    assert tokens == 1066  # heads of 8: 32 bytes against 12
    free = weight_bytes(config, torch.float32) + 400 * cache_bytes_per_token(config, torch.float32)
    monkeypatch.setattr("fastdecode.memory.free_bytes", lambda device: free)
    options = {"dtype": "float32", "device": "cpu", "compile": False}
    with pytest.raises(InputError, match="--kv-cache int8"):
        load(str(tiny[0]), max_seq_len=401, **options)
    decoder = load(str(tiny[0]), max_seq_len=tokens, **kv, **options)
    assert sum(b.nbytes for b in decoder.cache.buffers()) == decoder.cache.rows * 3 * 2 * 2 * 12
    with pytest.raises(InputError, match="smaller --max-seq-len or --batch[.]"):
        load(str(tiny[0]), max_seq_len=tokens + 1, **kv, **options)


@pytest.mark.parametrize("value", ["int4", "INT8", "", "fp8"])
def test_another_name_is_refused_before_any_file_is_read(value):
    with pytest.raises(InputError, match=f"--kv-cache should be auto or int8, found '{value}'"):
        load("/nowhere", kv_cache=value)


@pytest.mark.slow
def test_the_demo_model_says_what_a_float_cache_finds_as_likely():
    decoder = load("smollm2-135m", dtype="float32", device="cpu", compile=False, max_seq_len=512, kv_cache="int8")
    model, divergences, behind = decoder.model, [], []
    for prompt in ("Why is the sky blue?", "Write a short poem about a lighthouse.", "What is 17 times 23?"):
        answer = decoder.generate(prompt, max_new_tokens=12).token_ids
        ids = torch.tensor([decoder.encode(prompt) + answer])
        rows = torch.arange(ids.shape[1])
        arguments = (ids, rows[None], rows[None], rows <= rows[None, :, None], rows[None])
        with torch.inference_mode():
            caches = [model.new_cache(1, len(rows) + 1, quantized) for quantized in (True, False)]
            log_p, exact = (model.logits(model(*arguments, cache).last)[0].log_softmax(-1) for cache in caches)
        divergences.append((exact.exp() * (exact - log_p)).sum(-1))  # of each token, in nats
        said = exact[-len(answer) - 1 : -1]
        behind.append(said.amax(-1) - said.gather(1, ids[0, -len(answer) :, None])[:, 0])
    assert 0 < torch.cat(divergences).mean() < 0.01
    assert torch.cat(behind).max() < 0.2
