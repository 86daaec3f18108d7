"""Weights from folders: every spelling lands in its place, every fault is one sentence, memory stays bounded."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import checkpoint, fuse
from checkpoints.checkpoint import find_checkpoint, load_weights, read_config, read_generation_config
from models.config import ModelConfig
from models.errors import InputError
from models.transformer import Transformer

BASE = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
}
LLAMA = BASE | {"model_type": "llama"}
MIXTRAL = BASE | {"model_type": "mixtral", "num_local_experts": 3}
QWEN3_MOE = BASE | {
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "mlp_only_layers": [0],
}


def hf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names, and the shapes, that the reference library saves."""
    h, d = config.hidden_size, config.head_dim
    shapes = {"model.embed_tokens.weight": (config.vocab_size, h), "model.norm.weight": (h,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, h)
    for i in range(config.n_layers):
        layer = f"model.layers.{i}."
        rows = {"q": config.n_heads * d, "k": config.n_kv_heads * d, "v": config.n_kv_heads * d}
        for part, n in rows.items():
            shapes[f"{layer}self_attn.{part}_proj.weight"] = (n, h)
            if config.qkv_bias:
                shapes[f"{layer}self_attn.{part}_proj.bias"] = (n,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (h, rows["q"])
        if config.o_bias:
            shapes[f"{layer}self_attn.o_proj.bias"] = (h,)
        if config.qk_norm:
            shapes |= {f"{layer}self_attn.q_norm.weight": (d,), f"{layer}self_attn.k_norm.weight": (d,)}
        shapes |= {f"{layer}input_layernorm.weight": (h,), f"{layer}post_attention_layernorm.weight": (h,)}
        if config.moe_layers[i]:
            block, (gate, up, down), n = "mlp", ("gate_proj", "up_proj", "down_proj"), config.moe_intermediate_size
            if config.model_type == "mixtral":
                block, (gate, up, down) = "block_sparse_moe", ("w1", "w3", "w2")
            shapes[f"{layer}{block}.gate.weight"] = (config.n_experts, h)
            for e in range(config.n_experts):
                expert = f"{layer}{block}.experts.{e}."
                shapes |= {f"{expert}{gate}.weight": (n, h), f"{expert}{up}.weight": (n, h)}
                shapes[f"{expert}{down}.weight"] = (h, n)
        else:
            n = config.intermediate_size
            for part, shape in {"gate": (n, h), "up": (n, h), "down": (h, n)}.items():
                shapes[f"{layer}mlp.{part}_proj.weight"] = shape
                if config.mlp_bias:
                    shapes[f"{layer}mlp.{part}_proj.bias"] = shape[:1]
    return shapes


def hf_tensors(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(shape, generator=generator).to(dtype) for n, shape in hf_shapes(config).items()}


def fused(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The network's parameters for these tensors, put together with cat and stack."""
    tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    found = {}
    for name in list(tensors):
        if name not in tensors:
            continue
        for parts, whole in (
            (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
            (("gate_proj", "up_proj"), "gate_up_proj"),
        ):
            if parts[0] in name and "experts" not in name:
                found[name.replace(parts[0], whole)] = torch.cat([tensors[name.replace(parts[0], p)] for p in parts])
    for i in range(config.n_layers):
        if config.moe_layers[i]:
            mixtral = config.model_type == "mixtral"
            block = f"layers.{i}.block_sparse_moe" if mixtral else f"layers.{i}.mlp"
            gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
            experts = [
                {part: tensors[f"{block}.experts.{e}.{part}.weight"] for part in (gate, up, down)}
                for e in range(config.n_experts)
            ]
            mlp = f"layers.{i}.mlp"
            found[f"{mlp}.gate.weight"] = tensors[f"{block}.gate.weight"]
            found[f"{mlp}.experts.gate_up_proj"] = torch.stack([torch.cat((x[gate], x[up])) for x in experts])
            found[f"{mlp}.experts.down_proj"] = torch.stack([x[down] for x in experts])
    apart = re.compile(r"\.(q|k|v|gate|up)_proj\.|experts|block_sparse_moe")
    return found | {name: value for name, value in tensors.items() if not apart.search(name)}


def save(folder: Path, fields: dict, tensors: dict[str, Tensor], n_shards: int = 1) -> ModelConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    if n_shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        names = sorted(tensors)
        shards = {f"model-{i + 1:05}-of-{n_shards:05}.safetensors": names[i::n_shards] for i in range(n_shards)}
        for shard, held in shards.items():
            save_file({name: tensors[name] for name in held}, folder / shard)
        weight_map = {name: shard for shard, held in shards.items() for name in held}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return read_config(folder)


def build(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    config = read_config(folder)
    model = build(config)
    load_weights(model, folder, config, "cpu", dtype)
    return dict(model.named_parameters())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value.to(found[name].dtype)), name


FAMILIES = {
    "llama": LLAMA,
    "llama-biased": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "mistral": BASE | {"model_type": "mistral", "sliding_window": None},
    "qwen2": BASE | {"model_type": "qwen2"},
    "qwen3": BASE | {"model_type": "qwen3"},
    "mixtral": MIXTRAL,
    "qwen3-moe": QWEN3_MOE,
}


@pytest.mark.parametrize("prefix", ["model.", ""], ids=["prefix", "bare"])
@pytest.mark.parametrize("fields", FAMILIES.values(), ids=FAMILIES.keys())
def test_every_familys_tensors_land_in_their_places(tmp_path, fields, prefix):
    tensors = hf_tensors(ModelConfig.from_hf(fields))
    stored = {re.sub("^model[.]", prefix, name): value for name, value in tensors.items()}
    config = save(tmp_path, fields, stored)
    found = load(tmp_path)
    assert_same(found, fused(tensors, config))
    assert all(p.device.type == "cpu" and not p.requires_grad for p in found.values())


@pytest.mark.parametrize("fields", [MIXTRAL, QWEN3_MOE], ids=["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("block", ["mlp", "block_sparse_moe"])
def test_experts_may_be_stored_stacked_and_fused(tmp_path, fields, block):
    config = ModelConfig.from_hf(fields)
    tensors = hf_tensors(config)
    expected = fused(tensors, config)
    stored = {n: v for n, v in tensors.items() if "experts" not in n and "block_sparse_moe" not in n}
    for name, value in expected.items():
        if "experts" in name or "mlp.gate." in name:
            stored.pop(f"model.{name}", None)
            stored["model." + name.replace("mlp", block)] = value
    save(tmp_path, fields, stored)
    assert_same(load(tmp_path), expected)


@pytest.mark.parametrize("n_shards", [2, 5])
def test_shards_give_what_one_file_gives(tmp_path, n_shards):
    tensors = hf_tensors(ModelConfig.from_hf(QWEN3_MOE))
    config = save(tmp_path, QWEN3_MOE, tensors, n_shards)
    assert_same(load(tmp_path), fused(tensors, config))


@pytest.mark.parametrize("to", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_converted_on_the_way(tmp_path, stored, to):
    tensors = hf_tensors(ModelConfig.from_hf(LLAMA), stored)
    config = save(tmp_path, LLAMA, tensors)
    found = load(tmp_path, to)
    assert all(value.dtype == to for value in found.values())
    assert_same(found, fused(tensors, config))


@pytest.mark.parametrize("chunk", [1, 7, 24, 100, 600])
def test_the_size_of_the_chunks_changes_nothing(tmp_path, monkeypatch, chunk):
    tensors = hf_tensors(ModelConfig.from_hf(MIXTRAL))
    config = save(tmp_path, MIXTRAL, tensors)
    monkeypatch.setattr(fuse, "CHUNK", chunk)
    assert_same(load(tmp_path), fused(tensors, config))


def test_numbers_beyond_float16_are_an_error_not_infinity(tmp_path):
    tensors = hf_tensors(ModelConfig.from_hf(LLAMA))
    tensors["model.layers.1.self_attn.v_proj.weight"][3, 3] = 1e5
    save(tmp_path, LLAMA, tensors)
    load(tmp_path, torch.bfloat16)
    with pytest.raises(InputError, match="v_proj.*float16"):
        load(tmp_path, torch.float16)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.lm_head.weight"])
def test_a_tied_model_loads_the_same_with_and_without_its_head_in_the_file(tmp_path, name):
    fields = LLAMA | {"tie_word_embeddings": True}
    tensors = hf_tensors(ModelConfig.from_hf(fields))
    save(tmp_path / "without", fields, tensors)
    save(tmp_path / "with", fields, tensors | {name: tensors["model.embed_tokens.weight"].clone()})
    assert_same(load(tmp_path / "with"), load(tmp_path / "without"))


def test_a_tied_config_with_another_head_in_the_file_is_refused(tmp_path):
    fields = LLAMA | {"tie_word_embeddings": True}
    tensors = hf_tensors(ModelConfig.from_hf(fields))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    save(tmp_path, fields, tensors)
    with pytest.raises(InputError, match="lm_head.weight differs.*tie_word_embeddings"):
        load(tmp_path)


def test_rotary_frequencies_in_the_file_are_ignored(tmp_path):
    tensors = hf_tensors(ModelConfig.from_hf(LLAMA))
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4, dtype=torch.int32) for i in range(2)}
    config = save(tmp_path, LLAMA, tensors | extra, n_shards=2)
    assert_same(load(tmp_path), fused(tensors, config))


# --- faults ---------------------------------------------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj.weight"
SECOND = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def rewrite_header(file: Path, change) -> None:
    """Let `change` edit the header (a dict) of a safetensors file; the data stay as they are."""
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])


def rewrite_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def cut(file: Path, n_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:n_bytes])


def in_second(name: str, **changes):
    def change(header: dict) -> None:
        header[name].update(changes)

    return lambda folder: rewrite_header(folder / SECOND, change)


def add_to_second(folder: Path, **tensors: Tensor) -> None:
    save_file(load_file(folder / SECOND) | tensors, folder / SECOND)


FAULTS = {
    "missing shard": (lambda f: (f / SECOND).unlink(), [SECOND, "missing", INDEX]),
    "truncated shard": (lambda f: cut(f / SECOND, (f / SECOND).stat().st_size - 1), [SECOND]),
    "shard cut in its header": (lambda f: cut(f / SECOND, 40), [SECOND]),
    "empty shard": (lambda f: cut(f / SECOND, 0), [SECOND]),
    "trailing bytes": (lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes() + b"more"), [SECOND]),
    "not safetensors": (lambda f: (f / SECOND).write_bytes(b"<!doctype html><html>Not found</html>"), [SECOND]),
    "a pointer file": (lambda f: (f / SECOND).write_text("version https://git-lfs.github.com/spec/v1\n"), [SECOND]),
    "absurd header length": (
        lambda f: (f / SECOND).write_bytes(struct.pack("<Q", 2**62) + (f / SECOND).read_bytes()[8:]),
        [SECOND],
    ),
    "offsets beyond the file": (in_second(Q, data_offsets=[0, 10**9]), [SECOND]),
    "negative offsets": (in_second(Q, data_offsets=[-4, 0]), [SECOND]),
    "overlapping offsets": (in_second(Q, data_offsets=[0, 48 * 24 * 4]), [SECOND]),
    "shape that contradicts the bytes": (in_second(Q, shape=[48, 25]), [SECOND]),
    "shape beyond arithmetic": (in_second(Q, shape=[2**40, 2**40]), [SECOND]),
    "unknown dtype": (in_second(Q, dtype="F99"), [SECOND]),
    "integer dtype": (in_second(Q, dtype="I32"), [SECOND, Q, "I32"]),
    "8-bit floats": (in_second(Q, dtype="F8_E4M3", shape=[48, 96]), [SECOND, Q]),
    "a tensor nothing asked for": (
        lambda f: add_to_second(f, **{"model.layers.0.self_attn.sinks": torch.ones(6)}),
        [SECOND, "model.layers.0.self_attn.sinks"],
    ),
    "a layer too many": (
        lambda f: add_to_second(f, **{"model.layers.2.input_layernorm.weight": torch.ones(24)}),
        [SECOND, "model.layers.2.input_layernorm.weight", "2 layers"],
    ),
    "a fused tensor of no known order": (
        lambda f: add_to_second(f, **{"model.layers.0.self_attn.qkv_proj.weight": torch.ones(80, 24)}),
        [SECOND, "qkv_proj"],
    ),
    "wrong shape": (lambda f: add_to_second(f, **{Q: torch.ones(48, 25)}), [SECOND, Q, "[48, 25]", "[48, 24]"]),
    "transposed": (lambda f: add_to_second(f, **{Q: torch.ones(24, 48)}), [SECOND, Q, "[24, 48]", "[48, 24]"]),
    "the same tensor in two shards": (
        lambda f: add_to_second(f, **{"lm_head.weight": torch.ones(40, 24)}),
        [SECOND, "lm_head.weight", "model-00001-of-00002.safetensors"],
    ),
    "the same tensor under two spellings": (
        lambda f: add_to_second(f, **{Q.removeprefix("model."): torch.ones(48, 24)}),
        [SECOND, "q_proj"],
    ),
    "index outside the folder": (
        lambda f: rewrite_index(f, lambda i: i["weight_map"].update({Q: "../other/model.safetensors"})),
        [INDEX, Q, "../other/model.safetensors"],
    ),
    "index with an absolute path": (
        lambda f: rewrite_index(f, lambda i: i["weight_map"].update({Q: "/etc/model.safetensors"})),
        [INDEX, Q],
    ),
    "index that names no file": (
        lambda f: rewrite_index(f, lambda i: i["weight_map"].update({Q: 7})),
        [INDEX, Q],
    ),
    "index that names the other shard": (
        lambda f: rewrite_index(f, lambda i: i["weight_map"].update({Q: "model-00001-of-00002.safetensors"})),
        ["model-00001-of-00002.safetensors", Q, INDEX],
    ),
    "index with a tensor that is nowhere": (
        lambda f: rewrite_index(f, lambda i: i["weight_map"].update({"model.extra": SECOND})),
        [SECOND, "model.extra"],
    ),
    "index without a weight_map": (lambda f: rewrite_index(f, lambda i: i.pop("weight_map")), [INDEX, "weight_map"]),
    "index that is not JSON": (lambda f: (f / INDEX).write_text('{"weight_map": {'), [INDEX, "JSON"]),
    "index that is a list": (lambda f: (f / INDEX).write_text("[]"), [INDEX, "list"]),
    "pytorch_model.bin only": (
        lambda f: [p.unlink() for p in f.glob("model*")] and (f / "pytorch_model.bin").write_bytes(b""),
        ["pytorch_model.bin", "convert", "safetensors"],
    ),
    "the index of a pytorch_model.bin, as it comes from the hub": (
        lambda f: [p.unlink() for p in f.glob("model*")] and (f / "pytorch_model.bin.index.json").write_text("{}"),
        ["pytorch_model.bin", "convert", "safetensors"],
    ),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], ["model.safetensors"]),
    "GGUF beside the config": (
        lambda f: [p.unlink() for p in f.glob("model*")] and (f / "x.gguf").write_bytes(b""),
        ["x.gguf"],
    ),
}


@pytest.mark.parametrize(("fault", "named"), FAULTS.values(), ids=FAULTS.keys())
def test_a_damaged_checkpoint_is_one_sentence_that_names_file_and_field(tmp_path, fault, named):
    config = save(tmp_path, LLAMA, hf_tensors(ModelConfig.from_hf(LLAMA)), n_shards=2)
    held = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert held[Q] == SECOND and held["lm_head.weight"] != SECOND  # what the faults above rely on
    fault(tmp_path)
    model = build(config)
    with pytest.raises(InputError) as error:
        load_weights(model, tmp_path, config, "cpu", torch.float32)
    for word in named:
        assert word in str(error.value)
    assert "\n" not in str(error.value)
    assert all(p.is_meta for p in model.parameters())  # nothing half-usable is left


@pytest.mark.parametrize("fields", [LLAMA, MIXTRAL, QWEN3_MOE], ids=["llama", "mixtral", "qwen3-moe"])
def test_every_single_tensor_is_needed(tmp_path, fields):
    tensors = hf_tensors(ModelConfig.from_hf(fields))
    for name in tensors:
        save(tmp_path, fields, {n: v for n, v in tensors.items() if n != name})
        with pytest.raises(InputError, match=re.escape(name.removeprefix("model.")) + " is missing"):
            load(tmp_path)


def test_an_expert_given_twice_does_not_stand_in_for_one_that_is_missing(tmp_path):
    tensors = hf_tensors(ModelConfig.from_hf(MIXTRAL))
    expert = "model.layers.0.block_sparse_moe.experts."
    tensors["model.layers.0.mlp.experts.1.gate_proj.weight"] = tensors.pop(f"{expert}0.w1.weight")
    save(tmp_path, MIXTRAL, tensors)
    with pytest.raises(InputError, match="twice"):
        load(tmp_path)


def test_no_flipped_byte_in_a_header_raises_anything_but_an_input_error(tmp_path):
    fields = LLAMA | {"num_hidden_layers": 1}
    config = save(tmp_path, fields, hf_tensors(ModelConfig.from_hf(fields)))
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    refused = 0
    for at in range(0, 8 + struct.unpack("<Q", raw[:8])[0], 3):
        file.write_bytes(raw[:at] + bytes([raw[at] ^ (1 << at % 8)]) + raw[at + 1 :])
        try:
            load_weights(build(config), tmp_path, config, "cpu", torch.float32)
        except InputError as error:
            assert "model.safetensors" in str(error) or "is missing" in str(error)
            refused += 1
    assert refused > 100


MEASURE = """
import sys
from pathlib import Path
import torch
from checkpoints.checkpoint import load_weights, read_config
from models.transformer import Transformer

def memory(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024

torch.ones(64, 64) @ torch.ones(64, 64)
folder = Path(sys.argv[1])
config = read_config(folder)
for dtype in (torch.bfloat16, torch.float32):
    with torch.device("meta"):
        model = Transformer(config)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = memory("VmRSS")
    load_weights(model, folder, config, "cpu", dtype)
    print(memory("VmHWM") - before - sum(p.numel() * p.element_size() for p in model.parameters()))
    del model
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_loading_takes_the_model_and_less_than_its_largest_tensor(tmp_path):
    fields = LLAMA | {
        "vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 16, "head_dim": 64, "tie_word_embeddings": True,
        "num_hidden_layers": 13,
    }  # fmt: skip
    shapes = hf_shapes(ModelConfig.from_hf(fields))  # the embedding alone: 134 MB
    save(tmp_path, fields, {n: torch.full(shape, 0.5, dtype=torch.bfloat16) for n, shape in shapes.items()}, n_shards=4)
    assert sum(p.stat().st_size for p in tmp_path.glob("*.safetensors")) > 390e6
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    above = [int(line) for line in ran.stdout.split()]
    assert len(above) == 2 and max(above) < 80e6, above


# --- finding a checkpoint, and its config ---------------------------------------------------------------------------


def no_network(*args, **kwargs):
    raise AssertionError("the hub was asked")


@pytest.mark.parametrize(
    "name",
    ["", "nope", "./a/b", "../a", "/no/such/folder", "a/b/c", "a/b.gguf", "model.gguf", "a b/c", "a/", "/b", "a/../b",
     "https://huggingface.co/a/b", "a\\b", "~nobody-here/x", "x" * 5000, "o/" + "x" * 200, "a/b\0"],
)  # fmt: skip
def test_a_name_that_cannot_be_a_hub_id_never_touches_the_network(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "snapshot_download", no_network)
    with pytest.raises(InputError) as error:
        find_checkpoint(name)
    assert len(str(error.value)) < 6000 and "\n" not in str(error.value)


def test_what_exists_here_comes_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "snapshot_download", no_network)
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    (tmp_path / "x.safetensors").write_bytes(b"")
    assert find_checkpoint("org/model") == Path("org/model")
    assert find_checkpoint("x.gguf") == Path("x.gguf")
    with pytest.raises(InputError, match="give the folder"):
        find_checkpoint("x.safetensors")


def test_the_demos_name_means_the_demo_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.setattr(checkpoint, "demo_model", lambda: Path("demo.gguf"))
    assert find_checkpoint("smollm2-135m") == Path("demo.gguf")
    assert find_checkpoint("./smollm2-135m") == Path("smollm2-135m")


def test_the_hub_is_asked_for_weights_config_and_tokenizer_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = {}

    def snapshot(hub_id, **options):
        asked.update(options, hub_id=hub_id)
        return str(tmp_path)

    monkeypatch.setattr(checkpoint, "snapshot_download", snapshot)
    assert find_checkpoint("org/model-1.5B_x") == tmp_path
    repository = [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
        "chat_template.jinja", "merges.txt", "vocab.json", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "draft/config.json", "draft/model.safetensors",
        "pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "README.md", "model.gguf",
        "onnx/model.onnx", "training_args.bin", "flax_model.msgpack",
    ]  # fmt: skip
    kept = filter_repo_objects(
        repository, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert asked["hub_id"] == "org/model-1.5B_x"
    assert list(kept) == repository[:12]
    find_checkpoint("org/head", also_wanted=["pytorch_model.bin"])
    assert "pytorch_model.bin" in filter_repo_objects(repository, allow_patterns=asked["allow_patterns"])


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (hub_errors.GatedRepoError, "gated"),
        (hub_errors.RepositoryNotFoundError, "does not exist or is private"),
        (hub_errors.LocalEntryNotFoundError, "cannot be reached"),
        (hub_errors.OfflineModeIsEnabled, "cannot be reached"),
        (ConnectionError, "cannot be fetched"),
        (hub_errors.HFValidationError, "cannot be fetched"),
    ],
)
def test_what_the_hub_answers_is_said_in_a_sentence(tmp_path, monkeypatch, kind, named):
    monkeypatch.chdir(tmp_path)

    def snapshot(*args, **kwargs):
        raise kind.__new__(kind)  # their constructors want an HTTP response

    monkeypatch.setattr(checkpoint, "snapshot_download", snapshot)
    with pytest.raises(InputError, match=f"org/model: there is no such folder here.*{named}"):
        find_checkpoint("org/model")


@pytest.mark.parametrize("text", ["", "{", "[1]", '"text"', "\xff", "[" * 100_000], ids=range(6))
def test_a_damaged_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match="config.json"):
        read_config(tmp_path)


def test_a_folder_without_a_config_says_what_is_expected(tmp_path):
    with pytest.raises(InputError, match="has no config.json"):
        read_config(tmp_path)
    with pytest.raises(InputError, match="config.json: model_type"):
        (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "field"), [(LLAMA, "num_hidden_layers"), (MIXTRAL, "num_local_experts"), (QWEN3_MOE, "num_experts")]
)
def test_absurd_counts_are_refused_before_anything_is_built(tmp_path, fields, field):
    (tmp_path / "config.json").write_text(json.dumps(fields | {field: 2**31 - 1}))
    with pytest.raises(InputError, match=f"config.json: {field}"):
        read_config(tmp_path)


def test_generation_config_is_optional(tmp_path):
    assert read_generation_config(tmp_path) == {}
    assert read_generation_config(tmp_path / "model.gguf") == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 2]}')
    assert read_generation_config(tmp_path) == {"temperature": 0.6, "eos_token_id": [1, 2]}
