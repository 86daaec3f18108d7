"""Public models as they are published, made small: they load, compute, chat, draft and quantize as they should."""

import pytest
import torch
from public_checkpoints import PUBLIC, special_id, write_public
from public_templates import SYSTEM, TALK
from test_reference import assert_close, our_logits

from fastdecode import load
from models.errors import InputError
from quantize import __main__ as quantize_script

LENGTH = 256  # of the longest text


@pytest.fixture(scope="module", params=PUBLIC, ids=lambda public: public.name)
def case(request, tmp_path_factory):
    """A public model, its folder, the reference library's model, and a plain decoder."""
    folder = tmp_path_factory.mktemp("public") / "model"
    reference = write_public(folder, request.param)
    return request.param, folder, reference, decoder_of(request.param, folder)


def decoder_of(public, folder, **options):
    options = {"draft": "none", "chat_template": public.chat_template, **options}
    return load(str(folder), dtype="float32", device="cpu", compile=False, max_seq_len=LENGTH, **options)


@torch.inference_mode()
def reference_answer(reference, decoder, ids, n, stops):
    """The greedy answer, and the stop token that ended it within `n` tokens."""
    answer = []
    for _ in range(n):
        logits = reference(torch.tensor([ids + answer])).logits[0, -1, : decoder.tokenizer.vocab_size]
        answer.append(int(logits.argmax()))
        if answer[-1] in stops:
            return answer[:-1], answer[-1]
    return answer, None


def test_logits_equal_the_reference(case):
    public, _, reference, decoder = case
    ids = torch.randint(0, decoder.tokenizer.vocab_size, (1, 60), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = reference(ids).logits
    ours = our_logits(decoder.model, ids, [40, 12, 1, 7], bucket=LENGTH)[0]
    assert_close(ours, expected)
    assert expected.abs().max() > 1  # numbers that say nothing would agree with anything


def test_a_conversation_is_the_text_that_the_template_means(case):
    public, _, _, decoder = case
    tokenizer = decoder.tokenizer
    ids = decoder.encode(TALK)
    assert ids == tokenizer.encode(public.chat)
    if tokenizer.bos_token_id is not None and public.sentencepiece:
        assert ids.count(tokenizer.bos_token_id) == max(1, public.chat.count("<s>"))
        assert ids[0] == tokenizer.bos_token_id
    if public.post_bos is not None:
        assert ids[0] == tokenizer.bos_token_id and ids.count(ids[0]) == 1
    if public.with_system is None:
        with pytest.raises(InputError, match="must alternate"):
            decoder.encode([SYSTEM, *TALK])
        return
    with_system = decoder.encode([SYSTEM, *TALK])
    opening = tokenizer.encode(public.with_system)
    assert with_system[: len(opening) - 2] == opening[:-2]  # its last tokens may join with what follows
    assert decoder.encode(TALK, system=SYSTEM["content"]) == with_system


def test_two_turns_are_the_references_and_end_at_every_stop_token(case):
    public, _, reference, decoder = case
    stops = [special_id(decoder.tokenizer, token) for token in public.stops]
    assert sorted(decoder.stop_ids) == sorted(stops)
    tied = decoder.model.config.tie_word_embeddings
    ours = (decoder.model.embed_tokens if tied else decoder.model.lm_head).weight
    theirs = reference.get_output_embeddings().weight
    for stop in stops:
        kept = ours[stop].clone()
        for factor in (4, -4, 8, -8, 3, -3, 2.5, -2.5, 2, -2):  # until a random model says it in mid-answer
            ours[stop], theirs[stop] = kept * factor, kept * factor
            opening = decoder.encode(TALK[:1])
            expected, said = reference_answer(reference, decoder, opening, 24, stops)
            if said == stop and expected:
                break
        try:
            first = decoder.generate(TALK[:1], max_new_tokens=24)  # keeps nothing that other weights made
            assert (first.token_ids, first.stop_token_id) == (expected, stop)
            assert first.finish_reason == "stop"
            talk = [TALK[0], {"role": "assistant", "content": first.text}, TALK[2]]
            expected, said = reference_answer(reference, decoder, decoder.encode(talk), 12, stops)
            second = decoder.generate(talk, max_new_tokens=12, keep_prefix=True)
            assert (second.token_ids, second.stop_token_id) == (expected, said)
        finally:
            ours[stop], theirs[stop] = kept, kept


def test_drafts_say_what_plain_decoding_says(case):
    public, folder, _, decoder = case
    drafts = [("ngram", "chain:3")]
    for index in range(len(public.heads)):
        drafts += [(str(folder.parent / f"head{index}"), tree) for tree in ("chain:3", "dynamic:3,4,12")]
    for draft, tree in drafts:
        drafted = decoder_of(public, folder, draft=draft, tree=tree)
        assert drafted.runner.round.drafter.n_nodes == (4 if tree == "chain:3" else 12)
        for options in ({}, {"temperature": 0.8, "seed": 5}):
            options = {"max_new_tokens": 24, **options}
            assert drafted.generate(TALK, **options).token_ids == decoder.generate(TALK, **options).token_ids


def test_a_quantized_folder_decodes(case, tmp_path, capsys):
    public, folder, reference, decoder = case
    head = ["--draft", str(folder.parent / "head0")] if public.heads else []
    quantize_script.main([str(folder), "-o", str(tmp_path / "small"), "--method", "rtn", "--bits", "8", *head])
    assert "error" in capsys.readouterr().out
    small = decoder_of(public, tmp_path / "small")
    ids = torch.tensor([decoder.encode(TALK)])
    with torch.inference_mode():
        expected = reference(ids).logits.flatten()
    ours = our_logits(small.model, ids, [ids.shape[1]], bucket=LENGTH)[0].flatten()
    # An expert that is a little less likely than the next may change places with it.
    least = 0.9 if decoder.model.config.n_experts else 0.99
    assert torch.cosine_similarity(ours, expected, dim=0) > least
    assert (small.encode(TALK), small.stop_ids) == (decoder.encode(TALK), decoder.stop_ids)
    plain = small.generate(TALK, max_new_tokens=16)
    assert plain.token_ids and plain.finish_reason in ("stop", "length")
    if head:
        drafted = decoder_of(public, tmp_path / "small", draft="auto", tree="chain:3")
        assert drafted.runner.round.drafter.n_nodes == 4
        assert drafted.generate(TALK, max_new_tokens=16).token_ids == plain.token_ids


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "DeepSeek-R1-Distill-Qwen-7B"])
def test_thoughts_before_an_earlier_answer_are_left_out(name, tmp_path):
    public = next(public for public in PUBLIC if public.name == name)
    write_public(tmp_path / "model", public)
    decoder = decoder_of(public, tmp_path / "model")
    thoughtful = {"role": "assistant", "content": "<think>\nhow?\n</think>" + TALK[1]["content"]}
    assert decoder.encode([TALK[0], thoughtful, TALK[2]]) == decoder.tokenizer.encode(public.chat)
