"""Writing a trained head in a public layout, so that other programs serve it and `--draft` reads it back.

safeai: SafeAILab/EAGLE's and SpecForge's (flat Llama config, `midlayer.*` for EAGLE-3, `layers.0.*` for EAGLE-1).
speculators: vLLM speculators' (nested `transformer_layer_config`, `layers.0.*`), which has EAGLE-3 only.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.fuse import slots
from models.config import ModelConfig, RopeConfig
from models.eagle import DraftHead
from models.errors import InputError
from models.head_config import HeadConfig
from quantize.writer import new_files, write_text

LAYOUTS = ("safeai", "speculators")
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm")  # flags that both layouts spell alike
# What a layer's config may say differently without being another layer.
NOT_THE_LAYERS = {
    "model_type": "llama",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_ids": (),
    "quantization": None,
    "norm_topk_prob": True,
}


@torch.no_grad()
def write_head(
    head: DraftHead,
    folder: Path,
    layout: str,
    extra: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    own: Collection[str] = (),
    verifier: str | None = None,
) -> None:
    """Write `head`, a float head on any device, to `folder`: config.json and model.safetensors, weights in `dtype`.

    `layout`: safeai or speculators. `extra`: more fields of config.json, such as target_fingerprint. `own`: which of
    embed_tokens and (EAGLE-1) lm_head are not the target's and are to be saved; the embedding of a head that is not as
    wide as its target always is. `verifier`: the target's name, which speculators' config has room for.

    Atomic (quantize.writer.new_files): killed at any moment, no config.json stands beside weights that are not its
    own. Raises InputError for a head that the layout cannot describe, and when the folder cannot be written.
    """
    config = head_json(head.config, layout, verifier)
    if clash := sorted(set(config) & set(extra or {})):
        raise ValueError(f"extra fields {', '.join(clash)} are the layout's own")
    config |= {"torch_dtype": str(dtype).removeprefix("torch."), **(extra or {})}
    tensors = head_tensors(head, layout, dtype, own)
    with new_files(folder) as part:
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        write_text(part / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def head_json(head: HeadConfig, layout: str, verifier: str | None = None) -> dict[str, Any]:
    """config.json of `head` in `layout`. Raises InputError where it would not be read back as this head."""
    if layout not in LAYOUTS:
        raise InputError(f"--layout should be {' or '.join(LAYOUTS)}, found {layout!r}.")
    if layout == "speculators" and head.kind == "eagle1":
        raise InputError("--layout speculators has no EAGLE-1 heads here; give --layout safeai.")
    if layout == "safeai" and head.kind == "eagle3" and head.layer.n_layers != 1:
        raise InputError(f"--layout safeai has one layer, and the head has {head.layer.n_layers}; give speculators.")
    config = _speculators(head, verifier) if layout == "speculators" else _safeai(head)
    for name, wanted, found in _differences(head, HeadConfig.from_json(config, f"--layout {layout}")):
        raise InputError(f"--layout {layout} cannot say {name} {wanted!r} (it would be {found!r}); use another layout.")
    return config


def head_tensors(
    head: DraftHead, layout: str, dtype: torch.dtype = torch.bfloat16, own: Collection[str] = ()
) -> dict[str, Tensor]:
    """The tensors of `head` under the layout's names, on the CPU: floats in `dtype`, and the maps between the two
    vocabularies, `d2t` (int64 offsets, `[draft_vocab]`) and `t2d` (bool, `[vocab]`), where they differ."""
    c = head.config
    narrow = c.layer.hidden_size != c.target_hidden_size
    borrowed = {"embed_tokens"} if not narrow else set()
    borrowed |= {"lm_head"} if c.kind == "eagle1" else set()
    borrowed -= set(own)
    parameters = {n: p for n, p in head.named_parameters() if n.partition(".")[0] not in borrowed}
    if any(not p.is_floating_point() for p in parameters.values()):
        raise InputError("The head is quantized, and a head is written in floats; load it with --quantize none.")
    prefix = "midlayer." if layout == "safeai" and c.kind == "eagle3" else "layers.0."
    tensors = {}
    for name, slot in slots(parameters, c.layer).items():
        name = prefix + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
        part = parameters[slot.parameter][slot.index]
        tensors[name] = part.detach().to("cpu", dtype, copy=True).contiguous()
    if head.drafted is not None:
        drafted = head.drafted.cpu()
        tensors["d2t"] = drafted - torch.arange(len(drafted))
        tensors["t2d"] = torch.zeros(c.layer.vocab_size, dtype=torch.bool).index_fill_(0, drafted, True)
    return tensors


def _safeai(head: HeadConfig) -> dict[str, Any]:
    name = "LlamaForCausalLMEagle3" if head.kind == "eagle3" else "LlamaForCausalLM"
    config = {"architectures": [name], **_layer_json(head.layer, "llama")}
    if head.layer.qkv_bias != head.layer.o_bias:
        config["qkv_bias"] = head.layer.qkv_bias
    if head.kind == "eagle1":
        return config | {"bias": head.fc_bias}
    config |= {"draft_vocab_size": head.draft_vocab_size, "target_hidden_size": head.target_hidden_size}
    config |= {name: True for name in NORMS if getattr(head, name)}
    # Here ids name the layers that the states leave, one less than those that they enter.
    left = [i - 1 for i in head.feature_layers]
    return config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": left, "use_aux_hidden_state": True}}


def _speculators(head: HeadConfig, verifier: str | None) -> dict[str, Any]:
    layer = head.layer
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": None if head.target_hidden_size == layer.hidden_size else head.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(head.feature_layers),
        **{name: getattr(head, name) for name in (*NORMS, "norm_output")},
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_json(layer, "qwen3" if layer.qk_norm else "llama"),
    }


def _layer_json(layer: ModelConfig, model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": layer.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": layer.n_layers,
        "num_attention_heads": layer.n_heads,
        "num_key_value_heads": layer.n_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "max_position_embeddings": layer.max_position_embeddings,
        "rope_theta": layer.rope.theta,
        "rope_scaling": _rope_json(layer.rope),
        "attention_bias": layer.o_bias,
        "mlp_bias": layer.mlp_bias,
        "tie_word_embeddings": False,
        "bos_token_id": layer.bos_token_id,
        "eos_token_id": list(layer.eos_token_ids) or None,
    }


def _rope_json(rope: RopeConfig) -> dict[str, Any] | None:
    """config.json's rope_scaling."""
    fields = {
        "linear": (),
        "dynamic": (),
        "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    }
    if rope.kind == "default":
        return None
    return {"rope_type": rope.kind, **{name: getattr(rope, name) for name in ("factor", *fields[rope.kind])}}


def _differences(wanted: HeadConfig, found: HeadConfig) -> list[tuple[str, Any, Any]]:
    """Fields, layer's and head's, in which two configs are not the same head, each with its two values."""
    pairs = []
    for head in (wanted, found):
        no_sliding = {} if head.layer.sliding_window else {"sliding_layers": ()}
        fields = asdict(replace(head, layer=replace(head.layer, **NOT_THE_LAYERS, **no_sliding)))
        pairs.append(fields.pop("layer") | fields)
    return [(name, value, pairs[1][name]) for name, value in pairs[0].items() if value != pairs[1][name]]
