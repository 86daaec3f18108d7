"""Draft heads in the layouts of public ones: their config.json, their tensors' names, random numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from golden_files import write_head
from public_configs import LLAMA, LLAMA_2, MIXTRAL, QWEN_2, QWEN_3, S_IDS, VICUNA_1_3, published

DRAFTED = 200  # tokens of a draft vocabulary

LLAMA_3_HEAD = {
    **LLAMA,
    "bos_token_id": "<|begin_of_text|>",
    "eos_token_id": "<|end_of_text|>",
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
}
R1_IDS = {"bos_token_id": "<｜begin▁of▁sentence｜>", "eos_token_id": "<｜end▁of▁sentence｜>"}
QWEN_3_HEAD = {
    **QWEN_3,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "draft_vocab_size": DRAFTED,
}
# vLLM speculators write out every field of the layer's config class.
SPECULATORS_LAYER = {
    **{name: value for name, value in LLAMA_3_HEAD.items() if name not in ("bos_token_id", "eos_token_id")},
    "_name_or_path": "",
    "add_cross_attention": False,
    "architectures": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "chunk_size_feed_forward": 0,
    "head_dim": 16,
    "is_decoder": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_hidden_layers": 1,
    "pad_token_id": None,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "top_k": 50,
    "torch_dtype": "bfloat16",
    "torchscript": False,
    "use_bfloat16": False,
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": DRAFTED,
    "has_no_defaults_at_init": False,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5, "accept_tolerance": 0.0}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0.dev42",
    "target_hidden_size": None,
    "torch_dtype": "bfloat16",
    "transformer_layer_config": SPECULATORS_LAYER,
    "transformers_version": "4.55.2",
}


@dataclass(frozen=True)
class PublicHead:
    """`kind`: eagle1, eagle3 or speculators; `file`: bin or safetensors."""

    name: str
    kind: str
    config: dict[str, Any]
    file: str = "bin"
    embedding: bool = True  # carries embed_tokens


LLAMA_2_HEAD = PublicHead("EAGLE-llama2-chat-7B", "eagle1", LLAMA_2)
VICUNA_HEAD = PublicHead("EAGLE-Vicuna-7B-v1.3", "eagle1", VICUNA_1_3)
LLAMA_3_EAGLE1 = PublicHead(
    "EAGLE-LLaMA3-Instruct-8B", "eagle1", {**LLAMA_3_HEAD, "rope_theta": 500000.0, "bias": False}
)
MIXTRAL_HEAD = PublicHead("EAGLE-mixtral-instruct-8x7B", "eagle1", MIXTRAL)
QWEN_2_HEAD = PublicHead("EAGLE-Qwen2-7B-Instruct", "eagle1", {**QWEN_2, "qkv_bias": True})
LLAMA_3_EAGLE3 = PublicHead(
    "EAGLE3-LLaMA3.1-Instruct-8B", "eagle3", {**LLAMA_3_HEAD, "draft_vocab_size": DRAFTED}, embedding=False
)
VICUNA_EAGLE3 = PublicHead(
    "EAGLE3-Vicuna1.3-13B",
    "eagle3",
    {**LLAMA_3_HEAD, **S_IDS, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "draft_vocab_size": None},
    embedding=False,
)
R1_EAGLE3 = PublicHead(
    "EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
    "eagle3",
    {**LLAMA_3_HEAD, **R1_IDS, "draft_vocab_size": DRAFTED},
    embedding=False,
)
ANGELSLIM = PublicHead("AngelSlim/Qwen3-8B_eagle3", "eagle3", QWEN_3_HEAD, embedding=False)
SPECFORGE = PublicHead(
    "SGLang-EAGLE3-Qwen3-30B-A3B",
    "eagle3",
    {**QWEN_3_HEAD, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}},
    "safetensors",
)
RED_HAT = PublicHead("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", "speculators", SPECULATORS, "safetensors")


def write_public_head(folder: Path, head: PublicHead, vocab_size: int, id_of) -> Path:
    """A random head in `head`'s layout for a target of `vocab_size` ids, whose tokens have the ids `id_of`."""
    config = published(head.config, id_of)
    layer = config.get("transformer_layer_config", config)
    config = {**config, "transformer_layer_config": {**layer, "vocab_size": vocab_size}} if layer is not config else {
        **config, "num_hidden_layers": 1, "vocab_size": vocab_size
    }  # fmt: skip
    if head.kind == "eagle3" and config["draft_vocab_size"] is None:
        config["draft_vocab_size"] = vocab_size
    layer = config.get("transformer_layer_config", config)
    tensors = _eagle1(layer) if head.kind == "eagle1" else _eagle3(layer, config["draft_vocab_size"], head)
    if head.embedding:
        tensors["embed_tokens.weight"] = (vocab_size, layer["hidden_size"])
    torch.manual_seed(3)
    weights = {name: _random(name, shape, layer["torch_dtype"]) for name, shape in tensors.items()}
    if head.kind != "eagle1":
        weights |= _maps(vocab_size, config["draft_vocab_size"])
    if head.file == "bin":  # older pickles carry a buffer beside the parameters
        prefix = "layers.0" if head.kind == "eagle1" else "midlayer"
        weights[f"{prefix}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    return write_head(folder, config, weights, head.file)


def _random(name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    numbers = torch.rand(shape) + 0.5 if "norm" in name else torch.randn(shape) * 0.3
    return numbers.to(getattr(torch, dtype))


def _maps(vocab_size: int, n_drafted: int) -> dict[str, torch.Tensor]:
    ids = torch.randperm(vocab_size)[:n_drafted].sort().values
    marks = torch.zeros(vocab_size, dtype=torch.bool)
    marks[ids] = True
    return {"d2t": ids - torch.arange(n_drafted), "t2d": marks}


def _layer(prefix: str, layer: dict[str, Any], inputs: int) -> dict[str, tuple[int, ...]]:
    width, inner, heads = layer["hidden_size"], layer["intermediate_size"], layer["num_attention_heads"]
    size = layer.get("head_dim", width // heads)
    rows = {"q": heads * size, "k": layer.get("num_key_value_heads", heads) * size}
    rows["v"] = rows["k"]
    found = {f"{prefix}.self_attn.{part}_proj.weight": (n, inputs) for part, n in rows.items()}
    if layer.get("qkv_bias"):
        found |= {f"{prefix}.self_attn.{part}_proj.bias": (n,) for part, n in rows.items()}
    return found | {
        f"{prefix}.self_attn.o_proj.weight": (width, rows["q"]),
        f"{prefix}.mlp.gate_proj.weight": (inner, width),
        f"{prefix}.mlp.up_proj.weight": (inner, width),
        f"{prefix}.mlp.down_proj.weight": (width, inner),
        f"{prefix}.post_attention_layernorm.weight": (width,),
    }


def _eagle1(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width = config["hidden_size"]
    bias = {"fc.bias": (width,)} if config.get("bias", True) else {}
    return _layer("layers.0", config, width) | {"fc.weight": (width, 2 * width)} | bias


def _eagle3(layer: dict[str, Any], n_drafted: int, head: PublicHead) -> dict[str, tuple[int, ...]]:
    width, prefix = layer["hidden_size"], "midlayer" if head.kind == "eagle3" else "layers.0"
    return _layer(prefix, layer, 2 * width) | {
        "fc.weight": (width, 3 * width),
        f"{prefix}.hidden_norm.weight": (width,),
        f"{prefix}.input_layernorm.weight": (width,),
        "norm.weight": (width,),
        "lm_head.weight": (n_drafted, width),
    }
