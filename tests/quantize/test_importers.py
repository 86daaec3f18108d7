"""What others quantized means the same here, number for number; anything else is refused in one sentence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_packing import (
    LAYER,
    Matrix,
    awq,
    awq_config,
    compressed,
    compressed_config,
    gptq,
    gptq_config,
    random_matrix,
    shuffled,
    write,
)
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from torch import Tensor

from checkpoints.checkpoint import open_tensors
from checkpoints.gguf import read_gguf
from models.errors import InputError
from quantize import import_gguf
from quantize.importers import Imported, read_gguf_matrix, read_matrix, read_quantization, split_tensors

NAME = LAYER.removeprefix("model.")


def load(folder: Path, shape: tuple[int, int]) -> Imported:
    """The one quantized layer of a folder, the way a loader would read it."""
    file = folder / "config.json"
    scheme = read_quantization(json.loads(file.read_text()), str(file))
    layers, rest = split_tensors(open_tensors(folder, None), scheme)
    assert list(layers) == [NAME] and list(rest) == ["norm.weight"]
    return read_matrix(layers[NAME], scheme, shape)


def load_tensors(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], matrix: Matrix) -> Imported:
    return load(write(folder, tensors, config), matrix.q.shape)


def check_same(imported: Imported, matrix: Matrix) -> None:
    """Bit for bit the definition, in columns where they were; and stored in groups that the rest of the code takes."""
    assert imported.column_order is None
    assert imported.weight.shape == matrix.q.shape
    assert imported.weight.bits == matrix.bits
    assert torch.equal(imported.weight.dequantize(), matrix.dense())


# GPTQ

SHAPES = [(24, 96, 32), (8, 128, 64), (16, 256, 128), (8, 256, -1)]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("zeros", ["v1", "v2"])
@pytest.mark.parametrize(("out", "n_columns", "group_size"), SHAPES)
def test_gptq_means_the_same(tmp_path, out, n_columns, group_size, zeros, symmetric):
    matrix = random_matrix(out, n_columns, group_size, symmetric=symmetric)
    config = gptq_config(group_size=group_size, sym=symmetric, checkpoint_format={"v1": "gptq", "v2": "gptq_v2"}[zeros])
    imported = load_tensors(tmp_path, gptq(matrix, zeros), config, matrix)
    check_same(imported, matrix)
    assert imported.weight.group_size == (128 if group_size == -1 else group_size)


@pytest.mark.parametrize("meta", [None, {"quantizer": ["gptqmodel:2.1.0"]}])
@pytest.mark.parametrize("zeros", ["v1", "v2"])
def test_gptq_of_8_bits_means_the_same(tmp_path, zeros, meta):
    matrix = random_matrix(24, 96, 32, bits=8, symmetric=True)
    matrix.q[0, :2] = 0, 255
    config = gptq_config(bits=8, sym=True, checkpoint_format={"v1": "gptq", "v2": "gptq_v2"}[zeros], meta=meta)
    imported = load_tensors(tmp_path, gptq(matrix, zeros), config, matrix)
    check_same(imported, matrix)
    assert imported.weight.minimum is None


def test_gptq_of_8_bits_with_other_zero_points_is_refused(tmp_path):
    matrix = random_matrix(24, 96, 32, bits=8)
    with pytest.raises(InputError, match=f"{NAME} has 8 bits and zero points that are not 128"):
        load_tensors(tmp_path, gptq(matrix), gptq_config(bits=8), matrix)


def test_a_format_that_is_not_named_is_gptqs_first(tmp_path):
    matrix = random_matrix(24, 96, 32)
    check_same(load_tensors(tmp_path, gptq(matrix, "v1"), gptq_config(), matrix), matrix)


def test_g_idx_may_be_absent_where_columns_are_in_order(tmp_path):
    matrix = random_matrix(24, 96, 32)
    check_same(load_tensors(tmp_path, gptq(matrix, g_idx=False), gptq_config(), matrix), matrix)
    with pytest.raises(InputError, match=r"down_proj\.g_idx is missing"):
        load_tensors(tmp_path, gptq(matrix, g_idx=False), gptq_config(desc_act=True), matrix)


@pytest.mark.parametrize("meta", [None, {"quantizer": "intel/auto-round:0.1"}, {"quantizer": ["autogptq:0.7"]}, 3])
def test_a_zero_point_of_0_wraps_around_in_the_first_format(tmp_path, meta):
    matrix = random_matrix(24, 96, 32)
    matrix.zero[::3] = 0
    check_same(load_tensors(tmp_path, gptq(matrix, "v1"), gptq_config(meta=meta), matrix), matrix)


@pytest.mark.parametrize("quantizer", ["gptqmodel:2.1.0", ["gptqmodel:5.0.0"], ["GPTQModel:1.0"]])
def test_gptqmodel_borrows_from_the_next_zero_point(tmp_path, quantizer):
    matrix = random_matrix(24, 96, 32)
    matrix.zero[::3] = 0
    matrix.zero[7] = 0  # the highest of its word, which borrows from nothing
    config = gptq_config(meta={"quantizer": quantizer}, checkpoint_format="gptq")
    check_same(load_tensors(tmp_path, gptq(matrix, "v1 borrow"), config, matrix), matrix)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n_columns", "group_size"), [(96, 32), (128, 64)])
def test_act_order_permutes_columns_so_that_groups_are_together(tmp_path, bits, n_columns, group_size):
    matrix = shuffled(random_matrix(24, n_columns, group_size, bits=bits, symmetric=bits == 8))
    config = gptq_config(bits=bits, group_size=group_size, desc_act=True)
    imported = load_tensors(tmp_path, gptq(matrix), config, matrix)
    order, dense = imported.column_order, matrix.dense()
    assert order.dtype == torch.int64 and sorted(order.tolist()) == list(range(n_columns))
    assert torch.equal(imported.weight.dequantize(), dense[:, order])
    assert imported.weight.group_size == group_size
    x = torch.randint(-8, 8, (3, n_columns)).float()
    torch.testing.assert_close(x[:, order] @ imported.weight.dequantize().T, x @ dense.T)


def test_act_order_with_static_groups_permutes_nothing(tmp_path):
    matrix = random_matrix(24, 96, 32)
    config = gptq_config(desc_act=True, static_groups=True)
    check_same(load_tensors(tmp_path, gptq(matrix), config, matrix), matrix)


@pytest.mark.parametrize(
    ("n_columns", "group_size", "stored"), [(96, -1, 32), (192, -1, 64), (384, -1, 128), (192, 128, 64), (96, 64, 32)]
)
def test_a_group_that_cannot_be_stored_becomes_several_with_the_same_scale(tmp_path, n_columns, group_size, stored):
    matrix = random_matrix(8, n_columns, group_size)
    imported = load_tensors(tmp_path, gptq(matrix), gptq_config(group_size=group_size), matrix)
    check_same(imported, matrix)
    assert imported.weight.group_size == stored


@pytest.mark.parametrize(
    ("dtype", "largest", "stored"),
    [
        (torch.float16, 60000.0, torch.float16),  # times any zero point it is more than fp16 holds
        (torch.bfloat16, 0.5, torch.float16),  # 8 bits fit into 11
        (torch.bfloat16, 2.0**16, torch.float32),
        (torch.float32, 0.5, torch.float32),
    ],
)
def test_scales_of_any_float_are_kept(tmp_path, dtype, largest, stored):
    matrix = random_matrix(24, 96, 32, dtype=dtype)
    matrix.scale[0] = 2.0**-20  # a subnormal number in fp16
    matrix.scale[1] = largest
    weight = load_tensors(tmp_path, gptq(matrix), gptq_config(), matrix).weight
    assert weight.scale.dtype == stored
    assert torch.equal(weight.scale.float(), matrix.scale.float())
    if dtype == torch.float32:  # 24 bits times 4 do not fit into 24: the product and the sum are rounded
        bound = 2.0**-23 * 15 * matrix.scale.abs().amax(1, keepdim=True)
        assert ((weight.dequantize() - matrix.dense()).abs() <= bound).all()
    else:
        assert torch.equal(weight.dequantize(), matrix.dense())


def test_minimums_are_fp16_where_that_is_exact(tmp_path):
    for symmetric, dtype in ((True, torch.float16), (False, torch.float32)):
        matrix = random_matrix(24, 96, 32, symmetric=symmetric)
        weight = load_tensors(tmp_path, gptq(matrix), gptq_config(), matrix).weight
        assert weight.scale.dtype == torch.float16 and weight.minimum.dtype == dtype
        expected = torch.tensor(-matrix.zero * matrix.scale.double().numpy())
        assert torch.equal(weight.minimum.double(), expected)


# AWQ


@pytest.mark.parametrize(("out", "n_columns", "group_size"), SHAPES)
@pytest.mark.parametrize("version", ["gemm", "GEMM"])
def test_awq_means_the_same(tmp_path, out, n_columns, group_size, version):
    matrix = random_matrix(out, n_columns, group_size)
    matrix.zero[0] = 0
    config = awq_config(group_size=group_size, version=version)
    check_same(load_tensors(tmp_path, awq(matrix), config, matrix), matrix)


# compressed-tensors


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("out", "n_columns", "group_size"), [*SHAPES, (20, 96, 32), (3, 96, -1)])
def test_compressed_tensors_mean_the_same(tmp_path, out, n_columns, group_size, symmetric):
    matrix = random_matrix(out, n_columns, group_size, symmetric=symmetric, dtype=torch.bfloat16)
    config = compressed_config(4, group_size, symmetric)
    check_same(load_tensors(tmp_path, compressed(matrix, symmetric), config, matrix), matrix)


@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_of_8_bits_mean_the_same(tmp_path, group_size, symmetric):
    matrix = random_matrix(6, 96, group_size, bits=8, symmetric=True)
    matrix.q[0, :2] = 0, 255
    config = compressed_config(8, group_size, symmetric)
    check_same(load_tensors(tmp_path, compressed(matrix, symmetric), config, matrix), matrix)


def test_compressed_tensors_of_8_bits_with_other_zero_points_are_refused(tmp_path):
    matrix = random_matrix(24, 96, 32, bits=8)
    with pytest.raises(InputError, match="8 bits and zero points that are not 128"):
        load_tensors(tmp_path, compressed(matrix, False), compressed_config(8, symmetric=False), matrix)


@pytest.mark.parametrize("actorder", ["group", "dynamic"])
def test_compressed_tensors_in_groups_by_an_index_are_permuted(tmp_path, actorder):
    matrix = shuffled(random_matrix(6, 96, 32))
    config = compressed_config(symmetric=False, actorder=actorder)
    imported = load_tensors(tmp_path, compressed(matrix, False, g_idx=True), config, matrix)
    assert torch.equal(imported.weight.dequantize(), matrix.dense()[:, imported.column_order])
    with pytest.raises(InputError, match="weight_g_idx is missing"):
        load_tensors(tmp_path, compressed(matrix, False), config, matrix)


def test_an_index_of_minus_ones_is_no_index(tmp_path):
    matrix = random_matrix(6, 96, 32, symmetric=True)
    tensors = compressed(matrix, True) | {"weight_g_idx": torch.full((96,), -1, dtype=torch.int32)}
    check_same(load_tensors(tmp_path, tensors, compressed_config(actorder="group"), matrix), matrix)


# GGUF


def gguf_file(path: Path, data: np.ndarray, kind: GGMLQuantizationType) -> Path:
    """A file with one tensor, `data` uint8: its blocks."""
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.attn_q.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_KINDS = [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0]
by_kind = pytest.mark.parametrize("kind", GGUF_KINDS, ids=lambda kind: kind.name)


def gguf_data(kind: GGMLQuantizationType, *shape: int) -> np.ndarray:
    return quantize(np.random.default_rng(0).standard_normal(shape).astype(np.float32), kind)


@by_kind
def test_gguf_blocks_mean_the_same(tmp_path, kind, monkeypatch):
    data = gguf_data(kind, 24, 96)
    tensor = read_gguf(gguf_file(tmp_path / "model.gguf", data, kind)).tensors["blk.0.attn_q.weight"]
    for chunk in (import_gguf.CHUNK, 7 * 96, 1):
        monkeypatch.setattr(import_gguf, "CHUNK", chunk)
        weight = read_gguf_matrix(tensor)
        assert (weight.shape, weight.group_size) == ((24, 96), 32)
        assert {weight.scale.dtype, weight.scale.dtype if weight.bits == 8 else weight.minimum.dtype} == {torch.float16}
        assert torch.equal(weight.dequantize(), torch.from_numpy(dequantize(data, kind)))


@by_kind
@pytest.mark.parametrize("n_heads", [1, 3])
def test_gguf_rows_of_rotary_pairs_come_half_split(tmp_path, kind, n_heads, monkeypatch):
    path = gguf_file(tmp_path / "model.gguf", gguf_data(kind, 24, 96), kind)
    tensor = replace(read_gguf(path).tensors["blk.0.attn_q.weight"], head_pairs=n_heads)
    expected = torch.empty(24, 96)
    tensor.copy_to(expected)  # how floats are read
    for chunk in (import_gguf.CHUNK, 9 * 96, 1):
        monkeypatch.setattr(import_gguf, "CHUNK", chunk)
        assert torch.equal(read_gguf_matrix(tensor).dequantize(), expected)
    assert not torch.equal(read_gguf_matrix(replace(tensor, head_pairs=0)).dequantize(), expected)


@by_kind
def test_gguf_experts_come_one_after_another(tmp_path, kind):
    data = gguf_data(kind, 2, 8, 64)
    tensor = read_gguf(gguf_file(tmp_path / "model.gguf", data, kind)).tensors["blk.0.attn_q.weight"]
    weight = read_gguf_matrix(tensor)
    assert torch.equal(weight.dequantize(), torch.from_numpy(dequantize(data, kind)).view(16, 64))


@pytest.mark.parametrize(("d", "dtype"), [(2.0**-24, torch.float16), (-3e-6, torch.float16), (60000.0, torch.float32)])
def test_q4_0_is_exact_at_the_ends_of_fp16(tmp_path, d, dtype):
    numbers = np.arange(16, dtype=np.uint8)
    block = np.concatenate((np.array([d], np.float16).view(np.uint8), numbers | (15 - numbers) << 4))[None]
    kind = GGMLQuantizationType.Q4_0
    weight = read_gguf_matrix(read_gguf(gguf_file(tmp_path / "model.gguf", block, kind)).tensors["blk.0.attn_q.weight"])
    by_hand = [float(np.float16(d)) * (i - 8) for i in range(16)]
    assert weight.dequantize().tolist() == [by_hand + by_hand[::-1]]
    assert weight.minimum.dtype == dtype


def test_what_gguf_has_in_other_types_is_refused(tmp_path):
    kind = GGMLQuantizationType.Q5_0
    tensor = read_gguf(gguf_file(tmp_path / "model.gguf", gguf_data(kind, 4, 64), kind)).tensors["blk.0.attn_q.weight"]
    with pytest.raises(InputError, match=r"blk.0.attn_q.weight is Q5_0 \[4, 64\], expected .* Q4_0, Q4_1, Q8_0"):
        read_gguf_matrix(tensor)


@by_kind
def test_damaged_gguf_blocks_are_refused(tmp_path, kind):
    data = gguf_data(kind, 24, 96)
    data[5, :2] = np.array([np.inf], np.float16).view(np.uint8)
    path = gguf_file(tmp_path / "model.gguf", data, kind)
    tensor = read_gguf(path).tensors["blk.0.attn_q.weight"]
    with pytest.raises(InputError, match="model.gguf: tensor blk.0.attn_q.weight holds numbers that are not finite"):
        read_gguf_matrix(tensor)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="model.gguf: the file ends inside tensor blk.0.attn_q.weight"):
        read_gguf_matrix(tensor)


# What the config says


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (gptq_config(), ("gptq", 4, 32, False, False, "minus one", ())),
        (gptq_config(sym=True, bits=8, group_size=-1), ("gptq", 8, -1, True, False, "minus one", ())),
        (gptq_config(checkpoint_format="gptq_v2", desc_act=True), ("gptq", 4, 32, False, True, "as they are", ())),
        (gptq_config(dynamic={"-:.*lm_head": {}}, pack_dtype="int32", meta={"quantizer": ["gptqmodel:2.0"]}),
         ("gptq", 4, 32, False, False, "minus one, borrowing", (".*lm_head",))),
        (awq_config(), ("awq", 4, 32, False, False, "as they are", ())),
        (awq_config(zero_point=False), ("awq", 4, 32, True, False, "as they are", ())),
        (awq_config(modules_to_not_convert=["a"]), ("awq", 4, 32, False, False, "as they are", ("a",))),
        (compressed_config(), ("compressed-tensors", 4, 32, True, False, "as they are", ("lm_head",))),
        (compressed_config(8, -1, False), ("compressed-tensors", 8, -1, False, False, "as they are", ("lm_head",))),
        (compressed_config(actorder="static"), ("compressed-tensors", 4, 32, True, False, "as they are", ("lm_head",))),
        (compressed_config(actorder="group"), ("compressed-tensors", 4, 32, True, True, "as they are", ("lm_head",))),
        (compressed_config() | {"sparsity_config": {"format": "dense", "targets": []}},
         ("compressed-tensors", 4, 32, True, False, "as they are", ("lm_head",))),
    ],
)  # fmt: skip
def test_the_config_is_read(config, expected):
    scheme = read_quantization({"quantization_config": config}, "config.json")
    names = ("method", "bits", "group_size", "symmetric", "act_order", "zeros", "ignored")
    assert tuple(getattr(scheme, name) for name in names) == expected
    assert read_quantization({"compression_config": config}, "config.json") == scheme


TWO_SCHEMES = compressed_config()
TWO_SCHEMES["config_groups"]["group_1"] = compressed_config(8)["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "quantization_config should be an object"),
        ({}, "quant_method is nothing; 'gptq' or 'awq' or 'compressed-tensors' can be read"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        (gptq_config(bits=3), "bits is 3; 4 or 8 can be read"),
        (gptq_config(bits=4.0), r"bits is 4\.0"),
        (gptq_config(bits=None), "bits is None"),
        (gptq_config(group_size=16), "group_size is 16; 32 or 64 or 128 or -1 can be read"),
        (gptq_config(sym="yes"), "sym is 'yes'"),
        (gptq_config(desc_act=1), "desc_act is 1; True or False"),
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format is 'marlin'; 'gptq' or 'gptq_v2' can be read"),
        (gptq_config(is_marlin_format=True), "is_marlin_format is True; only a config without it can be read"),
        (gptq_config(pack_dtype="int16"), "pack_dtype is 'int16'; 'int32' can be read"),
        (gptq_config(dynamic={"+:.*down.*": {"bits": 8}}), "only one scheme for all layers"),
        (gptq_config(dynamic=["x"]), "only one scheme for all layers"),
        (awq_config(bits=8), "bits is 8; only 4 can be read"),
        (awq_config(version="gemv"), "version is 'gemv'; only 'gemm' can be read"),
        (awq_config(zero_point="no"), "zero_point is 'no'"),
        (awq_config(group_size=100), "group_size is 100"),
        (awq_config(modules_to_not_convert="lm_head"), "only a list of names can be read"),
        (compressed_config(2), r"config_groups\.group_0\.weights\.num_bits is 2; 4 or 8 can be read"),
        (compressed_config(group_size=16), r"weights\.group_size is 16"),
        (compressed_config(strategy="tensor"), "strategy is 'tensor'; 'group' or 'channel' can be read"),
        (compressed_config(strategy=None, group_size=None), "group_size is None"),
        (compressed_config(strategy="channel", group_size=32), "group_size is 32; only -1 can be read"),
        (compressed_config(type="float"), "type is 'float'; only 'int' can be read"),
        (compressed_config(dynamic=True), "dynamic is True"),
        (compressed_config(actorder="random"), "actorder is 'random'"),
        (compressed_config() | {"format": "marlin-24"}, "format is 'marlin-24'; only 'pack-quantized' can be read"),
        (compressed_config() | {"quantization_status": "frozen"}, "quantization_status is 'frozen'"),
        (compressed_config() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is {'num_bits': 8}"),
        (compressed_config() | {"transform_config": {"u": 1}}, "transform_config is {'u': 1}"),
        (compressed_config() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config\.format is"),
        (compressed_config() | {"config_groups": {}}, "config_groups is {}; only one scheme"),
        (compressed_config() | {"config_groups": {"W4A16": ["Linear"]}}, r"config_groups\.W4A16 should be an object"),
        (TWO_SCHEMES, "only one scheme for all layers"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(config, said):
    with pytest.raises(InputError, match=rf"^/models/x/config\.json: .*{said}"):
        read_quantization({"quantization_config": config}, "/models/x/config.json")


@pytest.mark.parametrize(("field", "value"), [("input_activations", {"num_bits": 8}), ("format", "int-quantized")])
def test_a_group_that_does_more_than_pack_weights_is_refused(field, value):
    config = compressed_config()
    config["config_groups"]["group_0"][field] = value
    with pytest.raises(InputError, match=rf"config_groups\.group_0\.{field} is"):
        read_quantization({"quantization_config": config}, "config.json")


# Damage


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize(("pack", "config"), [(gptq, gptq_config()), (awq, awq_config())], ids=["gptq", "awq"])
def test_parts_missing_or_of_a_wrong_shape_are_refused(tmp_path, pack, config, part):
    matrix = random_matrix(24, 96, 32)
    tensors = pack(matrix)
    shape = list(tensors[part].shape)
    cut = tensors | {part: tensors[part][:-1].contiguous()}
    with pytest.raises(InputError) as error:
        load_tensors(tmp_path, cut, config, matrix)
    for said in (tmp_path / "model.safetensors", f"{LAYER}.{part}", shape, [shape[0] - 1, shape[1]]):
        assert str(said) in str(error.value)
    with pytest.raises(InputError, match=rf"model\.safetensors: tensor {NAME}\.{part} is missing"):
        load_tensors(tmp_path, {name: t for name, t in tensors.items() if name != part}, config, matrix)
    wrong = torch.int64 if part != "scales" else torch.int32
    with pytest.raises(InputError, match=rf"tensor {LAYER}\.{part} is stored as I(32|64), expected"):
        load_tensors(tmp_path, tensors | {part: tensors[part].to(wrong)}, config, matrix)


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"])
def test_compressed_parts_missing_or_of_a_wrong_shape_are_refused(tmp_path, part):
    matrix, config = random_matrix(24, 96, 32), compressed_config(symmetric=False)
    tensors = compressed(matrix, False)
    with pytest.raises(InputError, match=rf"tensor {LAYER}\.{part} has shape \[.*\], but the config makes it \["):
        load_tensors(tmp_path, tensors | {part: tensors[part][:-1].contiguous()}, config, matrix)
    with pytest.raises(InputError, match=rf"model\.safetensors: tensor {NAME}\.{part} is missing"):
        load_tensors(tmp_path, {name: t for name, t in tensors.items() if name != part}, config, matrix)


def test_a_shape_that_contradicts_the_config_is_refused(tmp_path):
    matrix = random_matrix(24, 96, 32)
    tensors = compressed(matrix, False) | {"weight_shape": torch.tensor([24, 95])}
    with pytest.raises(InputError, match=r"weight_shape says \[24, 95\], but the config makes it \[24, 96\]"):
        load_tensors(tmp_path, tensors, compressed_config(symmetric=False), matrix)
    with pytest.raises(InputError, match=r"weight_zero_point is there, though the config says symmetric"):
        load_tensors(tmp_path, compressed(matrix, False), compressed_config(), matrix)


def test_group_sizes_must_be_those_of_the_config(tmp_path):
    matrix = random_matrix(24, 128, 32)
    for pack, config in ((gptq, gptq_config), (awq, awq_config)):
        with pytest.raises(InputError, match=r"qzeros has shape \[4, 3\], but the config makes it \[2, 3\]"):
            load_tensors(tmp_path, pack(matrix), config(group_size=64), matrix)
    with pytest.raises(InputError, match=r"weight_scale has shape \[24, 4\], but the config makes it \[24, 1\]"):
        load_tensors(tmp_path, compressed(matrix, False), compressed_config(4, -1, False), matrix)


@pytest.mark.parametrize("group_size", [32, -1])
def test_rows_that_no_group_divides_are_refused(tmp_path, group_size):
    matrix = random_matrix(24, 80, group_size)
    with pytest.raises(InputError, match=f"tensor {NAME} has 80 columns, no multiple of 32"):
        load_tensors(tmp_path, gptq(matrix), gptq_config(group_size=group_size), matrix)


def test_rows_that_fill_no_word_are_refused(tmp_path):
    folder = write(tmp_path, gptq(random_matrix(24, 96, 32)), gptq_config())
    with pytest.raises(InputError, match="has 20 rows, no multiple of 8, as GPTQ needs"):
        load(folder, (20, 96))
    folder = write(tmp_path, awq(random_matrix(24, 96, 32)), awq_config())
    with pytest.raises(InputError, match="has 20 rows, no multiple of 8, as AWQ needs"):
        load(folder, (20, 96))


@pytest.mark.parametrize("damage", [np.inf, np.nan])
def test_scales_that_are_not_finite_are_refused(tmp_path, damage):
    matrix = random_matrix(24, 96, 32)
    matrix.scale[3, 1] = damage
    with pytest.raises(InputError, match=rf"{NAME}\.scales holds numbers that are not finite"):
        load_tensors(tmp_path, awq(matrix), awq_config(), matrix)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ([0] * 32 + [1] * 32 + [3] * 32, "its column index runs from 0 to 3, but there are 3 groups"),
        ([-1] * 32 + [1] * 32 + [2] * 32, "its column index runs from -1 to 2"),
        ([0] * 31 + [1] * 33 + [2] * 32, "its column index makes groups of uneven sizes"),
    ],
)
def test_an_index_that_makes_no_groups_is_refused(tmp_path, index, said):
    matrix = random_matrix(24, 96, 32)
    tensors = gptq(matrix) | {"g_idx": torch.tensor(index, dtype=torch.int32)}
    with pytest.raises(InputError, match=f"tensor {NAME}: {said}"):
        load_tensors(tmp_path, tensors, gptq_config(), matrix)


def test_a_file_cut_short_is_refused(tmp_path):
    folder = write(tmp_path, gptq(random_matrix(24, 96, 32)), gptq_config())
    scheme = read_quantization({"quantization_config": gptq_config()}, "config.json")
    layers, _ = split_tensors(open_tensors(folder, None), scheme)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(InputError, match=rf"model\.safetensors: the file ends inside tensor {LAYER}\."):
        read_matrix(layers[NAME], scheme, (24, 96))
    with pytest.raises(InputError, match=r"model\.safetensors: is not a whole safetensors file"):
        open_tensors(folder, None)


# The libraries that write these files


@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_is_what_compressed_tensors_decompresses(tmp_path, bits, symmetric, group_size, dtype):
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    arguments = compressed_config(bits, group_size, symmetric)["config_groups"]["group_0"]["weights"]
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    matrix = random_matrix(24, 96, group_size, bits=bits, symmetric=symmetric, dtype=dtype)
    # The library packs a weight that lies on the grid, so that nothing depends on how it rounds.
    state = {"weight": matrix.dense(), "weight_scale": matrix.scale}
    state["weight_zero_point"] = torch.from_numpy(matrix.zero - 2 ** (bits - 1)).to(torch.int8)
    packed = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(packed), scheme)["weight"]
    imported = load_tensors(tmp_path, packed, compressed_config(bits, group_size, symmetric), matrix)
    assert torch.equal(imported.weight.dequantize(dtype), expected)
    ours = compressed(matrix, symmetric)  # the tests' own packing is the library's
    assert all(torch.equal(packed[name], ours[name]) for name in ours)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("act_order", [False, True])
def test_it_is_what_auto_round_multiplies_with_for_gptq(tmp_path, bits, act_order):
    qlinear = pytest.importorskip("auto_round_extension.torch.qlinear_torch_zp", reason="auto-round is not installed")
    matrix = random_matrix(32, 96, 32, bits=bits, symmetric=bits == 8)
    matrix = shuffled(matrix) if act_order else matrix
    linear = qlinear.QuantLinear(bits, 32, 96, 32, bias=False)
    for name, tensor in gptq(matrix, "v1").items():
        setattr(linear, name, tensor)
    expected = linear(torch.eye(96)).T
    imported = load_tensors(tmp_path, gptq(matrix, "v1"), gptq_config(bits=bits, desc_act=act_order), matrix)
    order = slice(None) if imported.column_order is None else imported.column_order
    assert torch.equal(imported.weight.dequantize(torch.float16).float(), expected[:, order])


def test_it_is_what_auto_round_dequantizes_for_awq(tmp_path):
    library = pytest.importorskip("auto_round.export.export_to_awq.utils", reason="auto-round is not installed")
    matrix = random_matrix(24, 96, 32)
    tensors = awq(matrix)
    expected = library.dequantize_gemm(*(tensors[name] for name in ("qweight", "qzeros", "scales")), 4, 32).T
    imported = load_tensors(tmp_path, tensors, awq_config(), matrix)
    assert torch.equal(imported.weight.dequantize(torch.float16), expected)
