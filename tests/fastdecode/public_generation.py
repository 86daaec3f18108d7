"""generation_config.json of public models, with tokens in place of their ids, as in public_configs.py."""

from public_configs import S_IDS

PLAIN_GENERATION = {"_from_model_config": True, **S_IDS, "transformers_version": "4.34.0.dev0"}
LLAMA_2_GENERATION = {
    **S_IDS,
    "do_sample": True,
    "max_length": 4096,
    "pad_token_id": 0,
    "temperature": 0.6,
    "top_p": 0.9,
    "transformers_version": "4.32.0.dev0",
}
VICUNA_GENERATION = {**PLAIN_GENERATION, "max_length": 4096, "pad_token_id": 0, "temperature": 0.9, "top_p": 0.6}
LLAMA_3_GENERATION = {
    "bos_token_id": "<|begin_of_text|>",
    "do_sample": True,
    "eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    "temperature": 0.6,
    "top_p": 0.9,
    "transformers_version": "4.42.3",
}
LLAMA_3_0_GENERATION = {
    **LLAMA_3_GENERATION,
    "eos_token_id": ["<|end_of_text|>", "<|eot_id|>"],
    "max_length": 4096,
    "transformers_version": "4.40.0.dev0",
}
QWEN_GENERATION = {
    "bos_token_id": "<|endoftext|>",
    "do_sample": True,
    "eos_token_id": ["<|im_end|>", "<|endoftext|>"],
    "pad_token_id": "<|endoftext|>",
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "transformers_version": "4.37.0",
}
SMOLLM2_GENERATION = {
    "_from_model_config": True,
    "bos_token_id": "<|im_start|>",
    "eos_token_id": "<|im_end|>",
    "pad_token_id": "<|im_end|>",
    "transformers_version": "4.42.3",
}
R1_GENERATION = {
    "_from_model_config": True,
    "bos_token_id": "<｜begin▁of▁sentence｜>",
    "do_sample": True,
    "eos_token_id": "<｜end▁of▁sentence｜>",
    "temperature": 0.6,
    "top_p": 0.95,
    "transformers_version": "4.39.3",
}
