"""One prompt on its way to an answer: its text, its counts, its clock. Host side only."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastdecode.clock import Spent
from fastdecode.detokenizer import TextStream


@dataclass(frozen=True)
class Result:
    """An answer. `token_ids` leave out the stop token and whatever reaches into a stop string; `finish_reason` is
    "stop" or "length"; `stats` has prompt_tokens, new_tokens, ttft_s, decode_tokens_per_s, rounds, tau, seed,
    accept_by_depth (entry d: the share of rounds that accepted more than d drafts), draft_ms, verify_ms and rest_ms a
    round (None where they are not known); `stop_token_id` is the stop token that ended it, None for another end."""

    prompt: Any
    text: str
    token_ids: list[int]
    finish_reason: str
    stats: dict[str, Any] = field(default_factory=dict)
    stop_token_id: int | None = None


class Span(NamedTuple):
    """A part of an answer's text, and whether drafting won the tokens that it comes from."""

    text: str
    drafted: bool


def accept_by_depth(accepted: Sequence[int]) -> list[float]:
    """Entry d: the share of rounds that accepted more than d drafts, of the numbers that each round accepted."""
    return [sum(n > d for n in accepted) / len(accepted) for d in range(max(accepted, default=0))]


class Request:
    """What the host knows of a text while the device decodes it. `row`: what its noise is keyed by, beside the seed."""

    def __init__(self, index: int, row: int, prompt: Any, prompt_ids: list[int], stream: TextStream, seed: int):
        self.index, self.row, self.prompt, self.prompt_ids = index, row, prompt, prompt_ids
        self.stream, self.seed = stream, seed
        self.length = len(prompt_ids)
        self.started = time.perf_counter()
        self.first_at = self.last_at = 0.0
        self.rounds = self.committed = self.first_committed = 0
        self.accepted: list[int] = []  # drafts, by round
        self.drafted: list[bool] = []  # by token
        self.spent = Spent()
        self.finish_reason: str | None = None
        self.stop_token_id: int | None = None

    def take(self, new_tokens: list[int], n_drafted: int, done: bool, stop_ids: tuple[int, ...]) -> list[Span]:
        """Count the tokens that a round committed, of which the first `n_drafted` were drafted; returns the text that
        they complete, in parts that were drafted and parts that were not."""
        if not new_tokens:
            return []
        self.accepted.append(n_drafted)
        self.last_at = time.perf_counter()
        self.rounds += 1
        self.length += len(new_tokens)
        if not self.first_at:
            self.first_at, self.first_committed = self.last_at, len(new_tokens)
        spans: list[Span] = []
        for i, token in enumerate(new_tokens):
            self.committed += 1
            if token in stop_ids:
                self.finish_reason, self.stop_token_id = "stop", token
                break
            self.drafted.append(i < n_drafted)
            spans += self._spans(self.stream.push(token))
            if self.stream.stopped:
                self.finish_reason = "stop"
                break
        if done and self.finish_reason is None:
            self.finish_reason = "length"
        return spans + self._spans(self.stream.finish()) if self.finish_reason else spans

    def _spans(self, text: str) -> list[Span]:
        """`text`, which the stream returned just now, in parts by who found its tokens."""
        return [Span(part, self.drafted[token]) for part, token in self.stream.last_parts] if text else []

    def result(self) -> Result:
        """The finished answer. The rate leaves out the prompt and the first round; it is None when nothing followed."""
        later, seconds = self.committed - self.first_committed, self.last_at - self.first_at
        token_ids = self.stream.token_ids
        stats = {
            "prompt_tokens": len(self.prompt_ids),
            "new_tokens": len(token_ids),
            "ttft_s": self.first_at - self.started,
            "decode_tokens_per_s": later / seconds if later and seconds > 0 else None,
            "rounds": self.rounds,
            "tau": self.committed / self.rounds if self.rounds else None,
            "seed": self.seed,
            "accept_by_depth": accept_by_depth(self.accepted),
            **dict(zip(("draft_ms", "verify_ms", "rest_ms"), self.spent.milliseconds(), strict=True)),
        }
        reason = self.finish_reason or "length"
        return Result(self.prompt, self.stream.text, token_ids, reason, stats, self.stop_token_id)
