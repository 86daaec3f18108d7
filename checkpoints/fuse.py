"""From tensors in a file to the parameters that they fill: names, places, and copying in bounded memory.

Checkpoints keep q, k and v, gate and up, and every expert apart; the network holds them fused, so that a layer is one
matrix product. A `Slot` says which part of which parameter a tensor is; a `StoredTensor` says where its bytes lie.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from models.config import ModelConfig
from models.errors import InputError

CHUNK = 1 << 22  # elements read, decoded and copied at a time: 16 MB in fp32

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Slot:
    """The part `parameter[index]` of one parameter; the empty index is all of it."""

    parameter: str
    index: Index = ()


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file: `block` elements take `block_bytes` bytes, from byte `offset` on, rows one after another.

    `decode` turns such bytes into a flat tensor; None where the format is not one that can be read. `head_pairs` is the
    number of heads whose rows are stored as interleaved rotary pairs (0: half-split already, or not q or k).
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    block: int
    block_bytes: int
    decode: Callable[[bytearray], Tensor] | None
    head_pairs: int = 0

    def copy_to(self, target: Tensor) -> None:
        """Fill `target`, which has this tensor's shape and any dtype, device and strides, a chunk at a time.

        Raises InputError when the file ends early, and when float16 cannot hold a number.
        """
        for part, values in self._along(target):
            part.copy_(values)
            if part.dtype == torch.float16 and not part.isfinite().all():
                raise InputError(
                    f"{self.path}: tensor {self.name} has numbers that float16 cannot hold; use bfloat16 or float32."
                )

    def equals(self, target: Tensor) -> bool:
        """Whether `target` is what copy_to would make it. Raises InputError when the file ends early."""
        return all(torch.equal(values.to(part), part) for part, values in self._along(target))

    def _along(self, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views that cover `target`, each with the values that the file has for it."""
        if self.head_pairs:  # rows [heads, pair, half] in the file are [heads, half, pair] in the network
            target = target.unflatten(0, (self.head_pairs, 2, -1)).transpose(1, 2)
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset)
                for part in _chunks(target):
                    yield part, self._read(file, part.numel()).view(part.shape)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror or error}).") from error

    def _read(self, file: BinaryIO, n_elements: int) -> Tensor:
        # Plain reads, not a memory map: pages of a map count as ours until it is closed.
        data = bytearray(n_elements // self.block * self.block_bytes)
        view, at = memoryview(data), 0
        while at < len(data):
            count = file.readinto(view[at:])
            if not count:
                raise InputError(f"{self.path}: the file ends inside tensor {self.name}; fetch it again.")
            at += count
        return self.decode(data)


def _chunks(target: Tensor) -> Iterator[Tensor]:
    """Views that cover `target` in order, each of at most CHUNK elements and of whole rows."""
    if target.numel() <= CHUNK:
        yield target
    elif target.dim() > 1 and target[0].numel() > CHUNK:
        for item in target:
            yield from _chunks(item)
    else:
        items = CHUNK // target[0].numel()
        yield from target.split(items - items % 512 or items)  # even sizes, since they decode fastest


def slots(parameters: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Slot]:
    """Every tensor name that a checkpoint may use for these parameters (no leading "model."), and where it goes.

    Hugging Face spellings, experts apart (`mlp.experts.0.gate_proj.weight`, Mixtral's
    `block_sparse_moe.experts.0.w1.weight`), stacked (`mlp.experts.gate_proj`, as in GGUF files) or stacked and fused
    (`mlp.experts.gate_up_proj`). Of several spellings, the one that the family uses comes first.
    """
    found: dict[str, Slot] = {}
    for name, parameter in parameters.items():
        prefix, _, last = name.rpartition("self_attn.qkv_proj.")
        if prefix or name.startswith("self_attn.qkv_proj."):
            rows = {"q": config.n_heads, "k": config.n_kv_heads, "v": config.n_kv_heads}
            start = 0
            for part, heads in rows.items():
                stop = start + heads * config.head_dim
                found[f"{prefix}self_attn.{part}_proj.{last}"] = Slot(name, (slice(start, stop),))
                start = stop
        elif name.endswith((".gate_up_proj.weight", ".gate_up_proj.bias")):
            half = parameter.shape[0] // 2
            found[name.replace("gate_up_proj", "gate_proj")] = Slot(name, (slice(0, half),))
            found[name.replace("gate_up_proj", "up_proj")] = Slot(name, (slice(half, None),))
        elif name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj")):
            found |= _expert_slots(name, parameter, config)
        elif name.endswith("mlp.gate.weight"):
            spellings = [name, name.replace("mlp.gate", "block_sparse_moe.gate")]
            found |= dict.fromkeys(reversed(spellings) if config.model_type == "mixtral" else spellings, Slot(name))
        else:
            found[name] = Slot(name)
    return found


def _expert_slots(name: str, parameter: Tensor, config: ModelConfig) -> dict[str, Slot]:
    """Places in a stack of experts, `[E, 2 * I, h]` (gate first) or `[E, h, I]`."""
    layer, _, last = name.rpartition("mlp.experts.")
    if last == "gate_up_proj":
        half = parameter.shape[1] // 2
        parts = {"gate_proj": ("w1", slice(0, half)), "up_proj": ("w3", slice(half, None))}
    else:
        parts = {"down_proj": ("w2", slice(None))}
    qwen, mixtral = {}, {}
    for expert in range(parameter.shape[0]):
        for part, (short, rows) in parts.items():
            qwen[f"{layer}mlp.experts.{expert}.{part}.weight"] = Slot(name, (expert, rows))
            mixtral[f"{layer}block_sparse_moe.experts.{expert}.{short}.weight"] = Slot(name, (expert, rows))
    found = mixtral | qwen if config.model_type == "mixtral" else qwen | mixtral
    for part, (_, rows) in parts.items():
        found[f"{layer}mlp.experts.{part}"] = Slot(name, (slice(None), rows))
    return found | {f"{layer}{block}.experts.{last}": Slot(name) for block in ("mlp", "block_sparse_moe")}


def match(
    stored: Mapping[str, StoredTensor], parameters: Mapping[str, Tensor], config: ModelConfig, source: str
) -> list[tuple[StoredTensor, Slot]]:
    """Pair every stored tensor with its slot, before any byte of data is read.

    Raises InputError, naming the tensor, for one that nothing asked for, one of a wrong shape or of a dtype that cannot
    be read, a part given twice, and a parameter of which something is missing.
    """
    places = slots(parameters, config)
    pairs = []
    for name, tensor in stored.items():
        slot = places.get(name)
        if slot is None:
            raise InputError(
                f"{tensor.path}: tensor {tensor.name} is not part of a {config.model_type} model with "
                f"{config.n_layers} layers; is this config the one that belongs to these weights?"
            )
        expected = tuple(parameters[slot.parameter][slot.index].shape)
        if tensor.shape != expected:
            raise InputError(
                f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)}, but the config makes it "
                f"{list(expected)}."
            )
        if tensor.decode is None:
            raise InputError(
                f"{tensor.path}: tensor {tensor.name} is stored as {tensor.dtype}, which cannot be read; give a "
                "checkpoint in F32, F16 or BF16, or a GGUF file in a plain, Q or K format."
            )
        pairs.append((tensor, slot))
    # Only now, and only for what the files have: a config alone may ask for any amount of memory.
    covered: dict[str, Tensor] = {}
    for tensor, slot in pairs:
        parameter = parameters[slot.parameter]
        if slot.parameter not in covered:
            covered[slot.parameter] = torch.zeros(parameter.shape[: max(1, parameter.dim() - 1)], dtype=torch.bool)
        rows = covered[slot.parameter][slot.index]
        if rows.any():
            raise InputError(f"{tensor.path}: tensor {tensor.name} is given twice, under two spellings.")
        rows.fill_(True)
    missing = [n for n, s in places.items() if s.parameter not in covered or not covered[s.parameter][s.index].all()]
    if missing:
        hint = ", unless its config sets tie_word_embeddings" if missing[0] == "lm_head.weight" else ""
        raise InputError(f"{source}: tensor {missing[0]} is missing, and the model needs it{hint}.")
    return pairs


def float_decoder(dtype: torch.dtype) -> Callable[[bytearray], Tensor]:
    """Bytes of plain numbers, as they are."""
    return lambda data: torch.frombuffer(data, dtype=dtype)
