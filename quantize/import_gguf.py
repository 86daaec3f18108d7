"""GGUF's blocks of 32 numbers as groups of 32 columns, without loss.

Follows ggml's block layouts: Q4_0 `d * (q - 8)`, Q4_1 `d * q + m`, Q8_0 `d * q`, with d and m in fp16 before the
numbers, and of 16 bytes of nibbles the low ones first: numbers 0..15, then 16..31.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from checkpoints.fuse import CHUNK, StoredTensor
from models.errors import InputError
from quantize.import_parts import narrow
from quantize.storage import Quantized, pack_nibbles

GGUF_TYPES = ("Q4_0", "Q4_1", "Q8_0")
BLOCK = 32


def read_gguf_matrix(tensor: StoredTensor) -> Quantized:
    """A matrix of a GGUF file as it is stored there. Beyond it this takes some tens of MB and a quarter byte a number.

    Shapes before the last are rows, one after another: `[experts, out, in]` gives `[experts * out, in]`. Rows of q and
    k that the file has as interleaved rotary pairs (`tensor.head_pairs`) come half-split, as everywhere here.

    Raises InputError, naming file and tensor, for another type, when the file ends early, and for a d or m that is not
    finite.
    """
    if tensor.dtype not in GGUF_TYPES or len(tensor.shape) < 2:
        raise InputError(
            f"{tensor.path}: tensor {tensor.name} is {tensor.dtype} {list(tensor.shape)}, expected a matrix in "
            f"{', '.join(GGUF_TYPES)}; other types are read as floats and quantized again."
        )
    n_rows, n_columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    bits = 8 if tensor.dtype == "Q8_0" else 4
    q = torch.empty(n_rows, n_columns * bits // 8, dtype=torch.uint8)
    scale = torch.empty(n_rows, n_columns // BLOCK)
    minimum = torch.empty_like(scale) if bits == 4 else None

    head = n_rows // tensor.head_pairs if tensor.head_pairs else 1  # rows that must stay together
    step = max(1, CHUNK // n_columns // head) * head
    for start in range(0, n_rows, step):
        rows = slice(start, min(start + step, n_rows))
        blocks = _read_rows(tensor, rows.start, rows.stop, (rows.stop - start) // head if tensor.head_pairs else 0)
        scale[rows] = _fp16(blocks[..., :2])
        if bits == 8:
            q[rows] = blocks[..., 2:].flatten(1)
            continue
        minimum[rows] = _fp16(blocks[..., 2:4]) if tensor.dtype == "Q4_1" else -8 * scale[rows]
        nibbles = blocks[..., -BLOCK // 2 :]
        q[rows] = pack_nibbles(torch.cat((nibbles & 15, nibbles >> 4), dim=-1)).flatten(1)
    if not (scale.isfinite().all() and (minimum is None or minimum.isfinite().all())):
        raise InputError(f"{tensor.path}: tensor {tensor.name} holds numbers that are not finite.")
    if bits == 8:
        return Quantized(8, BLOCK, q.view(torch.int8), narrow(scale))
    return Quantized(4, BLOCK, q, narrow(scale), narrow(minimum))


def _read_rows(tensor: StoredTensor, start: int, stop: int, n_heads: int) -> Tensor:
    """The bytes of these rows, `[rows, blocks, bytes of a block]`, in our order of rows."""
    row_bytes = tensor.shape[-1] // BLOCK * tensor.block_bytes
    part = replace(
        tensor,
        shape=(stop - start, row_bytes),
        offset=tensor.offset + start * row_bytes,
        block=1,
        block_bytes=1,
        decode=lambda data: torch.frombuffer(data, dtype=torch.uint8),
        head_pairs=n_heads,
    )
    data = torch.empty(part.shape, dtype=torch.uint8)
    part.copy_to(data)
    return data.unflatten(1, (-1, tensor.block_bytes))


def _fp16(data: Tensor) -> Tensor:
    """Bytes `[rows, blocks, 2]` -> the fp16 numbers that they are, `[rows, blocks]`."""
    return data.contiguous().view(torch.float16).squeeze(-1)
