"""Models on disk: find one by name, read its config, stream its weights into a network.

A checkpoint is a folder in the Hugging Face layout (config.json with model.safetensors, or shards and their index), or
one GGUF file. Weights are checked against the config by their headers first, and only then copied, a chunk at a time,
into parameters made once in their final dtype and place.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from checkpoints.download import DEMO_NAME, demo_model
from checkpoints.fuse import StoredTensor, float_decoder, match
from checkpoints.gguf import read_gguf
from checkpoints.gguf_config import gguf_config, gguf_tensors
from checkpoints.json_text import parse_json
from models.config import ModelConfig
from models.errors import InputError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
WANTED = ["*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "*.safetensors"]
UNWANTED = ["consolidated*", "original/*", "onnx/*"]  # second copies of the same weights

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def find_checkpoint(name: str, also_wanted: Sequence[str] = ()) -> Path:
    """The folder or `.gguf` file that `name` means: `smollm2-135m` (fetched once), a folder, a `.gguf` file, or a hub
    id `org/name` (fetched into the hub library's cache, with its token; `also_wanted`: files beside the
    usual ones).

    Raises InputError, saying what was tried, when there is nothing of that name or it cannot be fetched.
    """
    if name == DEMO_NAME:
        return demo_model()
    try:
        path = Path(name).expanduser()
        is_folder, is_file = bool(name) and path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long, a folder that may not be entered, a home unknown
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{name[:80]!r}: cannot be looked up ({reason}).") from error
    if is_folder:
        return path
    if is_file:
        if path.suffix == ".gguf":
            return path
        raise InputError(f"{name}: is a file, but not a .gguf file; give the folder that holds config.json.")
    is_hub_id = HUB_ID.fullmatch(name) and len(name) <= 96 and ".." not in name and "--" not in name
    if not is_hub_id or path.suffix in (".gguf", ".safetensors", ".json", ".bin"):
        raise InputError(
            f"{name!r}: there is no such folder or .gguf file here, and it is not a hub id (org/name); give one of "
            f"these, or {DEMO_NAME}."
        )
    return _fetch(name, also_wanted)


def _fetch(hub_id: str, also_wanted: Sequence[str]) -> Path:
    tried = f"{hub_id}: there is no such folder here, and on the Hugging Face hub the model"
    try:
        return Path(snapshot_download(hub_id, allow_patterns=[*WANTED, *also_wanted], ignore_patterns=UNWANTED))
    except hub_errors.GatedRepoError as error:
        raise InputError(
            f"{tried} is gated: accept its terms at https://huggingface.co/{hub_id}, then log in with `hf auth login`."
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise InputError(
            f"{tried} does not exist or is private: check the spelling, or log in with `hf auth login`."
        ) from error
    except (hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled) as error:
        raise InputError(
            f"{tried} cannot be reached and is not in the cache: check the connection (or HF_HUB_OFFLINE), or give a "
            "folder that holds it."
        ) from error
    except Exception as error:  # the hub library lets errors of several HTTP libraries through
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{tried} cannot be fetched: {reason[0][:200]}") from error


def read_config(path: Path) -> ModelConfig:
    """The config of a folder (its config.json) or of a GGUF file (its metadata).

    Raises InputError, naming file and field, for what is missing, damaged, or cannot be honoured.
    """
    if not path.is_dir():
        return gguf_config(read_gguf(path))
    file = path / "config.json"
    if not file.is_file():
        raise InputError(f"{path}: has no config.json; give the folder of a model in the Hugging Face layout.")
    return ModelConfig.from_hf(_read_json(file), str(file))


def read_generation_config(path: Path) -> dict[str, Any]:
    """generation_config.json of a folder; `{}` where there is none, and for a GGUF file."""
    file = path / "generation_config.json"
    return _read_json(file) if path.is_dir() and file.is_file() else {}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read as JSON ({error}); fetch it again.") from error
    if not isinstance(value, dict):
        raise InputError(f"{file}: expected a JSON object, found {type(value).__name__}.")
    return value


def load_weights(
    model: nn.Module, path: Path, config: ModelConfig, device: torch.device | str, dtype: torch.dtype
) -> None:
    """Give `model`, built on the meta device, its weights: every parameter on `device`, in `dtype`, without gradient.

    `path` is a folder or a GGUF file. Beyond the model itself it takes some tens of MB, whatever the checkpoint.
    Raises InputError, naming file and tensor, when files are missing or damaged, or do not hold exactly the tensors
    that the model has; the model is then left as it was, on meta.
    """
    if config.quantization is not None:
        raise InputError(
            f"{path}: quantization_config names {config.quantization!r}, and what is stored so is not read here; give "
            "the unquantized checkpoint."
        )
    fill_parameters(model, open_tensors(path, config), config, device, dtype, str(path))


def fill_parameters(
    model: nn.Module,
    stored: dict[str, StoredTensor],
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    source: str,
) -> None:
    """`load_weights` of the parameters that are still on meta, from `stored`, which belongs to the file `source`."""
    parameters = {name: p for name, p in model.named_parameters() if p.is_meta}
    spare_head = stored.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    pairs = match(stored, parameters, config, source)
    pairs.sort(key=lambda pair: (pair[0].path, pair[0].offset))  # disks like to be read forwards

    filled = {name: torch.empty(p.shape, dtype=dtype, device=device) for name, p in parameters.items()}
    for tensor, slot in pairs:
        tensor.copy_to(filled[slot.parameter][slot.index])
    if spare_head is not None and "embed_tokens.weight" in filled:
        _check_tied(spare_head, filled["embed_tokens.weight"])
    set_parameters(model, filled)


def set_parameters(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Make `values` the parameters of those names, without gradient."""
    for name, value in values.items():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, nn.Parameter(value, requires_grad=False))


def _check_tied(head: StoredTensor, embedding: Tensor) -> None:
    """A tied model may still carry its head, if it is the embedding again."""
    if head.shape != tuple(embedding.shape) or head.decode is None or not head.equals(embedding):
        raise InputError(
            f"{head.path}: tensor {head.name} differs from the embedding, but the config sets tie_word_embeddings; "
            "set that to false if the model has a head of its own."
        )


def open_tensors(path: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Where each tensor of a checkpoint lies, by its Hugging Face name without a leading "model.".

    Reads headers only. `rotary_emb.inv_freq`, which the config decides, is left out. Raises InputError, naming the
    file, when one is missing, damaged, or not what its name says.
    """
    return open_folder(path) if path.is_dir() else gguf_tensors(read_gguf(path), config)


def open_folder(path: Path) -> dict[str, StoredTensor]:
    """`open_tensors` of a folder, whose names need no config."""
    found: dict[str, StoredTensor] = {}
    for file in _safetensors_files(path):
        for tensor in _read_header(file):
            name = tensor.name.removeprefix("model.")
            if name.endswith("rotary_emb.inv_freq"):
                continue
            if name in found:
                raise InputError(f"{file}: tensor {tensor.name} is in {found[name].path.name} already.")
            found[name] = tensor
    _check_index(path, found)
    return found


def _safetensors_files(folder: Path) -> list[Path]:
    """`model.safetensors`, or the shards that the index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{index}: weight_map should map tensor names to files; fetch it again.")
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or re.search(r"[/\\:\0]", shard) or not shard.endswith(".safetensors"):
                raise InputError(
                    f"{index}: weight_map gives {shard!r} for {name}, expected the name of a .safetensors file here."
                )
        files = [folder / shard for shard in sorted(set(weight_map.values()))]
        for file in files:
            if not file.is_file():
                raise InputError(f"{file}: is missing, though weight_map in {index.name} names it; fetch it again.")
        return files
    if any(folder.glob("pytorch_model*.bin*")):  # or their index, which comes from the hub without them
        raise InputError(
            f"{folder}: has its weights in pytorch_model.bin only, a format that can run code; convert them to "
            "model.safetensors (transformers: from_pretrained, then save_pretrained)."
        )
    if ggufs := sorted(folder.glob("*.gguf")):
        raise InputError(f"{folder}: has no model.safetensors, but GGUF files; give one, such as {ggufs[0]}.")
    raise InputError(f"{folder}: has no weights, neither model.safetensors nor {index.name}.")


def _check_index(folder: Path, found: dict[str, StoredTensor]) -> None:
    """What the index promises must be where it says."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        return
    for name, shard in _read_json(index)["weight_map"].items():
        tensor = found.get(name.removeprefix("model."))
        if not name.endswith("rotary_emb.inv_freq") and (tensor is None or tensor.path.name != shard):
            raise InputError(f"{folder / shard}: does not hold {name}, though weight_map in {index.name} says so.")


def _read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file, whose header the safetensors library has found consistent with its size."""
    try:
        with safe_open(file, framework="pt"):  # checks lengths, offsets, overlaps, shapes; reads no tensor
            pass
        with open(file, "rb") as opened:
            n_bytes = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(n_bytes))
    except SafetensorError as error:
        raise InputError(
            f"{file}: is not a whole safetensors file ({error}); it is damaged or cut short, fetch it again."
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({error}).") from error
    header.pop("__metadata__", None)
    tensors = []
    for name, entry in header.items():
        dtype = FLOATS.get(entry["dtype"])
        decode, size = (float_decoder(dtype), dtype.itemsize) if dtype else (None, 1)
        offset, shape = 8 + n_bytes + entry["data_offsets"][0], tuple(entry["shape"])
        tensors.append(StoredTensor(file, name, shape, entry["dtype"], offset, 1, size, decode))
    return tensors
