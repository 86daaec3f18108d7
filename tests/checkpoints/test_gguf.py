"""GGUF files: metadata become a config, tensors land un-permuted and dequantized, damage is one sentence."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from torch import Tensor

from checkpoints import fuse
from checkpoints.checkpoint import find_checkpoint, load_weights, read_config, read_generation_config
from checkpoints.gguf import read_gguf
from models.config import ModelConfig
from models.errors import InputError
from models.transformer import Transformer

N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB = 2, 3, 1, 8, 32, 64, 40

LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": N_LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": N_HEADS,
    "llama.attention.head_count_kv": N_KV_HEADS,
    "llama.attention.key_length": HEAD_DIM,
    "llama.attention.value_length": HEAD_DIM,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 50000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def metadata_for(architecture: str, **extra: Any) -> dict[str, Any]:
    """LLAMA for another architecture; `extra` keys are without the architecture's name."""
    found = {key.replace("llama.", f"{architecture}."): value for key, value in LLAMA.items()}
    found["general.architecture"] = architecture
    return found | {f"{architecture}.{key}": value for key, value in extra.items()}


def layer_tensors(layer: int, *, bias: bool = False, norms: bool = False, experts: int = 0) -> dict[str, np.ndarray]:
    """One layer's tensors under GGUF names, as the Hugging Face checkpoint has them (not permuted)."""
    rng = np.random.default_rng(layer)
    q, k = N_HEADS * HEAD_DIM, N_KV_HEADS * HEAD_DIM
    shapes = {"attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,), "attn_output.weight": (HIDDEN, q)}
    for part, rows in {"q": q, "k": k, "v": k}.items():
        shapes[f"attn_{part}.weight"] = (rows, HIDDEN)
        if bias:
            shapes[f"attn_{part}.bias"] = (rows,)
        if norms and part != "v":
            shapes[f"attn_{part}_norm.weight"] = (HEAD_DIM,)
    if experts:
        shapes["ffn_gate_inp.weight"] = (experts, HIDDEN)
        shapes |= {f"ffn_{part}_exps.weight": (experts, FFN, HIDDEN) for part in ("gate", "up")}
        shapes["ffn_down_exps.weight"] = (experts, HIDDEN, FFN)
    else:
        shapes |= {f"ffn_{part}.weight": (FFN, HIDDEN) for part in ("gate", "up")}
        shapes["ffn_down.weight"] = (HIDDEN, FFN)
    return {f"blk.{layer}.{n}": rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}


def model_tensors(*, tied: bool = False, **kinds: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(99)
    found = {
        "token_embd.weight": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32),
        "output_norm.weight": rng.standard_normal(HIDDEN).astype(np.float32),
    }
    if not tied:
        found["output.weight"] = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    for layer in range(N_LAYERS):
        found |= layer_tensors(layer, **kinds)
    return found


def interleave(weights: np.ndarray, n_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: within a head, row i of both halves side by side."""
    heads = weights.reshape(n_heads, 2, HEAD_DIM // 2, *weights.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weights.shape)


def as_llama_cpp_stores(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    def stored(name: str, value: np.ndarray) -> np.ndarray:
        if ".attn_q." in name:
            return interleave(value, N_HEADS)
        return interleave(value, N_KV_HEADS) if ".attn_k." in name else value

    return {name: stored(name, value) for name, value in tensors.items()}


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Write with the gguf package. A tensor is an array, or (bytes [rows, n], quantization type)."""
    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    config = read_config(path)
    with torch.device("meta"):
        model = Transformer(config)
    load_weights(model, path, config, "cpu", dtype)
    return dict(model.named_parameters())


def expected_parameters(tensors: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The network's parameters for un-permuted GGUF tensors."""
    t = {name: torch.from_numpy(value) for name, value in tensors.items()}
    found = {"embed_tokens.weight": t["token_embd.weight"], "norm.weight": t["output_norm.weight"]}
    if "output.weight" in t:
        found["lm_head.weight"] = t["output.weight"]
    for i in range(N_LAYERS):
        ours, theirs = f"layers.{i}.", f"blk.{i}."
        found[f"{ours}input_layernorm.weight"] = t[f"{theirs}attn_norm.weight"]
        found[f"{ours}post_attention_layernorm.weight"] = t[f"{theirs}ffn_norm.weight"]
        found[f"{ours}self_attn.o_proj.weight"] = t[f"{theirs}attn_output.weight"]
        for kind in ("weight", "bias"):
            if f"{theirs}attn_q.{kind}" in t:
                parts = [t[f"{theirs}attn_{part}.{kind}"] for part in "qkv"]
                found[f"{ours}self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        for part in "qk":
            if f"{theirs}attn_{part}_norm.weight" in t:
                found[f"{ours}self_attn.{part}_norm.weight"] = t[f"{theirs}attn_{part}_norm.weight"]
        if f"{theirs}ffn_gate_inp.weight" in t:
            gate_up = torch.cat((t[f"{theirs}ffn_gate_exps.weight"], t[f"{theirs}ffn_up_exps.weight"]), dim=1)
            found[f"{ours}mlp.gate.weight"] = t[f"{theirs}ffn_gate_inp.weight"]
            found[f"{ours}mlp.experts.gate_up_proj"] = gate_up
            found[f"{ours}mlp.experts.down_proj"] = t[f"{theirs}ffn_down_exps.weight"]
        else:
            gate_up = torch.cat((t[f"{theirs}ffn_gate.weight"], t[f"{theirs}ffn_up.weight"]))
            found[f"{ours}mlp.gate_up_proj.weight"] = gate_up
            found[f"{ours}mlp.down_proj.weight"] = t[f"{theirs}ffn_down.weight"]
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value.to(found[name].dtype)), name


# --- metadata -------------------------------------------------------------------------------------------------------


def test_metadata_become_the_config(tmp_path):
    path = write(tmp_path / "x.gguf", LLAMA, model_tensors())
    expected = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS, "num_key_value_heads": N_KV_HEADS,
        "head_dim": HEAD_DIM, "rms_norm_eps": float(np.float32(1e-5)), "max_position_embeddings": 128,
        "rope_theta": 50000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    assert read_config(path) == ModelConfig.from_hf(expected)
    assert find_checkpoint(str(path)) == path
    assert read_generation_config(path) == {}


def test_head_size_and_key_value_heads_have_llama_cpps_defaults(tmp_path):
    left_out = ("head_count_kv", "key_length", "value_length", "dimension_count", "freq_base")
    metadata = {k: v for k, v in LLAMA.items() if not k.endswith(left_out)} | {"llama.attention.head_count": 4}
    config = read_config(write(tmp_path / "x.gguf", metadata, model_tensors()))
    assert (config.head_dim, config.n_kv_heads, config.rope.theta) == (HIDDEN // 4, 4, 10000.0)


def test_every_token_that_ends_a_turn_is_a_stop(tmp_path):
    more = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2}
    assert read_config(write(tmp_path / "x.gguf", LLAMA | more, model_tensors())).eos_token_ids == (2, 9)


@pytest.mark.parametrize(
    ("keys", "kind", "factor"),
    [
        ({}, "default", 1.0),
        ({"type": "none", "factor": 4.0}, "default", 1.0),
        ({"type": "linear", "factor": 4.0}, "linear", 4.0),
        ({"factor": 4.0}, "linear", 4.0),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 32}, "yarn", 4.0),
    ],
)
def test_rope_scaling_is_read(tmp_path, keys, kind, factor):
    metadata = LLAMA | {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    rope = read_config(write(tmp_path / "x.gguf", metadata, model_tensors())).rope
    assert (rope.kind, rope.factor, rope.theta) == (kind, factor, 50000.0)
    if kind == "yarn":
        assert rope.original_max_position_embeddings == 32
        assert rope.attention_factor == pytest.approx(0.1 * np.log(4.0) + 1)


def test_rope_scaling_in_its_first_spelling_is_linear(tmp_path):
    path = write(tmp_path / "x.gguf", LLAMA | {"llama.rope.scale_linear": 2.0}, model_tensors())
    assert (read_config(path).rope.kind, read_config(path).rope.factor) == ("linear", 2.0)


def test_rope_frequency_factors_go_into_the_config_and_not_into_the_weights(tmp_path):
    tensors = as_llama_cpp_stores(model_tensors())
    factors = np.array([1, 1, 4, 8], np.float32)
    path = write(tmp_path / "x.gguf", LLAMA, {"rope_freqs.weight": factors} | tensors)
    assert read_config(path).rope.freq_factors == (1.0, 1.0, 4.0, 8.0)
    assert_same(load(path), expected_parameters(model_tensors()))
    for bad in (factors[:3], factors * 0, factors * np.nan):
        with pytest.raises(InputError, match="rope_freqs.weight"):
            read_config(write(path, LLAMA, {"rope_freqs.weight": bad} | tensors))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "gemma2"}, "general.architecture.*'gemma2'"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.block_count": 3}, "llama.block_count"),
        ({"llama.block_count": 2**31}, "llama.block_count"),
        ({"llama.embedding_length": "32"}, "llama.embedding_length"),
        ({"llama.attention.head_count": [3, 3]}, "llama.attention.head_count"),
        ({"llama.attention.head_count_kv": 2}, "num_key_value_heads"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "rms_norm_eps"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "longrope"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": "4"}, "llama.rope.scaling.factor"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale"),
        ({"llama.expert_count": 2}, "llama.expert_used_count"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id"),
        ({"split.count": 3}, "llama-gguf-split"),
    ],
)
def test_metadata_that_cannot_be_honoured_are_named(tmp_path, change, named):
    metadata = {key: value for key, value in (LLAMA | change).items() if value is not None}
    path = write(tmp_path / "x.gguf", metadata, model_tensors())
    with pytest.raises(InputError, match=f"x.gguf.*{named}"):
        read_config(path)


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1 << 22, 8, 40, 512])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_llamas_q_and_k_come_back_half_split(tmp_path, monkeypatch, tied, chunk):
    monkeypatch.setattr(fuse, "CHUNK", chunk)
    tensors = model_tensors(tied=tied)
    path = write(tmp_path / "x.gguf", LLAMA, as_llama_cpp_stores(tensors))
    assert not np.array_equal(as_llama_cpp_stores(tensors)["blk.0.attn_q.weight"], tensors["blk.0.attn_q.weight"])
    assert read_config(path).tie_word_embeddings == tied
    assert_same(load(path), expected_parameters(tensors))


def test_biases_of_a_llama_are_permuted_too(tmp_path):
    tensors = model_tensors(bias=True)
    for i in range(N_LAYERS):
        tensors[f"blk.{i}.attn_output.bias"] = np.full(HIDDEN, i, np.float32)
    found = load(write(tmp_path / "x.gguf", LLAMA, as_llama_cpp_stores(tensors)))
    biases = {f"layers.{i}.self_attn.o_proj.bias": torch.full((HIDDEN,), float(i)) for i in range(N_LAYERS)}
    assert_same(found, expected_parameters(tensors) | biases)


@pytest.mark.parametrize(("architecture", "kinds"), [("qwen2", {"bias": True}), ("qwen3", {"norms": True})])
def test_qwens_q_and_k_are_not_permuted(tmp_path, architecture, kinds):
    tensors = model_tensors(**kinds)
    path = write(tmp_path / "x.gguf", metadata_for(architecture), tensors)
    assert read_config(path).model_type == architecture
    assert_same(load(path), expected_parameters(tensors))


@pytest.mark.parametrize("experts_stored", ["stacked", "apart", "fused"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_experts_are_read_stacked_apart_and_fused(tmp_path, architecture, experts_stored):
    extra = {"expert_count": 3, "expert_used_count": 2}
    if architecture == "qwen3moe":
        extra["expert_feed_forward_length"] = FFN
    tensors = model_tensors(experts=3, norms=architecture == "qwen3moe")
    stored = as_llama_cpp_stores(tensors) if architecture == "llama" else dict(tensors)
    for i in range(N_LAYERS):
        if experts_stored == "fused":
            gate, up = (stored.pop(f"blk.{i}.ffn_{part}_exps.weight") for part in ("gate", "up"))
            stored[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate((gate, up), axis=1)
        elif experts_stored == "apart":
            for part in ("gate", "up", "down"):
                for e, expert in enumerate(stored.pop(f"blk.{i}.ffn_{part}_exps.weight")):
                    stored[f"blk.{i}.ffn_{part}.{e}.weight"] = expert
    path = write(tmp_path / "x.gguf", metadata_for(architecture, **extra), stored)
    config = read_config(path)
    assert config.model_type == ("mixtral" if architecture == "llama" else "qwen3_moe")
    assert (config.n_experts, config.n_experts_per_token, config.norm_topk_prob) == (3, 2, True)
    assert_same(load(path), expected_parameters(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_types_are_converted(tmp_path, dtype):
    tensors = as_llama_cpp_stores(model_tensors())
    expected = expected_parameters(model_tensors())
    stored: dict[str, Any] = dict(tensors)
    stored["blk.0.ffn_down.weight"] = tensors["blk.0.ffn_down.weight"].astype(np.float16)
    bf16 = quantize(tensors["blk.1.ffn_down.weight"], GGMLQuantizationType.BF16)
    stored["blk.1.ffn_down.weight"] = (bf16, GGMLQuantizationType.BF16)
    expected["layers.0.mlp.down_proj.weight"] = expected["layers.0.mlp.down_proj.weight"].half().float()
    expected["layers.1.mlp.down_proj.weight"] = expected["layers.1.mlp.down_proj.weight"].bfloat16().float()
    assert_same(load(write(tmp_path / "x.gguf", LLAMA, stored), dtype), expected)


# Where the fp16 scales lie in a block; every other byte may be anything.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0], "IQ4_XS": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    blocks = rng.integers(0, 256, (rows * columns // block, block_bytes), dtype=np.uint8)
    for at in SCALES[kind.name]:
        blocks[:, at : at + 2] = rng.uniform(-0.1, 0.1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


WIDE = LLAMA | {"llama.feed_forward_length": 512}


def wide_tensors() -> dict[str, Any]:
    """LLAMA's, with an FFN of two 256-element blocks."""
    found: dict[str, Any] = as_llama_cpp_stores(model_tensors())
    for i in range(N_LAYERS):
        found |= {f"blk.{i}.ffn_{part}.weight": np.ones((512, HIDDEN), np.float32) for part in ("gate", "up")}
        found[f"blk.{i}.ffn_down.weight"] = np.ones((HIDDEN, 512), np.float32)
    return found


@pytest.mark.parametrize("chunk", [1 << 22, 1024])
@pytest.mark.parametrize("name", SCALES)
def test_quantized_types_equal_the_packages_own_reading(tmp_path, monkeypatch, name, chunk):
    monkeypatch.setattr(fuse, "CHUNK", chunk)
    kind = GGMLQuantizationType[name]
    blocks = random_blocks(kind, HIDDEN, 512)
    path = write(tmp_path / "x.gguf", WIDE, wide_tensors() | {"blk.1.ffn_down.weight": (blocks, kind)})
    for dtype in (torch.float32, torch.bfloat16):
        found = load(path, dtype)["layers.1.mlp.down_proj.weight"]
        assert torch.equal(found, torch.from_numpy(dequantize(blocks, kind)).to(dtype))


def read_block(kind: str, data: bytes) -> list[float]:
    """A block of 32, read number by number from the format's definition."""
    d = float(np.frombuffer(data[:2], np.float16)[0])
    if kind == "Q8_0":
        return [d * q for q in struct.unpack("32b", data[2:])]
    at = 4 if kind.endswith("1") else 2
    m = float(np.frombuffer(data[2:4], np.float16)[0]) if kind.endswith("1") else 0.0
    high = 0
    if kind.startswith("Q5"):
        high, at = int.from_bytes(data[at : at + 4], "little"), at + 4
    low = [data[at + j] & 15 for j in range(16)] + [data[at + j] >> 4 for j in range(16)]
    q = [value + 16 * (high >> j & 1) for j, value in enumerate(low)]
    zero = {"Q4_0": 8, "Q5_0": 16}.get(kind, 0)
    return [d * (value - zero) + m for value in q]


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_of_32_mean_what_the_format_says(tmp_path, name):
    kind = GGMLQuantizationType[name]
    size = GGML_QUANT_SIZES[kind][1]
    tensors = as_llama_cpp_stores(model_tensors())
    down, q = random_blocks(kind, HIDDEN, FFN), random_blocks(kind, N_HEADS * HEAD_DIM, HIDDEN)
    path = write(
        tmp_path / "x.gguf", LLAMA, tensors | {"blk.0.ffn_down.weight": (down, kind), "blk.0.attn_q.weight": (q, kind)}
    )
    found = load(path)
    for row, data in zip(found["layers.0.mlp.down_proj.weight"], down, strict=True):
        expected = [x for at in range(0, len(data), size) for x in read_block(name, data[at : at + size].tobytes())]
        torch.testing.assert_close(row, torch.tensor(expected), rtol=1e-6, atol=1e-7)
    rows = found["layers.0.self_attn.qkv_proj.weight"]
    for head in range(N_HEADS):  # stored row 2i + half of a head is row i of that half
        for i in range(HEAD_DIM // 2):
            for half in range(2):
                stored = read_block(name, q[head * HEAD_DIM + 2 * i + half].tobytes())
                row = rows[head * HEAD_DIM + half * HEAD_DIM // 2 + i]
                torch.testing.assert_close(row, torch.tensor(stored), rtol=1e-6, atol=1e-7)


# --- damage ---------------------------------------------------------------------------------------------------------


def tiny_file(path: Path) -> Path:
    more = {"tokenizer.ggml.tokens": ["a", "b", "ď"], "tokenizer.ggml.scores": [0.5, 1.0, 2.0], "x.flag": True}
    return write(path, LLAMA | more, as_llama_cpp_stores(model_tensors()))


def test_the_header_is_read_as_it_was_written(tmp_path):
    file = read_gguf(tiny_file(tmp_path / "x.gguf"))
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ď"]
    assert file.metadata["tokenizer.ggml.scores"] == [0.5, 1.0, 2.0]
    assert file.metadata["x.flag"] is True
    assert file.metadata["llama.block_count"] == N_LAYERS
    assert file.tensors["blk.0.ffn_down.weight"].shape == (HIDDEN, FFN)


def test_a_file_cut_anywhere_is_an_input_error(tmp_path):
    raw = tiny_file(tmp_path / "x.gguf").read_bytes()
    config = read_config(tmp_path / "x.gguf")
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 2000, 7), *range(2000, len(raw), 997), len(raw) - 1]:
        path.write_bytes(raw[:length])
        with torch.device("meta"):
            model = Transformer(config)
        with pytest.raises(InputError, match="cut.gguf"):
            load_weights(model, path, config, "cpu", torch.float32)
        assert all(p.is_meta for p in model.parameters())


def test_no_flipped_byte_in_the_header_raises_anything_but_an_input_error(tmp_path):
    raw = tiny_file(tmp_path / "x.gguf").read_bytes()
    header = read_gguf(tmp_path / "x.gguf").tensors["token_embd.weight"].offset
    path = tmp_path / "flipped.gguf"
    refused = 0
    for at in range(header):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ (1 << (at * 5) % 8)]) + raw[at + 1 :])
        try:
            load(path)
        except InputError as error:
            assert "flipped.gguf" in str(error)
            refused += 1
    assert refused > header // 3


def put(raw: bytes, at: int, code: str, value: int) -> bytes:
    return raw[:at] + struct.pack("<" + code, value) + raw[at + struct.calcsize(code) :]


def after(raw: bytes, text: str) -> int:
    return raw.index(text.encode()) + len(text.encode())


DAMAGE = {
    "another format": (lambda raw: b"PK\3\4" + raw[4:], "not a GGUF file"),
    "an old version": (lambda raw: put(raw, 4, "I", 1), "version 1"),
    "big-endian": (lambda raw: raw[:4] + struct.pack(">I", 3) + raw[8:], "big-endian"),
    "tensors without end": (lambda raw: put(raw, 8, "Q", 2**60), "damaged"),
    "values without end": (lambda raw: put(raw, 16, "Q", 2**60), "damaged"),
    "a string without end": (lambda raw: put(raw, 24, "Q", 2**63), "asks for"),
    "an array without end": (
        lambda raw: put(raw, after(raw, "tokenizer.ggml.scores") + 8, "Q", 2**62),
        "asks for",
    ),
    "an unknown value type": (lambda raw: put(raw, after(raw, "llama.block_count"), "I", 99), "unknown type 99"),
    "an unknown tensor type": (
        lambda raw: put(raw, after(raw, "blk.0.ffn_down.weight") + 4 + 16, "I", 999),
        "blk.0.ffn_down.weight has the unknown type 999",
    ),
    "a type that is not read": (
        lambda raw: put(raw, after(raw, "output_norm.weight") + 4 + 8, "I", GGMLQuantizationType.I32),
        "output_norm.weight is stored as I32",
    ),
    "too many dimensions": (
        lambda raw: put(raw, after(raw, "blk.0.ffn_down.weight"), "I", 2**31),
        "blk.0.ffn_down.weight has 2147483648 dimensions",
    ),
    "an absurd size": (
        lambda raw: put(raw, after(raw, "blk.0.ffn_down.weight") + 4, "Q", 2**63),
        "blk.0.ffn_down.weight",
    ),
    "an offset beyond the file": (
        lambda raw: put(raw, after(raw, "blk.0.ffn_down.weight") + 4 + 16 + 4, "Q", 2**40),
        "blk.0.ffn_down.weight ends at byte",
    ),
    "overlapping tensors": (
        lambda raw: put(raw, after(raw, "output_norm.weight") + 4 + 8 + 4, "Q", 0),
        "overlaps",
    ),
    "broken blocks": (
        lambda raw: put(raw, after(raw, "output_norm.weight") + 4 + 8, "I", GGMLQuantizationType.Q4_K),
        "output_norm.weight has shape",
    ),
}


@pytest.mark.parametrize(("damage", "named"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_one_sentence_that_names_it(tmp_path, damage, named):
    path = tiny_file(tmp_path / "x.gguf")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError) as error:
        load(path)
    assert "x.gguf" in str(error.value) and named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"blk.0.attn_q.weight": None}, "layers.0.self_attn.q_proj.weight is missing"),
        ({"blk.0.attn_sinks.weight": np.ones(3, np.float32)}, "blk.0.attn_sinks.weight is not part"),
        ({"blk.2.attn_norm.weight": np.ones(HIDDEN, np.float32)}, "blk.2.attn_norm.weight is not part"),
        ({"blk.1.ffn_up.weight": np.ones((FFN, HIDDEN + 1), np.float32)}, r"\[64, 33\].*\[64, 32\]"),
        ({"token_embd.weight": None}, "token_embd.weight is missing"),
    ],
)
def test_tensors_must_be_exactly_the_models(tmp_path, change, named):
    tensors = {k: v for k, v in (as_llama_cpp_stores(model_tensors()) | change).items() if v is not None}
    path = write(tmp_path / "x.gguf", LLAMA, tensors)
    with pytest.raises(InputError, match=f"x.gguf.*{named}"):
        load(path)


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="x.gguf"):
        read_config(tmp_path / "x.gguf")


@pytest.mark.slow
def test_the_demo_model_loads_whole(demo_model_path):
    config = read_config(demo_model_path)
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.vocab_size) == (30, 9, 3, 49152)
    assert (config.hidden_size, config.intermediate_size, config.rope.theta) == (576, 1536, 100000.0)
    assert config.tie_word_embeddings and config.eos_token_ids == (2,)
    found = load(demo_model_path, torch.bfloat16)
    assert sum(p.numel() for p in found.values()) == 134_515_008
    assert all(p.isfinite().all() for p in found.values())
    assert read_gguf(demo_model_path).metadata["tokenizer.ggml.pre"] == "smollm"
