"""Reference tensors of EAGLE heads: where they lie, and checkpoints and targets made from them.

A folder holds pairs NAME.json (the facts) and NAME.safetensors: a head's weights under published names (`head.*`),
inputs, and what a reference implementation computed.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.head_checkpoint import load_head, read_head_config
from models.config import ModelConfig
from models.transformer import Hidden, Transformer

TESTS = Path(__file__).resolve().parents[1]
NOT_IN_CONFIG = ("kind", "total_tokens", "depth", "top_k", "rounds", "fc_bias", "layout")


@dataclass(frozen=True)
class Golden:
    name: str
    facts: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def kind(self) -> str:
        """eagle1, eagle3 (SafeAILab's layout) or speculators."""
        return self.facts.get("layout") or self.facts["kind"]

    @property
    def config(self) -> dict[str, Any]:
        """The head's config.json."""
        if self.kind == "speculators":
            return json.loads(json.dumps(self.facts["config"]))
        config = {name: value for name, value in self.facts.items() if name not in NOT_IN_CONFIG}
        return config | ({"bias": self.facts["fc_bias"]} if self.kind == "eagle1" else {})

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {n.removeprefix("head."): t.clone() for n, t in self.tensors.items() if n.startswith("head.")}

    @property
    def hidden(self) -> Hidden:
        """The features, as the target would give them."""
        features = self.tensors["features"]
        n_states = 1 if self.kind == "eagle1" else len(self.config.get("eagle_aux_hidden_state_layer_ids") or "abc")
        return Hidden(features, features.chunk(n_states, -1))

    @property
    def next_ids(self) -> torch.Tensor:
        """`[1, n]`: the token after each feature."""
        ids = self.tensors["input_ids"]
        return ids if self.kind == "speculators" else ids[:, 1:]


@cache
def read_golden(file: Path) -> Golden:
    return Golden(file.stem, json.loads(file.read_text()), load_file(file.with_suffix(".safetensors")))


def carried(kind: str) -> Golden:
    """The one of this kind that the tests carry, for claims that need some head and not every golden."""
    found = (read_golden(file) for file in sorted((TESTS / "golden").glob("*.json")))
    return next(golden for golden in found if golden.kind == kind)


def golden_files(config: pytest.Config, *kinds: str) -> list[Golden]:
    """What --golden names; by default what the tests carry, and the shared measuring data where it is present."""
    given = config.getoption("--golden")
    folders = [Path(given)] if given else [TESTS / "golden", TESTS.parents[1] / "shared" / "golden"]
    files = {file.stem: file for folder in folders for file in sorted(folder.glob("*.json"))}
    if given and not files:
        raise pytest.UsageError(f"--golden {given}: there are no reference tensors")
    return [golden for golden in map(read_golden, files.values()) if golden.kind in kinds]


def parametrize_golden(metafunc: pytest.Metafunc, *kinds: str) -> None:
    """Give a test's `golden` argument every file of these kinds. Call it from a module's pytest_generate_tests."""
    if "golden" in metafunc.fixturenames:
        found = golden_files(metafunc.config, *kinds)
        metafunc.parametrize("golden", found, ids=[golden.name for golden in found])


def write_head(folder: Path, config: dict, weights: dict[str, torch.Tensor], form: str = "safetensors") -> Path:
    """A head's checkpoint; `form`: safetensors, or bin (a pickle, as many published heads are)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if form == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def target_for(config: dict[str, Any], n_layers: int | None = None, seed: int = 0, **changes: Any) -> Transformer:
    """A random fp32 target that a head with this config.json fits."""
    n_layers = n_layers or max(8, *(i + 1 for i in config.get("eagle_aux_hidden_state_layer_ids") or (0, 0)))
    layer = config.get("transformer_layer_config", config)
    width = config.get("target_hidden_size") or layer["hidden_size"]
    sizes = {
        "model_type": "llama",
        "vocab_size": layer["vocab_size"],
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
    }
    torch.manual_seed(seed)
    return Transformer(ModelConfig.from_hf(sizes | changes)).requires_grad_(False).eval()


def load(folder: Path, target: Transformer, rope_theta: float | None = None):
    """As the loader does: config, fit, weights."""
    config = read_head_config(folder).with_rope_theta(rope_theta).fitted_to(target.config, str(folder))
    return load_head(folder, config, target)


def golden_head(golden: Golden, folder: Path):
    """The golden's head, by way of a checkpoint, and its target (whose lm_head is the golden's where it gives one)."""
    target = target_for(golden.config)
    if "target.lm_head.weight" in golden.tensors:
        target.lm_head.weight.copy_(golden.tensors["target.lm_head.weight"])
    return load(write_head(folder, golden.config, golden.weights), target), target


@torch.inference_mode()
def teacher_forced(head, token_ids, features, chunks=None):
    """Run fused `features [B, n, h]` with the tokens after them, causally: fed-back states and logits."""
    batch, n = token_ids.shape
    head.set_rotary(n + 1)
    cache = head.new_cache(batch, n + 1)
    results, start = [], 0
    for size in chunks or [n]:
        part = slice(start, start + size)
        positions = torch.arange(n)[part].expand(batch, -1)
        mask = torch.arange(n) <= positions[:, :, None]
        results.append(head(token_ids[:, part], features[:, part], positions, positions, mask, cache))
        start += size
    fed_back, for_logits = (torch.cat(parts, 1) for parts in zip(*results, strict=True))
    return fed_back, head.logits(for_logits)


def assert_close(ours, reference, tolerance):
    """Within `tolerance` of the reference's largest magnitude."""
    assert ours.shape == reference.shape
    assert (ours - reference).abs().max() <= tolerance * reference.abs().max()
