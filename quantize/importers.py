"""Checkpoints that others quantized: what config.json says of them, and their matrices as `Quantized`.

Read strictly: a value that would change what the numbers mean is honoured or refused, never passed over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checkpoints.fuse import StoredTensor
from models.errors import InputError
from quantize.import_gguf import GGUF_TYPES, read_gguf_matrix
from quantize.import_parts import Imported, Parts
from quantize.import_words import AWQ_PARTS, COMPRESSED_PARTS, GPTQ_PARTS, read_awq, read_compressed, read_gptq
from quantize.storage import GROUP_SIZES

__all__ = [
    "GGUF_TYPES",
    "Imported",
    "Parts",
    "Scheme",
    "read_gguf_matrix",
    "read_matrix",
    "read_quantization",
    "split_tensors",
]

PARTS = {"gptq": GPTQ_PARTS, "awq": AWQ_PARTS, "compressed-tensors": COMPRESSED_PARTS}


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint was quantized. `group_size` -1: one group a row. `act_order`: columns are in groups by an index.

    `zeros`: how GPTQ's zero points are stored, see `read_gptq`. `ignored`: the layers that the config excludes, in its
    own words; the tensors themselves say which layers are quantized.
    """

    method: str
    bits: int
    group_size: int
    symmetric: bool
    act_order: bool = False
    zeros: str = "as they are"
    ignored: tuple[str, ...] = ()


def read_quantization(config: Mapping[str, Any], source: str) -> Scheme:
    """What `quantization_config` (in older files `compression_config`) of this config.json says; `source` names it.

    Methods: gptq (formats gptq and gptq_v2), awq (version gemm), compressed-tensors (pack-quantized). Raises
    InputError, naming the field, what it holds and what would be read, for anything else.
    """
    key = "compression_config" if config.get("compression_config") is not None else "quantization_config"
    fields = _Fields(config.get(key), source, key)
    method = fields.one_of("quant_method", *PARTS)
    return {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}[method](fields)


def split_tensors(
    tensors: Mapping[str, StoredTensor], scheme: Scheme
) -> tuple[dict[str, Parts], dict[str, StoredTensor]]:
    """The quantized layers among `tensors` (see `open_tensors`), by name, and the tensors that remain: norms,
    embeddings, biases and layers left as they were."""
    layers: dict[str, dict[str, StoredTensor]] = {}
    rest = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if part in PARTS[scheme.method]:
            layers.setdefault(layer, {})[part] = tensor
        else:
            rest[name] = tensor
    return {layer: Parts(layer, found) for layer, found in layers.items()}, rest


def read_matrix(parts: Parts, scheme: Scheme, shape: tuple[int, int]) -> Imported:
    """The matrix of one quantized layer, `shape` `(out, in)` as the model's config makes it.

    Takes two or three bytes a number while it works. Raises InputError, naming file and tensor, for parts that are
    missing, damaged, or do not fit the shape and the scheme.
    """
    parts.check_columns(shape[1])
    if scheme.method == "gptq":
        return read_gptq(parts, shape, scheme.bits, scheme.group_size, scheme.act_order, scheme.zeros)
    if scheme.method == "awq":
        return read_awq(parts, shape, scheme.group_size)
    return read_compressed(parts, shape, scheme.bits, scheme.group_size, scheme.act_order, scheme.symmetric)


class _Fields:
    """Typed access to one object of a config; every complaint names the file and the field."""

    def __init__(self, values: Any, source: str, name: str):
        self.values, self.source, self.name = values, source, name
        if not isinstance(values, dict):
            raise InputError(f"{source}: {name} should be an object, found {values!r}"[:200] + ".")

    def below(self, key: str) -> "_Fields":
        return _Fields(self.values.get(key), self.source, f"{self.name}.{key}")

    def fail(self, key: str, expected: str) -> InputError:
        found = repr(self.values[key])[:80] if key in self.values else "nothing"
        return InputError(f"{self.source}: {self.name}.{key} is {found}; {expected} can be read.")

    def one_of(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """The value, one of `allowed` (strings in any case); null and a missing field are `default`."""
        value = self.values.get(key)
        value = default if value is None else value.lower() if isinstance(value, str) else value
        for choice in allowed:
            if type(value) is type(choice) and value == choice:  # True is not 1
                return value
        raise self.fail(key, f"{'only ' if len(allowed) == 1 else ''}{' or '.join(map(repr, allowed))}")

    def absent(self, key: str, *, but: tuple[Any, ...] = ()) -> None:
        """Refuse a field that changes the meaning of the others, unless it is empty or one of `but`."""
        if self.values.get(key) and self.values[key] not in but:
            raise self.fail(key, " or ".join(map(repr, but)) if but else "only a config without it")

    def names(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, "only a list of names")
        return tuple(value)


def _gptq(fields: _Fields) -> Scheme:
    fields.absent("is_marlin_format")
    fields.absent("pack_dtype", but=("int32",))
    checkpoint_format = fields.one_of("checkpoint_format", "gptq", "gptq_v2", default="gptq")
    zeros = "as they are"
    if checkpoint_format == "gptq":
        zeros = "minus one, borrowing" if _by_gptqmodel(fields.values.get("meta")) else "minus one"
    dynamic = fields.values.get("dynamic") or {}
    if not isinstance(dynamic, dict) or any(rule and not name.startswith("-:") for name, rule in dynamic.items()):
        raise fields.fail("dynamic", "only one scheme for all layers (rules that leave layers out, '-:...', are fine)")
    return Scheme(
        method="gptq",
        bits=fields.one_of("bits", 4, 8),
        group_size=fields.one_of("group_size", *GROUP_SIZES, -1),
        symmetric=fields.one_of("sym", True, False, default=True),
        act_order=fields.one_of("desc_act", True, False, default=False),
        zeros=zeros,
        ignored=tuple(name.removeprefix("-:") for name in dynamic if name.startswith("-:")),
    )


def _by_gptqmodel(meta: Any) -> bool:
    """Whether GPTQModel wrote it: `meta.quantizer` is "gptqmodel:2.1.0", or a list with such."""
    quantizer = meta.get("quantizer") if isinstance(meta, dict) else None
    writers = quantizer if isinstance(quantizer, list) else [quantizer]
    return any(isinstance(writer, str) and writer.lower().startswith("gptqmodel") for writer in writers)


def _awq(fields: _Fields) -> Scheme:
    fields.one_of("version", "gemm", default="gemm")
    return Scheme(
        method="awq",
        bits=fields.one_of("bits", 4),
        group_size=fields.one_of("group_size", *GROUP_SIZES, -1),
        symmetric=not fields.one_of("zero_point", True, False, default=True),
        ignored=fields.names("modules_to_not_convert"),
    )


def _compressed(fields: _Fields) -> Scheme:
    fields.one_of("format", "pack-quantized")
    fields.one_of("quantization_status", "compressed", default="compressed")
    fields.absent("kv_cache_scheme")
    fields.absent("transform_config")
    if fields.values.get("sparsity_config"):
        fields.below("sparsity_config").one_of("format", "dense")
    groups = fields.below("config_groups")
    schemes = {_compressed_group(groups.below(name)) for name in groups.values}
    if len(schemes) != 1:
        raise fields.fail("config_groups", "only one scheme for all layers")
    bits, group_size, symmetric, act_order = schemes.pop()
    return Scheme("compressed-tensors", bits, group_size, symmetric, act_order, ignored=fields.names("ignore"))


def _compressed_group(group: _Fields) -> tuple[int, int, bool, bool]:
    """Bits, group size, symmetric and whether columns are in groups by an index."""
    group.absent("input_activations")
    group.absent("output_activations")
    group.absent("format", but=("pack-quantized",))
    weights = group.below("weights")
    weights.one_of("type", "int", default="int")
    weights.absent("dynamic")
    weights.absent("block_structure")
    size = weights.values.get("group_size")
    strategy = weights.one_of("strategy", "group", "channel", default="channel" if size == -1 else "group")
    if strategy == "channel":
        size = weights.one_of("group_size", -1, default=-1)
    else:
        size = weights.one_of("group_size", *GROUP_SIZES)
    order = weights.one_of("actorder", "weight", "static", "group", "dynamic", False, default=False)
    symmetric = weights.one_of("symmetric", True, False, default=True)
    return weights.one_of("num_bits", 4, 8), size, symmetric, order in ("group", "dynamic")
