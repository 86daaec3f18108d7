"""What a GGUF file's metadata and tensor names mean in Hugging Face terms.

Follows llama.cpp's conventions for the llama (also Mistral and Mixtral), qwen2, qwen3 and qwen3moe architectures.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from checkpoints.fuse import StoredTensor
from checkpoints.gguf import GGUFFile
from models.config import ModelConfig
from models.errors import InputError

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}  # architecture -> model_type

TOP_LEVEL = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
STACKED = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
}


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The metadata as config.json would say it, through the same checks (ModelConfig.from_hf).

    Raises InputError, naming file and field, for an architecture or a value that cannot be honoured.
    """
    config = ModelConfig.from_hf(hf_fields(file), f"{file.path} (metadata)")
    factors = file.tensors.get("rope_freqs.weight")
    if factors is None:
        return config
    if factors.shape != (config.head_dim // 2,) or factors.dtype != "F32":
        raise InputError(
            f"{file.path}: tensor rope_freqs.weight should be F32 [{config.head_dim // 2}], half of head_dim, found "
            f"{factors.dtype} {list(factors.shape)}."
        )
    values = torch.empty(factors.shape)
    factors.copy_to(values)
    if not (values.isfinite() & (values > 0)).all():
        raise InputError(f"{file.path}: tensor rope_freqs.weight should hold finite numbers above 0.")
    return replace(config, rope=replace(config.rope, freq_factors=tuple(values.tolist())))


class _Metadata:
    """Typed access to one architecture's keys; every complaint names the file and the key."""

    def __init__(self, file: GGUFFile):
        self.path, self.metadata = file.path, file.metadata
        self.architecture = file.metadata.get("general.architecture")
        if not isinstance(self.architecture, str) or self.architecture not in FAMILIES:
            raise self.fail("general.architecture", f"one of {', '.join(FAMILIES)}")

    def fail(self, key: str, expected: str) -> InputError:
        found = repr(self.metadata[key])[:80] if key in self.metadata else "nothing"
        return InputError(f"{self.path}: {key} should be {expected}, found {found}.")

    def size(self, key: str, default: int | None = None) -> int:
        key = f"{self.architecture}.{key}"
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(key, "a whole number above 0")
        return value

    def number(self, key: str, default: float | None) -> float | None:
        key = f"{self.architecture}.{key}"
        value = self.metadata.get(key, default)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
        ):
            raise self.fail(key, "a finite number")
        return value

    def neutral(self, key: str, *values: float) -> None:
        if self.number(key, values[0]) not in values:
            raise self.fail(f"{self.architecture}.{key}", f"{values[0]:g}: the model needs an operation not built")


def hf_fields(file: GGUFFile) -> dict[str, Any]:
    """config.json's fields for these metadata. Raises InputError for what is missing or not supported."""
    metadata = _Metadata(file)
    architecture, tensors = metadata.architecture, file.tensors
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise InputError(f"{file.path}: is one part of several; join them with llama.cpp's llama-gguf-split --merge.")
    for key in ("logit_scale", "embedding_scale", "residual_scale", "expert_weights_scale"):
        metadata.neutral(key, 1, 0)
    metadata.neutral("attention.scale", 0)
    metadata.neutral("expert_shared_count", 0)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise InputError(f"{file.path}: tensor token_embd.weight is missing, and the model needs it.")
    hidden_size, n_heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    head_dim = metadata.size("attention.key_length", max(1, hidden_size // n_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.size(key, head_dim) != head_dim:
            raise metadata.fail(f"{architecture}.{key}", f"the head's size, {head_dim}")
    n_layers = metadata.size("block_count")
    if f"blk.{n_layers - 1}.attn_norm.weight" not in tensors:
        raise metadata.fail(f"{architecture}.block_count", "the number of layers in the file")
    stops = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    fields = {
        "model_type": FAMILIES[architecture],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", None),
        "max_position_embeddings": metadata.size("context_length"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [stop for i, stop in enumerate(stops) if stop is not None and stop not in stops[:i]],
    }
    window = metadata.number("attention.sliding_window", 0) or None
    if architecture == "llama":
        if metadata.number("expert_count", 0):
            fields["model_type"] = "mixtral"
        elif window:
            fields["model_type"] = "mistral"
        fields["sliding_window"] = window
    elif window:
        raise metadata.fail(f"{architecture}.attention.sliding_window", "absent: windows are built for llama only")
    if fields["model_type"] in ("mixtral", "qwen3_moe"):
        fields["num_local_experts"] = metadata.size("expert_count")
        fields["num_experts_per_tok"] = metadata.size("expert_used_count")
    if architecture == "qwen3moe":
        fields["moe_intermediate_size"] = metadata.size("expert_feed_forward_length")
        fields["norm_topk_prob"] = file.metadata.get("qwen3moe.expert_weights_norm", True)  # llama.cpp always does
    return fields


def _rope_scaling(metadata: _Metadata) -> dict[str, Any] | None:
    """config.json's rope_scaling. A factor without a type is linear, as it is to llama.cpp."""
    kind = metadata.metadata.get(f"{metadata.architecture}.rope.scaling.type", "linear")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", None))
    if kind == "none" or not factor or factor == 1:
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        metadata.neutral("rope.scaling.yarn_ext_factor", 1)
        metadata.neutral("rope.scaling.yarn_log_multiplier", 0)
        scaling["original_max_position_embeddings"] = metadata.number("rope.scaling.original_context_length", None)
        scaling["beta_fast"] = metadata.number("rope.scaling.yarn_beta_fast", None)
        scaling["beta_slow"] = metadata.number("rope.scaling.yarn_beta_slow", None)
        attention = metadata.number("rope.scaling.attn_factor", 1) * metadata.number("rope.scaling.yarn_attn_factor", 1)
        if attention != 1 and factor > 1:  # llama.cpp multiplies it with YaRN's own 0.1 ln f + 1
            scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
    return scaling


def gguf_tensors(file: GGUFFile, config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors under Hugging Face names (no leading "model."), q and k of the llama architecture marked as
    interleaved. Names that have no equivalent stay as they are; rope_freqs.weight, part of the config, is left out.
    """
    interleaved = {}
    if file.metadata.get("general.architecture") == "llama":
        interleaved = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}
    found = {}
    for name, tensor in file.tensors.items():
        if name == "rope_freqs.weight":
            continue
        found[_hf_name(name)] = tensor
        parts = name.split(".")
        if len(parts) == 4 and parts[2] in interleaved:
            found[_hf_name(name)] = replace(tensor, head_pairs=interleaved[parts[2]])
    return found


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in TOP_LEVEL:
        return f"{TOP_LEVEL[parts[0]]}.{parts[1]}"
    if parts[0] != "blk" or len(parts) < 4:
        return name
    layer, kind, rest = parts[1], parts[2], parts[3:]
    if kind in STACKED and rest == ["weight"]:
        return f"layers.{layer}.{STACKED[kind]}"
    if kind in ("ffn_gate", "ffn_up", "ffn_down") and len(rest) == 2:  # one tensor an expert, as older files have it
        return f"layers.{layer}.mlp.experts.{rest[0]}.{kind.removeprefix('ffn_')}_proj.{rest[1]}"
    if kind in IN_LAYER and len(rest) == 1:
        return f"layers.{layer}.{IN_LAYER[kind]}.{rest[0]}"
    return name
