"""Conversations on disk: token ids and which of them are answers, in shards that are written whole or not at all."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.errors import InputError

SHARD = "shard-{:05d}.safetensors"


class Conversation(NamedTuple):
    """`token_ids` int32 `[n]`: a conversation as the target reads it. `answer` bool `[n]`: the tokens that the target
    itself said, the stop token after them included; only these are trained on."""

    token_ids: np.ndarray
    answer: np.ndarray


class ConversationStore:
    """A folder of conversations for one target, in the order in which they came.

    Raises InputError, naming the file, for data of another target and for damaged shards.
    `fingerprint`: the target's, kept in every shard. `seen`: hashes of all prompts so far; `n_made`: see `append`.
    """

    def __init__(self, folder: Path, fingerprint: str):
        self.folder, self.fingerprint = folder, fingerprint
        self.conversations: list[Conversation] = []
        self.seen: set[str] = set()
        self.n_made = 0
        self.n_shards = 0
        folder.mkdir(parents=True, exist_ok=True)
        for draft in folder.glob("*.tmp"):  # of a run that was killed while it wrote
            draft.unlink()
        while (path := folder / SHARD.format(self.n_shards)).is_file():
            self._read(path)
            self.n_shards += 1

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> Conversation:
        return self.conversations[index]

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self.conversations)

    @property
    def n_answer_tokens(self) -> int:
        """Tokens of answers in all conversations."""
        return sum(int(c.answer.sum()) for c in self.conversations)

    def append(self, conversations: Sequence[Conversation], n_made: int, seen: Sequence[str] = ()) -> None:
        """Write a shard. `n_made`: how many attempts at a conversation lie behind it and all before, duplicates and
        empty ones included: where to go on. `seen`: hashes of the prompts in it. Raises InputError where it cannot be
        written; nothing of it stays then."""
        lengths = np.array([len(c.token_ids) for c in conversations], dtype=np.int64)
        tensors = {
            "token_ids": _joined([c.token_ids for c in conversations], np.int32),
            "answer": _joined([c.answer for c in conversations], np.uint8),
            "lengths": lengths,
        }
        header = {"target_fingerprint": self.fingerprint, "n_made": str(n_made), "seen": json.dumps(list(seen))}
        path = self.folder / SHARD.format(self.n_shards)
        draft = path.with_suffix(".tmp")
        try:
            save_file(tensors, draft, metadata=header)
            with open(draft, "rb") as file:
                os.fsync(file.fileno())
            os.replace(draft, path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise InputError(f"{path}: cannot be written ({error}); make room, and go on with --resume.") from error
        self._read(path)
        self.n_shards += 1

    def _read(self, path: Path) -> None:
        try:
            with safe_open(path, framework="np") as file:
                header = file.metadata() or {}
                ids, answer, lengths = (file.get_tensor(name) for name in ("token_ids", "answer", "lengths"))
            n_made, seen = int(header["n_made"]), json.loads(header["seen"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise InputError(f"{path}: is no shard of conversations, or damaged ({error}); delete it.") from error
        if header.get("target_fingerprint") != self.fingerprint:
            raise InputError(f"{path}: holds the conversations of another target; give another -o folder.")
        if len(ids) != len(answer) or lengths.sum() != len(ids) or (lengths < 0).any():
            raise InputError(f"{path}: is damaged: its lengths do not add up; delete it.")
        ends = np.cumsum(lengths)
        for end, length in zip(ends, lengths, strict=True):
            part = slice(end - length, end)
            self.conversations.append(Conversation(ids[part], answer[part].astype(bool)))
        self.seen.update(seen)
        self.n_made = n_made


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
