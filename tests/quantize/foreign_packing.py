"""Checkpoints in the layouts of others, written from their definitions, one number at a time.

A matrix is `q`, whole numbers from 0, with `zero` and `scale` a group and row: `w[n, k] = scale[n, g] * (q[n, k] -
zero[n, g])`, where g is `group_of[k]`. Nothing here is shared with the code that reads.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

LAYER = "model.layers.0.mlp.down_proj"


@dataclass
class Matrix:
    bits: int
    q: np.ndarray  # [out, in]
    zero: np.ndarray  # [out, groups]
    scale: Tensor  # [out, groups]
    group_of: list[int]  # [in]

    def dense(self) -> Tensor:
        """The definition, in fp32."""
        out, n_columns = self.q.shape
        scale = self.scale.float().numpy()
        w = np.zeros((out, n_columns), np.float32)
        for n in range(out):
            for k in range(n_columns):
                g = self.group_of[k]
                w[n, k] = scale[n, g] * np.float32(int(self.q[n, k]) - int(self.zero[n, g]))
        return torch.from_numpy(w)


def random_matrix(
    out: int, n_columns: int, group_size: int, *, bits: int = 4, symmetric: bool = False, dtype=torch.float16, seed=0
) -> Matrix:
    """Any numbers that fit; `group_size` -1 for one group a row, and a short last group where it must be."""
    rng = np.random.default_rng(seed)
    group_of = [0 if group_size == -1 else k // group_size for k in range(n_columns)]
    shape, top = (out, group_of[-1] + 1), 2**bits
    zero = np.full(shape, top // 2) if symmetric else rng.integers(1, top, shape)
    scale = torch.from_numpy(rng.uniform(-0.01, 0.02, shape)).to(dtype)
    return Matrix(bits, rng.integers(0, top, (out, n_columns)), zero, scale, group_of)


def shuffled(matrix: Matrix, seed: int = 1) -> Matrix:
    """The same with columns in groups by an index that goes up and down: act-order without static groups."""
    group_of = np.random.default_rng(seed).permutation(matrix.group_of).tolist()
    return Matrix(matrix.bits, matrix.q, matrix.zero, matrix.scale, group_of)


def word(numbers, bits: int) -> int:
    """An int32 with the first number in the lowest bits."""
    total = 0
    for position, number in enumerate(numbers):
        assert 0 <= number < 2**bits
        total |= int(number) << (bits * position)
    return signed(total)


def signed(total: int) -> int:
    """The int32 that has these 32 bits."""
    total %= 2**32
    return total - 2**32 if total >= 2**31 else total


def along_rows(numbers: np.ndarray, bits: int) -> Tensor:
    """[a, b] -> int32 [a, b / per_word]: words of neighbours in a row; a short last word is filled up with 0."""
    per_word = 32 // bits
    return torch.tensor(
        [[word(row[i : i + per_word], bits) for i in range(0, len(row), per_word)] for row in numbers.tolist()],
        dtype=torch.int32,
    )


def down_columns(numbers: np.ndarray, bits: int) -> Tensor:
    """[a, b] -> int32 [a / per_word, b]: words of neighbours in a column."""
    return along_rows(numbers.T, bits).T.contiguous()


def gptq(matrix: Matrix, zeros: str = "v1", g_idx: bool = True) -> dict[str, Tensor]:
    """`zeros`: v2 as they are; v1 minus one, 0 becoming the largest number; v1 borrow, whole words minus 0x11111111."""
    zero = (matrix.zero.T - 1) % 2**matrix.bits if zeros == "v1" else matrix.zero.T
    qzeros = along_rows(zero, matrix.bits)
    if zeros == "v1 borrow":
        ones = int("1" * 8, 16) if matrix.bits == 4 else int("01" * 4, 16)
        qzeros = torch.tensor([[signed(w - ones) for w in row] for row in qzeros.tolist()], dtype=torch.int32)
    tensors = {
        "qweight": down_columns(matrix.q.T, matrix.bits),
        "qzeros": qzeros,
        "scales": matrix.scale.T.contiguous(),
    }
    if g_idx:
        tensors["g_idx"] = torch.tensor(matrix.group_of, dtype=torch.int32)
    return tensors


def awq(matrix: Matrix) -> dict[str, Tensor]:
    """Words of eight outputs: the nibble i holds output [0, 2, 4, 6, 1, 3, 5, 7][i]."""

    def pack(numbers: np.ndarray) -> Tensor:  # [a, out]
        eights = numbers.reshape(len(numbers), -1, 8)
        rows = [[word([eight[o] for o in (0, 2, 4, 6, 1, 3, 5, 7)], 4) for eight in row] for row in eights.tolist()]
        return torch.tensor(rows, dtype=torch.int32)

    return {"qweight": pack(matrix.q.T), "qzeros": pack(matrix.zero.T), "scales": matrix.scale.T.contiguous()}


def compressed(matrix: Matrix, symmetric: bool, g_idx: bool = False) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": along_rows(matrix.q, matrix.bits),
        "weight_scale": matrix.scale,
        "weight_shape": torch.tensor(matrix.q.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = down_columns(matrix.zero, matrix.bits)
    if g_idx:
        tensors["weight_g_idx"] = torch.tensor(matrix.group_of, dtype=torch.int32)
    return tensors


def compressed_config(bits: int = 4, group_size: int = 32, symmetric: bool = True, **weights: Any) -> dict[str, Any]:
    """quantization_config as llm-compressor writes it."""
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None if group_size == -1 else group_size,
        "num_bits": bits,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "channel" if group_size == -1 else "group",
        "symmetric": symmetric,
        "type": "int",
    } | weights
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.10.2",
    }


def gptq_config(**fields: Any) -> dict[str, Any]:
    """quantization_config as AutoGPTQ writes it."""
    return {
        "bits": 4,
        "group_size": 32,
        "damp_percent": 0.01,
        "desc_act": False,
        "static_groups": False,
        "sym": False,
        "true_sequential": True,
        "quant_method": "gptq",
    } | fields


def awq_config(**fields: Any) -> dict[str, Any]:
    """quantization_config as AutoAWQ writes it."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    } | fields


def write(folder: Path, tensors: dict[str, Tensor], quantization_config: dict[str, Any], layer: str = LAYER) -> Path:
    """A folder with config.json and the tensors of one layer, beside one that is not quantized."""
    folder.mkdir(exist_ok=True)
    named = {f"{layer}.{part}": tensor for part, tensor in tensors.items()}
    named["model.norm.weight"] = torch.ones(8, dtype=torch.float16)
    save_file(named, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization_config}))
    return folder
