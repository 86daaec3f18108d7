"""The config.json that a GGUF file would have as a folder."""

from pathlib import Path
from typing import Any

import torch

from checkpoints.gguf import read_gguf
from checkpoints.gguf_config import gguf_config, hf_fields
from models.config import FAMILIES, ModelConfig, RopeConfig
from models.errors import InputError
from models.rope import inverse_frequencies

LLAMA3_LENGTH = 8192  # what Llama 3's models were trained on before their context was stretched


def hf_config(path: Path) -> dict[str, Any]:
    """Fields of config.json for a GGUF file: `ModelConfig.from_hf` reads what `read_config` finds in the file itself.

    Llama 3's frequency factors, a tensor in the file, become the rope schedule that they were made by. Raises
    InputError where they were made by no such schedule.
    """
    file = read_gguf(path)
    config = gguf_config(file)
    family = config.model_type
    fields = {"architectures": [FAMILIES[family][0]], "hidden_act": "silu", **hf_fields(file)}
    if config.n_experts and family != "mixtral":
        fields["num_experts"] = config.n_experts
    if config.rope.freq_factors:
        fields["rope_scaling"] = _llama3(config, path)
    return fields


def _llama3(config: ModelConfig, path: Path) -> dict[str, Any]:
    """The schedule whose factors these are, to fp32's rounding."""
    found = torch.tensor(config.rope.freq_factors)
    plain = inverse_frequencies(RopeConfig(theta=config.rope.theta), config.head_dim, 1)
    factor = round(found.max().item(), 4)
    rope = RopeConfig("llama3", config.rope.theta, factor, LLAMA3_LENGTH, low_freq_factor=1.0, high_freq_factor=4.0)
    made = plain / inverse_frequencies(rope, config.head_dim, 1)
    if config.rope.kind != "default" or not torch.allclose(found, made, rtol=1e-4):
        raise InputError(
            f"{path}: its rope_freqs.weight is no schedule that config.json can name; give the original checkpoint."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": LLAMA3_LENGTH,
    }
