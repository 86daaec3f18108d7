"""A network on the weights that a checkpoint has quantized: matrices as they are stored, the rest as floats.

Each source of matrices (a GGUF file, the portable form, GPTQ, AWQ, compressed-tensors) is read one matrix at a time,
and packed for the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from checkpoints.checkpoint import fill_parameters, open_tensors
from checkpoints.fuse import StoredTensor, slots
from checkpoints.head_checkpoint import load_head, renamed_tensors, tensors_of
from checkpoints.json_text import parse_json
from models.config import ModelConfig
from models.eagle import DraftHead
from models.errors import InputError
from models.head_config import HeadConfig
from models.layers import Experts, Linear
from models.transformer import Transformer
from quantize.experts import QuantizedExperts, QuantizedStack
from quantize.files import read_quantized
from quantize.importers import GGUF_TYPES, Imported, read_gguf_matrix, read_matrix, read_quantization, split_tensors
from quantize.linear import Norm, QuantizedEmbedding, QuantizedLinear, concatenated, operators_available
from quantize.methods import quantize_matrix

Note = Callable[[str], None]


@dataclass(frozen=True)
class Matrix:
    """A quantized matrix in a checkpoint: its name there (no leading "model."), its shape, and how to read it."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Imported]


@dataclass(frozen=True)
class DequantizedTensor:
    """A quantized matrix with the face of a StoredTensor: what it stands for, as floats."""

    path: Path
    matrix: Matrix
    offset: int = 0
    dtype: str = "quantized"
    decode: bool = True

    @property
    def name(self) -> str:
        return self.matrix.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    def equals(self, target: Tensor) -> bool:
        """Whether `target` is what copy_to would make it."""
        return torch.equal(dequantized(self.matrix.read()).to(target.device, target.dtype), target)

    def copy_to(self, target: Tensor) -> None:
        """Fill `target`, of this shape and any dtype and device."""
        target.copy_(dequantized(self.matrix.read()))


def load_network(
    path: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    quantized: bool,
    note: Note = lambda sentence: None,
) -> Transformer:
    """The network of a checkpoint, ready but for its rotary tables.

    `quantized`: keep matrices in the bits in which they are stored, where `device` has an operator for them; else
    everything is in `dtype`. `note` receives a sentence where that cannot be. Raises InputError as `load_weights` does.
    """
    with torch.device("meta"):
        network = Transformer(config)
    stored = open_tensors(path, config)
    matrices = {m.name: m for m in quantized_matrices(path, config, stored, network)}
    if matrices and quantized and not operators_available(device):
        note("There is no operator for quantized weights here, so they are dequantized; install g++, or set CXX.")
        quantized = False
    if quantized:
        for name, parts in whole_parameters(network, config, matrices).items():
            imported = [part.read() for part in parts]
            if alike(imported):
                replace_module(network, name, imported, device, dtype)
                for part in parts:
                    del matrices[part.name]
            else:
                note(f"{name}: its parts are quantized differently, so it is dequantized.")
        quantize_experts(network, config, matrices, device)
        if any(".experts." in name for name in matrices):
            note("Some experts are quantized differently from each other, so they are dequantized.")
    stored |= {name: DequantizedTensor(path, matrix) for name, matrix in matrices.items()}
    fill_parameters(network, stored, config, device, dtype, str(path))
    if has_quantized_matrices(network) and device.type == "cpu":
        network.norm = Norm(network.norm)
    return network.eval()


def load_draft_head(folder: Path, config: HeadConfig, target: Transformer, bits: int | None = None) -> DraftHead:
    """`checkpoints.head_checkpoint.load_head`, of a head whose matrices `python -m quantize` wrote in 4 or 8 bits as
    well: those are kept so where the target's device has an operator for them. Floats are quantized to `bits` there,
    unless that is None."""
    if config.layer.quantization is None:
        head = load_head(folder, config, target)
        available = bits is not None and operators_available(target.norm.weight.device)
        return quantized_head(head, bits) if available else head
    if config.layer.quantization != "fastdecode":
        raise InputError(f"{folder}: is a head quantized by {config.layer.quantization!r}; give it as floats.")
    stored = tensors_of(folder)
    matrices = {
        name: Matrix(name, source.shape, lambda source=source: Imported(source.read(), None))
        for name, source in read_quantized(folder, stored).items()
    }
    whole = stored | {name: DequantizedTensor(folder, matrix) for name, matrix in matrices.items()}
    head = load_head(folder, config, target, stored=whole)
    weight = target.norm.weight
    if operators_available(weight.device):
        named = renamed_tensors(matrices, config, folder)
        for name, parts in whole_parameters(head, config.layer, named).items():
            imported = [part.read() for part in parts]
            if alike(imported):  # else they stay as load_head made them, floats
                replace_module(head, name, imported, weight.device, weight.dtype)
    return head


def quantized_head(head: DraftHead, bits: int = 8) -> DraftHead:
    """`head` with its float matrices rounded to nearest in `bits`, in groups of 64 columns or 32; those whose columns
    are a multiple of neither stay floats, as its embedding does.

    Drafts are proposals that the target checks: rounding can cost some acceptance, and never changes output.
    """
    for name, module in list(head.named_modules()):
        fitting = [size for size in (64, 32) if isinstance(module, Linear) and module.in_features % size == 0]
        if fitting:
            weight = quantize_matrix(module.weight, bits, fitting[0], "rtn", name)
            replace_module(head, f"{name}.weight", [Imported(weight, None)], module.weight.device, module.weight.dtype)
    return head


def has_quantized_matrices(network: nn.Module) -> bool:
    """Whether any of its matrices is computed with as it is stored, in 4 or 8 bits."""
    return any(isinstance(module, QuantizedLinear | QuantizedExperts) for module in network.modules())


def quantized_matrices(
    path: Path, config: ModelConfig, stored: dict[str, StoredTensor], network: Transformer
) -> Iterator[Matrix]:
    """The matrices of a checkpoint that it has in 4 or 8 bits, which are taken out of `stored`.

    Raises InputError for a layout that cannot be read.
    """
    parameters = dict(network.named_parameters())
    places = slots(parameters, config)
    if not path.is_dir():
        for name, tensor in list(stored.items()):
            place = places.get(name)
            part = None if place is None else parameters[place.parameter][place.index]
            if part is not None and part.dim() == 2 == parameters[place.parameter].dim() and (
                tensor.dtype in GGUF_TYPES and tensor.shape == part.shape
            ):
                del stored[name]
                yield Matrix(name, tensor.shape, lambda tensor=tensor: Imported(read_gguf_matrix(tensor), None))
    elif config.quantization == "fastdecode":
        for name, source in read_quantized(path, stored).items():
            name = name.removeprefix("model.")
            yield Matrix(name, source.shape, lambda source=source: Imported(source.read(), None))
    elif config.quantization is not None:
        file = path / "config.json"
        scheme = read_quantization(parse_json(file.read_text(encoding="utf-8")), str(file))
        layers, rest = split_tensors(stored, scheme)
        stored.clear()
        stored.update(rest)
        for name, parts in layers.items():
            place = places.get(f"{name}.weight")
            if place is None:  # let the float tensors' check name it
                stored.update(parts.tensors)
                continue
            shape = tuple(parameters[place.parameter][place.index].shape)
            yield Matrix(f"{name}.weight", shape, partial(read_matrix, parts, scheme, shape))


def whole_parameters(
    network: nn.Module, config: ModelConfig, matrices: dict[str, Matrix]
) -> dict[str, list[Matrix]]:
    """Per parameter of the network, the matrices that it consists of, from its first row on.

    Parameters of which some part is missing, or that stack experts, are not among them.
    """
    parameters = dict(network.named_parameters())
    found: dict[str, list[tuple[int, int, Matrix]]] = {}
    for name, place in slots(parameters, config).items():
        if name in matrices and parameters[place.parameter].dim() == 2:
            rows = range(parameters[place.parameter].shape[0])[place.index[0] if place.index else slice(None)]
            found.setdefault(place.parameter, []).append((rows.start, len(rows), matrices[name]))
    whole = {}
    for name, parts in found.items():
        parts.sort(key=lambda part: part[0])
        if sum(count for _, count, _ in parts) == parameters[name].shape[0]:
            whole[name] = [matrix for *_, matrix in parts]
    return whole


def quantize_experts(
    network: Transformer, config: ModelConfig, matrices: dict[str, Matrix], device: torch.device
) -> None:
    """Put quantized stacks where all matrices of a layer's experts are among `matrices`, and take them out of there."""
    parameters = dict(network.named_parameters())
    parts: dict[str, dict[int, list[tuple[int, Matrix]]]] = {}  # by parameter and expert
    for name, place in slots(parameters, config).items():
        if name in matrices and len(place.index) == 2 and isinstance(place.index[0], int):
            start = place.index[1].start or 0
            found = parts.setdefault(place.parameter, {})
            found.setdefault(place.index[0], []).append((start, matrices[name]))
    for name, module in list(network.named_modules()):
        stacks, used = [], []
        for attribute in ("gate_up_proj", "down_proj") if isinstance(module, Experts) else ():
            parameter = f"{name}.{attribute}"
            experts = [[m for _, m in sorted(parts.get(parameter, {}).get(e, []), key=lambda part: part[0])]
                       for e in range(module.down_proj.shape[0])]
            if any(sum(m.shape[0] for m in expert) != parameters[parameter].shape[1] for expert in experts):
                break
            imported = [[m.read() for m in expert] for expert in experts]
            if not alike([part for expert in imported for part in expert]) or imported[0][0].column_order is not None:
                break
            stacks.append(QuantizedStack([concatenated([p.weight for p in expert]) for expert in imported], device))
            used += [m.name for expert in experts for m in expert]
        if len(stacks) == 2:
            parent, _, attribute = name.rpartition(".")
            setattr(network.get_submodule(parent), attribute, QuantizedExperts(*stacks))
            for matrix_name in used:
                del matrices[matrix_name]


def alike(parts: list[Imported]) -> bool:
    """Whether matrices can be one: the same bits, groups, and order of columns."""
    first = parts[0]
    return all(
        (part.weight.bits, part.weight.group_size) == (first.weight.bits, first.weight.group_size)
        and (part.column_order is None) == (first.column_order is None)
        and (part.column_order is None or torch.equal(part.column_order, first.column_order))
        for part in parts
    )


def dequantized(part: Imported) -> Tensor:
    """The matrix that an import stands for, fp32, its columns in the layer's own order."""
    w = part.weight.dequantize()
    return w if part.column_order is None else w[:, part.column_order.argsort()]


def replace_module(
    network: nn.Module, name: str, parts: list[Imported], device: torch.device, dtype: torch.dtype
) -> None:
    """Put a quantized layer where the module of the parameter `name` was; a bias is left to be filled."""
    module_name = name.removesuffix(".weight")
    parent, _, attribute = module_name.rpartition(".")
    old = network.get_submodule(module_name)
    weight = concatenated([part.weight for part in parts])
    if isinstance(old, nn.Embedding):
        new: nn.Module = QuantizedEmbedding(weight, device, dtype)
    else:
        order = parts[0].column_order
        new = QuantizedLinear(weight, device, column_order=None if order is None else order.to(device))
        new.bias = old.bias
    setattr(network.get_submodule(parent), attribute, new)
