"""Safetensors files of models, quantized folders and heads, and config.json beside them: loaded whole, or refused."""

import json
import shutil

import pytest
import torch
from eagle_fixtures import random_head
from hypothesis import given
from hypothesis import strategies as st
from mutations import as_text, damaged, documents, inputs, tally, texts_of  # noqa: F401 - a fixture
from tiny import reference_model, save_checkpoint
from tokenizer_fixtures import byte_level_folder

from checkpoints.checkpoint import read_config
from checkpoints.head_checkpoint import holds_head, load_head, read_head_config
from fastdecode.options import run_command
from fastdecode.train.output import write_head
from models.transformer import Transformer
from quantize.__main__ import main as quantize_main
from quantize.network import load_network

CPU = torch.device("cpu")
SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 430}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(reference_model("llama", **SIZES), folder)
    return byte_level_folder(folder)


@pytest.fixture(scope="module")
def quantized(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized") / "out"
    assert run_command(quantize_main, [str(model), "-o", str(folder), "--method", "rtn"]) == 0
    return folder


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    write_head(random_head("eagle3", 430, 32, 50), folder, "speculators")
    return folder


def split(file):
    """The header of a safetensors file, parsed, and its data."""
    raw = file.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + n]), raw[8 + n :]


def joined(header: str, data: bytes) -> bytes:
    encoded = header.encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def files_like(file) -> st.SearchStrategy[bytes]:
    """The file with a header that says something else, or with other bytes near its beginning."""
    header, data = split(file)
    whole = file.read_bytes()
    in_header = documents(header).map(lambda document: joined(as_text(document), data))
    return st.one_of(in_header, in_header, damaged(whole, len(whole) - len(data)), damaged(whole))


def copy_of(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    return copy


def load_model(folder):
    load_network(folder, read_config(folder), CPU, torch.float32, True)


@pytest.mark.parametrize("kind", ["model", "quantized"])
def test_the_weights_of_a_model(request, tmp_path, tally, kind):  # noqa: F811
    folder = copy_of(request.getfixturevalue(kind), tmp_path)
    file = folder / "model.safetensors"

    @inputs(300)
    @given(files_like(file))
    def run(content):
        file.write_bytes(content)
        tally.check(lambda: load_model(folder))

    run()


def test_what_a_quantized_files_header_says_of_its_matrices(quantized, tmp_path, tally):  # noqa: F811
    folder = copy_of(quantized, tmp_path)
    file = folder / "model.safetensors"
    header, data = split(file)

    @inputs(300)
    @given(texts_of(json.loads(header["__metadata__"]["fastdecode"])))
    def run(description):
        metadata = header["__metadata__"] | {"fastdecode": description.decode(errors="replace")}
        file.write_bytes(joined(json.dumps(header | {"__metadata__": metadata}), data))
        tally.check(lambda: load_model(folder))

    run()


def test_a_config_beside_weights_that_it_does_not_fit(model, tmp_path, tally):  # noqa: F811
    folder = copy_of(model, tmp_path)
    file = folder / "config.json"

    @inputs(300)
    @given(documents(json.loads(file.read_text()), most=1))
    def run(document):
        file.write_text(as_text(document))
        tally.check(lambda: load_model(folder))

    run()


def test_the_index_of_shards(model, tmp_path, tally):  # noqa: F811
    folder = copy_of(model, tmp_path)
    header, _ = split(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = [name for name in header if name != "__metadata__"]
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}

    @inputs(200)
    @given(texts_of(index))
    def run(text):
        (folder / "model.safetensors.index.json").write_bytes(text)
        tally.check(lambda: load_model(folder))

    run()


def test_a_heads_config_and_weights(model, head, tmp_path, tally):  # noqa: F811
    target: Transformer = load_network(model, read_config(model), CPU, torch.float32, False)
    folder = copy_of(head, tmp_path)
    config, weights = folder / "config.json", folder / "model.safetensors"
    good = config.read_bytes(), weights.read_bytes()

    def load():
        assert holds_head(folder)
        load_head(folder, read_head_config(folder).fitted_to(target.config, "head"), target)

    load()
    either = st.one_of(
        st.tuples(texts_of(json.loads(good[0])), st.just(good[1])), st.tuples(st.just(good[0]), files_like(weights))
    )

    @inputs(400)
    @given(either)
    def run(files):
        config.write_bytes(files[0])
        weights.write_bytes(files[1])
        tally.check(lambda: holds_head(folder) and load())

    run()
