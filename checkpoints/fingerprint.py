"""Which model a checkpoint holds, whatever precision it is stored in: what a draft head remembers of its target."""

import hashlib
from pathlib import Path

import torch

from checkpoints.checkpoint import open_tensors
from models.config import ModelConfig
from models.errors import InputError

SIZES = ("vocab_size", "hidden_size", "n_layers", "n_heads", "n_kv_heads", "head_dim")


def target_fingerprint(path: Path, config: ModelConfig) -> str:
    """SHA-256, in hex, over the sizes and the final norm of the checkpoint `path` (folder or GGUF file), whose config
    this is.

    The norm is read as fp32. Norms are small, so that no format quantizes them: a model in safetensors, in a GGUF file
    and in 4 bits has one fingerprint. Reads headers and that one tensor. Raises InputError, naming the file, where it
    is missing or damaged.
    """
    norm = open_tensors(path, config).get("norm.weight")
    if norm is None or norm.decode is None or norm.shape != (config.hidden_size,):
        raise InputError(f"{path}: should have a final norm of {config.hidden_size} floats (norm.weight).")
    values = torch.empty(config.hidden_size)
    norm.copy_to(values)
    sizes = ",".join(f"{name}={getattr(config, name)}" for name in SIZES)
    return hashlib.sha256(sizes.encode() + values.numpy().astype("<f4").tobytes()).hexdigest()
