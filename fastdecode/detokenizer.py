"""From token ids back to text, one token at a time, and where that text has to stop.

Everything works on bytes. A token is a run of bytes and may hold a part of a character; a stop string is a run of
bytes too, so one search finds it inside a token, across tokens and across the halves of a character. UTF-8 marks
where a character starts, so a match never begins or ends inside a foreign character. Text appears when a character
is complete, which is what the standard library's incremental decoder does.
"""

import bisect
import codecs
from typing import Protocol

from models.errors import InputError


class TokenBytes(Protocol):
    """What is needed of a tokenizer: the bytes of a token, and whether texts start with an artificial space."""

    prefix_space: bool

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Turns ids into text as they come; what was returned is final, and each token costs the same.

    A character appears with its last byte. Bytes that can never become a character (a model may produce any) appear
    as U+FFFD, at the latest with the token that follows them, as `bytes.decode(errors="replace")` would have them.

    continues: the ids continue a text, so a leading space belongs to it; else the artificial space with which
        SentencePiece starts every text is left out.
    """

    def __init__(self, tokenizer: TokenBytes, continues: bool):
        self._tokenizer = tokenizer
        self._strip_space = tokenizer.prefix_space and not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty while a character is being assembled."""
        return self.decode(self.bytes_of(token_id))

    @property
    def n_pending(self) -> int:
        """How many bytes of an unfinished character are held back."""
        return len(self._utf8.getstate()[0])

    def finish(self) -> str:
        """Ends the text. Half a character is dropped, so nothing is left to return."""
        self._utf8.reset()
        return ""

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that the next token adds to the text (the first step of `push`)."""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return data

    def decode(self, data: bytes, final: bool = False) -> str:
        """The text that these bytes complete (the second step of `push`); `final` gives up on half a character."""
        return self._utf8.decode(data, final)


class StopStrings:
    """Finds the first stop string in a stream of bytes and holds back what could be its beginning.

    The string that is complete first wins, and among those complete at the same byte the longest: the rule does not
    depend on how the stream is cut into tokens.

    Raises `InputError` for a stop string that is empty or no valid Unicode.
    """

    def __init__(self, stops: tuple[str, ...]):
        if not all(stops):
            raise InputError("a stop string is empty; give at least one character or leave --stop out")
        try:
            self._stops = [stop.encode() for stop in stops]
        except UnicodeEncodeError as error:
            raise InputError(f"stop string {error.object!r} is not valid Unicode; give it as UTF-8") from None
        self._held = b""
        self.found = False

    def push(self, data: bytes) -> bytes:
        """The bytes that are certain to come before any stop string. Sets `found`, and is deaf from then on."""
        if self.found:
            return b""
        window = self._held + data
        matches = [(start + len(stop), start) for stop in self._stops if (start := window.find(stop)) >= 0]
        if matches:
            self.found, self._held = True, b""
            return window[: min(matches)[1]]
        safe = len(window) - self._overlap(window)
        self._held = window[safe:]
        return window[:safe]

    def release(self) -> bytes:
        """The bytes still held back, once it is known that no more come."""
        held, self._held = self._held, b""
        return held

    def _overlap(self, window: bytes) -> int:
        """How many bytes at the end of the window could begin a stop string."""
        longest = max(map(len, self._stops), default=0) - 1
        for size in range(min(longest, len(window)), 0, -1):
            if any(stop.startswith(window[-size:]) for stop in self._stops):
                return size
        return 0


class TextStream:
    """The text of an answer while it grows: detokenized, and ended by stop strings.

    continues: as in `Detokenizer`.
    `stopped` tells that a stop string was found; `text` is all that was returned, and ends before it; `token_ids` are
    the ids that stand for the text: those that reach into the stop string, by a single byte even, are left out.
    `last_parts`: what `push` or `finish` returned last, each part with the number of the token that completes it.
    Raises `InputError` for an empty stop string.
    """

    def __init__(self, tokenizer: TokenBytes, stops: tuple[str, ...] = (), continues: bool = False):
        self._detokenizer = Detokenizer(tokenizer, continues)
        self._stops = StopStrings(stops)
        self._pieces: list[str] = []
        self._ids: list[int] = []
        self._ends: list[int] = []  # bytes of text up to and with each token
        self._sent = 0  # bytes handed to the UTF-8 decoder
        self._shown = 0  # bytes that the text so far stands for
        self.last_parts: list[tuple[str, int]] = []

    def push(self, token_id: int) -> str:
        """Takes one token and returns the text that is now safe to show. Nothing counts after a stop string."""
        if self.stopped:
            self.last_parts = []
            return ""
        data = self._detokenizer.bytes_of(token_id)
        self._ids.append(token_id)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(data))
        safe = self._stops.push(data)
        self._sent += len(safe)
        if self.stopped:
            kept = bisect.bisect_right(self._ends, self._sent)
            del self._ids[kept:], self._ends[kept:]
        # Bytes before a stop string that make no character never will: more bytes follow them.
        return self._add(self._detokenizer.decode(safe, final=self.stopped))

    def finish(self) -> str:
        """Ends the text: returns what was held back and proved to be no stop string. Half a character is dropped."""
        held = self._stops.release()
        self._sent += len(held)
        text = self._detokenizer.decode(held)
        return self._add(text + self._detokenizer.finish())

    @property
    def stopped(self) -> bool:
        return self._stops.found

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def token_ids(self) -> list[int]:
        return list(self._ids)

    def _add(self, text: str) -> str:
        self._pieces.append(text)
        self.last_parts, end = [], self._shown
        for character in text:
            end += len(character.encode())
            token = min(bisect.bisect_left(self._ends, end), max(0, len(self._ends) - 1))
            before, owner = self.last_parts[-1] if self.last_parts else ("", token)
            if owner == token:
                self.last_parts[-1:] = [(before + character, token)]
            else:
                self.last_parts.append((character, token))
        self._shown = self._sent - self._detokenizer.n_pending
        return text
