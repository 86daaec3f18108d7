"""Training conversations: the target's own answers, kept whole through kills, the same ones when a run goes on."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import tiny_checkpoint

from fastdecode.loading import load
from fastdecode.train.data import DataOptions, answer_file, make_conversations, read_beginnings, read_conversations
from fastdecode.train.store import Conversation, ConversationStore
from models.errors import InputError

OPTIONS = DataOptions(prompt_tokens=12, answer_tokens=10, greedy_share=0.5, seed=3)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_checkpoint(folder)
    return load(str(folder), draft="none", batch=2, compile=False, dtype="float32", max_seq_len=256)


def talk(n: int, mark: int = 0) -> Conversation:
    return Conversation(np.arange(n, dtype=np.int32) + mark, np.arange(n) >= n // 2)


def same(a: ConversationStore, b: ConversationStore) -> bool:
    pairs = zip(a, b, strict=True)
    return all(np.array_equal(x.token_ids, y.token_ids) and np.array_equal(x.answer, y.answer) for x, y in pairs)


def write_jsonl(path, *records):
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path


def test_a_store_gives_back_what_was_put_in_it(tmp_path):
    store = ConversationStore(tmp_path, "target")
    store.append([talk(5), talk(3, 100)], n_made=4, seen=["a", "b"])
    store.append([], n_made=6)
    store.append([talk(7, 200)], n_made=9, seen=["c"])
    again = ConversationStore(tmp_path, "target")
    assert same(store, again) and len(again) == 3 and again.n_made == 9 and again.seen == {"a", "b", "c"}
    assert again[2].token_ids.tolist() == list(range(200, 207)) and again[2].answer.tolist() == [False] * 3 + [True] * 4
    assert again.n_answer_tokens == 3 + 2 + 4


def test_what_a_killed_run_left_half_written_is_no_part_of_a_store(tmp_path):
    ConversationStore(tmp_path, "target").append([talk(5)], n_made=1)
    (tmp_path / "shard-00001.tmp").write_bytes(b"half")
    assert len(ConversationStore(tmp_path, "target")) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-00000.safetensors"]


def test_a_full_disk_is_said_and_leaves_what_was_there(tmp_path):
    resource = pytest.importorskip("resource")
    few = Conversation(np.arange(4, dtype=np.int32), np.ones(4, dtype=bool))
    many = Conversation(np.arange(50_000, dtype=np.int32), np.ones(50_000, dtype=bool))
    store = ConversationStore(tmp_path, "target")
    store.append([few], 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(InputError, match="cannot be written"):
            store.append([many], 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in tmp_path.iterdir()] == ["shard-00000.safetensors"]
    again = ConversationStore(tmp_path, "target")
    assert len(again) == 1 and again.n_made == 1
    again.append([many], 2)
    assert len(ConversationStore(tmp_path, "target")) == 2


def test_a_store_of_another_target_is_refused_and_so_is_a_damaged_one(tmp_path):
    ConversationStore(tmp_path, "target").append([talk(5)], n_made=1)
    with pytest.raises(InputError, match="another target"):
        ConversationStore(tmp_path, "other")
    path = tmp_path / "shard-00000.safetensors"
    whole, tensors = path.read_bytes(), load_file(path)
    save_file(tensors | {"lengths": np.array([4])}, path, {"target_fingerprint": "target", "n_made": "1", "seen": "[]"})
    with pytest.raises(InputError, match="do not add up"):
        ConversationStore(tmp_path, "target")
    for damaged in (whole[:-3], whole[:20], b""):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="shard-00000"):
            ConversationStore(tmp_path, "target")


def test_the_target_asks_itself_and_only_its_answers_are_marked(tmp_path, decoder):
    store = ConversationStore(tmp_path, "target")
    # A random target seldom ends its turn by itself: here any of many tokens ends it.
    decoder = decoder.with_drafter(decoder.plan)
    decoder.stop_ids = tuple(range(0, decoder.tokenizer.vocab_size, 8))
    decoder.state.stop_ids = decoder.state.stop_ids.new_tensor(decoder.stop_ids)
    make_conversations(decoder, store, 6, OPTIONS)
    assert len(store) == 6 and len(store.seen) == 6
    opening = decoder.encode(decoder.tokenizer.chat_opening(), raw=True)
    for conversation in store:
        ids, first = conversation.token_ids.tolist(), int(conversation.answer.argmax())
        assert ids[: len(opening)] == opening and conversation.answer[first:].all()
        text = decoder.tokenizer.decode(ids[:first])
        assert text.endswith("assistant\n") and 0 < len(ids) - first <= OPTIONS.answer_tokens
        if len(ids) - first < OPTIONS.answer_tokens:
            assert ids[-1] % 8 == 0  # the stop token is part of the answer


def test_the_target_finishes_prompts_that_are_begun(tmp_path, decoder):
    decoder = decoder.with_drafter(decoder.plan)
    decoder.stop_ids = tuple(range(0, decoder.tokenizer.vocab_size, 8))
    decoder.state.stop_ids = decoder.state.stop_ids.new_tensor(decoder.stop_ids)
    file = write_jsonl(tmp_path / "begun.jsonl", {"prompt": "Write a"}, {"turns": ["Why do", "never said"]})
    options = replace(OPTIONS, beginnings=read_beginnings(file))
    assert options.beginnings == ("Write a", "Why do")
    stores = [ConversationStore(tmp_path / name, "target") for name in ("one", "other")]
    for store in stores:
        make_conversations(decoder, store, 8, options)
    assert same(*stores) and len(stores[0]) == 8
    opening = len(decoder.encode(decoder.tokenizer.chat_opening(), raw=True))
    texts = [decoder.tokenizer.decode(c.token_ids[~c.answer].tolist()[opening:]) for c in stores[0]]
    begun = [[text.startswith(beginning) for text in texts] for beginning in options.beginnings]
    assert all(map(any, zip(*begun, strict=True))) and all(map(any, begun))
    with pytest.raises(InputError, match="no beginnings"):
        read_beginnings(write_jsonl(tmp_path / "none.jsonl"))


def test_a_greedy_answer_is_what_the_decoder_says(tmp_path, decoder):
    file = write_jsonl(tmp_path / "prompts.jsonl", {"turns": ["hello", "and now?"]}, {"prompt": "what is this?"})
    store = ConversationStore(tmp_path / "data", "target")
    answer_file(decoder, store, file, None, DataOptions(answer_tokens=10, greedy_share=1.0))
    first, second = store
    answer = decoder.generate("what is this?", max_new_tokens=10)
    assert second.token_ids[second.answer].tolist() == answer.token_ids
    assert second.token_ids[~second.answer].tolist() == decoder.encode("what is this?")
    said = decoder.generate("hello", max_new_tokens=10)
    messages = [("user", "hello"), ("assistant", said.text), ("user", "and now?")]
    prompt = decoder.encode([{"role": role, "content": text} for role, text in messages])
    assert first.token_ids[: len(prompt)].tolist() == prompt
    assert first.token_ids[len(prompt) :].tolist() == decoder.generate(
        [{"role": role, "content": text} for role, text in messages], max_new_tokens=10
    ).token_ids
    assert first.answer[len(prompt) :].all()


def test_a_run_that_goes_on_makes_what_one_run_makes(tmp_path, decoder):
    records = [{"turns": [f"question {i}"]} for i in range(20)]
    file = write_jsonl(tmp_path / "prompts.jsonl", *records, records[0])
    whole = ConversationStore(tmp_path / "whole", "target")
    answer_file(decoder, whole, file, None, OPTIONS)
    assert len(whole) == 20  # the one that is there twice counts once
    parts = ConversationStore(tmp_path / "parts", "target")

    class Killed(Exception):
        pass

    def kill(*_):
        raise Killed

    with pytest.raises(Killed):
        answer_file(decoder, parts, file, None, OPTIONS, kill)
    parts = ConversationStore(tmp_path / "parts", "target")
    assert 0 < len(parts) < 20
    answer_file(decoder, parts, file, None, OPTIONS)
    assert same(whole, parts)


def test_answers_of_a_file_can_be_kept(tmp_path, decoder):
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "oh"}, {"from": "human", "value": "so?"}]
    file = write_jsonl(tmp_path / "talks.jsonl", {"conversations": [*turns, {"from": "gpt", "value": "yes"}]})
    store = ConversationStore(tmp_path / "data", "target")
    answer_file(decoder, store, file, None, DataOptions(keep_answers=True))
    ids, answer = store[0]
    text = decoder.tokenizer.decode(ids[answer])
    assert "oh" in text and "yes" in text and "hi" not in text and "so?" not in text


@pytest.mark.parametrize("record", [{"turns": [1]}, {"x": "y"}, [], {"messages": [{"role": "nobody", "content": ""}]}])
def test_a_line_that_is_no_conversation_is_named(tmp_path, record):
    file = write_jsonl(tmp_path / "talks.jsonl", {"prompt": "fine"}, record)
    with pytest.raises(InputError, match="line 2: expected"):
        list(read_conversations(file))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match="missing"):
        list(read_conversations(tmp_path / "missing.jsonl"))
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(InputError, match="line 1: is not valid JSON"):
        list(read_conversations(tmp_path / "bad.jsonl"))
