"""Training conversations: the answers are the target's own, since a head learns to say what the target would.

Two sources of prompts. The target makes them up: given the opening of a user's turn in its chat template, and the first
words of that turn where there are such, it writes the turn (temperature 1, top-p 0.95), as in Magpie (arXiv
2406.08464). Or a JSONL file brings them: `{"turns": [...]}`,
`{"prompt": ...}`, or ShareGPT's `{"conversations": [{"from": "human", "value": ...}, ...]}`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.json_text import parse_json
from fastdecode.decoder import Decoder
from fastdecode.train.store import Conversation, ConversationStore
from models.errors import InputError

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
GROUP = 8  # prompts per slot of the decoder that are made before anything is saved
LONGEST_PROMPT = 1000  # characters of a made-up turn that is still worth an answer

Progress = Callable[[int, int], None]  # conversations and answer tokens since the last call
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class DataOptions:
    """How conversations are made. `greedy_share` of the answers are greedy, the others sampled at `temperature`.

    `beginnings`: what a made-up prompt may begin with; each is drawn as often as the others.
    `keep_answers`: answers in a file stand as they are, though another model may have said them.
    """

    prompt_tokens: int = 96
    answer_tokens: int = 256
    greedy_share: float = 0.6
    temperature: float = 0.7
    seed: int = 0
    keep_answers: bool = False
    beginnings: Sequence[str] = ("",)


def make_conversations(
    decoder: Decoder, store: ConversationStore, count: int, options: DataOptions, progress: Progress = lambda *_: None
) -> None:
    """Let the target talk to itself until `store` has `count` conversations, from where an earlier run stopped.

    `decoder`: of the target, without a draft. Raises InputError for a target without chat template, and when nothing
    new comes any more.
    """
    opening, closing = decoder.tokenizer.chat_opening(), _after_user(decoder)
    size, barren = GROUP * decoder.batch, 0
    while len(store) < count:
        first = store.n_made
        drawn = np.random.default_rng((options.seed, first)).integers(len(options.beginnings), size=size)
        beginnings = [options.beginnings[i] for i in drawn]
        prompts = decoder.generate(
            [opening + beginning for beginning in beginnings],
            raw=True,
            max_new_tokens=options.prompt_tokens,
            stop=closing,
            first_index=first,
            keep_prefix=True,
            temperature=1.0,
            top_p=0.95,
            seed=options.seed,
        )
        fresh: dict[str, Messages] = {}
        for beginning, prompt in zip(beginnings, prompts, strict=True):
            text = (beginning + prompt.text).strip()
            key = _hash(text)
            complete = prompt.finish_reason == "stop" and text and len(text) <= LONGEST_PROMPT
            if complete and key not in store.seen and key not in fresh:
                fresh[key] = [{"role": "user", "content": text}]
        _answer(decoder, store, dict(list(fresh.items())[: count - len(store)]), first + size, options, progress)
        barren = 0 if fresh else barren + 1
        if barren == 10:
            raise InputError("The target makes up no new prompts any more; give --data FILE, or fewer --conversations.")


def answer_file(
    decoder: Decoder,
    store: ConversationStore,
    file: Path,
    count: int | None,
    options: DataOptions,
    progress: Progress = lambda *_: None,
) -> None:
    """Fill `store` with the conversations of a JSONL file (at most `count`), from where an earlier run stopped; the
    answers are made anew, or with `keep_answers` kept."""
    waiting: dict[str, Messages] = {}
    number = 0
    for number, messages in enumerate(read_conversations(file), 1):
        if number <= store.n_made:
            continue
        key = _hash(json.dumps(messages))
        if key not in store.seen:
            waiting[key] = messages
        if len(waiting) == GROUP * decoder.batch:
            _answer(decoder, store, waiting, number, options, progress)
            waiting = {}
        if count is not None and len(store) + len(waiting) >= count:
            break
    if waiting:
        _answer(decoder, store, waiting, number, options, progress)


def read_conversations(file: Path) -> Iterator[Messages]:
    """The conversations of a JSONL file, from their first user's turn on. Raises InputError, naming file and line."""
    try:
        with open(file, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _messages(line, f"{file}, line {number}")
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error}).") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: is not UTF-8 text ({error.reason}).") from error


def read_beginnings(file: Path) -> tuple[str, ...]:
    """The first user's turns of a JSONL file, each as the beginning of a prompt. Raises InputError."""
    found = tuple(messages[0]["content"] for messages in read_conversations(file) if messages)
    if not found:
        raise InputError(f"{file}: holds no beginnings of prompts.")
    return found


def _messages(line: str, where: str) -> Messages:
    try:
        record: Any = parse_json(line)
    except ValueError as error:
        raise InputError(f"{where}: is not valid JSON ({error}).") from None
    record = record if isinstance(record, dict) else {}
    found: list[tuple[Any, Any]] = []
    if isinstance(record.get("turns"), list):
        found = [("user", turn) for turn in record["turns"]]
    elif isinstance(record.get("prompt"), str):
        found = [("user", record["prompt"])]
    else:
        turns = record.get("conversations") or record.get("messages")
        for turn in turns if isinstance(turns, list) else []:
            turn = turn if isinstance(turn, dict) else {}
            role = turn.get("from", turn.get("role"))
            role = ROLES.get(role) if isinstance(role, str) else None
            found.append((role, turn.get("value", turn.get("content"))))
    if not found or any(role is None or not isinstance(text, str) for role, text in found):
        raise InputError(
            f'{where}: expected {{"turns": [text, ...]}}, {{"prompt": text}} or '
            '{"conversations": [{"from": "human", "value": text}, ...]}.'
        )
    first = next((i for i, (role, _) in enumerate(found) if role != "assistant"), len(found))
    return [{"role": role, "content": text} for role, text in found[first:]]


def _answer(
    decoder: Decoder,
    store: ConversationStore,
    waiting: dict[str, Messages],
    n_made: int,
    options: DataOptions,
    progress: Progress,
) -> None:
    """Answer the user's turns of every conversation, one turn after another, and save them as a shard."""
    if options.keep_answers:
        made = [_kept(decoder, messages) for messages in waiting.values()]
    else:
        # Which answers are greedy hangs on where the shard begins, so that a resumed run makes the same ones.
        greedy = np.random.default_rng((options.seed, n_made)).random() < options.greedy_share
        made = _regenerated(decoder, list(waiting.values()), n_made, 0.0 if greedy else options.temperature, options)
    made = [conversation for conversation in made if conversation is not None and conversation.answer.any()]
    store.append(made, n_made, list(waiting))
    progress(len(made), sum(int(c.answer.sum()) for c in made))


def _regenerated(
    decoder: Decoder, asked: list[Messages], first: int, temperature: float, options: DataOptions
) -> list[Conversation | None]:
    """The target's own answers to every user's turn, each after its own earlier answers."""
    turns = [[m for m in messages if m["role"] != "assistant"] for messages in asked]
    said: list[Messages] = [[] for _ in asked]
    made: list[Conversation | None] = [None] * len(asked)
    open_: list[int] = list(range(len(asked)))
    while open_:
        for i in open_:
            while turns[i]:
                said[i].append(turns[i].pop(0))
                if said[i][-1]["role"] == "user":
                    break
        open_ = [i for i in open_ if said[i] and said[i][-1]["role"] == "user"]
        open_ = [i for i in open_ if len(decoder.encode(said[i])) + options.answer_tokens < decoder.max_seq_len]
        results = decoder.generate(
            [said[i] for i in open_],
            max_new_tokens=options.answer_tokens,
            first_index=first,
            keep_prefix=True,
            temperature=temperature,
            seed=options.seed,
        ) if open_ else []
        for i, result in zip(open_, results, strict=True):
            end = [] if result.stop_token_id is None else [result.stop_token_id]
            made[i] = _extended(made[i], decoder.encode(said[i]), [*result.token_ids, *end])
            said[i].append({"role": "assistant", "content": result.text})
        open_ = [i for i in open_ if turns[i]]
    return made


def _extended(before: Conversation | None, prompt: Sequence[int], answer: Sequence[int]) -> Conversation:
    """The conversation with one more answer; earlier answers are marked where the new prompt still has their tokens."""
    ids = np.array([*prompt, *answer], dtype=np.int32)
    marks = np.zeros(len(ids), dtype=bool)
    if before is not None:
        n = min(len(before.token_ids), len(prompt))
        same = np.cumprod(before.token_ids[:n] == ids[:n]).astype(bool)
        marks[:n] = before.answer[:n] & same
    marks[len(prompt) :] = True
    return Conversation(ids, marks)


def _kept(decoder: Decoder, messages: Messages) -> Conversation | None:
    """A conversation with the answers that it came with."""
    conversation = None
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = decoder.encode(messages[:i])
            whole = decoder.tokenizer.encode_chat(messages[: i + 1], add_generation_prompt=False)
            if whole[: len(prompt)] != prompt or len(whole) > decoder.max_seq_len:
                break  # a template that renders an answer differently once it is past
            conversation = _extended(conversation, prompt, whole[len(prompt) :])
    return conversation


def _after_user(decoder: Decoder) -> tuple[str, ...]:
    """What a template writes after a user's turn, as a stop string where it is text and no stop token."""
    closing = decoder.tokenizer.chat_closing().split()
    first = closing[0] if closing else ""
    is_special = not first or all(i in decoder.stop_ids for i in decoder.tokenizer.encode(first)[-1:])
    return () if is_special else (first,)


def _hash(text: str) -> str:
    return hashlib.sha256(" ".join(text.lower().split()).encode()).hexdigest()[:24]
