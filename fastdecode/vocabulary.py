"""Two kinds of vocabulary behind one interface: text to ids, and an id to its bytes.

Bytes, because a token may end in the middle of a character: only whole texts can be decoded by the libraries.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import sentencepiece
import tokenizers
from tokenizers import AddedToken

from models.errors import InputError


class Backend(Protocol):
    """A vocabulary: text to ids without any BOS of its own, special tokens in the text included, and ids to bytes."""

    vocab_size: int  # highest id + 1
    prefix_space: bool  # texts start with an artificial space

    def encode(self, text: str) -> list[int]: ...

    def leading_ids(self) -> list[int] | None: ...  # what its own rules put before a text; None: it has no rules

    def find(self, token: str) -> int | None: ...

    def token_bytes(self, token_id: int) -> bytes: ...  # b"" for a special token


class TokenizersBackend:
    """A vocabulary of the `tokenizers` library.

    Tokens become bytes by the rules of the vocabulary's decoder, which is asked rather than looked into: byte-level
    BPE spells bytes as printable characters, SentencePiece's descendants write a space as ▁ and odd bytes as <0x0A>.
    Raises `InputError`, naming the `source`, where it decodes by other rules, since its text could not be streamed.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, source: Path):
        tokenizer.no_truncation()  # a file may carry the settings of its training
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

        decode = tokenizer.decoder.decode if tokenizer.decoder else " ".join
        self._byte_level = decode(["Ġa"]) == " a"
        self._byte_fallback = decode(["<0xE2>", "<0x82>", "<0xAC>"]) == "€"
        self.prefix_space = decode(["▁a"]) == "a"
        if decode(["a", "b"]) != "ab" or not (self._byte_level or decode(["a", "▁b"]) == "a b"):
            raise InputError(
                f"{source}: its decoder is neither byte-level nor SentencePiece's (▁ for a space); other kinds are not "
                "supported"
            )
        self._byte_of = byte_alphabet()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def leading_ids(self) -> list[int] | None:
        plain, whole = self.encode("a"), self._tokenizer.encode("a").ids
        starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return whole[: next(starts, 0)]

    def find(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def mark_special(self, token: str) -> None:
        """Makes a token of the vocabulary special, as a name such as `eos_token` in a checkpoint's files does."""
        token_id = self.find(token)
        if token_id is not None and token_id not in self._added:
            self._tokenizer.add_special_tokens([AddedToken(token, normalized=False)])
            self._added = self._tokenizer.get_added_tokens_decoder()

    def token_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None and added.special:
            return b""
        token = added.content if added is not None else self._tokenizer.id_to_token(token_id)
        if token is None:  # a hole between two ids
            return b""
        if self._byte_level:
            spelled = added is None and all(character in self._byte_of for character in token)
            return bytes(self._byte_of[character] for character in token) if spelled else token.encode()
        return piece_bytes(token, self._byte_fallback)


class SentencePieceBackend:
    """A vocabulary of the `sentencepiece` library, with the tokens that a checkpoint adds to it.

    The library does not see special tokens in a text, so the text is split at them first. `prefix_every_segment`:
    whether the artificial space comes before every part between special tokens (as Llama's first tokenizers did,
    transformers' `legacy`), or only at the start of the text.
    Raises `InputError`, naming the `source`, where the model cannot be read.
    """

    def __init__(self, model: bytes, added: Mapping[int, AddedToken], prefix_every_segment: bool, source: Path):
        try:
            self._first = sentencepiece.SentencePieceProcessor(model_proto=model)
            # Protocol buffers merge a repeated field, so these bytes set normalizer_spec.add_dummy_prefix = false.
            continued = model if prefix_every_segment else model + b"\x1a\x02\x18\x00"
            self._continued = sentencepiece.SentencePieceProcessor(model_proto=continued)
        except (RuntimeError, ValueError, OSError) as error:
            raise InputError(f"{source} cannot be read as a SentencePiece model: {error}") from None
        pieces = self._n_pieces = self._first.GetPieceSize()
        special = (i for i in range(pieces) if self._first.IsControl(i) or self._first.IsUnknown(i))
        self._added = {i: AddedToken(self._first.IdToPiece(i), special=True) for i in special} | dict(added)
        self._added = {i: token for i, token in self._added.items() if token.content}
        self._ids = {token.content: i for i, token in self._added.items()}
        self._stripped = {token.strip(): i for token, i in self._ids.items()}
        self._pattern = _added_pattern(self._added.values())
        while pieces and self._first.IsUnused(pieces - 1):
            pieces -= 1
        self.vocab_size = max(pieces, max(self._added, default=-1) + 1)
        self.prefix_space = self._first.Normalize("a") == "▁a"

    def encode(self, text: str) -> list[int]:
        ids, start = [], 0
        for match in self._pattern.finditer(text) if self._added else ():
            ids += self._encode_segment(text[start : match.start()], first=start == 0)
            token = match.group()
            ids.append(self._ids[token] if token in self._ids else self._stripped[token.strip()])
            start = match.end()
        return ids + self._encode_segment(text[start:], first=start == 0)

    def _encode_segment(self, text: str, first: bool) -> list[int]:
        return (self._first if first else self._continued).Encode(text)

    def leading_ids(self) -> list[int] | None:
        return None

    def find(self, token: str) -> int | None:
        if token in self._ids:
            return self._ids[token]
        index = self._first.PieceToId(token)  # the unknown id for what is no piece
        return index if self._first.IdToPiece(index) == token else None

    def token_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return b"" if added.special else added.content.encode()
        if token_id >= self._n_pieces:  # a hole between two added tokens
            return b""
        return piece_bytes(self._first.IdToPiece(token_id), self._first.IsByte(token_id))


def piece_bytes(piece: str, byte_fallback: bool) -> bytes:
    """The bytes of a SentencePiece piece: ▁ stands for a space, and <0x0A> for a byte where there are byte pieces."""
    if byte_fallback and re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def byte_alphabet() -> dict[str, int]:
    """The characters that spell bytes in byte-level BPE (GPT-2): themselves if printable, else counted from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _added_pattern(tokens: Iterable[AddedToken]) -> re.Pattern:
    """Matches the longest added token at a place, with the white space that the token takes along."""
    contents = sorted(tokens, key=lambda token: len(token.content), reverse=True)
    space = {True: r"\s*", False: ""}
    return re.compile(
        "|".join(space[token.lstrip] + re.escape(token.content) + space[token.rstrip] for token in contents)
    )
