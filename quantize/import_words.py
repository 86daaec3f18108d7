"""Decoders of the three layouts that pack numbers into int32 words: GPTQ, AWQ and compressed-tensors.

Each takes the tensors of one layer, its shape `(out, in)`, and what the config says; each raises InputError, naming
file and tensor, for a part that is missing, of another dtype or shape, or not finite.
"""

import torch

from models.errors import InputError
from quantize.import_parts import Imported, Parts, assemble, n_groups, word_values
from quantize.storage import pack_nibbles

GPTQ_PARTS = ("qweight", "qzeros", "scales", "g_idx")
AWQ_PARTS = ("qweight", "qzeros", "scales")
COMPRESSED_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # output 8i + j is the nibble AWQ_ORDER[j] of word i


def read_gptq(
    parts: Parts, shape: tuple[int, int], bits: int, group_size: int, act_order: bool, zeros: str
) -> Imported:
    """GPTQ, as AutoGPTQ and GPTQModel write it: `w = scale * (q - zero)`.

    qweight int32 `[in * bits / 32, out]`: the number j of word i, low bits first, is column `i * 32 / bits + j`.
    qzeros int32 `[groups, out * bits / 32]`, scales `[groups, out]`, g_idx `[in]`: the group of each column.
    `act_order`: groups follow the order in which columns were quantized, so g_idx must be there.

    `zeros` says how zero points are stored: "as they are" (format `gptq_v2`), or minus one (format `gptq`), where a
    zero point of 0 wraps around, in one of two ways. "minus one" wraps each number by itself, so 0xF reads as 0, as
    AutoGPTQ's plain kernels do with (z + 1) & 15 (others read 16, which no writer means: zero points are 0..15).
    "minus one, borrowing" is GPTQModel's: it subtracts 0x11111111 from whole words, so that a 0 also borrows from the
    number above it, and adds the same on reading. Without a zero point of 0 the two are the same.
    """
    out, n_columns = shape
    per_word, groups = 32 // bits, n_groups(n_columns, group_size)
    if out % per_word:
        raise InputError(f"{parts.path}: tensor {parts.name} has {out} rows, no multiple of {per_word}, as GPTQ needs.")
    qweight = parts.words("qweight", n_columns // per_word, out)
    qzeros = parts.words("qzeros", groups, out // per_word)
    scales = parts.floats("scales", groups, out)
    group_of = None
    if act_order or "g_idx" in parts.tensors:
        group_of = parts.indices("g_idx", n_columns)
    if zeros == "minus one, borrowing":
        zero = word_values(qzeros + (0x11111111 if bits == 4 else 0x01010101), bits)  # int32 sums wrap, as is meant
    else:
        zero = word_values(qzeros, bits)
        if zeros == "minus one":
            zero = (zero + 1) & (2**bits - 1)
    # A word's four bytes hold its columns in order, two to a byte with the lower first: they only have to move.
    q = qweight.view(torch.uint8).view(n_columns // per_word, out, 4).transpose(0, 1).reshape(out, -1)
    return assemble(parts, bits, q, scales.t(), zero.t(), group_size, group_of)


def read_awq(parts: Parts, shape: tuple[int, int], group_size: int) -> Imported:
    """AWQ, version gemm, as AutoAWQ writes it, 4 bits: `w = scale * (q - zero)`.

    qweight int32 `[in, out / 8]`, qzeros int32 `[groups, out / 8]`: eight outputs to a word, in `AWQ_ORDER`. scales
    `[groups, out]`.
    """
    out, n_columns = shape
    groups = n_groups(n_columns, group_size)
    if out % 8:
        raise InputError(f"{parts.path}: tensor {parts.name} has {out} rows, no multiple of 8, as AWQ needs.")
    qweight = parts.words("qweight", n_columns, out // 8)
    qzeros = parts.words("qzeros", groups, out // 8)
    scales = parts.floats("scales", groups, out)
    q, zero = (word_values(words, 4).unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1) for words in (qweight, qzeros))
    return assemble(parts, 4, pack_nibbles(q.t()), scales.t(), zero.t(), group_size, None)


def read_compressed(
    parts: Parts, shape: tuple[int, int], bits: int, group_size: int, act_order: bool, symmetric: bool
) -> Imported:
    """compressed-tensors, format pack-quantized, as llm-compressor writes it: `w = scale * (q - zero)`.

    weight_packed int32 `[out, in * bits / 32]`: signed numbers plus 8 (or 128), low bits first along the row.
    weight_scale `[out, groups]`, weight_shape `[2]`; unless `symmetric`, weight_zero_point int32
    `[out * bits / 32, groups]`, packed alike but down the column. `act_order`: weight_g_idx `[in]` gives the group of
    each column.
    """
    out, n_columns = shape
    per_word, groups = 32 // bits, n_groups(n_columns, group_size)
    stated = tuple(parts.indices("weight_shape", 2).tolist())
    if stated != shape:
        raise InputError(
            f"{parts.tensors['weight_shape'].path}: tensor {parts.name}.weight_shape says {list(stated)}, but the "
            f"config makes it {list(shape)}."
        )
    q = parts.words("weight_packed", out, n_columns // per_word).view(torch.uint8)  # packed as we pack already
    scale = parts.floats("weight_scale", out, groups)
    zero = 2 ** (bits - 1)
    if not symmetric:
        words = parts.words("weight_zero_point", -(-out // per_word), groups)
        zero = word_values(words.t(), bits)[:, :out].t()
    elif "weight_zero_point" in parts.tensors:
        raise InputError(
            f"{parts.path}: tensor {parts.name}.weight_zero_point is there, though the config says symmetric."
        )
    group_of = None
    if act_order or "weight_g_idx" in parts.tensors:
        group_of = parts.indices("weight_g_idx", n_columns)
        if (group_of == -1).all():  # how a layer is marked that was quantized in its own order
            group_of = None
    return assemble(parts, bits, q, scale, zero, group_size, group_of)
