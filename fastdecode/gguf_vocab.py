"""The vocabulary inside a GGUF file, rebuilt for the library that tokenizes with it.

A GGUF file stores lists (`tokenizer.ggml.tokens`, `scores`, `token_type`, `merges`) and two names:
`tokenizer.ggml.model` is the algorithm and, for byte-level BPE, `tokenizer.ggml.pre` says how text is split before
merging. The keys, the names and their meaning are llama.cpp's, which defines the format.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from tokenizers.models import BPE

from models.errors import InputError

# tokenizer.ggml.token_type; SentencePiece's own piece types have the same numbers
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
DIGITS_GPT2 = (r"\p{N}", *GPT2)
PUNCTUATION_GPT2 = (r"[\p{P}\$\+<=>\^~\|]+", *GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
QWEN2 = (LLAMA3[0].replace(r"\p{N}{1,3}", r"\p{N}"),)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-\uD7FF]+", r"\p{N}")
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

# tokenizer.ggml.pre -> expressions that cut the text, each within the pieces of the one before
SPLITTERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4", "mpt", "trillion"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), DIGITS_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
    "default": PUNCTUATION_GPT2,
    "qwen35": QWEN35,
    "tekken": TEKKEN,
    "deepseek-coder": DEEPSEEK_CODER,
    "deepseek-v3": DEEPSEEK3,
}
# What the values under `tokenizer.` have to be; of a list's items ITEMS says it.
FIELDS = {
    **dict.fromkeys(("model", "pre", "chat_template"), str),
    **dict.fromkeys(("add_bos_token", "add_space_prefix", "remove_extra_whitespaces"), bool),
    **dict.fromkeys([f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding")], int),
    **dict.fromkeys(("tokens", "merges"), list[str]),
    "token_type": list[int],
    "scores": list[float],
}
ITEMS = {list[str]: "text", list[int]: "whole numbers", list[float]: "numbers"}
# These vocabularies take a whole piece that is a token as it is, even where the merges would not lead to it, and begin
# with BOS unless the file says otherwise.
WHOLE_PIECES_AND_BOS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral", "tekken"}


@dataclass(frozen=True)
class GgufVocab:
    """What a GGUF file says about its tokenizer; ids that it does not name are None."""

    model: str  # "gpt2" or "llama"
    pre: str | None
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None
    bos_token_id: int | None
    unknown_token_id: int | None
    padding_token_id: int | None
    stop_token_ids: tuple[int, ...]  # end of text, of a turn, of a message; the first is eos
    add_bos: bool
    add_space_prefix: bool
    remove_extra_whitespaces: bool
    chat_template: str | None

    @property
    def size(self) -> int:
        """Ids that mean something: converters pad the list with unused tokens up to the rows of the embedding."""
        size = len(self.tokens)
        while size and self.types[size - 1] == UNUSED:
            size -= 1
        return size


def gguf_vocab(metadata: Mapping[str, Any], source: Path) -> GgufVocab:
    """What a file's metadata says about its tokenizer; `source` names the file in messages.

    Raises `InputError` where it has no vocabulary, contradicts itself, or names a tokenizer or splitter that is not
    supported.
    """
    fields = {
        name.removeprefix("tokenizer.").removeprefix("ggml."): value
        for name, value in metadata.items()
        if name.startswith("tokenizer.")
    }
    for name, kind in FIELDS.items():
        if name in fields and not _is_of(fields[name], kind):
            expected = f"a list of {ITEMS[kind]}" if kind in ITEMS else kind.__name__
            raise InputError(f"{source}: tokenizer.ggml.{name} should be {expected}; fetch the file again")
    model, pre = fields.get("model"), fields.get("pre")
    if model not in ("gpt2", "llama"):
        raise InputError(f"{source}: tokenizer.ggml.model is {model!r}, but 'gpt2' or 'llama' is supported")
    if model == "gpt2" and pre not in SPLITTERS:
        raise InputError(
            f"{source}: tokenizer.ggml.pre is {pre!r}, but one of {', '.join(sorted(SPLITTERS))} is supported; "
            "give the original checkpoint folder instead"
        )
    tokens, needed = fields.get("tokens"), "merges" if model == "gpt2" else "scores"
    if not tokens or needed not in fields:
        raise InputError(f"{source}: tokenizer.ggml.tokens and tokenizer.ggml.{needed} are needed and missing")
    for name in ("token_type", "scores"):
        if name in fields and len(fields[name]) != len(tokens):
            raise InputError(
                f"{source}: tokenizer.ggml.{name} has {len(fields[name])} entries for {len(tokens)} tokens"
            )

    types = fields.get("token_type") or [NORMAL] * len(tokens)
    if not 0 <= min(types) <= max(types) <= BYTE:
        raise InputError(f"{source}: tokenizer.ggml.token_type should hold numbers from 0 to {BYTE}; fetch it again")

    def token_id(name: str, default: int | None = None) -> int | None:
        value = fields.get(f"{name}_token_id", default)
        if value is not None and not 0 <= value < len(tokens):
            raise InputError(f"{source}: tokenizer.ggml.{name}_token_id is {value}, of {len(tokens)} tokens")
        return value

    llama = model == "llama"  # its vocabularies have fixed places for these three, which files may leave unsaid
    stops = (token_id("eos", 2 if llama else None), token_id("eot"), token_id("eom"))
    return GgufVocab(
        model=model,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=fields.get("scores"),
        merges=fields.get("merges"),
        bos_token_id=token_id("bos", 1 if llama else None),
        unknown_token_id=token_id("unknown", 0 if llama else None),
        padding_token_id=token_id("padding"),
        stop_token_ids=tuple(dict.fromkeys(stop for stop in stops if stop is not None)),
        add_bos=fields.get("add_bos_token", llama or pre in WHOLE_PIECES_AND_BOS),
        add_space_prefix=fields.get("add_space_prefix", llama),
        remove_extra_whitespaces=fields.get("remove_extra_whitespaces", False),
        chat_template=fields.get("chat_template"),
    )


def _is_of(value: Any, kind: Any) -> bool:
    if kind not in ITEMS:
        return type(value) is kind  # a flag is no number
    item = {list[str]: str, list[int]: int, list[float]: (int, float)}[kind]
    return isinstance(value, list) and all(isinstance(one, item) for one in value)


def build_byte_level_bpe(vocab: GgufVocab, source: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a `gpt2` vocabulary. Raises `InputError` where its merges name tokens that it lacks."""
    ids = {token: index for index, token in enumerate(vocab.tokens[: vocab.size])}
    merges = [tuple(merge.split(" ", 1)) for merge in vocab.merges]
    try:
        model = BPE(vocab=ids, merges=merges, ignore_merges=vocab.pre in WHOLE_PIECES_AND_BOS)
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{source}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITTERS[vocab.pre]]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for kind in (CONTROL, USER_DEFINED):
        tokens = [token for token, type_ in zip(vocab.tokens, vocab.types, strict=True) if type_ == kind]
        add = tokenizer.add_special_tokens if kind == CONTROL else tokenizer.add_tokens
        add([AddedToken(token, normalized=False, special=kind == CONTROL) for token in tokens])
    return tokenizer


def build_sentencepiece(vocab: GgufVocab) -> bytes:
    """A serialized SentencePiece `ModelProto` of a `llama` vocabulary (BPE by scores, byte fallback).

    Written out by hand, since the message has few fields: sentencepiece_model.proto gives their numbers.
    """
    pieces, seen = b"", set()
    for index, (token, score, type_) in enumerate(zip(vocab.tokens, vocab.scores, vocab.types, strict=True)):
        if not token or token in seen:
            token, type_ = f"<unused {index}>", UNUSED  # SentencePiece wants every piece named, and once
        elif type_ == UNKNOWN and index != vocab.unknown_token_id:
            type_ = CONTROL  # and one unknown piece
        elif index == vocab.unknown_token_id:
            type_ = UNKNOWN
        seen.add(token)
        pieces += _message(1, _message(1, token.encode()) + _float(2, score) + _varint(3, type_))
    bpe, no_id = 2, 2**64 - 1  # ids of control pieces stand in the pieces' types; -1 as a 64-bit varint
    trainer = _varint(3, bpe) + _varint(35, 1) + _varint(40, vocab.unknown_token_id)
    trainer += b"".join(_varint(field, no_id) for field in (41, 42, 43))
    normalizer = _message(1, b"identity") + _varint(3, vocab.add_space_prefix)
    normalizer += _varint(4, vocab.remove_extra_whitespaces) + _varint(5, True)
    return pieces + _message(2, trainer) + _message(3, normalizer)


def _varint_bytes(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def _varint(field: int, value: int) -> bytes:
    return _varint_bytes(field << 3) + _varint_bytes(int(value))


def _float(field: int, value: float) -> bytes:
    return _varint_bytes(field << 3 | 5) + struct.pack("<f", value)


def _message(field: int, data: bytes) -> bytes:
    return _varint_bytes(field << 3 | 2) + _varint_bytes(len(data)) + data
