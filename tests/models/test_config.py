"""config.json is read strictly: what would change results and is not built is refused by name."""

import pytest

from models.config import ModelConfig
from models.errors import InputError

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

REFUSED = [
    ({"model_type": "gpt_neox"}, "model_type"),
    ({"model_type": None}, "model_type"),
    ({"model_type": ["llama"]}, "model_type"),
    ({"layer_types": [{}, {}]}, "layer_types"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_theta"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, "architectures"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type"),
    ({"rope_scaling": {"type": "su", "factor": 4.0}}, "type"),
    ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": "big"}}, "factor"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, "high_freq_factor"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}}, "rope_parameters"),
    ({"rope_theta": -1}, "rope_theta"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"logit_scale": 0.5}, "logit_scale"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": 65}, "hidden_size"),
    ({"hidden_size": "64"}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 15}, "head_dim"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"eos_token_id": [2, "x"]}, "eos_token_id"),
    ({"eos_token_id": -1}, "eos_token_id"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
]


@pytest.mark.parametrize(("change", "field"), REFUSED, ids=str)
def test_what_cannot_be_honoured_is_refused_naming_file_and_field(change, field):
    with pytest.raises(InputError) as error:
        ModelConfig.from_hf({**LLAMA, **change}, "some/config.json")
    assert "some/config.json" in str(error.value) and field in str(error.value)


@pytest.mark.parametrize("value", [[], "text", None, 3])
def test_a_config_that_is_no_object_is_refused(value):
    with pytest.raises(InputError, match="JSON object"):
        ModelConfig.from_hf(value)


def test_neutral_values_of_foreign_fields_are_accepted():
    config = ModelConfig.from_hf({**LLAMA, "partial_rotary_factor": 1.0, "final_logit_softcapping": None, "x_note": 1})
    assert config == ModelConfig.from_hf(LLAMA)


def test_defaults_of_absent_fields_are_the_family_s():
    assert ModelConfig.from_hf(LLAMA).rope.theta == 10000.0
    mixtral = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    assert ModelConfig.from_hf(mixtral).rope.theta == 1e6
    assert ModelConfig.from_hf(mixtral).n_experts == 8
    mistral = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert ModelConfig.from_hf(mistral).sliding_window == 4096
    assert ModelConfig.from_hf({**mistral, "sliding_window": None}).sliding_window is None
    assert ModelConfig.from_hf({**LLAMA, "sliding_window": 7}).sliding_window is None  # Llama layers know none
    qwen2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
    assert ModelConfig.from_hf({**qwen2, "max_window_layers": 1}).sliding_window == 4096
    qwen3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    assert ModelConfig.from_hf(qwen3).head_dim == 128


def test_eos_is_one_id_or_a_list():
    assert ModelConfig.from_hf({**LLAMA, "eos_token_id": 7}).eos_token_ids == (7,)
    assert ModelConfig.from_hf({**LLAMA, "eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert ModelConfig.from_hf({**LLAMA, "eos_token_id": None}).eos_token_ids == ()


def test_rope_numbers_of_both_spellings_are_read_alike():
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_type"}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    for spelling in (old, new):
        rope = ModelConfig.from_hf({**LLAMA, **spelling}).rope
        assert (rope.kind, rope.theta, rope.factor, rope.original_max_position_embeddings) == ("llama3", 5e5, 8.0, 512)
    per_layer = {"rope_parameters": {"full_attention": {"rope_theta": 5e5, **LLAMA3}}}
    assert ModelConfig.from_hf({**LLAMA, **per_layer}).rope == ModelConfig.from_hf({**LLAMA, **new}).rope
