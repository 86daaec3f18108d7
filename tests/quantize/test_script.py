"""`python -m quantize` as people use it: every kind of checkpoint, every option, one sentence for bad input."""

import json
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import test_gguf
import tokenizer_fixtures
import torch
from golden_files import carried, load, target_for, write_head
from safetensors.torch import load_file, save_file
from tiny import save_checkpoint
from tiny_checkpoint import tiny_checkpoint

from checkpoints.checkpoint import open_folder, read_config
from fastdecode.loading import load as load_decoder
from fastdecode.options import run_command
from fastdecode.tokenizer import load_tokenizer
from models.config import ModelConfig
from quantize import __main__ as script
from quantize.calibration import LayerwiseCalibration
from quantize.files import read_quantized
from quantize.gptq import gptq_matrix
from quantize.methods import quantize_matrix
from quantize.network import load_network
from quantize.pipeline import quantize_checkpoint
from quantize.plan import Options, plan_model
from quantize.report import MatrixResult, Report, mean_error
from quantize.text import own_texts, read_text, rows_of

ROOT = Path(__file__).parents[2]
NO_O_PROJ = Options(skip=("*o_proj*",))  # of the tiny GGUF files, whose o_proj has 24 columns
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "in"
    tiny_checkpoint(folder, **SIZES, max_position_embeddings=512)
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    return folder


@pytest.fixture
def run(folder, tmp_path, capsys):
    """Runs the command in this process, to `tmp_path / "out"`; returns exit code, stdout and stderr."""

    def run(*arguments, model=folder, out=tmp_path / "out"):
        code = run_command(script.main, [str(model), "-o", str(out), *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def config_of(out):
    """Its config, read as that of the floats that it stands for."""
    config = json.loads((out / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "fastdecode"
    return ModelConfig.from_hf(config)


def matrices_of(out):
    stored = open_folder(out)
    return read_quantized(out, stored), stored


def logits(network, ids):
    network.set_rotary(64)
    n = ids.shape[1]
    cache, at = network.new_cache(1, n + 1), torch.arange(n)[None]
    with torch.inference_mode():
        hidden = network(ids, at, at, (at[0] <= at[0][:, None])[None], at, cache).last
        return network.logits(hidden)


def assert_near(out, source, tolerance=0.1):
    """The quantized network says about what the original does."""
    config = config_of(out)
    assert config == read_config(source)
    ids = torch.randint(3, config.vocab_size, (1, 40), generator=torch.Generator().manual_seed(2))
    expected = logits(load_network(source, config, torch.device("cpu"), torch.float32, quantized=False), ids)
    found = logits(load_network(out, read_config(out), torch.device("cpu"), torch.float32, quantized=False), ids)
    error = ((found - expected).norm() / expected.norm()).item()
    assert 0 < error < tolerance, error


def refused(answer, match):
    code, out, err = answer
    assert code == 2 and out == "" and re.search(match, err), err
    assert err.startswith("error: ") and len(err.splitlines()) == 1


# --- what comes out -------------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_out_whole(run, folder, tmp_path):
    code, out, err = run("--bits", 8)
    assert code == 0, err
    assert_near(tmp_path / "out", folder)
    names = {file.name for file in folder.iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    for name in names - {"config.json", "model.safetensors"}:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert load_tokenizer(tmp_path / "out").encode("hello there") == load_tokenizer(folder).encode("hello there")


def test_the_report_has_a_line_for_each_layer_and_totals(run, folder, tmp_path):
    code, out, _ = run("--group-size", 32)
    layers = re.findall(r"^  (\S+) +(\d\.\d\de-\d\d)", out, re.MULTILINE)
    assert [name for name, _ in layers] == ["embed_tokens", "layers.0", "layers.1", "lm_head"]
    assert all(1e-3 < float(error) < 1e-2 for name, error in layers if "layers" in name)
    last = out.splitlines()[-1]
    after = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert f"{after / 1e6:,.2f} MB after" in last and re.search(r"; \d+\.\d s$", last)
    n4, n8 = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 96 * 64), 2 * 64 * config_of(tmp_path / "out").vocab_size
    assert f"{(n4 * 5 + n8 * 8.5) / (n4 + n8):.2f} bits per quantized weight" in last


@pytest.mark.parametrize("method", ["rtn", "als", "hqq", "gptq"])
@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama-tied", {}),
        ("llama-biased", {}),
        ("qwen3", {"head_dim": 16}),
        ("mixtral", {"intermediate_size": 64}),
        ("qwen3-moe-mixed", {"head_dim": 16}),
    ],
)
def test_every_family_and_method(run, family, changes, method, tmp_path):
    source = tmp_path / "in"
    tiny_checkpoint(source, family, **{**SIZES, **changes})
    text = tmp_path / "text.txt"
    text.write_text("hello there, the quick brown fox. " * 40)
    calibration = ["--calibration", text] if method == "gptq" else []
    code, out, err = run("--method", method, *calibration, model=source)
    assert code == 0, err
    assert_near(tmp_path / "out", source, 0.6)
    sources, rest = matrices_of(tmp_path / "out")
    assert ("lm_head.weight" in sources) == (family != "llama-tied")
    assert not any("mlp.gate.weight" in name or "norm" in name or "bias" in name for name in sources)
    before = {name.removeprefix("model."): t for name, t in load_file(source / "model.safetensors").items()}
    assert sources.keys() | rest.keys() == before.keys()
    if "experts" in " ".join(before):
        assert len(re.findall(r"^  layers", out, re.MULTILINE)) == 2  # one line a layer
    assert "gate.weight" not in out
    if method == "als":
        for name, found in sources.items():
            expected = quantize_matrix(before[name], found.bits, found.group_size)
            assert torch.equal(found.read().q, expected.q)


def test_gptq_sees_what_the_quantized_layers_before_it_pass_on(folder, tmp_path):
    ids = torch.randint(3, 400, (3, 40), generator=torch.Generator().manual_seed(4))
    options = Options(method="gptq", lm_head="16")
    quantize_checkpoint(plan_model(folder, options), tmp_path / "out", options, token_ids=ids)
    sources = matrices_of(tmp_path / "out")[0]
    network = load_network(folder, read_config(folder), torch.device("cpu"), torch.float32, quantized=False)
    calibration = LayerwiseCalibration(network.config, network.embed_tokens, ids)
    for i, layer in enumerate(network.layers):
        hessians = calibration.layer(i, layer)
        for name, parts in (("self_attn.qkv", "qkv"), ("self_attn.o", "o"), ("mlp.gate_up", ("gate", "up"))):
            weight = layer.get_parameter(f"{name}_proj.weight")
            place, sizes = name.rpartition(".")[0], {"qkv": [64, 32, 32], "o": [64]}.get(parts, [96, 96])
            for part, rows in zip(parts, weight.split(sizes), strict=True):
                expected = gptq_matrix(rows, hessians[f"{name}_proj"], 4, 32)
                assert torch.equal(sources[f"layers.{i}.{place}.{part}_proj.weight"].read().q, expected.q)
                rows.copy_(expected.dequantize())
        down = layer.mlp.down_proj.weight
        down.copy_(gptq_matrix(down, hessians["mlp.down_proj"], 4, 32).dequantize())
        calibration.advance(layer)


def test_stacked_experts_come_apart(run, tmp_path):
    """As some checkpoints store them: one tensor for all experts, gate and up together."""
    source, stacked = tmp_path / "in", tmp_path / "stacked"
    tiny_checkpoint(source, "qwen3-moe", **SIZES, head_dim=16)
    shutil.copytree(source, stacked)
    tensors = load_file(source / "model.safetensors")
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        parts = {p: torch.stack([tensors.pop(f"{at}{e}.{p}_proj.weight") for e in range(8)]) for p in ("gate", "up")}
        tensors[f"{at}gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        tensors[f"{at}down_proj"] = torch.stack([tensors.pop(f"{at}{e}.down_proj.weight") for e in range(8)])
    save_file(tensors, stacked / "model.safetensors", {"format": "pt"})
    assert run(model=source, out=tmp_path / "a")[0] == run(model=stacked, out=tmp_path / "b")[0] == 0
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_sharded_sources(run, folder, tmp_path):
    from tiny import reference_model

    model = reference_model("llama", **SIZES)
    tokenizer = ("tokenizer.json", "tokenizer_config.json")
    for name, shard in (("one", "5GB"), ("many", "30KB")):
        save_checkpoint(model, tmp_path / name, shard)
        for file in tokenizer:
            shutil.copy(folder / file, tmp_path / name / file)
        assert run(model=tmp_path / name, out=tmp_path / f"{name}-out")[0] == 0
    assert not (tmp_path / "many-out" / "model.safetensors.index.json").exists()
    one, many = (load_file(tmp_path / f"{name}-out" / "model.safetensors") for name in ("one", "many"))
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)


def test_lm_head_as_it_is_or_like_the_others(run, folder, tmp_path):
    assert run("--lm-head", 16, "--group-size", 64, "--skip", "*down_proj*")[0] == 0
    sources, rest = matrices_of(tmp_path / "out")
    assert "lm_head.weight" in rest and "embed_tokens.weight" in rest
    assert run("--lm-head", "same", "--group-size", 64, "--skip", "*down_proj*")[0] == 0
    sources, rest = matrices_of(tmp_path / "out")
    assert (sources["lm_head.weight"].bits, sources["embed_tokens.weight"].group_size) == (4, 64)


def test_skipped_layers_stay_and_are_reported(run, folder, tmp_path):
    code, out, _ = run("--skip", "model.layers.1.*", "--skip", "layers.0.mlp.*")
    assert code == 0
    sources, rest = matrices_of(tmp_path / "out")
    kept = {name for name in rest if "_proj" in name}
    assert len(kept) == 10 and all(name.startswith(("layers.1.", "layers.0.mlp.")) for name in kept)
    assert set(re.findall(r"^left as it is: model\.(\S+)$", out, re.MULTILINE)) == kept
    assert_near(tmp_path / "out", folder, 0.6)


def test_a_layers_error_is_that_of_its_matrices_together():
    a = MatrixResult("a", "layers.0.a", error=0.1, length=3, n_weights=10, n_bytes=5)
    b = MatrixResult("b", "layers.0.b", error=0.5, length=1, n_weights=10, n_bytes=5)
    assert mean_error([a, b]) == pytest.approx((0.3 + 0.5) / 4)
    text = Report((a, b), (), (), 1, 1, 1.0).text()
    assert re.search(r"layers.0 +2.00e-01   5.00e-01 b$", text, re.MULTILINE) and "4.00 bits per" in text


def test_long_lists_of_what_stays_are_cut(run):
    code, out, _ = run("--skip", "*", "--lm-head", 16)
    assert code == 0 and out.count("left as it is:") == 16 and "0.00 bits" in out
    report = Report((), tuple(f"name{i}" for i in range(100)), (), 1, 1, 1.0)
    assert report.text().count("left as it is: name") == 20 and "left as it is: 80 more" in report.text()


def test_a_tied_models_second_head_is_dropped_if_it_is_the_embedding(run, tmp_path):
    source = tmp_path / "in"
    tiny_checkpoint(source, "llama-tied", **SIZES)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    code, out, err = run(model=source)
    assert code == 0 and "left out: lm_head.weight" in out, err
    assert not any("lm_head" in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    refused(run(model=source), "differs from the embedding")


# --- GGUF -----------------------------------------------------------------------------------------------------------


def gguf(path, vocabulary, **kinds):
    """A tiny llama as llama.cpp stores it, with a real vocabulary; q and k interleaved."""
    fields = {f"tokenizer.ggml.{name}": value for name, value in vocabulary.items()}
    n = len(vocabulary["tokens"])
    tensors = test_gguf.model_tensors(**kinds)
    rng = np.random.default_rng(5)
    for name in tensors.keys() & {"token_embd.weight", "output.weight"}:
        tensors[name] = rng.standard_normal((n, test_gguf.HIDDEN)).astype(np.float32)
    metadata = {k: v for k, v in test_gguf.LLAMA.items() if "tokenizer" not in k}
    metadata["tokenizer.chat_template"] = tiny_template()
    return test_gguf.write(path, metadata | fields, test_gguf.as_llama_cpp_stores(tensors))


def tiny_template():
    from tiny_checkpoint import TEMPLATE

    return TEMPLATE


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_files_become_folders(run, kind, tied, tmp_path):
    fields = getattr(tokenizer_fixtures, f"{kind}_fields")() | {"add_bos_token": tied}
    source = gguf(tmp_path / "x.gguf", fields, tied=tied)
    code, out, err = run("--bits", 8, "--skip", "*o_proj*", model=source)
    assert code == 0, err
    assert_near(tmp_path / "out", source, 0.3)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight_scale" in weights and "model.norm.weight" in weights
    assert ("lm_head.weight" in weights) != tied
    ours, theirs = load_tokenizer(tmp_path / "out"), load_tokenizer(source)
    assert (ours.vocab_size, ours.bos_token_id, ours.chat_template) == (
        theirs.vocab_size,
        theirs.bos_token_id,
        theirs.chat_template,
    )
    for text in [*tokenizer_fixtures.TEXTS, "<think>a</s><|im_end|> b[INST] c"]:
        assert ours.encode(text) == theirs.encode(text)
    assert all(ours.token_bytes(i) == theirs.token_bytes(i) for i in range(ours.vocab_size))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3moe", "mixtral"])
def test_the_config_of_a_gguf_reads_back_the_same(architecture, tmp_path):
    extra, kinds = {}, {}
    name = "llama" if architecture == "mixtral" else architecture
    if architecture in ("qwen3moe", "mixtral"):
        extra, kinds = {"expert_count": 4, "expert_used_count": 2}, {"experts": 4}
    if architecture == "qwen3moe":
        extra["expert_feed_forward_length"] = test_gguf.FFN
    kinds |= {"bias": name == "qwen2", "norms": name.startswith("qwen3")}
    tensors = test_gguf.model_tensors(**kinds)
    if name == "llama":
        tensors = test_gguf.as_llama_cpp_stores(tensors)
    source = test_gguf.write(tmp_path / "x.gguf", test_gguf.metadata_for(name, **extra), tensors)
    plan = plan_model(source, NO_O_PROJ)
    assert ModelConfig.from_hf(json.loads(json.dumps(plan.config_json))) == read_config(source)
    stacks = [piece.name for piece in plan.pieces if "experts.3" in piece.name]
    spelling = {"mixtral": "model.layers.1.block_sparse_moe.experts.3.w2.weight"}
    expected = spelling.get(architecture, "model.layers.1.mlp.experts.3.down_proj.weight")
    assert (expected in stacks) == bool(kinds.get("experts")) and len(stacks) in (0, 6)
    if stacks:  # each piece reads its own part of the stack
        piece = next(p for p in plan.pieces if p.name == expected)
        assert torch.equal(piece.read(), torch.from_numpy(tensors["blk.1.ffn_down_exps.weight"][3]))
        up = next(p for p in plan.pieces if p.name in (expected.replace("w2", "w3").replace("down", "up"),))
        assert torch.equal(up.read(), torch.from_numpy(tensors["blk.1.ffn_up_exps.weight"][3]))


@pytest.mark.parametrize("factor", [8.0, 32.0, None])
def test_llama_3s_rope_factors_become_its_rope_scaling(factor, tmp_path):
    from models.config import RopeConfig
    from models.rope import inverse_frequencies

    llama3 = RopeConfig("llama3", 50000.0, factor or 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    plain = inverse_frequencies(RopeConfig(theta=50000.0), test_gguf.HEAD_DIM, 1)
    factors = plain / inverse_frequencies(llama3, test_gguf.HEAD_DIM, 1)
    if factor is None:
        factors[1] += 0.5
    tensors = test_gguf.as_llama_cpp_stores(test_gguf.model_tensors()) | {"rope_freqs.weight": factors.numpy()}
    source = test_gguf.write(tmp_path / "x.gguf", test_gguf.LLAMA, tensors)
    if factor is None:
        with pytest.raises(script.InputError, match="no schedule"):
            plan_model(source, NO_O_PROJ)
        return
    rope = ModelConfig.from_hf(plan_model(source, NO_O_PROJ).config_json).rope
    assert torch.allclose(
        inverse_frequencies(rope, 8, 1), inverse_frequencies(read_config(source).rope, 8, 1), rtol=1e-4
    )
    assert (rope.kind, rope.factor) == ("llama3", factor)


def test_blocks_of_a_gguf_that_are_left_alone_become_float16(run, tmp_path):
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    source = gguf(tmp_path / "x.gguf", tokenizer_fixtures.byte_level_fields())
    metadata_from = test_gguf.read_gguf(source)
    rng = np.random.default_rng(5)
    data = quantize(
        rng.standard_normal((len(metadata_from.metadata["tokenizer.ggml.tokens"]), 32)).astype(np.float32),
        GGMLQuantizationType.Q8_0,
    )
    tensors = test_gguf.as_llama_cpp_stores(test_gguf.model_tensors()) | {
        "token_embd.weight": (data, GGMLQuantizationType.Q8_0)
    }
    tensors["output.weight"] = tensors["token_embd.weight"]
    metadata = {k: v for k, v in metadata_from.metadata.items() if k.startswith(("general.arch", "llama.", "token"))}
    source = test_gguf.write(tmp_path / "y.gguf", metadata, tensors)
    code, _, err = run("--lm-head", 16, "--skip", "*o_proj*", model=source)
    assert code == 0, err
    found = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    values = torch.from_numpy(dequantize(data, GGMLQuantizationType.Q8_0))
    assert torch.equal(found, values.half())
    assert run("--lm-head", "same", "--skip", "*o_proj*", model=source)[0] == 0  # and quantized from fp32
    found, expected = matrices_of(tmp_path / "out")[0]["embed_tokens.weight"].read(), quantize_matrix(values, 4, 32)
    assert torch.equal(found.q, expected.q) and torch.equal(found.scale, expected.scale)


def test_a_gguf_needs_no_tokenizer_to_become_weights(tmp_path):
    source = test_gguf.write(tmp_path / "x.gguf", test_gguf.LLAMA, test_gguf.model_tensors())
    quantize_checkpoint(plan_model(source, NO_O_PROJ), tmp_path / "out", NO_O_PROJ)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


# --- a draft head ---------------------------------------------------------------------------------------------------


def head_and_target(golden, tmp_path, form):
    """A target checkpoint that the golden head fits, and the head's folder."""
    target = target_for(golden.config)
    config = target.config
    folder = tmp_path / "target"
    tokenizer_fixtures.byte_level_folder(folder)
    fields = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = {}
    for name, value in target.named_parameters():
        if "qkv_proj" in name:
            sizes = [n * config.head_dim for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]
            tensors |= {name.replace("qkv", p): part for p, part in zip("qkv", value.split(sizes), strict=True)}
        elif "gate_up_proj" in name:
            tensors |= dict(zip((name.replace("gate_up", p) for p in ("gate", "up")), value.chunk(2), strict=True))
        else:
            tensors[name] = value
    tensors = {n if n.startswith("lm_head") else f"model.{n}": t.detach().clone() for n, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder, write_head(tmp_path / "head", golden.config, golden.weights, form), target


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "speculators"])
def test_a_draft_head_goes_into_draft(run, kind, form, tmp_path):
    golden = carried(kind)
    folder, head, target = head_and_target(golden, tmp_path, form)
    code, out, err = run("--draft", head, "--skip", "draft/*o_proj*", model=folder)
    assert code == 0, err
    draft = tmp_path / "out" / "draft"
    config = json.loads((draft / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "fastdecode" and config == golden.config
    sources, rest = matrices_of(draft)
    weights = golden.weights
    matrices = {n for n, t in weights.items() if t.dim() == 2} - {"embed_tokens.weight"}
    assert sources.keys() == {n for n in matrices if "o_proj" not in n} and "fc.weight" in sources
    assert sources["fc.weight"].bits == 4 and "  draft/layers.0" in out and "  draft/fc" in out
    if "lm_head.weight" in weights:
        assert sources["lm_head.weight"].bits == 8
    kept = load_file(draft / "model.safetensors")
    for name in rest:
        assert kept[name].dtype == weights[name].dtype and torch.equal(kept[name], weights[name])
    assert sources.keys() | rest.keys() == weights.keys()

    # the same head, a little worse: as floats, it loads and drafts
    floats = {n: source.read().dequantize() for n, source in sources.items()}
    loaded = load(write_head(tmp_path / "floats", golden.config, kept_floats(kept, sources) | floats), target)
    for name, value in load(head, target).named_parameters():
        found = loaded.get_parameter(name)
        assert (found - value).norm() < 0.1 * value.norm()
    assert "left as it is: draft/" in out


def kept_floats(kept, sources):
    parts = {f"{name}{part}" for name in sources for part in ("", "_scale", "_min")}
    return {name: tensor for name, tensor in kept.items() if name not in parts}


def test_a_heads_copy_of_the_embedding_is_left_out(run, tmp_path):
    golden = carried("eagle3")
    folder, head, target = head_and_target(golden, tmp_path, "safetensors")
    weights = golden.weights | {"embed_tokens.weight": target.embed_tokens.weight.detach().clone()}
    write_head(head, golden.config, weights)
    code, out, err = run("--draft", head, model=folder)
    assert code == 0 and "left out: draft/embed_tokens.weight" in out, err
    assert "embed_tokens.weight" not in load_file(tmp_path / "out" / "draft" / "model.safetensors")


def test_heads_that_do_not_fit_are_refused(run, folder, tmp_path):
    _, head, _ = head_and_target(carried("eagle3"), tmp_path, "safetensors")
    refused(run("--draft", head), "the head reads a vocabulary of 320")
    refused(run("--draft", folder), "is not a draft head")
    assert not (tmp_path / "out").exists()


# --- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
def test_perplexity_before_and_after(run, tmp_path, monkeypatch, fast):
    monkeypatch.setattr("quantize.a8.fast", lambda: fast)
    (tmp_path / "text.txt").write_text("hello there, the quick brown fox. " * 30)
    code, out, err = run("--bits", 8, "--evaluate", tmp_path / "text.txt")
    assert code == 0, err
    before, after = map(float, re.fullmatch(r"perplexity before (\S+) after (\S+)", out.splitlines()[-1]).groups())
    assert before > 100 and before != after and abs(after / before - 1) < 0.05
    rounded = re.search(r"^perplexity with 8-bit activations (\S+)$", out, re.MULTILINE)
    assert bool(rounded) == fast
    if rounded:
        assert float(rounded[1]) not in (before, after) and abs(float(rounded[1]) / after - 1) < 0.05


def test_the_text_that_is_shipped_is_the_default(run, monkeypatch):
    seen = []
    monkeypatch.setattr(script, "evaluate", lambda path, out, plan, ids: seen.append(len(ids)))
    assert run("--evaluate")[0] == 0 and seen[0] > 20000


@pytest.mark.parametrize("jsonl", [False, True])
def test_calibration_comes_from_a_file(run, tmp_path, jsonl, monkeypatch):
    text = tmp_path / "text"
    line = "The quick brown fox jumps over the lazy dog, def square(x): return x ** 2"
    text.write_text("\n".join([json.dumps({"turns": [line]}) if jsonl else line] * 30))
    seen = []
    monkeypatch.setattr("quantize.pipeline.quantize_checkpoint", lambda *a, **k: seen.append(k["token_ids"]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("--method", "gptq", "--calibration", text)
    assert seen[0].shape[1] == 512 and seen[0].shape[0] >= 1


@pytest.mark.parametrize("template", [True, False])
def test_without_a_file_the_model_makes_texts_up(run, folder, template, tmp_path, monkeypatch):
    source = shutil.copytree(folder, tmp_path / "in")
    if not template:
        (source / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer_fixtures.byte_level_folder(source)
    monkeypatch.setattr(script, "OWN_TEXTS", 3)
    monkeypatch.setattr(script, "OWN_LENGTH", 20)
    monkeypatch.setattr("fastdecode.loading.load", partial(load_decoder, compile=False))  # which would take a minute
    code, _, err = run("--method", "gptq", model=source)
    assert code == 0 and re.search(r"\d+ tokens in \d+ s", err), err
    assert_near(tmp_path / "out", source, 0.8)


def test_texts_made_up_are_reproducible_and_begin_as_the_template_does(folder, monkeypatch):
    decoder = load_decoder(str(folder), batch=2, compile=False, max_seq_len=200)
    ids = own_texts(decoder, 2, 20)
    assert ids == own_texts(decoder, 2, 20) and len(ids) >= 40
    generate, prompts = decoder.generate, []
    monkeypatch.setattr(decoder, "generate", lambda given, **how: prompts.append(given) or generate(given, **how))
    assert own_texts(decoder, 2, 20) == ids
    assert prompts[0] == ["<|im_start|>user\n"] * 2  # it asks, and then it answers what it asked
    assert len({message["content"] for (message,) in prompts[1]}) == 2


def test_rows_are_taken_evenly_from_the_whole_text():
    assert rows_of(range(1000), "x", 10, 50)[:, 0].tolist() == [0, 240, 490, 740, 990]
    assert rows_of(range(105), "x", 10, 1000).shape == (10, 10)
    assert rows_of(range(40), "x", 100).shape == (1, 40)
    with pytest.raises(script.InputError, match="has 5 tokens"):
        rows_of(range(5), "x")
    assert len(read_text(ROOT / "quantize" / "evaluation.txt", "x", 100)) == 100


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, match",
    [
        (["--bits", "3"], "--bits should be one of 4, 8, found 3"),
        (["--bits", "four"], "whole number"),
        (["--group-size", "16"], "--group-size should be one of 32, 64, 128"),
        (["--method", "awq"], "--method should be one of rtn, als, hqq, gptq"),
        (["--method", "hqq", "--bits", "8"], "hqq moves zero points"),
        (["--lm-head", "4"], "--lm-head should be one of 8, 16, same"),
        (["--skip", "*nothing*"], "--skip .*nothing.* fits no tensor; names are like model.layers"),
        (["--calibration", "x"], "--calibration is for --method gptq"),
        (["--method", "gptq", "--calibration", "missing.txt"], "--calibration missing.txt: cannot be read"),
        (["--evaluate", "missing.txt"], "--evaluate missing.txt: cannot be read"),
        (["--draft", "missing/"], "missing/"),
        (["--unknown"], "see --help"),
    ],
)
def test_bad_options_are_one_sentence_before_any_work(run, arguments, match, tmp_path, monkeypatch):
    monkeypatch.setattr("quantize.pipeline.quantize_matrix", lambda *a: pytest.fail("work was begun"))
    refused(run(*arguments), match)
    assert not list(tmp_path.iterdir())


def test_groups_that_do_not_fit_are_named_before_any_work(run, tmp_path, monkeypatch):
    monkeypatch.setattr("quantize.pipeline.quantize_matrix", lambda *a: pytest.fail("work was begun"))
    refused(run("--group-size", 64), r"down_proj.weight: 96 columns .* groups of 32 fit")
    refused(run("--group-size", 128), r"groups of 32 or 64 fit|groups of 32 fit")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "fastdecode"])
def test_what_is_quantized_already_is_refused(run, folder, method, tmp_path):
    source = shutil.copytree(folder, tmp_path / "in")
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    (source / "config.json").write_text(json.dumps(config))
    refused(run(model=source), f"is quantized already .{method}.; give the checkpoint that it was made from")


def test_no_model_no_out_and_a_missing_tokenizer(run, folder, tmp_path):
    refused(run(model=tmp_path / "nowhere"), "no such folder")
    refused(run(out=folder), "holds files that this script did not write")
    source = tmp_path / "in"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, source / name)
    refused(run(model=source), "neither tokenizer.json nor tokenizer.model")
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-1])
    refused(run(model=source), "damaged or cut short")


def test_help_is_quick_and_imports_no_torch():
    code = "import sys; from quantize.__main__ import parse\ntry: parse(['--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    for option in ("--bits", "--group-size", "--lm-head", "--skip", "--method", "--calibration", "--evaluate", "-o"):
        assert option in ran.stdout
    assert ran.stdout.count("default") == 6


def test_ctrl_c_ends_with_130_and_leaves_nothing(folder, tmp_path):
    code = f"""
import signal, sys
from fastdecode.options import run_command
from quantize import __main__ as script
from quantize import pipeline
quantize = pipeline.quantize_matrix
def interrupted(*args):
    if "layers.1" in args[-1]:
        signal.raise_signal(signal.SIGINT)
    return quantize(*args)
pipeline.quantize_matrix = interrupted
sys.exit(run_command(script.main, [{str(folder)!r}, "-o", {str(tmp_path / "out")!r}]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 128 + signal.SIGINT and "interrupted" in ran.stderr and ran.stdout == ""
    assert "Traceback" not in ran.stderr and not list(tmp_path.iterdir())
