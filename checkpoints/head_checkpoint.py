"""EAGLE heads on disk: read their config, check it against the target, load their weights.

A head is a folder with config.json and either model.safetensors (or shards) or, as many published ones, a
pytorch_model.bin, which is read as tensors and nothing else (`weights_only`). Names of SafeAILab/EAGLE and SpecForge
(`midlayer.*`) and of vLLM speculators (`layers.0.*`) mean the same parameters.
"""

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from checkpoints.checkpoint import open_folder, set_parameters
from checkpoints.fuse import StoredTensor, match
from checkpoints.json_text import parse_json
from models.eagle import DraftHead, Eagle3Head, EagleHead, TiedHead
from models.errors import InputError
from models.head_config import HeadConfig
from models.layers import Linear
from models.transformer import Transformer

PICKLE = "pytorch_model.bin"
BORROWED = ("embed_tokens", "lm_head")  # what a head may lack and its target has


@dataclass(frozen=True)
class PickledTensor:
    """A tensor of a pytorch_model.bin, with the face of a StoredTensor."""

    path: Path
    name: str
    value: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> str:
        return str(self.value.dtype).removeprefix("torch.")

    @property
    def decode(self) -> bool | None:
        return True if self.value.is_floating_point() else None

    def copy_to(self, target: Tensor) -> None:
        """Fill `target`. Raises InputError when float16 cannot hold a number."""
        target.copy_(self.value)
        if target.dtype == torch.float16 and not target.isfinite().all():
            raise InputError(
                f"{self.path}: tensor {self.name} has numbers that float16 cannot hold; use bfloat16 or float32."
            )

    def equals(self, target: Tensor) -> bool:
        """Whether `target` is what copy_to would make it."""
        return torch.equal(self.value.to(target.device, target.dtype), target)


Stored = dict[str, StoredTensor | PickledTensor]


def read_head_config(folder: Path) -> HeadConfig:
    """The config of the head in `folder`; reads no weights. Raises InputError, naming file and field."""
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{folder}: has no config.json; give the folder of a draft head.")
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read as JSON ({error}); fetch it again.") from error
    return HeadConfig.from_json(config, str(file))


def holds_head(folder: Path) -> bool:
    """Whether `folder` holds a draft head rather than a small model: only a head has an `fc`.

    An EAGLE-1 head's config.json looks like a model's, so the names of its tensors decide. Raises InputError when
    the weights cannot be read.
    """
    return folder.is_dir() and "fc.weight" in tensors_of(folder)


def load_head(
    folder: Path,
    config: HeadConfig,
    target: Transformer,
    dtype: torch.dtype | None = None,
    stored: Stored | None = None,
) -> DraftHead:
    """The head in `folder`, in `dtype` (None: the target's), where the target is; no gradients. `stored`: its tensors
    by the names in its files, where something else has opened them.

    `config`: what read_head_config returned, fitted to the target's config. An embedding or lm_head that the checkpoint
    lacks is the target's own (of lm_head, the drafted rows), and an embedding equal to the target's is shared with it.
    Raises InputError, naming file and tensor, when files are missing or damaged, when they do not hold exactly what the
    config says, when the maps between the vocabularies contradict each other, and when a missing part has another width
    than the target's.
    """
    stored = renamed_tensors(tensors_of(folder) if stored is None else stored, config, folder)
    drafted = drafted_ids(stored, config, folder)
    with torch.device("meta"):
        head = (Eagle3Head if config.kind == "eagle3" else EagleHead)(config)
    place, dtype = target.norm.weight.device, dtype or target.norm.weight.dtype
    if drafted is not None:
        head.drafted = drafted.to(place)
    _borrow(head, stored, target, folder, dtype)

    missing = [part for part in BORROWED if f"{part}.weight" not in stored]
    parameters = {name: p for name, p in head.named_parameters() if name.partition(".")[0] not in missing}
    pairs = match(stored, parameters, config.layer, str(folder))
    filled = {name: torch.empty(p.shape, dtype=dtype, device=place) for name, p in parameters.items()}
    for tensor, slot in pairs:
        tensor.copy_to(filled[slot.parameter][slot.index])
    set_parameters(head, filled)
    return head.eval()


def _borrow(head: DraftHead, stored: Stored, target: Transformer, folder: Path, dtype: torch.dtype) -> None:
    """Take from the target what the checkpoint lacks, and an embedding that is the target's anyway."""
    embedding, own = target.embed_tokens, stored.get("embed_tokens.weight")
    if own is not None and isinstance(embedding, nn.Embedding) and embedding.weight.dtype == dtype:
        same_shape = own.decode is not None and tuple(own.shape) == tuple(embedding.weight.shape)
        if same_shape and own.equals(embedding.weight):
            del stored["embed_tokens.weight"]
    width, target_width = head.config.layer.hidden_size, target.config.hidden_size
    for part in BORROWED:
        if f"{part}.weight" not in stored and width != target_width:
            raise InputError(
                f"{folder}: has no {part}.weight, and the target's is {target_width} wide where the head is {width}; "
                "give a head that has its own."
            )
    if "embed_tokens.weight" not in stored:
        head.embed_tokens = embedding
    if "lm_head.weight" in stored:
        return
    tied = target.config.tie_word_embeddings
    if head.drafted is None:
        head.lm_head = TiedHead(embedding) if tied else target.lm_head
        return
    if tied:
        rows = embedding(head.drafted)
    elif isinstance(target.lm_head, nn.Linear):
        rows = target.lm_head.weight[head.drafted]
    else:
        rows = target.lm_head.dequantize()[head.drafted].to(dtype)
    head.lm_head = Linear(width, head.config.draft_vocab_size, bias=False, device="meta")
    head.lm_head.weight = nn.Parameter(rows, requires_grad=False)


def drafted_ids(stored: Stored, config: HeadConfig, folder: Path) -> Tensor | None:
    """Takes d2t and t2d out of `stored`; the target's id of each drafted id, int64 `[draft_vocab]`; None: the same ids.

    d2t holds offsets: target id = draft id + d2t[draft id]. t2d marks the target ids that are drafted, in that order.
    """
    d2t, t2d = stored.pop("d2t", None), stored.pop("t2d", None)
    n_drafted, n_target = config.draft_vocab_size, config.layer.vocab_size
    if n_drafted == n_target:
        return None  # files may still carry the maps, and then often unfilled
    if d2t is None:
        raise InputError(
            f"{folder}: the head drafts {n_drafted} of the target's {n_target} ids, but has no d2t that says which; "
            "fetch it again."
        )
    offsets = tensor_values(d2t)
    if tuple(offsets.shape) != (n_drafted,) or offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise InputError(
            f"{d2t.path}: d2t is {d2t.dtype} {list(d2t.shape)}, expected {n_drafted} whole numbers (draft_vocab_size)."
        )
    ids = offsets.long() + torch.arange(n_drafted)
    if ids[0] < 0 or ids[-1] >= n_target or (ids.diff() <= 0).any():
        raise InputError(
            f"{d2t.path}: d2t gives target ids from {int(ids.min())} to {int(ids.max())}, expected {n_drafted} "
            f"ascending ids below the vocabulary of {n_target}; this head is damaged."
        )
    if t2d is None:
        return ids
    marks = tensor_values(t2d)
    if tuple(marks.shape) != (n_target,):
        raise InputError(f"{t2d.path}: t2d has shape {list(t2d.shape)}, expected [{n_target}] (vocab_size).")
    marked = marks.nonzero()[:, 0]
    if not torch.equal(marked, ids):
        n_common = int(torch.isin(marked, ids).sum())
        raise InputError(
            f"{t2d.path}: t2d marks {len(marked)} target ids and d2t gives {n_drafted}, of which {n_common} are the "
            "same; they should all be, so this head is damaged."
        )
    return ids


def tensor_values(tensor: StoredTensor | PickledTensor) -> Tensor:
    """A small tensor of any dtype, on the CPU."""
    if isinstance(tensor, PickledTensor):
        return tensor.value
    with safe_open(tensor.path, framework="pt") as file:
        return file.get_tensor(tensor.name)


def tensors_of(folder: Path) -> Stored:
    """The tensors of a folder by the names in its files; reads no data."""
    has_safetensors = any(folder.glob("*.safetensors*"))
    return _unpickle(folder / PICKLE) if (folder / PICKLE).is_file() and not has_safetensors else open_folder(folder)


def open_head(folder: Path, config: HeadConfig) -> Stored:
    """The tensors of a head by the names of its parameters; reads no data. Raises InputError."""
    return renamed_tensors(tensors_of(folder), config, folder)


def renamed_tensors(found: Stored, config: HeadConfig, folder: Path) -> Stored:
    """The tensors of a checkpoint by the names of the parameters here."""
    kind = "eagle3" if any(name.startswith("midlayer.") for name in found) else config.kind
    if kind != config.kind:
        raise InputError(
            f"{folder}: midlayer tensors make this an EAGLE-3 head, but config.json has none of draft_vocab_size, "
            "target_hidden_size and eagle_config; add draft_vocab_size."
        )
    renamed = {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in found.items()}
    if len(renamed) < len(found):
        raise InputError(f"{folder}: has midlayer tensors and layers.0 tensors, expected one of the two.")
    return renamed


def _is_plain(value: Any) -> bool:
    """Whether this is a tensor with numbers that can be copied: not sparse, quantized or without memory."""
    is_strided = isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    return is_strided and not value.is_quantized


def _unpickle(file: Path) -> Stored:
    """Tensors of a pickle; anything else in it is refused before it could run."""
    try:
        try:
            values = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before torch 1.6 cannot be mapped
            values = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{file}: holds more than tensors, or is damaged, and is not opened; give a head in safetensors."
        ) from error
    except Exception as error:  # of a damaged file: whatever the unpickler stumbles over
        raise InputError(f"{file}: cannot be read as tensors ({type(error).__name__}); fetch it again.") from error
    if not isinstance(values, Mapping) or not all(
        isinstance(name, str) and _is_plain(value) for name, value in values.items()
    ):
        raise InputError(f"{file}: should hold names and tensors, none sparse or quantized.")
    found = {name.removeprefix("model."): PickledTensor(file, name, value) for name, value in values.items()}
    return {name: tensor for name, tensor in found.items() if not name.endswith("rotary_emb.inv_freq")}
