"""GGUF files: a header whose fields say something else, or with other bytes, is loaded whole or refused."""

import pytest
import test_gguf
import tokenizer_fixtures
import torch
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from mutations import NUMBERS, damaged, inputs, tally  # noqa: F401 - a fixture

from checkpoints.checkpoint import read_config
from checkpoints.gguf import read_gguf
from fastdecode.gguf_vocab import gguf_vocab
from fastdecode.tokenizer import load_tokenizer
from models.errors import InputError
from quantize.network import load_network

ODD = st.one_of(
    st.sampled_from([n for n in NUMBERS if isinstance(n, float) or -(2**63) <= n < 2**64]),
    st.booleans(), st.text(max_size=4), st.lists(st.integers(-5, 5), max_size=4), st.lists(st.text(max_size=3)),
    st.none(),
)  # fmt: skip


def load(path):
    load_network(path, read_config(path), torch.device("cpu"), torch.float32, True)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_header_of_a_model(tmp_path, tally, architecture):  # noqa: F811
    file = tmp_path / "model.gguf"
    tensors = test_gguf.model_tensors(norms=architecture == "qwen3")
    test_gguf.write(file, test_gguf.metadata_for(architecture), tensors)
    load(file)
    raw = file.read_bytes()
    header = read_gguf(file)
    size = min(tensor.offset for tensor in header.tensors.values())

    @inputs(400)
    @given(damaged(raw, size))
    def run(content):
        file.write_bytes(content)
        tally.check(lambda: load(file))

    run()


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_the_fields_of_a_vocabulary(tmp_path, tally, kind):  # noqa: F811
    byte_level = kind == "byte-level"
    fields = tokenizer_fixtures.byte_level_fields() if byte_level else tokenizer_fixtures.sentencepiece_fields()
    fields = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    fields["tokenizer.chat_template"] = "{{ 1 }}"
    gguf_vocab(fields, tmp_path)

    @inputs(300)
    @given(st.dictionaries(st.sampled_from(sorted(fields)), ODD, min_size=1, max_size=2))
    def run(changes):
        changed = {name: value for name, value in {**fields, **changes}.items() if value is not None}
        tally.check(lambda: gguf_vocab(changed, tmp_path))

    run()


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_the_bytes_of_a_vocabulary(tmp_path, tally, kind):  # noqa: F811
    byte_level = kind == "byte-level"
    fields = tokenizer_fixtures.byte_level_fields() if byte_level else tokenizer_fixtures.sentencepiece_fields()
    file = tokenizer_fixtures.write_gguf(tmp_path / "vocab.gguf", chat_template="{{ 1 }}", **fields)
    raw = file.read_bytes()

    def use():
        tokenizer = load_tokenizer(file)
        assert isinstance(tokenizer.decode(tokenizer.encode("hello <|im_end|> 12 é")), str)

    use()

    @inputs(200)
    @given(damaged(raw, most=6))
    def run(content):
        file.write_bytes(content)
        tally.check(use)

    run()


def test_a_count_is_not_believed_before_it_is_held_against_the_file(tmp_path):
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    raw = (tmp_path / "a.gguf").read_bytes()
    at = raw.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    (tmp_path / "a.gguf").write_bytes(raw[:at] + (2**62).to_bytes(8, "little") + raw[at + 8 :])
    with pytest.raises(InputError, match="damaged or cut short"):
        read_gguf(tmp_path / "a.gguf")
