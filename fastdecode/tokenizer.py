"""Text to token ids and back, for every kind of checkpoint: `tokenizer.json`, SentencePiece, GGUF.

Two libraries do the work, `tokenizers` and `sentencepiece`; a GGUF file's vocabulary is rebuilt for one of them. What
is added here is what a checkpoint says beside its vocabulary: which tokens begin and end a text, whether BOS is
added, and the chat template.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from checkpoints.gguf import read_gguf
from checkpoints.json_text import parse_json
from fastdecode.chat import ChatTemplate
from fastdecode.detokenizer import Detokenizer
from fastdecode.gguf_vocab import (
    CONTROL,
    USER_DEFINED,
    GgufVocab,
    build_byte_level_bpe,
    build_sentencepiece,
    gguf_vocab,
)
from fastdecode.vocabulary import Backend, SentencePieceBackend, TokenizersBackend
from models.errors import InputError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
PLACEHOLDER = "\u2402"  # a message whose place in a template is wanted


class Tokenizer:
    """Text to ids and back.

    vocab_size: ids from here on are padding rows of the embedding and must never be produced.
    bos_token_id: the token that begins a text, whether or not `encode` adds it; None where the files name none.
    stop_token_ids: end-of-text tokens named by the tokenizer's files (the model's config may name more).
    chat_template: the text of the Jinja template, or None.
    """

    def __init__(
        self,
        backend: Backend,
        bos_token_id: int | None,
        stop_token_ids: Iterable[int],
        add_bos: bool | None,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ):
        leading = backend.leading_ids() if add_bos is None else None
        if leading is None:
            leading = [] if add_bos is False or bos_token_id is None else [bos_token_id]
        self._backend = backend
        self._leading_ids = leading
        self._special_tokens = dict(special_tokens)
        self.vocab_size = backend.vocab_size
        self.prefix_space = backend.prefix_space
        self.bos_token_id = leading[0] if bos_token_id is None and len(leading) == 1 else bos_token_id
        self.stop_token_ids = tuple(stop_token_ids)
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        """Ids of a text, after BOS where the checkpoint adds one; never after two, should the text begin with it.

        Special tokens that are written in the text become their ids. May be empty for an empty text.
        Raises `InputError` for what is not text: another type, or halves of surrogate pairs.
        """
        if not isinstance(text, str):
            raise InputError(f"the prompt is {type(text).__name__}, but must be text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the prompt is not valid Unicode at character {error.start}; give it as UTF-8") from None
        ids = self._backend.encode(text)
        leading = self._leading_ids
        return ids if ids[: len(leading)] == leading else leading + ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, `{"role": ..., "content": text}` each, rendered by the chat template.

        Exactly one BOS where the checkpoint wants one, whether the template writes it or not. Raises `InputError`
        without a template, for a template that is no valid Jinja or refuses the messages, and for content that is
        not text.
        """
        return self.encode(self._template.render(messages, add_generation_prompt, self._special_tokens))

    def chat_opening(self) -> str:
        """The text of a conversation up to where the user's first message begins, for a model to go on from with a
        message that it makes up (Magpie, arXiv:2406.08464).

        The spaces before the message are left off, since they belong to the token of its first word. Raises
        `InputError` as `encode_chat` does, and where the template writes the message altered or not at all.
        """
        return self._around_message()[0].rstrip(" ")

    def chat_closing(self) -> str:
        """The text between the user's first message and the answer. Raises `InputError` as `chat_opening` does."""
        return self._around_message()[1]

    def _around_message(self) -> tuple[str, str]:
        messages = [{"role": "user", "content": PLACEHOLDER}]
        text = self._template.render(messages, True, self._special_tokens)
        opening, found, closing = text.partition(PLACEHOLDER)
        if not found:
            raise InputError("the chat template does not write a user's message as it is; give another")
        return opening, closing

    def first_difference(self, other: "Tokenizer") -> int | None:
        """The lowest id that stands for another text in `other`; None where they agree on all ids that both have."""
        for i in range(min(self.vocab_size, other.vocab_size)):
            if self.token_bytes(i) != other.token_bytes(i):
                return i
        return None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens left out, half a character at the end dropped."""
        detokenizer = Detokenizer(self, continues=False)
        return "".join(map(detokenizer.push, ids)) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none for a special token.

        Raises `InputError` for an id beyond the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise InputError(f"token id {token_id} is outside the tokenizer's 0..{self.vocab_size - 1}")
        return self._backend.token_bytes(token_id)

    @cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise InputError("this checkpoint has no chat template; use --raw, or give one with --chat-template")
        return ChatTemplate(self.chat_template)


def load_tokenizer(
    path: Path | str, chat_template: str | None = None
) -> Tokenizer:
    """The tokenizer of a checkpoint: a folder (`tokenizer.json`, else `tokenizer.model`) or a GGUF file.

    chat_template: the text of a template that replaces the checkpoint's.
    Raises `InputError` for a folder without a tokenizer, a file that cannot be read, and settings not supported.
    """
    path = Path(path)
    if path.is_dir():
        try:
            return _from_folder(path, chat_template)
        except OSError as error:
            raise InputError(f"{path}: the tokenizer's files cannot be read ({error.strerror or error}).") from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{path}: the tokenizer's JSON files do not have the layout that is expected "
                f"({type(error).__name__}: {error}); fetch them again."
            ) from None
    return _from_gguf(gguf_vocab(read_gguf(path).metadata, path), chat_template, path)


def _from_folder(folder: Path, chat_template: str | None) -> Tokenizer:
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    values = {name: config.get(name) for name in NAMED_TOKENS}
    values = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    named = {name: value for name, value in values.items() if isinstance(value, str)}
    add_bos = config.get("add_bos_token")

    if (folder / "tokenizer.json").is_file():
        backend = _read_tokenizer_json(folder / "tokenizer.json")
        for token in named.values():
            backend.mark_special(token)
    elif (folder / "tokenizer.model").is_file():
        added = _added_tokens(folder, config, set(named.values()))
        path = folder / "tokenizer.model"
        backend = SentencePieceBackend(path.read_bytes(), added, config.get("legacy") is True, path)
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # unless the files say otherwise
        named = {name: token for name, token in names.items() if backend.find(token) is not None} | named
        add_bos = True if add_bos is None else add_bos
    else:
        raise InputError(f"{folder} has neither tokenizer.json nor tokenizer.model; give a complete checkpoint folder")

    ids = {name: backend.find(token) for name, token in named.items()}
    for name in ("bos_token", "eos_token"):
        if name in named and ids[name] is None:
            raise InputError(f"{folder}: {name} is {named[name]!r}, which its vocabulary lacks")
    if chat_template is None:
        chat_template = _checkpoint_template(folder, config)
    stops = [ids["eos_token"]] if "eos_token" in named else []
    return Tokenizer(backend, ids.get("bos_token"), stops, add_bos, named, chat_template)


def _from_gguf(vocab: GgufVocab, chat_template: str | None, path: Path) -> Tokenizer:
    if vocab.model == "gpt2":
        backend = TokenizersBackend(build_byte_level_bpe(vocab, path), path)
    else:
        types = (CONTROL, USER_DEFINED)
        added = {
            index: AddedToken(token, special=type_ == CONTROL)
            for index, (token, type_) in enumerate(zip(vocab.tokens, vocab.types, strict=True))
            if type_ in types and token
        }
        # llama.cpp, whose format this is, puts the space before every part between special tokens.
        backend = SentencePieceBackend(build_sentencepiece(vocab), added, True, path)
    ids = {
        "bos_token": vocab.bos_token_id,
        "eos_token": next(iter(vocab.stop_token_ids), None),
        "unk_token": vocab.unknown_token_id,
        "pad_token": vocab.padding_token_id,
    }
    named = {name: vocab.tokens[index] for name, index in ids.items() if index is not None}
    template = vocab.chat_template if chat_template is None else chat_template
    return Tokenizer(backend, vocab.bos_token_id, vocab.stop_token_ids, vocab.add_bos, named, template)


def _read_tokenizer_json(path: Path) -> TokenizersBackend:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{path} cannot be read as a tokenizer: {error}") from None
    return TokenizersBackend(tokenizer, path)


def _added_tokens(folder: Path, config: Mapping[str, Any], named: set[str]) -> dict[int, AddedToken]:
    """Tokens added to a SentencePiece model: added_tokens.json, overruled by tokenizer_config.json."""
    extra = config.get("additional_special_tokens") or []
    special = named | {token.get("content") if isinstance(token, dict) else token for token in extra}
    added = {
        index: AddedToken(token, special=token in special)
        for token, index in _read_json(folder / "added_tokens.json").items()
    }
    for index, token in (config.get("added_tokens_decoder") or {}).items():
        added[int(index)] = AddedToken(
            token["content"],
            lstrip=token.get("lstrip", False),
            rstrip=token.get("rstrip", False),
            special=token.get("special", False) or token["content"] in special,
        )
    return added


def _checkpoint_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template's own file comes before the config's field, which is a text or a list of named texts."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except ValueError as error:
            raise InputError(f"{path} is not UTF-8 text: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise InputError(f"{folder}: chat_template should be text or a list of named texts; fetch it again.")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, but must hold an object")
    return content
