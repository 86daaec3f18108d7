"""A model is known by its fingerprint, however it is stored, and the head that was trained for it drafts unasked."""

import json

import eagle_fixtures
import pytest
import test_gguf
import tokenizer_fixtures
import torch
from safetensors.torch import load_file, save_file
from test_decoder import forget_stop_tokens, text_of
from tiny_checkpoint import tiny_checkpoint

from checkpoints.checkpoint import read_config
from checkpoints.fingerprint import target_fingerprint
from fastdecode import load
from fastdecode.drafting import DraftOptions
from fastdecode.options import run_command
from fastdecode.shipped_heads import find_shipped_head, shipped_heads
from fastdecode.tokenizer import load_tokenizer
from fastdecode.train.output import write_head
from models.errors import InputError
from models.layers import Linear
from quantize.__main__ import main as quantize_main
from quantize.linear import QuantizedLinear

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


def mark(path):
    return target_fingerprint(path, read_config(path))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint whose values bf16 holds, as published ones do."""
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint(folder, **SIZES)
    weights = {name: value.bfloat16().float() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def copied(model, folder, change=lambda name, value: value, **fields):
    folder.mkdir()
    weights = load_file(model / "model.safetensors")
    save_file({name: change(name, value) for name, value in weights.items()}, folder / "model.safetensors")
    config = json.loads((model / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fingerprint_is_the_same_in_every_precision(model, tmp_path, dtype):
    assert mark(copied(model, tmp_path / "copy", lambda name, value: value.to(dtype))) == mark(model)


@pytest.mark.parametrize("bits", ["4", "8"])
def test_the_fingerprint_survives_quantization_and_gguf(model, tmp_path, bits):
    metadata = {name: value for name, value in test_gguf.LLAMA.items() if "tokenizer" not in name}
    fields = tokenizer_fixtures.byte_level_fields()
    tensors = test_gguf.model_tensors()
    for name in ("token_embd.weight", "output.weight"):
        tensors[name] = tensors[name][:1].repeat(len(fields["tokens"]), 0)
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    metadata |= {"tokenizer.chat_template": "{{ messages }}"}
    gguf = test_gguf.write(tmp_path / "x.gguf", metadata, test_gguf.as_llama_cpp_stores(tensors))
    for name, path in (("folder", model), ("gguf", gguf)):
        out = tmp_path / name
        assert run_command(quantize_main, [str(path), "-o", str(out), "--bits", bits, "--skip", "*o_proj*"]) == 0
        assert mark(out) == mark(path)
    assert mark(gguf) != mark(model)


def test_another_norm_or_size_is_another_fingerprint_and_other_weights_are_not(model, tmp_path):
    def scaled(part):
        return lambda name, value: value * 1.5 if name == part else value

    assert mark(copied(model, tmp_path / "tuned", scaled("model.norm.weight"))) != mark(model)
    assert mark(copied(model, tmp_path / "fewer", num_hidden_layers=2)) != mark(model)
    assert mark(copied(model, tmp_path / "same", scaled("model.layers.0.mlp.up_proj.weight"))) == mark(model)


def test_a_checkpoint_without_a_final_norm_is_refused(model, tmp_path):
    copy = copied(model, tmp_path / "copy", lambda name, value: value[:-1] if name == "model.norm.weight" else value)
    with pytest.raises(InputError, match="final norm of 64"):
        mark(copy)


def ship(model, heads, name, kind, fingerprint=None, seed=0):
    """Write a random head for `model`, as the trainer does, into `heads`."""
    config = read_config(model)
    head = eagle_fixtures.random_head(kind, config.vocab_size, config.hidden_size, n_drafted=60, seed=seed)
    heads.mkdir(exist_ok=True)
    write_head(head, heads / name, "safeai", {"target_fingerprint": fingerprint or mark(model)})
    return heads / name


def planned(model, heads, draft="auto", tree="auto"):
    return DraftOptions.parse(draft, tree, None).plan(read_config(model), load_tokenizer(model), model, heads).path


def test_auto_takes_the_head_that_was_trained_for_the_model_eagle3_first(model, tmp_path):
    heads = tmp_path / "heads"
    assert planned(model, heads) is None  # there is no such folder
    ship(model, heads, "b-of-another", "eagle3", fingerprint="0" * 64)
    (heads / "notes").mkdir()
    (heads / "README.md").write_text("heads")
    (heads / "broken").mkdir()
    (heads / "broken" / "config.json").write_text("{")
    assert planned(model, heads) is None
    ship(model, heads, "a-eagle1", "eagle1")
    assert planned(model, heads).name == "a-eagle1"
    for name in ("d-eagle3", "c-eagle3", ".e-eagle3.part"):
        ship(model, heads, name, "eagle3")
    assert planned(model, heads).name == "c-eagle3"
    assert planned(model, heads, tree="dynamic:2,3,8").name == "c-eagle3"
    assert planned(model, heads, draft="none") is planned(model, heads, draft="ngram") is None
    assert planned(model, heads, draft=str(heads / "a-eagle1")).name == "a-eagle1"


def test_a_head_inside_the_models_folder_comes_before_the_shipped_ones(model, tmp_path):
    folder, heads = tmp_path / "model", tmp_path / "heads"
    tiny_checkpoint(folder, **SIZES)
    ship(folder, heads, "eagle3", "eagle3")
    assert planned(folder, heads) == heads / "eagle3"
    ship(folder, folder, "draft", "eagle1")
    assert planned(folder, heads) == folder / "draft"


def test_a_tree_with_no_head_to_grow_it_is_refused(model, tmp_path):
    with pytest.raises(InputError, match="--tree chain:2 needs a draft"):
        planned(model, tmp_path / "heads", tree="chain:2")


def test_a_head_that_claims_the_model_but_does_not_fit_is_refused(model, tmp_path):
    file = ship(model, tmp_path / "heads", "head", "eagle3") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_hidden_size": 96}))
    with pytest.raises(InputError, match="width 96"):
        find_shipped_head(model, read_config(model), tmp_path / "heads")


def test_without_heads_the_checkpoint_is_not_opened(model, tmp_path, monkeypatch):
    monkeypatch.setattr("fastdecode.shipped_heads.target_fingerprint", None)
    assert find_shipped_head(model, read_config(model), tmp_path) is None


def test_heads_ship_beside_the_code():
    assert shipped_heads().parts[-2:] == ("models", "heads")


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_shipped_head_drafts_unasked_in_int8_beside_quantized_weights_and_changes_nothing(
    model, tmp_path, monkeypatch, kind
):
    quantized, heads = tmp_path / "int8", tmp_path / "heads"
    assert run_command(quantize_main, [str(model), "-o", str(quantized), "--bits", "8"]) == 0
    ship(model, heads, "head", kind)
    monkeypatch.setattr("fastdecode.drafting.shipped_heads", lambda: heads)

    def decoder(path, **options):
        found = load(str(path), dtype="float32", device="cpu", compile=False, max_seq_len=256, **options)
        forget_stop_tokens(found)
        return found

    for path, quantize, layer in (
        (quantized, "auto", QuantizedLinear),
        (quantized, "none", Linear),
        (model, "auto", Linear),
    ):
        drafted, plain = decoder(path, quantize=quantize), decoder(path, quantize=quantize, draft="none")
        head = drafted.runner.round.drafter.head
        parts = (head.fc, head.layers[0].self_attn.qkv_proj, head.layers[0].mlp.gate_up_proj)
        assert all(type(part) is layer for part in parts)
        assert type(head.layers[0].mlp.down_proj) is Linear  # no group fits its 48 columns
        assert kind == "eagle1" or type(head.lm_head) is layer
        for n in (1, 40):
            options = {"raw": True, "max_new_tokens": 24}
            assert drafted.generate(text_of(n), **options).token_ids == plain.generate(text_of(n), **options).token_ids
