"""The tuner's choices on disk: a small JSON file per model, draft, precision and machine, beside compiled programs."""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpoints.fingerprint import target_fingerprint
from checkpoints.json_text import parse_json
from fastdecode.drafting import DraftPlan
from fastdecode.memory import cpu_name
from fastdecode.tree_options import parse_tree
from fastdecode.tuner import PLAIN, Expectation
from models.errors import InputError
from models.transformer import Transformer
from quantize.linear import QuantizedLinear

VERSION = 1  # of the files; raise it when what was chosen before should be forgotten


class Choice(NamedTuple):
    """A tree as `--tree` names it, or "plain", and everything that it was chosen from, plain first."""

    tree: str
    rows: tuple[Expectation, ...]


def choice_key(plan: DraftPlan, model: Transformer, batch: int, int8_cache: bool, compile: bool) -> dict[str, Any]:
    """What a choice depends on: the model and its draft, their precision, and the machine."""
    weight = model.norm.weight
    on_cuda = weight.device.type == "cuda"
    return {
        "version": VERSION,
        "model": target_fingerprint(plan.target, model.config),
        "weights": _weights(model),
        "dtype": str(weight.dtype),
        "int8_cache": int8_cache,
        "draft": _identity(plan),
        "batch": batch,
        "compile": compile,
        "device": torch.cuda.get_device_name(weight.device) if on_cuda else cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def read_choice(folder: Path, key: Mapping[str, Any]) -> Choice | None:
    """The choice that was stored for exactly `key`; None where there is none, or the file is damaged."""
    try:
        stored = parse_json(_file(folder, key).read_text(encoding="utf-8"))
        if stored["key"] != key:
            return None
        rows = tuple(Expectation(str(t), int(n), *map(float, times)) for t, n, *times in stored["rows"])
        tree = stored["tree"]
        if tree != PLAIN:
            parse_tree(tree)
        sound = all(0 < row.tokens < math.inf and 0 < row.round_s < math.inf for row in rows)
        if not sound or tree not in [row.tree for row in rows]:
            return None
        return Choice(tree, rows)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, InputError):
        return None


def store_choice(folder: Path, key: Mapping[str, Any], choice: Choice) -> None:
    """Write whole or not at all; where it cannot be written, the next start takes the default tree."""
    text = json.dumps({"key": key, "tree": choice.tree, "rows": choice.rows}, indent=1)
    file = _file(folder, key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            draft = Path(scratch) / file.name
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, file)
    except OSError:
        pass


def _file(folder: Path, key: Mapping[str, Any]) -> Path:
    return folder / f"tree-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"


def _weights(model: Transformer) -> str:
    for layer in model.layers.modules():
        if isinstance(layer, QuantizedLinear):
            return layer.scheme
    return "float"


def _identity(plan: DraftPlan) -> list[Any]:
    """A draft's name, and for one with files their sizes and times, so that a head trained anew is another draft."""
    if plan.path is None:
        return [plan.options.draft]
    path = plan.path.resolve()
    files = sorted(f for f in path.iterdir() if f.is_file()) if path.is_dir() else [path]
    stamps = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    return [str(path), plan.options.quantize, plan.options.rope_theta, plan.options.lookup, stamps]
