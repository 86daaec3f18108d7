"""Tiny real tokenizers, trained on the spot, and the checkpoint folders and GGUF files that hold them."""

import functools
import io
import json
from pathlib import Path

import sentencepiece
from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from fastdecode.detokenizer import Detokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Ďábelské ódy pěly příšerně žluťoučké koně.",
    "삼겹살을 먹고 싶어요, 정말로 맛있어요.",
    "def square(x):\n    return x ** 2  # 12345",
    "user assistant system hello there, it's what we'll do, hello hello hello",
]

# Kinds of text that break tokenizers; the last ones have characters that no training text had.
TEXTS = [
    "hello there",
    "ďábelské",
    "삼겹살 먹고",
    "tab\tand\ttab",
    "carriage\r\nreturn\r\n\r\n",
    "nul\0byte",
    "   ",
    " ",
    "  two spaces before, two after  ",
    "\n\n  \n x",
    "12345 and 6.7e8",
    "it's I'M we'll",
    "emoji 🙂 and 👩‍👩‍👧‍👦 and 🏳️‍🌈!",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 漢字 ﷽",
]


@functools.cache
def sentencepiece_model() -> bytes:
    """A Llama-like model: BPE, unk/bos/eos 0/1/2, byte fallback, an artificial space before the text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 5),
        model_writer=model,
        model_type="bpe",
        vocab_size=500,
        character_coverage=1.0,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        control_symbols=["[INST]", "[/INST]"],
        minloglevel=2,
    )
    return model.getvalue()


@functools.cache
def _byte_level_json(kind: str) -> str:
    tokenizer = Tokenizer(models.BPE())
    before = {
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    }
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before[kind])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 5, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer.to_str()


def byte_level_tokenizer(kind: str = "smollm") -> Tokenizer:
    """A GPT-2-like tokenizer: byte-level BPE, three special tokens and one added token that is text."""
    return Tokenizer.from_str(_byte_level_json(kind))


def write_json(path: Path, content) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def byte_level_folder(folder: Path, tokenizer: Tokenizer | None = None, **config) -> Path:
    folder.mkdir(exist_ok=True)
    (tokenizer or byte_level_tokenizer()).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"} | config)
    return folder


def sentencepiece_folder(folder: Path, **config) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"} | config)
    return folder


def write_gguf(path: Path, **fields) -> Path:
    """A GGUF file of metadata only; `fields` are `tokenizer.ggml.*` keys and `chat_template`."""
    writer = GGUFWriter(path, "llama")
    if template := fields.pop("chat_template", None):
        writer.add_chat_template(template)
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_fields(kind: str = "smollm") -> dict:
    tokenizer = byte_level_tokenizer(kind)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    types = [4 if token == "<think>" else 3 if index < 3 else 1 for index, token in enumerate(tokens)]
    return {
        "model": "gpt2",
        "pre": kind,
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }


def sentencepiece_fields() -> dict:
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    ids = range(processor.GetPieceSize())
    kinds = ((processor.IsUnknown, 2), (processor.IsControl, 3), (processor.IsUnused, 5), (processor.IsByte, 6))
    return {
        "model": "llama",
        "tokens": [processor.IdToPiece(index) for index in ids],
        "scores": [processor.GetScore(index) for index in ids],
        "token_type": [next((number for test, number in kinds if test(index)), 1) for index in ids],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def stream(tokenizer, ids, continues: bool = False) -> list[str]:
    """What a reader sees after each token."""
    detokenizer, shown = Detokenizer(tokenizer, continues), [""]
    for token_id in ids:
        shown.append(shown[-1] + detokenizer.push(token_id))
    return shown
