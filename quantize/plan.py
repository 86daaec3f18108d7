"""What becomes of each tensor of a checkpoint, decided and checked from headers before any work."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints.checkpoint import FLOATS, open_tensors, read_config
from checkpoints.fuse import Slot, StoredTensor, match, slots
from checkpoints.head_checkpoint import (
    BORROWED,
    PickledTensor,
    drafted_ids,
    holds_head,
    open_head,
    read_head_config,
    tensor_values,
)
from checkpoints.json_text import parse_json
from models.config import ModelConfig
from models.eagle import Eagle3Head, EagleHead
from models.errors import InputError
from models.transformer import Transformer
from quantize.gguf_source import hf_config
from quantize.methods import METHODS
from quantize.storage import GROUP_SIZES, check_group_size
from quantize.writer import SHARD_BYTES, Entry

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
VOCABULARY_GROUP = 32  # of the embedding and lm_head in 8 bits
DRAFT = "draft/"  # the head's folder inside the checkpoint, and what --skip calls its tensors


@dataclass(frozen=True)
class Options:
    """What the user asked for. `skip`: patterns of tensor names that stay as they are. `lm_head`: 8 (int8 in groups of
    32), 16 (as it is) or same (as the other matrices); it holds for the embedding, too."""

    bits: int = 4
    group_size: int = 32
    method: str = "als"
    skip: tuple[str, ...] = ()
    lm_head: str = "8"
    shard_bytes: int = SHARD_BYTES

    def __post_init__(self) -> None:
        for option, value, allowed in (
            ("--bits", self.bits, (4, 8)),
            ("--group-size", self.group_size, GROUP_SIZES),
            ("--method", self.method, (*METHODS, "gptq")),
            ("--lm-head", self.lm_head, ("8", "16", "same")),
        ):
            if value not in allowed:
                raise InputError(f"{option} should be one of {', '.join(map(str, allowed))}, found {value!r}.")
        if self.method == "hqq" and self.bits == 8:
            raise InputError("--method hqq moves zero points, which 8 bits do not have; use als or rtn, or --bits 4.")


@dataclass(frozen=True)
class Piece:
    """One tensor of the new checkpoint: the part `slot` of the network, from `source`, or a small `value` at hand.

    `bits` None: it stays as it is. `method`: what quantizes it, gptq only inside decoder layers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # in which it stays as it is
    slot: Slot | None = None
    source: StoredTensor | PickledTensor | None = None
    value: Tensor | None = None
    bits: int | None = None
    group_size: int = 0
    method: str = "als"

    @property
    def layer(self) -> int | None:
        """The decoder layer that it is part of."""
        parts = self.slot.parameter.split(".") if self.slot else [""]
        return int(parts[1]) if parts[0] == "layers" else None

    @property
    def is_matrix(self) -> bool:
        """Whether it could be quantized: not a norm, a bias, a map, or the router of experts."""
        return len(self.shape) == 2 and self.slot is not None and not self.slot.parameter.endswith("mlp.gate.weight")

    @property
    def entry(self) -> Entry:
        return Entry(self.name, self.shape, None if self.bits else self.dtype, self.bits, self.group_size)

    @property
    def working_dtype(self) -> torch.dtype:
        """One that holds its values exactly: blocks of a GGUF file need fp32."""
        return torch.float32 if getattr(self.source, "block", 1) > 1 else self.dtype

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """Its values, in the dtype in which it stays as it is, or another."""
        if self.value is not None:
            return self.value
        values = torch.empty(self.shape, dtype=dtype or self.dtype)
        self.source.copy_to(values)
        return values


@dataclass(frozen=True)
class Plan:
    """All pieces, in the order of the network: embedding, layers, the rest. `config_json`: as it will be written, but
    for the quantization. `dropped`: sentences about tensors that are not written."""

    path: Path
    config: ModelConfig
    config_json: dict[str, Any]
    pieces: tuple[Piece, ...]
    bytes_before: int
    dropped: tuple[str, ...] = ()


def plan_model(path: Path, options: Options) -> Plan:
    """The plan of a model: a folder or a GGUF file. Reads headers (and a tied model's second head) only.

    Raises InputError for a checkpoint that does not hold together or is quantized already, for a matrix whose columns
    do not fit the groups, and for a --skip pattern that fits nothing.
    """
    config_json = _folder_config(path) if path.is_dir() else hf_config(path)
    config = read_config(path)
    with torch.device("meta"):
        parameters = dict(Transformer(config).named_parameters())
    stored, dropped = open_tensors(path, config), ()
    before = _n_bytes(stored.values())
    if config.tie_word_embeddings and "lm_head.weight" in stored:
        _check_tied(stored.pop("lm_head.weight"), stored.get("embed_tokens.weight"))
        dropped = ("lm_head.weight is the embedding, and not written twice",)
    pairs = match(stored, parameters, config, str(path))
    pieces = _pieces(pairs, parameters, config, renamed=path.is_file())
    pieces = _with_methods(pieces, options, "")
    return Plan(path, config, config_json, _in_order(pieces), before, dropped)


def plan_head(folder: Path, target: Plan, options: Options) -> Plan:
    """The plan of a draft head for the model `target`; its matrices follow the same options, gptq excepted.

    An embedding equal to the target's is left out, since a head without one takes the target's. Raises InputError as
    `plan_model` does, and for a folder that holds no head, or one of another target.
    """
    config_json = _folder_config(folder)
    if not holds_head(folder):
        raise InputError(f"--draft {folder}: is not a draft head; quantize a small model by itself.")
    config = read_head_config(folder).fitted_to(target.config, str(folder))
    stored, dropped = open_head(folder, config), ()
    before = _n_bytes(stored.values())
    maps = {name: tensor_values(stored[name]) for name in ("d2t", "t2d") if name in stored}
    drafted_ids(stored, config, folder)
    with torch.device("meta"):
        parameters = dict((Eagle3Head if config.kind == "eagle3" else EagleHead)(config).named_parameters())
    absent = {f"{part}.weight" for part in BORROWED if f"{part}.weight" not in stored}
    pairs = match(stored, {n: p for n, p in parameters.items() if n not in absent}, config.layer, str(folder))
    own = next((piece for piece, slot in pairs if slot.parameter == VOCABULARY[0]), None)
    if own is not None and _is_targets(own, target):
        pairs = [(tensor, slot) for tensor, slot in pairs if tensor is not own]
        dropped = ("draft/embed_tokens.weight is the model's, and not written twice",)
    pieces = _pieces(pairs, parameters, config.layer, renamed=False)
    options = replace(options, method="als") if options.method == "gptq" else options
    pieces = _with_methods(pieces, options, DRAFT)
    pieces += [Piece(name, tuple(value.shape), value.dtype, value=value) for name, value in maps.items()]
    return Plan(folder, config.layer, config_json, _in_order(pieces), before, dropped)


def check_skip(patterns: Iterable[str], plans: Iterable[Plan]) -> None:
    """Raise InputError for a pattern that fits no tensor."""
    plans = list(plans)
    names = [name for plan, prefix in zip(plans, ("", DRAFT), strict=False) for p in plan.pieces
             for name in _names(p, prefix)]  # fmt: skip
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f"--skip {pattern}: fits no tensor; names are like {plans[0].pieces[1].name}.")


def _folder_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder that is not quantized yet."""
    file = folder / "config.json"
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{folder}: has no config.json; give a folder in the Hugging Face layout.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read as JSON ({error}); fetch it again.") from error
    if not isinstance(config, dict):
        raise InputError(f"{file}: expected a JSON object, found {type(config).__name__}.")
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            found = config[key].get("quant_method", "?") if isinstance(config[key], Mapping) else "?"
            raise InputError(
                f"{folder}: is quantized already ({str(found)[:40]}); give the checkpoint that it was made from."
            )
    return config


def _pieces(
    pairs: Iterable[tuple[StoredTensor | PickledTensor, Slot]],
    parameters: Mapping[str, Tensor],
    config: ModelConfig,
    renamed: bool,
) -> list[Piece]:
    """The tensors as pieces, stacks of experts taken apart. `renamed`: under the family's names and not their own."""
    family: dict[str, tuple[str, Slot]] = {}  # the family's own spelling for each place
    for name, slot in slots(parameters, config).items():
        family.setdefault(repr(slot), (name, slot))
    pieces = []
    for tensor, slot in pairs:
        dtype = FLOATS.get(tensor.dtype) or getattr(torch, tensor.dtype, torch.float16)  # blocks become float16
        if not slot.parameter.endswith(("experts.gate_up_proj", "experts.down_proj")):
            name = _prefixed(family[repr(slot)][0]) if renamed else tensor.name
            pieces.append(Piece(name, tensor.shape, dtype, slot, tensor))
            continue
        for name, part in family.values():
            if part.parameter == slot.parameter and len(part.index) == 2 and isinstance(part.index[0], int):
                cut = _cut(tensor, slot, part, parameters[slot.parameter])
                if cut is not None:
                    whole = len(tensor.shape) == 2 and not renamed
                    name = tensor.name if whole else _prefixed(name, tensor.name if not renamed else "model.")
                    pieces.append(Piece(name, cut.shape, dtype, part, cut))
    return pieces


def _cut(tensor: StoredTensor, slot: Slot, part: Slot, parameter: Tensor) -> StoredTensor | None:
    """What `tensor`, stored for `slot` of a stack of experts, holds of one expert's matrix `part`; None: nothing."""
    expert, rows = part.index
    first, end, _ = rows.indices(parameter.shape[1])
    if len(tensor.shape) == 2:
        return tensor if repr(slot) == repr(part) else None
    if slot.index:  # gate or up of all experts
        if repr(slot.index[1]) != repr(rows):
            return None
        first, end = 0, end - first
    _, n_rows, n_columns = tensor.shape
    start = (expert * n_rows + first) * n_columns // tensor.block * tensor.block_bytes
    return replace(tensor, shape=(end - first, n_columns), offset=tensor.offset + start)


def _prefixed(name: str, like: str = "model.") -> str:
    """A name as files have it: with "model.", where `like` has that, but for lm_head."""
    return name if name.startswith("lm_head.") or not like.startswith("model.") else f"model.{name}"


def _with_methods(pieces: Iterable[Piece], options: Options, prefix: str) -> list[Piece]:
    """Decide for each piece, and check that its columns fit the groups."""
    decided = []
    for piece in pieces:
        bits, group_size = options.bits, options.group_size
        parameter = piece.slot.parameter
        is_matrix = piece.is_matrix
        if parameter in VOCABULARY:
            is_matrix = options.lm_head != "16" and not (prefix and parameter == VOCABULARY[0])
            if options.lm_head == "8":
                bits, group_size = 8, VOCABULARY_GROUP
        if is_matrix and not any(fnmatchcase(name, p) for name in _names(piece, prefix) for p in options.skip):
            check_group_size(piece.shape[1], group_size, piece.name)
            uses_als = (options.method == "hqq" and bits == 8) or (options.method == "gptq" and piece.layer is None)
            method = "als" if uses_als else options.method
            piece = replace(piece, bits=bits, group_size=group_size, method=method)
        decided.append(piece)
    return decided


def _names(piece: Piece, prefix: str) -> tuple[str, str]:
    return prefix + piece.name, prefix + piece.name.removeprefix("model.")


def _in_order(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The embedding, the layers, the rest; within these as they lie in the files, which disks like."""

    def place(piece: Piece) -> tuple:
        layer = piece.layer
        if layer is None:
            layer = -1 if piece.slot and piece.slot.parameter == VOCABULARY[0] else 1 << 30
        at = (str(piece.source.path), piece.source.offset) if isinstance(piece.source, StoredTensor) else ("", 0)
        return layer, *at

    return tuple(sorted(pieces, key=place))


def _check_tied(head: StoredTensor, embedding: StoredTensor | None) -> None:
    if embedding is None or head.decode is None or embedding.decode is None:
        return  # match complains
    values = torch.empty(embedding.shape, dtype=FLOATS.get(embedding.dtype, torch.float32))
    embedding.copy_to(values)
    if head.shape != embedding.shape or not head.equals(values):
        raise InputError(
            f"{head.path}: tensor {head.name} differs from the embedding, but the config sets tie_word_embeddings; "
            "set that to false if the model has a head of its own."
        )


def _is_targets(own: StoredTensor | PickledTensor, target: Plan) -> bool:
    theirs = next(p for p in target.pieces if p.slot.parameter == VOCABULARY[0])
    if theirs.shape != tuple(own.shape):
        return False
    values = torch.empty(own.shape, dtype=FLOATS.get(own.dtype) or getattr(torch, own.dtype))
    own.copy_to(values)
    return theirs.source.equals(values)


def _n_bytes(tensors: Iterable[StoredTensor | PickledTensor]) -> int:
    total = 0
    for tensor in tensors:
        if isinstance(tensor, PickledTensor):
            total += tensor.value.numel() * tensor.value.itemsize
        else:
            total += torch.Size(tensor.shape).numel() // tensor.block * tensor.block_bytes
    return total
