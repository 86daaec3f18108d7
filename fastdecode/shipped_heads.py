"""The draft heads that ship in models/heads/, and which of them was trained for a given target."""

from pathlib import Path

from checkpoints.fingerprint import target_fingerprint
from checkpoints.head_checkpoint import read_head_config
from checkpoints.json_text import parse_json
from models.config import ModelConfig
from models.head_config import HeadConfig


def shipped_heads() -> Path:
    """The folder of heads beside the code; it need not be there."""
    return Path(__file__).resolve().parents[1] / "models" / "heads"


def find_shipped_head(path: Path, target: ModelConfig, heads: Path) -> tuple[Path, HeadConfig] | None:
    """The head in a folder of `heads` whose config.json names the fingerprint of the checkpoint `path`, fitted to
    `target`, its config. Of several an EAGLE-3 head, and then the first by name; None where there is none.

    Reads of the checkpoint its headers and one norm, and only where some head has a fingerprint to compare with.
    Raises InputError where the head that fits cannot be read.
    """
    named = {folder: mark for folder in sorted(heads.glob("[!.]*/")) if (mark := _target_of(folder)) is not None}
    if not named:
        return None
    wanted = target_fingerprint(path, target)
    found = [(folder, read_head_config(folder)) for folder, mark in named.items() if mark == wanted]
    if not found:
        return None
    folder, head = min(found, key=lambda entry: entry[1].kind != "eagle3")
    return folder, head.fitted_to(target, str(folder))


def _target_of(folder: Path) -> str | None:
    """`target_fingerprint` of a head's config.json; None where there is none to be read."""
    try:
        config = parse_json((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    mark = config.get("target_fingerprint") if isinstance(config, dict) else None
    return mark if isinstance(mark, str) else None
