"""One prompt on its way to an answer: its text, its counts, its clock. Host side only."""

import time
from dataclasses import dataclass, field
from typing import Any

from fastdecode.detokenizer import TextStream


@dataclass(frozen=True)
class Result:
    """An answer. `token_ids` leave out the stop token and whatever reaches into a stop string; `finish_reason` is
    "stop" or "length"; `stats` has prompt_tokens, new_tokens, ttft_s, decode_tokens_per_s, rounds, tau and seed."""

    prompt: Any
    text: str
    token_ids: list[int]
    finish_reason: str
    stats: dict[str, Any] = field(default_factory=dict)


class Request:
    """What the host knows of a text while the device decodes it. `row`: what its noise is keyed by, beside the seed."""

    def __init__(self, index: int, row: int, prompt: Any, prompt_ids: list[int], stream: TextStream, seed: int):
        self.index, self.row, self.prompt, self.prompt_ids = index, row, prompt, prompt_ids
        self.stream, self.seed = stream, seed
        self.length = len(prompt_ids)
        self.started = time.perf_counter()
        self.first_at = self.last_at = 0.0
        self.rounds = self.committed = self.first_committed = 0
        self.finish_reason: str | None = None

    def take(self, new_tokens: list[int], done: bool, stop_ids: tuple[int, ...]) -> str:
        """Count the tokens that a round committed; returns the text that they complete."""
        if not new_tokens:
            return ""
        self.last_at = time.perf_counter()
        self.rounds += 1
        self.length += len(new_tokens)
        if not self.first_at:
            self.first_at, self.first_committed = self.last_at, len(new_tokens)
        text = ""
        for token in new_tokens:
            self.committed += 1
            if token in stop_ids:
                self.finish_reason = "stop"
                break
            text += self.stream.push(token)
            if self.stream.stopped:
                self.finish_reason = "stop"
                break
        if done and self.finish_reason is None:
            self.finish_reason = "length"
        return text + self.stream.finish() if self.finish_reason else text

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
        }
        return Result(self.prompt, self.stream.text, token_ids, self.finish_reason or "length", stats)
