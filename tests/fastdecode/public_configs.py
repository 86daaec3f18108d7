"""config.json of public models: the fields and spellings that were published.

Only sizes are small. Where a published file has a token's id, the token stands here, since a small vocabulary has
other ids; `published` puts the ids in.
"""

from collections.abc import Callable, Mapping
from typing import Any

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "use_cache": True,
}
LLAMA = {**SMALL, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
S_IDS = {"bos_token_id": "<s>", "eos_token_id": "</s>"}

LLAMA_2 = {
    **LLAMA,
    **S_IDS,
    "_name_or_path": "meta-llama/Llama-2-7b-chat-hf",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "torch_dtype": "float16",
    "transformers_version": "4.32.0.dev0",
}
VICUNA_1_3 = {
    **LLAMA,
    **S_IDS,
    "_name_or_path": "vicuna-7b-v1.3",
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
}
VICUNA_1_5 = {
    **LLAMA,
    **S_IDS,
    "_name_or_path": "vicuna-7b-v1.5",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0",
}
LLAMA_3 = {
    **LLAMA,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": "<|begin_of_text|>",
    "eos_token_id": "<|eot_id|>",
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
}
LLAMA_3_1 = {
    **LLAMA_3,
    "eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "transformers_version": "4.42.3",
}
LLAMA_3_2 = {
    **LLAMA_3_1,
    "head_dim": 64,
    "rope_scaling": {**LLAMA_3_1["rope_scaling"], "factor": 32.0},
    "tie_word_embeddings": True,
    "transformers_version": "4.45.0.dev0",
}
R1_LLAMA = {
    **LLAMA_3_1,
    "bos_token_id": "<｜begin▁of▁sentence｜>",
    "eos_token_id": "<｜end▁of▁sentence｜>",
    "transformers_version": "4.43.0.dev0",
}
MISTRAL_0_1 = {
    **SMALL,
    **S_IDS,
    "architectures": ["MistralForCausalLM"],
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
}
MISTRAL_0_2 = {
    **MISTRAL_0_1,
    "attention_dropout": 0.0,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "transformers_version": "4.36.0",
}
MISTRAL_0_3 = {**MISTRAL_0_2, "transformers_version": "4.42.0.dev0"}
MIXTRAL = {
    **MISTRAL_0_2,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "transformers_version": "4.36.0.dev0",
}
QWEN_2_5 = {
    **SMALL,
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": "<|endoftext|>",
    "eos_token_id": "<|im_end|>",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_sliding_window": False,
}
QWEN_2 = {**QWEN_2_5, "transformers_version": "4.41.2"}
QWEN_2_5_TIED = {**QWEN_2_5, "max_window_layers": 21, "sliding_window": 32768, "tie_word_embeddings": True}
R1_QWEN = {
    **QWEN_2_5,
    "bos_token_id": "<｜end▁of▁sentence｜>",
    "eos_token_id": "<｜end▁of▁sentence｜>",
    "max_position_embeddings": 131072,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "transformers_version": "4.44.0",
    "use_mrope": False,
}
QWEN_3 = {
    **SMALL,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": "<|endoftext|>",
    "eos_token_id": "<|im_end|>",
    "head_dim": 128,
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_sliding_window": False,
}
QWEN_3_TIED = {**QWEN_3, "max_window_layers": 28, "tie_word_embeddings": True}
QWEN_3_MOE = {
    **QWEN_3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "rope_theta": 1000000.0,
}
SMOLLM2 = {
    **LLAMA,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": "<|im_start|>",
    "eos_token_id": "<|im_end|>",
    "hidden_size": 288,
    "initializer_range": 0.041666666666666664,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "pad_token_id": "<|im_end|>",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
}
SMOLLM2_BIG = {
    **{name: value for name, value in SMOLLM2.items() if name not in ("is_llama_config", "rope_interleaved")},
    "hidden_size": 64,
    "initializer_range": 0.02,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rope_theta": 130000,
}
TINYLLAMA = {
    **LLAMA,
    **S_IDS,
    "attention_bias": False,
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.35.0",
}


def published(config: Mapping[str, Any], id_of: Callable[[str], int | None]) -> dict[str, Any]:
    """`config` with ids in place of the tokens in its `…_token_id` fields. Raises ValueError for an unknown token."""

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(item) for item in value]
        found = id_of(value) if isinstance(value, str) else value
        if found is None:
            raise ValueError(f"no token {value!r}")
        return found

    return {name: resolved(v) if name.endswith("_token_id") else v for name, v in config.items()}
