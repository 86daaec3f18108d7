"""The decoder's loop: the right tokens, for every prompt length, batch, stop and limit."""

import json
import re
from collections import Counter

import pytest
import scipy.stats
import torch
from tiny_checkpoint import PADDING_ROWS, tiny_checkpoint

from fastdecode import load
from fastdecode.memory import cache_bytes_per_token, weight_bytes
from fastdecode.prefill import chunk_plan
from models.errors import InputError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder, its reference model, and a decoder without compilation; stop tokens are out of the way."""
    folder = tmp_path_factory.mktemp("tiny")
    reference = tiny_checkpoint(folder)
    return folder, reference, plain_decoder(folder)


def plain_decoder(folder, **options):
    decoder = load(str(folder), device="cpu", compile=False, **{"dtype": "float32", **options})
    forget_stop_tokens(decoder)
    return decoder


def forget_stop_tokens(decoder):
    """Random models say their eos by accident; most tests want a full answer."""
    decoder.stop_ids = ()
    decoder.state.stop_ids.fill_(-1)


def text_of(n_tokens: int, seed: int = 0) -> str:
    """Text of exactly `n_tokens` tokens of the tiny tokenizer: digits are one token each."""
    digits = torch.randint(0, 10, (n_tokens,), generator=torch.Generator().manual_seed(seed))
    return "".join(map(str, digits.tolist()))


@torch.inference_mode()
def reference_tokens(reference, decoder, prompt, n):
    """The reference's greedy answer, its padded vocabulary masked as ours is."""
    ids = decoder.encode(prompt, raw=True)
    vocab = decoder.tokenizer.vocab_size
    padding = list(range(vocab, reference.config.vocab_size))
    out = reference.generate(torch.tensor([ids]), max_new_tokens=n, do_sample=False, suppress_tokens=padding)
    return out[0, len(ids) :].tolist()


# A chunk, a bucket, one less, one more; the root is not prefilled, so chunk edges are met by one more token.
LENGTHS = [1, 2, 31, 32, 33, 34, 128, 129, 130, 255, 256, 257, 511, 512, 513, 514, 545, 1025]


@pytest.mark.parametrize("n", LENGTHS)
def test_greedy_tokens_equal_the_reference_at_every_prompt_length(tiny, n):
    _, reference, decoder = tiny
    prompt = text_of(n)
    assert len(decoder.encode(prompt, raw=True)) == n
    result = decoder.generate(prompt, raw=True, max_new_tokens=12)
    assert result.token_ids == reference_tokens(reference, decoder, prompt, 12)
    assert result.finish_reason == "length"
    assert result.stats["prompt_tokens"] == n


@pytest.mark.parametrize("family", ["mistral-window", "qwen2", "qwen3-moe", "rope-llama3"])
def test_other_families_decode_as_the_reference_does(family, tmp_path):
    reference = tiny_checkpoint(tmp_path, family)
    decoder = plain_decoder(tmp_path)
    for n in (3, 40, 70):
        result = decoder.generate(text_of(n), raw=True, max_new_tokens=30)
        assert result.token_ids == reference_tokens(reference, decoder, text_of(n), 30)


def test_chunks_cover_every_length_with_few_sizes():
    for n in range(1, 1200):
        plan = chunk_plan(n)
        assert sum(plan) >= n > sum(plan[:-1])
        assert set(plan) <= {32, 128, 512}
    assert chunk_plan(0) == []


def test_a_smaller_budget_gives_a_prefix(tiny):
    decoder = tiny[2]
    answers = [decoder.generate("hello", raw=True, max_new_tokens=n).token_ids for n in (40, 20, 30, 1)]
    assert [len(a) for a in answers] == [40, 20, 30, 1]
    assert all(answers[0][: len(a)] == a for a in answers)


def test_short_and_long_answers_follow_each_other_in_one_process(tiny):
    _, reference, decoder = tiny
    short = decoder.generate("hello", raw=True, max_new_tokens=100).token_ids
    long = decoder.generate("hello", raw=True, max_new_tokens=1000).token_ids
    assert long[:100] == short and len(long) == 1000
    assert long == reference_tokens(reference, decoder, "hello", 1000)


def test_an_answer_ends_exactly_at_the_context_limit(tiny, tmp_path):
    folder, reference, _ = tiny
    decoder = plain_decoder(folder, max_seq_len=70)
    result = decoder.generate(text_of(50), raw=True, max_new_tokens=1000)
    assert result.finish_reason == "length"
    assert result.token_ids == reference_tokens(reference, decoder, text_of(50), 20)
    one = decoder.generate(text_of(69), raw=True)
    assert len(one.token_ids) == 1 and one.finish_reason == "length"


@pytest.mark.parametrize("n", [70, 71, 500])
def test_a_prompt_that_does_not_fit_is_refused_before_any_work(tiny, n):
    decoder = plain_decoder(tiny[0], max_seq_len=70)
    with pytest.raises(InputError, match=rf"{n} tokens, but at most 69"):
        decoder.run(["fits", text_of(n)], raw=True)
    assert decoder.state.length.tolist() == [1]


def test_padded_vocabulary_is_never_produced(tmp_path):
    reference = tiny_checkpoint(tmp_path)
    with torch.no_grad():  # make the padding rows by far the likeliest
        reference.lm_head.weight[-PADDING_ROWS:] = 50 * reference.lm_head.weight[:PADDING_ROWS].abs()
    reference.save_pretrained(tmp_path)
    decoder = plain_decoder(tmp_path)
    vocab = decoder.tokenizer.vocab_size
    for options in ({}, {"temperature": 2.0, "seed": 3}):
        ids = decoder.generate("hello", raw=True, max_new_tokens=100, **options).token_ids
        assert len(ids) == 100 and max(ids) < vocab


def test_a_batch_gives_each_prompt_its_own_answer_and_refills_finished_slots(tiny):
    folder, _, single = tiny
    prompts = [text_of(n, seed=n) for n in (5, 33, 1, 60, 300, 2, 18)]
    batched = plain_decoder(folder, batch=3)
    for options in ({}, {"temperature": 1.0, "seed": 5}):
        together = batched.generate(prompts, raw=True, max_new_tokens=24, **options)
        for i, result in enumerate(together):
            alone = {**options, "seed": options["seed"] + i} if options else {}
            assert result.token_ids == single.generate(prompts[i], raw=True, max_new_tokens=24, **alone).token_ids
            assert result.stats["seed"] == (options.get("seed", 0) + i)


def test_pieces_of_a_stream_make_the_text(tiny):
    decoder = tiny[2]
    pieces = list(decoder.stream("hello", raw=True, max_new_tokens=40))
    assert "".join(pieces) == decoder.generate("hello", raw=True, max_new_tokens=40).text
    assert len(pieces) > 1


def test_a_stop_token_ends_the_answer_and_is_left_out(tiny):
    folder, _, decoder = tiny
    ids = decoder.generate("hello", raw=True, max_new_tokens=40).token_ids
    stop = next(t for t in ids if ids.index(t) > 3)
    stopping = load(str(folder), dtype="float32", device="cpu", compile=False)
    stopping.stop_ids = (stop,)
    stopping.state.stop_ids.fill_(stop)
    result = stopping.generate("hello", raw=True, max_new_tokens=40)
    assert result.token_ids == ids[: ids.index(stop)]
    assert result.finish_reason == "stop"
    assert result.stats["rounds"] == len(result.token_ids) + 1 and result.stats["tau"] == 1


def test_stop_tokens_come_from_every_place_that_names_them(tmp_path):
    tiny_checkpoint(tmp_path, eos_token_id=[11, 12])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [13, 11]}))
    decoder = load(str(tmp_path), dtype="float32", device="cpu", compile=False)
    eos = decoder.tokenizer.stop_token_ids
    assert len(eos) == 1
    assert set(decoder.stop_ids) == {11, 12, 13, *eos}
    assert set(decoder.state.stop_ids.tolist()) == set(decoder.stop_ids)


def test_a_stop_string_ends_text_and_ids_before_it(tiny):
    decoder = tiny[2]
    full = decoder.generate("hello", raw=True, max_new_tokens=60)
    stop = re.search(r"[a-zA-Z ]{3,}", full.text[5:])[0][1:3]
    result = decoder.generate("hello", raw=True, max_new_tokens=60, stop=[stop])
    cut = full.text.index(stop)
    assert result.text == full.text[:cut]
    assert result.finish_reason == "stop"
    assert full.token_ids[: len(result.token_ids)] == result.token_ids
    assert full.text[:cut].startswith(decoder.tokenizer.decode(result.token_ids))
    assert result.stats["new_tokens"] == len(result.token_ids)
    again = decoder.generate("hello", raw=True, max_new_tokens=60)
    assert again.token_ids == full.token_ids  # nothing is left behind


def test_the_same_seed_gives_the_same_text_and_another_seed_another(tiny):
    decoder = tiny[2]
    options = {"raw": True, "max_new_tokens": 30, "temperature": 1.0}
    first, other, again = (decoder.generate("hello", seed=s, **options).token_ids for s in (1, 2, 1))
    assert first == again != other


def test_two_token_continuations_have_the_model_s_distribution(tmp_path):
    """20,000 seeds at temperature 0.7 with top-k 5 and top-p 0.9, through the whole decoder."""
    reference = tiny_checkpoint(tmp_path, initializer_range=0.12)
    n, batch = 20_000, 1000
    decoder = plain_decoder(tmp_path, batch=batch, max_seq_len=16)
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 11}
    counts = Counter()
    for start in range(0, n, batch):
        results = decoder.generate(["a"] * batch, raw=True, max_new_tokens=2, first_index=start, **options)
        counts.update(tuple(r.token_ids) for r in results)
    assert counts.total() == n

    @torch.inference_mode()
    def distribution(ids):
        logits = reference(torch.tensor([ids])).logits[0, -1, : decoder.tokenizer.vocab_size].double() / 0.7
        top = logits.topk(5)
        p = top.values.softmax(-1)
        kept = p.cumsum(-1) - p < 0.9
        p = torch.where(kept, p, 0) / p[kept].sum()
        return {int(i): float(q) for i, q in zip(top.indices, p, strict=True) if q > 0}

    prompt = decoder.encode("a", raw=True)
    expected = {
        (a, b): n * p * q for a, p in distribution(prompt).items() for b, q in distribution([*prompt, a]).items()
    }
    assert set(counts) <= set(expected) and len(expected) > 8
    statistic = sum((counts[pair] - mean) ** 2 / mean for pair, mean in expected.items())
    assert scipy.stats.chi2.sf(statistic, len(expected) - 1) > 0.001


def test_penalties_equal_a_step_by_step_computation(tiny):
    _, reference, decoder = tiny
    ids = decoder.encode("hello", raw=True)
    vocab = decoder.tokenizer.vocab_size
    text = list(ids)
    with torch.inference_mode():
        for _ in range(24):
            logits = reference(torch.tensor([text])).logits[0, -1, :vocab].clone()
            for token in set(text):
                logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
            for token in set(text[len(ids) :]):
                logits[token] -= 0.4
            text.append(int(logits.argmax()))
    result = decoder.generate("hello", raw=True, max_new_tokens=24, repetition_penalty=1.3, presence_penalty=0.4)
    assert result.token_ids == text[len(ids) :]


def test_an_empty_prompt_starts_from_bos_and_special_tokens_alone_run(tiny):
    decoder = tiny[2]
    assert decoder.encode("", raw=True) == [decoder.tokenizer.bos_token_id]
    assert len(decoder.generate("", raw=True, max_new_tokens=5).token_ids) == 5
    assert len(decoder.generate("<|im_end|><|im_end|>", raw=True, max_new_tokens=5).token_ids) == 5


def test_an_empty_prompt_without_bos_is_a_clear_error(tiny):
    decoder = plain_decoder(tiny[0])
    decoder.tokenizer.bos_token_id = None
    with pytest.raises(InputError, match="no BOS token"):
        decoder.run([""], raw=True)


def test_sampling_values_of_the_checkpoint_are_not_applied_but_told(tmp_path):
    tiny_checkpoint(tmp_path)
    suggested = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(suggested))
    decoder = plain_decoder(tmp_path)
    greedy = decoder.generate("hello", raw=True, max_new_tokens=20).token_ids
    (tmp_path / "generation_config.json").unlink()
    assert greedy == plain_decoder(tmp_path).generate("hello", raw=True, max_new_tokens=20).token_ids
    assert decoder.suggested_sampling == {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.mark.parametrize("stop", [(), ("e",)])
def test_a_second_turn_equals_a_fresh_process_given_the_whole_conversation(tiny, stop):
    folder, _, _ = tiny
    chatting, messages = plain_decoder(folder), []
    for turn in ("hello there", "and then?", "why"):
        messages.append({"role": "user", "content": turn})
        kept = chatting.generate(list(messages), max_new_tokens=30, stop=stop, keep_prefix=True)
        fresh = plain_decoder(folder).generate(list(messages), max_new_tokens=30, stop=stop)
        assert kept.text == fresh.text and kept.token_ids == fresh.token_ids
        messages.append({"role": "assistant", "content": kept.text})


def test_the_cache_is_kept_between_turns_as_far_as_the_ids_agree(tiny):
    decoder = plain_decoder(tiny[0])
    first = [{"role": "user", "content": "hello there"}]
    decoder.generate(first, max_new_tokens=10, keep_prefix=True)
    cached = list(decoder.cached_ids[0])
    assert cached[: len(decoder.encode(first))] == decoder.encode(first)
    started = []
    run = decoder.prefill.run
    decoder.prefill.run = lambda slot, ids, start: (started.append(start), run(slot, ids, start))
    decoder.generate([*first, {"role": "assistant", "content": "something else"}, first[0]], keep_prefix=True)
    assert started and started[0] >= len(decoder.encode(first)) - 1
    decoder.generate(first, max_new_tokens=2)  # not a conversation: computed anew
    assert started[-1] == 0


def test_an_abandoned_stream_leaves_the_decoder_usable(tiny):
    decoder = tiny[2]
    expected = decoder.generate("hello", raw=True, max_new_tokens=20).token_ids
    stream = decoder.stream("other", raw=True, max_new_tokens=50)
    next(stream)
    with pytest.raises(RuntimeError, match="middle of another text"):
        decoder.generate("hello", raw=True)
    stream.close()
    assert decoder.generate("hello", raw=True, max_new_tokens=20).token_ids == expected


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "many"])
def test_a_budget_that_is_no_positive_whole_number_is_refused(tiny, value):
    with pytest.raises(InputError, match="max_new_tokens"):
        tiny[2].run(["hello"], max_new_tokens=value)


def test_a_machine_without_a_compiler_runs_uncompiled_and_says_so(tiny, monkeypatch):
    monkeypatch.setattr("fastdecode.loading.can_compile", lambda: False)
    notes = []
    decoder = load(str(tiny[0]), dtype="float32", device="cpu", note=notes.append)
    forget_stop_tokens(decoder)
    assert any("compiler" in note for note in notes)
    expected = tiny[2].generate("hello", raw=True, max_new_tokens=5).token_ids
    assert decoder.generate("hello", raw=True, max_new_tokens=5).token_ids == expected


def test_a_prompt_token_beyond_the_embedding_is_refused(tiny, monkeypatch):
    decoder = plain_decoder(tiny[0])
    monkeypatch.setattr(decoder.tokenizer, "encode", lambda text: [1, decoder.model.config.vocab_size])
    with pytest.raises(InputError, match="the model knows only"):
        decoder.run(["hello"], raw=True)


def test_a_text_longer_than_memory_is_refused_and_a_default_one_cut(tiny, monkeypatch):
    notes, config = [], tiny[2].model.config
    free = weight_bytes(config, torch.float32) + 1600 * cache_bytes_per_token(config, torch.float32)
    monkeypatch.setattr("fastdecode.memory.free_bytes", lambda device: free)
    decoder = load(str(tiny[0]), dtype="float32", device="cpu", compile=False, note=notes.append)
    assert decoder.max_seq_len == 768 and any("Memory allows" in note for note in notes)  # half, in whole 64s
    load(str(tiny[0]), dtype="float32", device="cpu", compile=False, max_seq_len=1600)
    with pytest.raises(InputError, match="more than the memory that is free"):
        load(str(tiny[0]), dtype="float32", device="cpu", compile=False, max_seq_len=1601)
