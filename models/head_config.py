"""HeadConfig: what an EAGLE head's config.json says, checked, in one frozen object.

Two layouts: the flat one of SafeAILab/EAGLE and SpecForge (a Llama config with a few more fields), and the nested one
of vLLM speculators (`transformer_layer_config`). Heads of EAGLE-1 (arXiv 2401.15077; EAGLE-2's are the same) and of
EAGLE-3 (arXiv 2503.01840).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.config import FAMILIES, ConfigReader, ModelConfig
from models.errors import InputError

EAGLE3_FIELDS = ("draft_vocab_size", "target_hidden_size", "eagle_config")  # any of them in a flat config: EAGLE-3
LAYER_KINDS = ("llama", "qwen3")  # layers that speculators heads are made of


@dataclass(frozen=True)
class HeadConfig:
    """An EAGLE head. `layer` has the sizes, norms and rope of its decoder layers, and the vocabulary it reads.

    `feature_layers`: the target layers whose *entering* hidden states are its features, ascending; None until
    `fitted_to` knows the target, and empty for EAGLE-1, whose feature is the target's state after its final norm.
    """

    kind: str  # eagle1 (EAGLE-1 and EAGLE-2), eagle3
    layer: ModelConfig
    draft_vocab_size: int  # rows of lm_head
    target_hidden_size: int
    fc_bias: bool
    feature_layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False  # the first layer adds to the normed state
    norm_before_fc: bool = False  # one RMSNorm over the concatenated features
    fc_norm: bool = False  # one RMSNorm for each feature (EAGLE-3.1)
    norm_output: bool = False  # the state fed back is the normed one (EAGLE-3.1)

    @staticmethod
    def from_json(config: Mapping[str, Any], source: str = "config.json") -> "HeadConfig":
        """Read the parsed config.json of a head, of either layout.

        Raises InputError, naming `source` and the field, for what is missing or cannot be honoured.
        """
        at = ConfigReader(config, source)
        nested = "transformer_layer_config" in config or "speculators_model_type" in config
        head = _speculators(at) if nested else _flat(at)
        return replace(head, layer=replace(head.layer, quantization=at.quantization()))

    @property
    def feature_size(self) -> int:
        """Width of the concatenated features of one position."""
        return self.target_hidden_size * (len(self.feature_layers) if self.feature_layers else 1)

    def with_rope_theta(self, theta: float | None) -> "HeadConfig":
        """The same head with another rotary base: some were trained at 10000 whatever their config says."""
        if theta is None:
            return self
        if not 0 < theta < math.inf:
            raise InputError(f"The head's rope theta should be a number above 0, found {theta}.")
        return replace(self, layer=replace(self.layer, rope=replace(self.layer.rope, theta=theta)))

    def fitted_to(self, target: ModelConfig, source: str) -> "HeadConfig":
        """This head with its feature layers settled, checked against the target that it is to draft for.

        Raises InputError, naming `source` and both numbers, when vocabulary, hidden size or layers do not fit.
        """
        if self.layer.vocab_size != target.vocab_size:
            raise InputError(
                f"{source}: the head reads a vocabulary of {self.layer.vocab_size} ids, but the target's has "
                f"{target.vocab_size}; give a head made for this target."
            )
        if self.target_hidden_size != target.hidden_size:
            raise InputError(
                f"{source}: the head reads hidden states of width {self.target_hidden_size}, but the target's are "
                f"{target.hidden_size} wide; give a head made for this target."
            )
        layers = self.feature_layers
        if layers is None:
            layers = tuple(sorted((2, target.n_layers // 2, target.n_layers - 3)))
        if layers and not 0 <= layers[0] <= layers[-1] < target.n_layers:
            worst = layers[-1] if layers[-1] >= target.n_layers else layers[0]
            raise InputError(
                f"{source}: the head reads the state that enters layer {worst}, but the target's {target.n_layers} "
                f"layers are 0 to {target.n_layers - 1}; give a head made for this target."
            )
        return replace(self, feature_layers=layers)


def _flat(at: ConfigReader) -> HeadConfig:
    """SafeAILab's and SpecForge's layout. A head's layer is Llama's, whatever family its target is of."""
    config = at.config
    if config.get("model_type", "llama") not in tuple(FAMILIES):
        raise at.fail("model_type", f"one of {', '.join(FAMILIES)}")
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise at.fail("architectures", "a list of names")
    eagle3 = any(field in config for field in EAGLE3_FIELDS) or any("Eagle3" in str(name) for name in names)
    llama = {"num_hidden_layers": 1, **config, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    layer = ModelConfig.from_hf(llama, at.source)
    if "qkv_bias" in config:
        layer = replace(layer, qkv_bias=at.flag("qkv_bias", False))
    if not eagle3:
        # Published configs that leave `bias` out (LLaMA2's, Vicuna's) have one.
        return HeadConfig("eagle1", layer, layer.vocab_size, layer.hidden_size, at.flag("bias", True), ())
    if layer.n_layers != 1:
        raise at.fail("num_hidden_layers", "1 for an EAGLE-3 head of this layout")
    if not at.flag("norm_output", True):  # SpecForge's meaning of the word: the norm before lm_head
        raise at.fail("norm_output", "true: a head without a norm before lm_head is not supported")
    extra = config.get("eagle_config") or {}
    if not isinstance(extra, Mapping):
        raise at.fail("eagle_config", "a JSON object")
    inner = ConfigReader(extra, f"{at.source}: eagle_config")
    if not inner.flag("use_aux_hidden_state", True):
        raise inner.fail("use_aux_hidden_state", "true: a head of the last hidden state alone is not supported")
    # Here ids name the layers that the states leave, not those that they enter.
    left = _layer_ids(inner, "eagle_aux_hidden_state_layer_ids")
    entered = tuple(i + 1 for i in left) if left else _layer_ids(at, "eagle_aux_hidden_state_layer_ids")
    return HeadConfig("eagle3", layer, fc_bias=False, feature_layers=entered, **_eagle3(at, layer))


def _speculators(at: ConfigReader) -> HeadConfig:
    """vLLM speculators' layout; absent flags have its config class's defaults."""
    if at.config.get("speculators_model_type", "eagle3") != "eagle3":
        raise at.fail("speculators_model_type", "eagle3")
    nested = at.config.get("transformer_layer_config")
    if not isinstance(nested, Mapping):
        raise at.fail("transformer_layer_config", "a JSON object")
    kind = nested.get("model_type", "qwen3")
    inner = ConfigReader(nested, f"{at.source}: transformer_layer_config")
    if kind not in LAYER_KINDS:
        raise inner.fail("model_type", f"one of {', '.join(LAYER_KINDS)}")
    layer = ModelConfig.from_hf(
        {"num_hidden_layers": 1, **nested, "model_type": kind, "architectures": None}, inner.source
    )
    if layer.sliding_window is not None:
        raise inner.fail("sliding_window", "null: draft heads with a sliding window are not supported")
    return HeadConfig(
        "eagle3",
        layer,
        fc_bias=False,
        feature_layers=_layer_ids(at, "eagle_aux_hidden_state_layer_ids"),
        norm_output=at.flag("norm_output", False),
        **_eagle3(at, layer),
    )


def _eagle3(at: ConfigReader, layer: ModelConfig) -> dict[str, Any]:
    """Fields that both layouts have at the top level of an EAGLE-3 head's config."""
    norm_before_fc, fc_norm = at.flag("norm_before_fc", False), at.flag("fc_norm", False)
    if norm_before_fc and fc_norm:
        raise at.fail("fc_norm", "false where norm_before_fc is true: features are normed once")
    return {
        "draft_vocab_size": at.size("draft_vocab_size", layer.vocab_size, high=layer.vocab_size),
        "target_hidden_size": at.size("target_hidden_size", layer.hidden_size),
        "norm_before_residual": at.flag("norm_before_residual", False),
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
    }


def _layer_ids(at: ConfigReader, field: str) -> tuple[int, ...] | None:
    """Layer ids, ascending, since that is the order in which their states are concatenated; None if absent."""
    ids = at.config.get(field) or None
    if ids is None:
        return None
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not whole or sorted(set(ids)) != ids:
        raise at.fail(field, "a list of ascending layer numbers")
    return tuple(ids)
