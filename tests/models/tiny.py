"""Tiny random models of every supported family, made by the reference library, saved as users' checkpoints are."""

import json
from pathlib import Path

import torch
import transformers

SIZES = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-9-heads-on-3": ("Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "llama-head-dim": ("Llama", {"head_dim": 16}),
    "rope-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "rope-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    "rope-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "rope-yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "rope-yarn-mscale": ("Llama", {"rope_parameters": {**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 0.5}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 20}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-biased": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
}


def reference_model(family: str, seed: int = 0, **changes):
    """A random fp32 model of the reference library, biases and norms random too, so that nothing hides at 0 or 1."""
    kind, settings = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def save_checkpoint(model, folder: Path, shard_size: str = "5GB") -> Path:
    """Save as published checkpoints are; a small `shard_size` gives many shards and an index."""
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def old_spelling(folder: Path) -> None:
    """Rewrite config.json with `rope_theta` and `rope_scaling`, as files from before 2026 have them."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    file.write_text(json.dumps(config))
