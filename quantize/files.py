"""The portable file: a quantized checkpoint, described by its safetensors headers and read back by them alone.

A folder in the Hugging Face layout under the checkpoint's own tensor names. A matrix `X.weight` `[out, in]` is
`X.weight` (uint8 `[out, in / 2]` for 4 bits, int8 `[out, in]` for 8), `X.weight_scale` and, for 4 bits,
`X.weight_min` (both F16 or F32, `[out, in / group_size]`); all else is plain floats. Each file's header says in its
metadata which matrices these are: `{"format": "pt", "fastdecode": '{"version": 1, "tensors": {"X.weight": {"bits": 4,
"group_size": 32, "shape": [out, in]}}}'}`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints.fuse import StoredTensor, float_decoder
from checkpoints.json_text import parse_json
from models.errors import InputError
from quantize.storage import GROUP_SIZES, Quantized

FORMAT, VERSION = "fastdecode", 1
Q_DTYPES = {4: "U8", 8: "I8"}  # bits -> how q is stored
DTYPES = {"U8": torch.uint8, "I8": torch.int8, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class StoredQuantization:
    """What config.json says of the matrices of a quantized checkpoint; some (embedding, lm_head) may differ."""

    bits: int
    group_size: int
    method: str


@dataclass(frozen=True)
class QuantizedSource:
    """One quantized matrix in a file; `shape` is `(out, in)` of the matrix that it stands for."""

    path: Path
    name: str
    shape: tuple[int, int]
    bits: int
    group_size: int
    parts: tuple[StoredTensor, ...] = field(repr=False)  # q, scale and, for 4 bits, minimum

    def read(self) -> Quantized:
        """The matrix, in memory. Raises InputError when the file ends early or has a scale that is no number."""
        q, *parameters = (_read(part) for part in self.parts)
        for part, value in zip(self.parts[1:], parameters, strict=True):
            if not value.isfinite().all():
                raise InputError(f"{self.path}: tensor {part.name} has values that are no finite numbers; {AGAIN}.")
        return Quantized(self.bits, self.group_size, q, *parameters)


AGAIN = "the file is damaged, quantize or fetch the model again"


def quantization_config(bits: int, group_size: int, method: str) -> dict[str, Any]:
    """config.json's `quantization_config` of a checkpoint of ours."""
    return {
        "quant_method": FORMAT,
        "version": VERSION,
        "bits": bits,
        "group_size": group_size,
        "method": method,
    }


def stored_quantization(config: Mapping[str, Any], source: str = "config.json") -> StoredQuantization | None:
    """What this config.json (parsed) says, where its quantization is ours; None where it is another's, or none.

    Raises InputError, naming `source`, for another version of the format and for values that are none of it.
    """
    found = config.get("quantization_config")
    if not isinstance(found, Mapping) or found.get("quant_method") != FORMAT:
        return None
    _check_version(found.get("version"), source)
    bits, group_size, method = (found.get(key) for key in ("bits", "group_size", "method"))
    if not _is_one_of(bits, Q_DTYPES) or not _is_one_of(group_size, GROUP_SIZES) or not isinstance(method, str):
        raise InputError(
            f"{source}: quantization_config should have bits of 4 or 8, a group_size of 32, 64 or 128 and a method, "
            f"found {bits!r}, {group_size!r} and {method!r}; {AGAIN}."
        )
    return StoredQuantization(bits, group_size, method)


def read_quantized(path: Path, stored: dict[str, StoredTensor]) -> dict[str, QuantizedSource]:
    """The quantized matrices of the folder `path`, by name as in `stored`: what `open_folder(path)` returned.

    Takes their parts out of `stored`. Reads headers only. Raises InputError, naming the file, where a description is
    missing, of another version, or contradicts the tensors.
    """
    files = sorted({tensor.path for tensor in stored.values()})
    descriptions = {file: _description(file) for file in files}
    if all(description is None for description in descriptions.values()) and not is_ours(path):
        return {}
    found = {}
    for file, description in descriptions.items():
        if description is None:
            raise InputError(f"{file}: its header has no description of quantized tensors, as it should here; {AGAIN}.")
        for name, entry in description.items():
            source = _source(file, name, entry, stored)
            found[name.removeprefix("model.")] = source
    return found


def is_ours(folder: Path) -> bool:
    """Whether config.json says that `folder` is a checkpoint of this format. InputError: of another version of it."""
    try:
        config = parse_json((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever reads the config complains
        return False
    return isinstance(config, dict) and stored_quantization(config, str(folder / "config.json")) is not None


def _description(file: Path) -> dict[str, Any] | None:
    """The described tensors of a file whose header is known to be whole; None where it describes none."""
    try:
        with open(file, "rb") as opened:
            header = parse_json(opened.read(int.from_bytes(opened.read(8), "little")))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({error}).") from error
    text = (header.get("__metadata__") or {}).get(FORMAT)
    if text is None:
        return None
    try:
        description = parse_json(text)
    except ValueError:
        description = None
    if not isinstance(description, dict):
        raise InputError(f"{file}: the description in its header is no JSON object; {AGAIN}.")
    _check_version(description.get("version"), str(file))
    tensors = description.get("tensors")
    if not isinstance(tensors, dict) or not all(isinstance(entry, dict) for entry in tensors.values()):
        raise InputError(f"{file}: the description in its header has no tensors; {AGAIN}.")
    return tensors


def _check_version(version: Any, source: str) -> None:
    if type(version) is not int or version != VERSION:
        raise InputError(
            f"{source}: is version {version!r} of the quantized format, and this program reads version {VERSION}; "
            "update it, or quantize the model again."
        )


def _source(file: Path, name: str, entry: dict[str, Any], stored: dict[str, StoredTensor]) -> QuantizedSource:
    bits, group_size, shape = (entry.get(key) for key in ("bits", "group_size", "shape"))
    if not _is_one_of(bits, Q_DTYPES) or not _is_one_of(group_size, GROUP_SIZES):
        raise InputError(
            f"{file}: tensor {name} is described as {bits!r} bits in groups of {group_size!r}, expected 4 or 8 bits "
            f"in groups of 32, 64 or 128; {AGAIN}."
        )
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
        raise InputError(f"{file}: tensor {name} is described with shape {shape!r}, expected [out, in]; {AGAIN}.")
    out, n_columns = shape
    if n_columns % group_size:
        raise InputError(f"{file}: tensor {name}: {n_columns} columns are no groups of {group_size}; {AGAIN}.")
    floats, groups = ("F16", "F32"), (out, n_columns // group_size)
    q = _part(file, name, stored, (Q_DTYPES[bits],), (out, n_columns // 2 if bits == 4 else n_columns))
    scale = _part(file, f"{name}_scale", stored, floats, groups)
    if bits == 8:
        if f"{name}_min".removeprefix("model.") in stored:
            raise InputError(f"{file}: tensor {name}_min is there, but {name} is described as 8 bits; {AGAIN}.")
        return QuantizedSource(file, name, (out, n_columns), bits, group_size, (q, scale))
    minimum = _part(file, f"{name}_min", stored, (scale.dtype,), groups)
    return QuantizedSource(file, name, (out, n_columns), bits, group_size, (q, scale, minimum))


def _part(
    file: Path, name: str, stored: dict[str, StoredTensor], dtypes: tuple[str, ...], shape: tuple[int, int]
) -> StoredTensor:
    """Take one tensor out of `stored`."""
    tensor = stored.pop(name.removeprefix("model."), None)
    if tensor is None or tensor.path != file or tensor.name != name:
        raise InputError(f"{file}: tensor {name} is missing, though the header describes it; {AGAIN}.")
    if tensor.dtype not in dtypes or tensor.shape != shape:
        raise InputError(
            f"{file}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, expected {' or '.join(dtypes)} "
            f"{list(shape)}; {AGAIN}."
        )
    return tensor


def _read(tensor: StoredTensor) -> Tensor:
    """A tensor of a dtype in DTYPES, its bytes as they are."""
    dtype = DTYPES[tensor.dtype]
    data = torch.empty(tensor.shape[0] * tensor.shape[1] * dtype.itemsize, dtype=torch.uint8)
    as_bytes = replace(
        tensor, shape=tuple(data.shape), dtype="U8", block=1, block_bytes=1, decode=float_decoder(torch.uint8)
    )
    as_bytes.copy_to(data)
    return data.view(dtype).view(tensor.shape)


def _is_one_of(value: Any, allowed: Any) -> bool:
    return type(value) is int and value in allowed  # True is not 1
