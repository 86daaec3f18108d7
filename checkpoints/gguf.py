"""GGUF files: the header, and where each tensor lies and how it is decoded.

Follows the GGUF specification, versions 2 and 3: magic, version, counts, typed key-value pairs, tensor infos, then the
data, each tensor aligned. Constants and dequantization are the `gguf` package's. The header is read here, because that
package's reader makes an array object per vocabulary entry (seconds for each opening) and trusts the lengths it reads.
"""

import functools
import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from torch import Tensor

from checkpoints.fuse import StoredTensor, float_decoder
from models.errors import InputError

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")

SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}

READ_AHEAD = 1 << 18  # bytes


@dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file. Tensor names are the file's own; shapes are rows first, as in torch."""

    path: Path
    metadata: dict[str, Any]  # numbers, strings, booleans, and lists of them
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file; no tensor data.

    Raises InputError, naming the file, when it is not GGUF, is cut short, or its header contradicts itself or the
    file's size.
    """
    try:
        found = os.stat(path)
        file = _read_once(path, found.st_ino, found.st_size, found.st_mtime_ns)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}).") from error
    return GGUFFile(path, dict(file.metadata), dict(file.tensors))


@functools.lru_cache(maxsize=2)  # a target and a draft; loading one asks for its header half a dozen times
def _read_once(path: Path, inode: int, size: int, modified: int) -> GGUFFile:
    with open(path, "rb") as file:
        return _Header(path, file).read()


class _Header:
    """A cursor over the header; no length that it states is believed before it is held against the file's size."""

    def __init__(self, path: Path, file: BinaryIO):
        self.path, self.file = path, file
        self.left = self.size = file.seek(0, 2)
        file.seek(0)
        self.buffer, self.at = b"", 0  # what was read ahead, and how far it was used

    def fail(self, reason: str) -> InputError:
        return InputError(f"{self.path}: {reason}; the GGUF file is damaged or cut short, fetch it again.")

    def take(self, n_bytes: int) -> bytes:
        if n_bytes > self.left:
            raise self.fail(f"the header asks for {n_bytes} bytes where {self.left} are left")
        end = self.at + n_bytes
        if end > len(self.buffer):
            self.buffer, end = self.buffer[self.at :], n_bytes
            self.buffer, self.at = self.buffer + self.file.read(max(n_bytes - len(self.buffer), READ_AHEAD)), 0
            if end > len(self.buffer):
                raise self.fail("the file ends inside the header")
        data = self.buffer[self.at : end]
        self.left, self.at = self.left - n_bytes, end
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError as error:
            raise self.fail("a string in the header is not UTF-8") from error

    def strings(self, count: int) -> list[str]:
        """`count` strings: a vocabulary has so many that a call for each would be felt at every start."""
        values: list[str] = []
        length = struct.Struct("<Q").unpack_from
        while len(values) < count:
            buffer, at = self.buffer, self.at
            last = len(buffer) - 8
            try:
                while len(values) < count and at <= last and (end := at + 8 + length(buffer, at)[0]) <= len(buffer):
                    values.append(buffer[at + 8 : end].decode())
                    at = end
            except UnicodeDecodeError as error:
                raise self.fail("a string in the header is not UTF-8") from error
            self.left, self.at = self.left - (at - self.at), at
            if len(values) < count:
                values.append(self.string())  # which reads on
        return values

    def value_type(self) -> GGUFValueType:
        code = self.number("I")
        try:
            return GGUFValueType(code)
        except ValueError as error:
            raise self.fail(f"the header has a value of unknown type {code}") from error

    def value(self) -> Any:
        kind = self.value_type()
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is not GGUFValueType.ARRAY:
            return self.number(SCALARS[kind])
        kind, count = self.value_type(), self.number("Q")
        if kind is GGUFValueType.ARRAY:
            raise self.fail("the header has an array of arrays")
        if kind is GGUFValueType.STRING:
            return self.strings(count)
        return np.frombuffer(self.take(count * struct.calcsize(SCALARS[kind])), f"<{SCALARS[kind]}").tolist()

    def read(self) -> GGUFFile:
        if self.size < 4 or self.take(4) != struct.pack("<I", GGUF_MAGIC):
            raise InputError(f"{self.path}: is not a GGUF file, since it does not begin with 'GGUF'.")
        version = self.number("I")
        if version not in (2, 3):
            raise InputError(
                f"{self.path}: is GGUF version {version if version < 65536 else 'for big-endian machines'}; "
                "convert the model again with a current llama.cpp."
            )
        n_tensors, n_values = self.number("Q"), self.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(n_values):
            key = self.string()
            if key in metadata:
                raise self.fail(f"the header gives {key} twice")
            metadata[key] = self.value()
        infos = [self.tensor_info() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment should be a power of two, found {alignment!r}")
        data_start = -(-(self.size - self.left) // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        end, last = data_start, "the header"
        for name, shape, kind, offset in sorted(infos, key=lambda info: info[3]):
            tensor = self.stored_tensor(name, shape, kind, data_start + offset)
            if name in tensors or tensor.offset < end:
                raise self.fail(f"tensor {name} is given twice or overlaps {last}")
            end, last = tensor.offset + math.prod(shape) // tensor.block * tensor.block_bytes, f"tensor {name}"
            if end > self.size:
                raise self.fail(f"tensor {name} ends at byte {end} and the file at {self.size}")
            tensors[name] = tensor
        return GGUFFile(self.path, metadata, tensors)

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, n_dims = self.string(), self.number("I")
        if not 1 <= n_dims <= 4:
            raise self.fail(f"tensor {name} has {n_dims} dimensions")
        shape = tuple(reversed([self.number("Q") for _ in range(n_dims)]))
        return name, shape, self.number("I"), self.number("Q")

    def stored_tensor(self, name: str, shape: tuple[int, ...], code: int, offset: int) -> StoredTensor:
        try:
            kind = GGMLQuantizationType(code)
        except ValueError as error:
            raise InputError(f"{self.path}: tensor {name} has the unknown type {code}; update gguf.") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise self.fail(f"tensor {name} has shape {list(shape)}, rows not made of {kind.name} blocks of {block}")
        return StoredTensor(self.path, name, shape, kind.name, offset, block, block_bytes, _decoder(kind))


def _decoder(kind: GGMLQuantizationType) -> Callable[[bytearray], Tensor] | None:
    if kind.name in PLAIN:
        return float_decoder(PLAIN[kind.name])
    if kind.name not in QUANTIZED:
        return None
    block, block_bytes = GGML_QUANT_SIZES[kind]

    def decode(data: bytearray) -> Tensor:
        # The package works on 16 rows at a time; rows of 8192 elements keep those in the processor's cache.
        blocks = math.gcd(len(data) // block_bytes, 8192 // block)
        rows = np.frombuffer(data, np.uint8).reshape(-1, blocks * block_bytes)
        with np.errstate(all="ignore"):  # a block may hold infinity
            return torch.from_numpy(dequantize(rows, kind)).flatten()

    return decode
