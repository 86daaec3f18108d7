"""config.json of models, heads and quantized checkpoints: whatever it says, it is honoured or refused in a sentence."""

import json

import pytest
from hypothesis import given
from mutations import as_text, documents, inputs, nested, tally, texts_of  # noqa: F401 - a fixture

from checkpoints.checkpoint import read_config
from checkpoints.head_checkpoint import read_head_config
from models.errors import InputError
from models.head_config import HeadConfig
from models.rope import inverse_frequencies
from quantize.files import is_ours, stored_quantization
from quantize.importers import read_quantization

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "hidden_act": "silu", "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 64},
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": [2, 3],
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4, "mscale": 0.8,
        "mscale_all_dim": 0.5, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 20,
                "rope_scaling": None, "rope_parameters": YARN},
    "qwen2": {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True,
              "sliding_window": 20, "max_window_layers": 1, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "qwen3_moe": {**LLAMA, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
                  "decoder_sparse_step": 2, "mlp_only_layers": [0], "rope_scaling": {"type": "linear", "factor": 2},
                  "layer_types": ["full_attention"] * 3},
}  # fmt: skip
HEADS = {
    "eagle1": {**LLAMA, "num_hidden_layers": 1, "bias": True, "rope_scaling": None},
    "eagle3": {**LLAMA, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 50,
               "target_hidden_size": 48, "norm_output": True, "qkv_bias": False,
               "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
    "speculators": {"speculators_model_type": "eagle3", "transformer_layer_config": {**LLAMA, "num_hidden_layers": 1},
                    "draft_vocab_size": 50, "target_hidden_size": 48, "norm_before_residual": True, "fc_norm": False,
                    "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}  # fmt: skip
QUANTIZED = {
    "ours": {"quant_method": "fastdecode", "version": 1, "bits": 4, "group_size": 32, "method": "als"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
             "checkpoint_format": "gptq", "meta": {"quantizer": ["gptqmodel:2"]}, "dynamic": {"-:lm_head": {}}},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": ["lm_head"]},
    "compressed": {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
                   "quantization_status": "compressed", "config_groups": {"group_0": {"weights": {
                       "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128,
                       "actorder": None}, "input_activations": None}}},
}  # fmt: skip


@pytest.mark.parametrize("family", MODELS)
def test_a_models_config(tmp_path, tally, family):  # noqa: F811
    @inputs(300)
    @given(texts_of(MODELS[family]))
    def run(text):
        def read():
            config = read_config(tmp_path)
            inverse_frequencies(config.rope, min(config.head_dim, 512), 512)

        (tmp_path / "config.json").write_bytes(text)
        tally.check(read)

    run()


@pytest.mark.parametrize("layout", HEADS)
def test_a_heads_config(tmp_path, tally, layout):  # noqa: F811
    @inputs(300)
    @given(texts_of(HEADS[layout]))
    def run(text):
        def read():
            config = read_head_config(tmp_path).with_rope_theta(5e5)
            config.fitted_to(target, "head")

        (tmp_path / "config.json").write_bytes(text)
        tally.check(read)

    target = HeadConfig.from_json({**LLAMA, "num_hidden_layers": 6}).layer
    run()


@pytest.mark.parametrize("method", QUANTIZED)
def test_what_a_config_says_of_its_quantization(tmp_path, tally, method):  # noqa: F811
    @inputs(150)
    @given(documents(QUANTIZED[method]))
    def run(document):
        def read():
            is_ours(tmp_path)
            if stored_quantization(config) is None and read_config(tmp_path).quantization is not None:
                read_quantization(config, "config.json")

        config = {**LLAMA, "quantization_config": document}
        (tmp_path / "config.json").write_text(json.dumps(config))
        tally.check(read)

    run()


def test_values_nested_to_any_depth(tmp_path):
    """Python's stack ends somewhere: while reading, while checking, while showing the value in a message, or never."""
    for depth in (*range(1, 120), *range(120, 1100, 7), 10_000):
        (tmp_path / "config.json").write_text(as_text(LLAMA | {"hidden_size": nested(depth, 1)}))
        with pytest.raises(InputError, match="hidden_size should be" if depth < 99 else "too deep"):
            read_config(tmp_path)
