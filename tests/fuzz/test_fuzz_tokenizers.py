"""Tokenizer files: whatever they hold, text goes in and comes out, or one sentence says why not."""

import json

import pytest
import tokenizer_fixtures
from hypothesis import given
from mutations import damaged, inputs, tally, texts_of  # noqa: F401 - a fixture
from tiny_checkpoint import TEMPLATE

from fastdecode.tokenizer import load_tokenizer

TEXT = "hello  <think> <|im_end|></s> 12 é 🙂"
CONFIG = {
    "bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "unk_token": "<unk>", "legacy": True,
    "add_bos_token": True, "additional_special_tokens": ["<x>"], "chat_template": TEMPLATE,
    "added_tokens_decoder": {"500": {"content": "<x>", "special": True, "lstrip": False, "rstrip": True}},
}  # fmt: skip
BYTE_LEVEL = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": [
    {"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": ""}]}  # fmt: skip


def use(folder):
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer.decode(tokenizer.encode(TEXT)), str)
    if tokenizer.chat_template is not None:
        tokenizer.encode_chat([{"role": "user", "content": TEXT}])


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_tokenizer_config_json(tmp_path, tally, kind):  # noqa: F811
    byte_level = kind == "byte-level"
    folder = getattr(tokenizer_fixtures, f"{'byte_level' if byte_level else 'sentencepiece'}_folder")(tmp_path / "t")

    @inputs(250)
    @given(texts_of(BYTE_LEVEL if byte_level else CONFIG))
    def run(text):
        (folder / "tokenizer_config.json").write_bytes(text)
        tally.check(lambda: use(folder))

    run()


def test_added_tokens_json(tmp_path, tally):  # noqa: F811
    folder = tokenizer_fixtures.sentencepiece_folder(tmp_path / "t")

    @inputs(150)
    @given(texts_of({"<x>": 500, "<y>": 501, "é": 502}))
    def run(text):
        (folder / "added_tokens.json").write_bytes(text)
        tally.check(lambda: use(folder))

    run()


def test_tokenizer_json(tmp_path, tally):  # noqa: F811
    folder = tokenizer_fixtures.byte_level_folder(tmp_path / "t")
    whole = json.loads((folder / "tokenizer.json").read_text())

    @inputs(250)
    @given(texts_of(whole))
    def run(text):
        (folder / "tokenizer.json").write_bytes(text)
        tally.check(lambda: use(folder))

    run()


def test_tokenizer_model(tmp_path, tally):  # noqa: F811
    folder = tokenizer_fixtures.sentencepiece_folder(tmp_path / "t")

    @inputs(150)
    @given(damaged(tokenizer_fixtures.sentencepiece_model()))
    def run(content):
        (folder / "tokenizer.model").write_bytes(content)
        tally.check(lambda: use(folder))

    run()
