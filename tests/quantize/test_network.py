"""Networks on quantized weights: every layout that can be loaded gives what its numbers mean, and drafting on top of it
changes nothing."""

import json
from pathlib import Path

import foreign_packing as foreign
import pytest
import torch
from golden_files import teacher_forced
from safetensors.torch import load_file, save_file
from test_decoder import text_of
from test_script import carried, head_and_target
from tiny_checkpoint import tiny_checkpoint

from checkpoints.head_checkpoint import read_head_config
from fastdecode import load
from fastdecode.drafters.ngram import NgramDrafter
from fastdecode.loading import read_config
from fastdecode.options import run_command
from models.errors import InputError
from models.layers import Experts, Linear
from quantize import cpu, kernels
from quantize.__main__ import main as quantize_main
from quantize.experts import QuantizedExperts
from quantize.linear import QuantizedEmbedding, QuantizedLinear, concatenated
from quantize.methods import quantize_matrix
from quantize.network import has_quantized_matrices, load_draft_head, load_network
from quantize.on_the_fly import load_as

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
CPU = torch.device("cpu")
LAYOUTS = {
    "gptq": (foreign.gptq_config(), foreign.gptq),
    "gptq with a column order": (foreign.gptq_config(desc_act=True), lambda m: foreign.gptq(foreign.shuffled(m))),
    "awq": (foreign.awq_config(), foreign.awq),
    "compressed-tensors": (foreign.compressed_config(symmetric=False), lambda m: foreign.compressed(m, False)),
}


def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


@pytest.fixture(params=["llama", "qwen2"])
def folders(request, tmp_path):
    """`folders(layout)`: a checkpoint in this layout, and the same numbers as floats."""

    def make(layout: str) -> tuple[Path, Path]:
        config, pack = LAYOUTS[layout]
        for kind in ("packed", "dense"):
            tiny_checkpoint(tmp_path / kind, request.param, **SIZES)
        weights = load_file(tmp_path / "dense" / "model.safetensors")
        packed, dense = {}, {}
        for seed, (name, weight) in enumerate(weights.items()):
            if not is_matrix(name):
                packed[name] = dense[name] = weight
                continue
            matrix = foreign.random_matrix(*weight.shape, 32, seed=seed)
            matrix.scale = matrix.scale * 3
            parts = pack(matrix)
            layer = name.removesuffix(".weight")
            packed |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
            dense[name] = (foreign.shuffled(matrix) if "order" in layout else matrix).dense()
        save_file(packed, tmp_path / "packed" / "model.safetensors")
        save_file(dense, tmp_path / "dense" / "model.safetensors")
        file = tmp_path / "packed" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
        return tmp_path / "packed", tmp_path / "dense"

    return make


def decoder(folder: Path, **options):
    found = load(str(folder), dtype="float32", device="cpu", compile=False, max_seq_len=128, **options)
    found.stop_ids = ()
    found.state.stop_ids.fill_(-1)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_foreign_layout_says_what_its_numbers_say(folders, layout):
    packed, dense = folders(layout)
    expected = decoder(dense).generate(text_of(40), raw=True, max_new_tokens=24).token_ids
    quantized = decoder(packed)
    layers = [m for m in quantized.model.modules() if isinstance(m, QuantizedLinear)]
    assert len(layers) == 2 * 4 and {(layer.bits, layer.group_size) for layer in layers} == {(4, 32)}
    assert quantized.generate(text_of(40), raw=True, max_new_tokens=24).token_ids == expected
    floats = decoder(packed, quantize="none")
    assert not any(isinstance(m, QuantizedLinear) for m in floats.model.modules())
    assert floats.generate(text_of(40), raw=True, max_new_tokens=24).token_ids == expected


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 2}])
def test_drafts_on_quantized_weights_change_nothing(folders, options):
    packed, _ = folders("gptq")
    arguments = {"raw": True, "max_new_tokens": 40, **options}
    expected = [decoder(packed).generate(text_of(n), **arguments).token_ids for n in (1, 40)]
    for draft, tree in (("ngram", "chain:4"), (str(packed), "chain:3")):
        drafted = decoder(packed, draft=draft, tree=tree)
        results = [drafted.generate(text_of(n), **arguments) for n in (1, 40)]
        assert [r.token_ids for r in results] == expected
        assert draft == "ngram" or results[0].stats["tau"] == 4.0


def test_parts_that_are_quantized_differently_are_dequantized_with_a_note(folders):
    packed, dense = folders("gptq")
    tensors = load_file(packed / "model.safetensors")
    layer = "model.layers.0.self_attn.k_proj"
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{layer}.{part}"]
    matrix = foreign.random_matrix(32, 64, 32, seed=50)
    tensors |= {f"{layer}.{part}": value for part, value in foreign.gptq(foreign.shuffled(matrix, 3)).items()}
    weights = load_file(dense / "model.safetensors") | {f"{layer}.weight": foreign.shuffled(matrix, 3).dense()}
    save_file(tensors, packed / "model.safetensors")
    save_file(weights, dense / "model.safetensors")
    notes = []
    found = decoder(packed, note=notes.append)
    assert len(notes) == 1 and "layers.0.self_attn.qkv_proj" in notes[0]
    assert not isinstance(found.model.layers[0].self_attn.qkv_proj, QuantizedLinear)
    options = {"raw": True, "max_new_tokens": 24}
    assert found.generate(text_of(9), **options).token_ids == decoder(dense).generate(text_of(9), **options).token_ids


def test_without_an_operator_weights_are_dequantized_and_a_note_says_so(folders, monkeypatch):
    packed, dense = folders("awq")
    monkeypatch.setattr("quantize.network.operators_available", lambda device: False)
    notes = []
    config = read_config(packed)
    network = load_network(packed, config, CPU, torch.float32, True, notes.append)
    assert not any(isinstance(m, QuantizedLinear) for m in network.modules())
    assert len(notes) == 1 and "dequantized" in notes[0]


def test_a_layout_that_is_not_known_is_refused_by_name(folders):
    packed, _ = folders("awq")
    file = packed / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    file.write_text(json.dumps(config))
    with pytest.raises(InputError, match="bitsandbytes"):
        decoder(packed)


def test_a_layer_that_is_missing_is_named(folders):
    packed, _ = folders("gptq")
    tensors = load_file(packed / "model.safetensors")
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"model.layers.1.mlp.down_proj.{part}"]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(InputError, match="layers.1.mlp.down_proj.weight is missing"):
        decoder(packed)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_multiply_and_look_up_by_the_matrix_that_they_stand_for(bits, dtype):
    torch.manual_seed(0)
    parts = [quantize_matrix(torch.randn(n, 64), bits, 32) for n in (40, 8)]
    weight = torch.cat([part.dequantize() for part in parts])
    layer = QuantizedLinear(concatenated(parts), CPU, torch.randn(48, dtype=dtype))
    assert torch.equal(layer.dequantize(), weight)
    x = torch.randn(2, 3, 64, dtype=dtype)
    expected = x.float() @ weight.t() + layer.bias.float()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert torch.allclose(layer(x).float(), expected, atol=tolerance * expected.abs().max().item())
    order = torch.randperm(64)
    ordered = QuantizedLinear(concatenated(parts), CPU, column_order=order)
    assert torch.equal(ordered.dequantize()[:, order], weight)
    assert torch.allclose(ordered(x).float(), x.float() @ ordered.dequantize().t(), atol=tolerance * 30)
    table = QuantizedEmbedding(concatenated(parts), CPU, dtype)
    ids = torch.tensor([[0, 47, 31], [32, 5, 5]])
    assert torch.equal(table(ids), weight[ids].to(dtype))
    assert torch.equal(table.project(x), table.table(x))


def test_rows_are_looked_up_alike_in_both_packings():
    torch.manual_seed(1)
    for bits, group in ((4, 32), (4, 64), (8, 32), (8, 128)):
        weight = quantize_matrix(torch.randn(70, 256), bits, group, "rtn")
        rows = torch.tensor([0, 1, 17, 31, 32, 69, 5])
        assert torch.equal(cpu.unpack_rows(cpu.pack(weight), rows), weight.dequantize()[rows])
        packed = kernels.pack(weight)
        assert torch.equal(kernels.unpack_rows(packed.weight, packed.scales, 256, rows), weight.dequantize()[rows])


def test_a_compiled_round_on_quantized_weights_says_the_same(folders):
    packed, _ = folders("gptq")
    plain = decoder(packed)
    compiled = load(str(packed), dtype="float32", device="cpu", max_seq_len=128, compile_cache=False)
    compiled = compiled.with_drafter(_Plan())
    compiled.stop_ids = ()
    compiled.state.stop_ids.fill_(-1)
    for n in (1, 40):
        options = {"raw": True, "max_new_tokens": 24}
        assert compiled.generate(text_of(n), **options).token_ids == plain.generate(text_of(n), **options).token_ids


@pytest.mark.parametrize("family", ["llama-tied", "qwen3", "mixtral", "qwen3-moe", "llama-biased"])
@pytest.mark.parametrize("how", ["int4", "int8", "w4a8", "w8a8"])
def test_quantizing_on_the_fly_happens_once_and_means_what_it_stores(tmp_path, monkeypatch, family, how):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    experts = {"moe_intermediate_size": 32} if family == "qwen3-moe" else {}
    tiny_checkpoint(tmp_path / "model", family, **SIZES, **experts)
    notes, options = [], {"raw": True, "max_new_tokens": 24}
    first = decoder(tmp_path / "model", quantize=how, note=notes.append)
    answers = [first.generate(text_of(n), **options).token_ids for n in (3, 40)]
    copies = list((tmp_path / "cache" / "fastdecode" / "quantized").iterdir())
    assert len(copies) == 1 and len(notes) == 1 and str(copies[0]) in notes[0]
    monkeypatch.setattr("quantize.on_the_fly.quantize_checkpoint", None)
    again = decoder(tmp_path / "model", quantize=how, note=notes.append)
    assert [again.generate(text_of(n), **options).token_ids for n in (3, 40)] == answers and len(notes) == 1
    kinds = {type(m) for m in again.model.modules()} & {QuantizedLinear, QuantizedExperts, QuantizedEmbedding, Experts}
    moe = family in ("mixtral", "qwen3-moe")
    assert kinds == {QuantizedLinear, QuantizedEmbedding} | ({QuantizedExperts} if moe else set())
    floats = load_network(copies[0], read_config(copies[0]), CPU, torch.float32, quantized=False)
    assert {type(m) for m in floats.modules()} & {QuantizedLinear, QuantizedExperts, QuantizedEmbedding} == set()
    ids = torch.tensor([first.encode(text_of(40), raw=True)])
    for network in (again.model, floats):
        network.set_rotary(64)
    rounding = [m.rounds_input for m in again.model.modules() if isinstance(m, QuantizedLinear)]
    assert all(rounding) if how in ("w4a8", "w8a8") else not any(rounding)
    if any(rounding):  # close to what is stored, and not equal
        ours, theirs = (logits_of(network, ids) for network in (again.model, floats))
        assert 0.98 < torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) < 1
        return
    ours, theirs = (logits_of(network, ids) for network in (again.model, floats))
    assert torch.allclose(ours, theirs, atol=2e-5 * theirs.abs().max().item())
    few = slice(0, 3)  # experts take another way there
    ours, theirs = (logits_of(network, ids[:, few]) for network in (again.model, floats))
    assert torch.allclose(ours, theirs, atol=2e-5 * theirs.abs().max().item())


def logits_of(network, ids):
    rows = torch.arange(ids.shape[1])
    cache = network.new_cache(1, ids.shape[1] + 1)
    return network.logits(network(ids, rows[None], rows[None], (rows <= rows[:, None])[None], rows[None], cache).last)


def test_an_interrupted_copy_leaves_nothing_and_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_checkpoint(tmp_path / "model", **SIZES)

    def interrupted(self, name, value):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("quantize.writer.CheckpointWriter.add", interrupted)
        decoder(tmp_path / "model", quantize="int4")
    assert not any((tmp_path / "cache").rglob("*.safetensors"))
    assert isinstance(decoder(tmp_path / "model", quantize="int4").model.layers[0].mlp.down_proj, QuantizedLinear)


class _Plan:
    def build(self, *args):
        return NgramDrafter(3)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "speculators"])
def test_a_head_that_was_quantized_with_its_target_drafts_unasked(tmp_path, kind):
    """`python -m quantize MODEL --draft HEAD -o OUT`, then `generate.py --model OUT`."""
    folder, head, _ = head_and_target(carried(kind), tmp_path, "safetensors")
    out = tmp_path / "out"
    assert run_command(quantize_main, [str(folder), "-o", str(out), "--draft", str(head)]) == 0
    drafted, without = decoder(out), decoder(out, draft="none")
    own = drafted.runner.round.drafter.head
    assert isinstance(own.fc, QuantizedLinear) and isinstance(own.layers[0].mlp.down_proj, QuantizedLinear)
    assert without.runner.round.drafter.n_nodes == 1
    for n in (1, 40):
        options = {"raw": True, "max_new_tokens": 24}
        assert drafted.generate(text_of(n), **options).token_ids == without.generate(text_of(n), **options).token_ids
    with pytest.raises(InputError, match="needs a draft"):
        decoder(folder, tree="chain:2")


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("how", ["int8", "w8a8"])
def test_a_head_rounds_its_inputs_and_leaves_its_targets_layers_as_they_are(tmp_path, monkeypatch, kind, how):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("quantize.a8.fast", lambda: True)
    folder, head, _ = head_and_target(carried(kind), tmp_path, "safetensors")
    drafted, without = (decoder(folder, quantize=how, draft=draft) for draft in (str(head), "none"))
    own = drafted.runner.round.drafter.head
    assert own.fc.rounds_input and own.layers[0].mlp.down_proj.rounds_input
    if kind == "eagle1":
        assert own.lm_head is drafted.model.lm_head or own.lm_head is drafted.model.embed_tokens
    for decoder_ in (drafted, without):
        layers = [m for m in decoder_.model.modules() if isinstance(m, QuantizedLinear)]
        assert layers and {m.rounds_input for m in layers} == {how == "w8a8"}
    for n in (1, 40):
        options = {"raw": True, "max_new_tokens": 24}
        assert drafted.generate(text_of(n), **options).token_ids == without.generate(text_of(n), **options).token_ids


def test_8_bit_activations_are_for_cpus():
    with pytest.raises(InputError, match="w4a8 is for CPUs; give int4"):
        load_as(Path("nowhere"), None, torch.device("cuda"), torch.float16, "w4a8")


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "speculators"])
@pytest.mark.parametrize(("bits", "closeness"), [(8, 0.999), (4, 0.9)])
def test_a_float_heads_matrices_are_quantized_at_load_when_asked(tmp_path, kind, bits, closeness):
    golden = carried(kind)
    _, folder, target = head_and_target(golden, tmp_path, "safetensors")
    config = read_head_config(folder).fitted_to(target.config, str(folder))
    floats, small = (load_draft_head(folder, config, target, b) for b in (None, bits))
    assert not any(isinstance(module, QuantizedLinear) for module in floats.modules())
    assert not any(type(module) is Linear for module in small.modules() if module is not target.lm_head)
    assert small.fc.bits == bits and has_quantized_matrices(small) and not has_quantized_matrices(target)
    assert type(target.lm_head) is Linear  # EAGLE-1 borrows it, and the target keeps it
    expected, found = (teacher_forced(h, golden.next_ids, h.fuse(golden.hidden))[1] for h in (floats, small))
    assert not torch.equal(found, expected)
    likeness = torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0)
    assert closeness < likeness < 1
