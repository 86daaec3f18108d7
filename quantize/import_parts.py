"""What every import shares: reading the tensors of one layer, checked, and putting them into groups of columns.

A checkpoint that others quantized keeps one matrix in several tensors, `layers.0.mlp.up_proj.qweight`, `.scales` and so
on. `Parts` reads them; `assemble` makes them a `Quantized`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoints.checkpoint import FLOATS
from checkpoints.fuse import StoredTensor, float_decoder
from models.errors import InputError
from quantize.storage import GROUP_SIZES, Quantized, pack_nibbles, unpack_nibbles

WORDS = {"I32": torch.int32}
INDICES = {"I32": torch.int32, "I64": torch.int64}


@dataclass(frozen=True)
class Imported:
    """A matrix as others quantized it, and the order of its columns.

    Where `column_order` (int64 `[in]`) is set, column j of `weight` is column `column_order[j]` of the layer: permute
    the activations, `x[..., column_order]`, or the rows of the layer before.
    """

    weight: Quantized
    column_order: Tensor | None = None


@dataclass(frozen=True)
class Parts:
    """The tensors of the layer `name`, by what follows its name: `{"qweight": ..., "scales": ...}`."""

    name: str
    tensors: Mapping[str, StoredTensor]

    @property
    def path(self) -> Path:
        """The file of the first part, for complaints about the layer as a whole."""
        return next(iter(self.tensors.values())).path

    def words(self, part: str, *shape: int) -> Tensor:
        """The packed int32 tensor `part`, which must have this shape. Raises InputError like the others here."""
        return self._read(part, shape, WORDS)

    def indices(self, part: str, *shape: int) -> Tensor:
        """The tensor `part` of whole numbers, as int64."""
        return self._read(part, shape, INDICES).long()

    def floats(self, part: str, *shape: int) -> Tensor:
        """The tensor `part` of floats, as fp32. Raises InputError also for one that is infinite or no number."""
        values = self._read(part, shape, FLOATS).float()
        if not values.isfinite().all():
            raise InputError(f"{self.tensors[part].path}: tensor {self.name}.{part} holds numbers that are not finite.")
        return values

    def _read(self, part: str, shape: tuple[int, ...], dtypes: Mapping[str, torch.dtype]) -> Tensor:
        tensor = self.tensors.get(part)
        if tensor is None:
            raise InputError(f"{self.path}: tensor {self.name}.{part} is missing, and {self.name} needs it.")
        if tensor.shape != shape:
            raise InputError(
                f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)}, but the config makes it "
                f"{list(shape)}."
            )
        dtype = dtypes.get(tensor.dtype)
        if dtype is None:
            raise InputError(
                f"{tensor.path}: tensor {tensor.name} is stored as {tensor.dtype}, expected {' or '.join(dtypes)}."
            )
        values = torch.empty(shape, dtype=torch.float32 if dtypes is FLOATS else dtype)
        replace(tensor, block_bytes=dtype.itemsize, decode=float_decoder(dtype)).copy_to(values)
        return values

    def check_columns(self, n_columns: int) -> None:
        """Raise InputError where rows of `n_columns` do not split into groups that can be stored."""
        if n_columns % GROUP_SIZES[0]:
            raise InputError(
                f"{self.path}: tensor {self.name} has {n_columns} columns, no multiple of {GROUP_SIZES[0]}, so that "
                f"groups of {', '.join(map(str, GROUP_SIZES))} columns do not fit; use the model as it was before."
            )


def n_groups(n_columns: int, group_size: int) -> int:
    """Groups in a row; the last may be shorter than the others. `group_size` -1: the whole row is one."""
    return 1 if group_size == -1 else -(-n_columns // group_size)


def word_values(words: Tensor, bits: int) -> Tensor:
    """int32 `[..., n]` of packed numbers -> uint8 `[..., n * 32 / bits]`, the lowest bits of a word first.

    Words are little-endian in the file and in memory, so their bytes are in this order already.
    """
    data = words.flatten().view(torch.uint8).view(*words.shape[:-1], -1)  # a transposed [1, n] has no unit stride
    return unpack_nibbles(data) if bits == 4 else data


def assemble(
    parts: Parts, bits: int, q: Tensor, scale: Tensor, zero: Tensor | int, group_size: int, group_of: Tensor | None
) -> Imported:
    """`w = scale * (q - zero)`, with one scale and zero a group, as a `Quantized`.

    `q`: uint8, `[out, in / 2]` packed as `Quantized` packs or, for 8 bits, `[out, in]` from 0 to 255. `scale` fp32 and
    `zero` uint8: `[out, groups]`. Column k belongs to group `k // group_size`, or to `group_of[k]`, int64 `[in]`.
    Groups that are not one of the sizes that can be stored (a whole row, a short last one) become several of the
    largest size that divides them, with the same numbers: nothing is rounded.

    Raises InputError, naming file and layer, for groups that cannot be stored so, and for zeros other than 128 at
    8 bits.
    """
    n_columns = q.shape[1] * (2 if bits == 4 else 1)
    order = None
    if group_of is None:
        group_of = torch.arange(n_columns) // group_size if group_size != -1 else torch.zeros(n_columns, dtype=int)
    elif group_of.min() < 0 or group_of.max() >= scale.shape[1]:
        raise InputError(
            f"{parts.path}: tensor {parts.name}: its column index runs from {group_of.min()} to {group_of.max()}, but "
            f"there are {scale.shape[1]} groups."
        )
    elif (group_of.diff() < 0).any():
        order = group_of.argsort(stable=True)
        group_of = group_of[order]
        q = pack_nibbles(unpack_nibbles(q)[:, order]) if bits == 4 else q[:, order]
    size = _group_size(group_of)
    if size is None:
        raise InputError(
            f"{parts.path}: tensor {parts.name}: its column index makes groups of uneven sizes, which do not split "
            f"into groups of {GROUP_SIZES[0]} columns."
        )
    block = group_of[::size]
    scale = scale[:, block]
    if bits == 8:
        if not (torch.as_tensor(zero) == 128).all():
            raise InputError(
                f"{parts.path}: tensor {parts.name} has 8 bits and zero points that are not 128, but 8 bits are stored "
                "as scale * q; use a checkpoint with symmetric quantization, or the model as it was before."
            )
        return Imported(Quantized(8, size, (q ^ 128).view(torch.int8), narrow(scale)), order)
    # Of a scale in fp16 or bf16, at most 11 bits long, any multiple up to 15 is exact in fp32: then scale * q + minimum
    # is exactly scale * (q - zero). Scales in fp32 leave a rounding in the last place, here and in the sum.
    zero = zero[:, block] if isinstance(zero, Tensor) else zero
    return Imported(Quantized(4, size, q, narrow(scale), narrow(-(scale * zero))), order)


def _group_size(group_of: Tensor) -> int | None:
    """The largest size of which every run of columns lies in one group; `group_of` is sorted."""
    for size in sorted(GROUP_SIZES, reverse=True):
        if len(group_of) % size == 0 and torch.equal(group_of[::size], group_of[size - 1 :: size]):
            return size
    return None


def narrow(values: Tensor) -> Tensor:
    """fp32 -> fp16 where that keeps every number as it is; fp32 else."""
    half = values.half()
    return half if torch.equal(half.float(), values) else values
