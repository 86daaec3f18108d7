"""ModelConfig: what config.json says, checked, in one frozen object.

Follows the Hugging Face config.json layout, old spellings (`rope_theta` + `rope_scaling`) and new
(`rope_parameters`). A value that would change results and that the layers here do not honour is an InputError:
there are no silent defaults for things that matter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.errors import InputError

# model_type -> architectures that mean "a decoder with a language-model head"
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LLaMAForCausalLM"),
    "mistral": ("MistralForCausalLM",),
    "mixtral": ("MixtralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
}

# What each family means when config.json leaves the field out (the reference library's class defaults).
DEFAULT_THETA = {"mixtral": 1e6}
DEFAULT_HEAD_DIM = {"qwen3": 128}
DEFAULT_SLIDING_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096, "qwen3_moe": 4096}

MOST_PARTS = 10_000  # layers, or experts: a damaged number must not keep the machine busy building a network

# Fields of relatives of these families (Granite, Cohere, Gemma, GPT-NeoX, …), with the one value that changes nothing.
NEUTRAL = {
    "partial_rotary_factor": 1.0,
    "rotary_pct": 1.0,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "scale_emb": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "clip_qkv": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": None,
    "num_nextn_predict_layers": 0,
    "attention_sinks": None,
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: which schedule of inverse frequencies, and its numbers. See rope.py."""

    kind: str = "default"  # default, linear, dynamic, llama3, yarn
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # trained length, for dynamic, llama3 and yarn
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies cos and sin
    freq_factors: tuple[float, ...] = ()  # divide inv_freq, one each (GGUF's rope_freqs.weight)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama kind. Sizes are counts; `rms_norm_eps` is a plain number."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # positions a query sees, itself included
    sliding_layers: tuple[bool, ...] = ()  # per layer; meaningful only with sliding_window
    n_experts: int = 0
    n_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    moe_layers: tuple[bool, ...] = ()  # per layer
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: str | None = None  # what quantized the checkpoint, by its own word

    @staticmethod
    def from_hf(config: Mapping[str, Any], source: str = "config.json") -> "ModelConfig":
        """Read a Hugging Face `config.json` (already parsed).

        Raises InputError, naming `source` and the field, for a family, rope type, activation, layer type or any other
        value that cannot be honoured, and for sizes that are missing or impossible.
        """
        return ConfigReader(config, source).model()


class ConfigReader:
    """Typed access to one config.json: a Mapping, and `source`, which every complaint names beside the field."""

    def __init__(self, config: Mapping[str, Any], source: str):
        if not isinstance(config, Mapping):
            raise InputError(f"{source}: expected a JSON object, found {type(config).__name__}.")
        self.config = config
        self.source = source

    def fail(self, field: str, expected: str) -> InputError:
        found = repr(self.config[field])[:80] if field in self.config else "nothing"
        return InputError(f"{self.source}: {field} should be {expected}, found {found}.")

    def size(self, field: str, default: int | None = None, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self.config.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(field, f"a whole number from {low} to {high}")
        return value

    def number(self, field: str, default: float | None = None, low: float = 0.0) -> float:
        value = self.config.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < 1e30:
            raise self.fail(field, f"a finite number above {low:g}")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.config.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(field, "true or false")
        return value

    def token_ids(self, field: str) -> tuple[int, ...]:
        value = self.config.get(field)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.fail(field, "a token id or a list of token ids")
        return tuple(ids)

    def model(self) -> ModelConfig:
        config = self.config
        family = config.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise self.fail("model_type", f"one of {', '.join(FAMILIES)}")
        architectures = config.get("architectures") or list(FAMILIES[family][:1])
        if not isinstance(architectures, list) or not any(a in FAMILIES[family] for a in architectures):
            raise self.fail("architectures", f"{FAMILIES[family][0]}")
        self.refuse_what_changes_results()

        hidden_size = self.size("hidden_size")
        n_layers = self.size("num_hidden_layers", high=MOST_PARTS)
        n_heads = self.size("num_attention_heads")
        n_kv_heads = self.size("num_key_value_heads", n_heads)
        if n_heads % n_kv_heads:
            raise self.fail("num_key_value_heads", f"a divisor of num_attention_heads ({n_heads})")
        if config.get("head_dim") is None and family not in DEFAULT_HEAD_DIM and hidden_size % n_heads:
            raise self.fail("hidden_size", f"a multiple of num_attention_heads ({n_heads})")
        head_dim = self.size("head_dim", DEFAULT_HEAD_DIM.get(family, max(1, hidden_size // n_heads)))
        if head_dim % 2:
            raise self.fail("head_dim", "an even number")
        max_positions = self.size("max_position_embeddings", 2048)
        window, sliding_layers = self.windows(family, n_layers)
        bias = self.flag("attention_bias", False) if family not in ("mistral", "mixtral", "qwen2") else False
        bos = self.token_ids("bos_token_id")
        return ModelConfig(
            model_type=family,
            vocab_size=self.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.size("intermediate_size"),
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.number("rms_norm_eps"),
            max_position_embeddings=max_positions,
            rope=self.rope(family, head_dim, max_positions),
            tie_word_embeddings=self.flag("tie_word_embeddings", False),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=self.flag("mlp_bias", False) if family == "llama" else False,
            qk_norm=family in ("qwen3", "qwen3_moe"),
            sliding_window=window,
            sliding_layers=sliding_layers,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=self.token_ids("eos_token_id"),
            quantization=self.quantization(),
            **self.experts(family, n_layers),
        )

    def refuse_what_changes_results(self) -> None:
        for field, neutral in NEUTRAL.items():
            if self.config.get(field, neutral) not in (neutral, None, []):
                raise self.fail(field, f"{neutral}: this model needs an operation that is not built")
        activation = self.config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise self.fail("hidden_act", "silu")

    def quantization(self) -> str | None:
        """What quantized the checkpoint, by its own word; whoever reads the weights knows the words."""
        value = self.config.get("quantization_config", self.config.get("compression_config"))
        if value is None:
            return None
        if not isinstance(value, Mapping) or not isinstance(value.get("quant_method"), str):
            raise self.fail("quantization_config", "an object with a quant_method")
        return value["quant_method"]

    def windows(self, family: str, n_layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """Which layers attend a sliding window, and its width in positions."""
        layer_types = self.config.get("layer_types")
        window = self.config.get("sliding_window", DEFAULT_SLIDING_WINDOW.get(family))
        uses = self.flag("use_sliding_window", False) if family.startswith("qwen") else family in ("mistral", "mixtral")
        if layer_types is not None:
            known = ("full_attention", "sliding_attention")
            is_list = isinstance(layer_types, list) and len(layer_types) == n_layers
            if not is_list or any(kind not in known for kind in layer_types):
                raise self.fail("layer_types", f"{n_layers} times full_attention or sliding_attention")
        if window is None or not uses:
            if layer_types and "sliding_attention" in layer_types:
                raise self.fail("layer_types", "full_attention only, since no sliding window is in use")
            return None, (False,) * n_layers
        window = self.size("sliding_window", window)
        if layer_types is not None:
            sliding = tuple(kind == "sliding_attention" for kind in layer_types)
        elif family in ("qwen2", "qwen3"):
            first = self.size("max_window_layers", 28, low=0)
            sliding = tuple(i >= first for i in range(n_layers))
        else:
            sliding = (True,) * n_layers
        return (window if any(sliding) else None), sliding

    def experts(self, family: str, n_layers: int) -> dict[str, Any]:
        if family == "mixtral":
            n_experts, intermediate = self.size("num_local_experts", 8, high=MOST_PARTS), self.size("intermediate_size")
            per_token, normalise, moe_layers = self.size("num_experts_per_tok", 2), True, (True,) * n_layers
        elif family == "qwen3_moe":
            name = "num_experts" if "num_experts" in self.config else "num_local_experts"
            n_experts, intermediate = self.size(name, high=MOST_PARTS), self.size("moe_intermediate_size")
            per_token, normalise = self.size("num_experts_per_tok", 8), self.flag("norm_topk_prob", False)
            step, dense = self.size("decoder_sparse_step", 1), self.config.get("mlp_only_layers") or []
            if not isinstance(dense, list):
                raise self.fail("mlp_only_layers", "a list of layer numbers")
            moe_layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(n_layers))
        else:
            return {"moe_layers": (False,) * n_layers}
        if per_token > n_experts:
            raise self.fail("num_experts_per_tok", f"at most the number of experts ({n_experts})")
        return {
            "n_experts": n_experts,
            "n_experts_per_token": per_token,
            "moe_intermediate_size": intermediate,
            "norm_topk_prob": normalise,
            "moe_layers": moe_layers,
        }

    def rope(self, family: str, head_dim: int, max_positions: int) -> RopeConfig:
        """Old and new spellings of the rotary embedding, as one RopeConfig with every number resolved."""
        field = "rope_parameters" if self.config.get("rope_parameters") is not None else "rope_scaling"
        found = self.config.get(field) or {}
        if not isinstance(found, Mapping):
            raise self.fail(field, "a JSON object")
        if found and all(isinstance(v, Mapping) for v in found.values()):  # one entry per layer type
            entries = list(found.values())
            if any(dict(e) != dict(entries[0]) for e in entries):
                raise self.fail(field, "the same for every layer type")
            found = entries[0]
        at = ConfigReader(found, f"{self.source}: {field}")
        theta = at.number("rope_theta", self.number("rope_theta", DEFAULT_THETA.get(family, 10000.0)))
        kind = found.get("rope_type", found.get("type", "default")) or "default"
        if found.get("partial_rotary_factor", 1.0) != 1.0:
            raise at.fail("partial_rotary_factor", "1.0")
        if kind == "default":
            return RopeConfig(theta=theta)
        if kind == "linear":
            return RopeConfig(kind, theta, at.number("factor"))
        if kind == "dynamic":
            if head_dim <= 2:
                raise self.fail("head_dim", "above 2 with a dynamic rope")
            return RopeConfig(kind, theta, at.number("factor"), max_positions)
        if kind not in ("llama3", "yarn"):
            raise at.fail(
                "rope_type" if "rope_type" in found else "type", "one of default, linear, dynamic, llama3, yarn"
            )
        original = at.size("original_max_position_embeddings", max_positions)
        if kind == "llama3":
            low, high = at.number("low_freq_factor"), at.number("high_freq_factor")
            if high <= low:
                raise at.fail("high_freq_factor", f"above low_freq_factor ({low:g})")
            return RopeConfig(kind, theta, at.number("factor"), original, low_freq_factor=low, high_freq_factor=high)
        if theta <= 1:
            raise self.fail("rope_theta", "above 1 with a yarn rope")
        factor = at.number("factor", max_positions / original)
        mscale, mscale_all = at.number("mscale", 0.0, -1.0), at.number("mscale_all_dim", 0.0, -1.0)
        if mscale and mscale_all:
            scale = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
        else:
            scale = _yarn_mscale(factor, 1.0)
        return RopeConfig(
            kind,
            theta,
            factor,
            original,
            beta_fast=at.number("beta_fast", 32.0),
            beta_slow=at.number("beta_slow", 1.0),
            truncate=at.flag("truncate", True),
            attention_factor=at.number("attention_factor", scale),
        )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
