"""Prompts from files and pipes, and the set that the benchmark ships."""

import sys
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from checkpoints.json_text import parse_json
from models.errors import InputError

SHIPPED = Path(__file__).with_name("prompts.jsonl")


class PromptLine(NamedTuple):
    """A prompt and, where the file names one, its category."""

    text: str
    category: str | None = None


def read_prompts(name: str) -> list[PromptLine]:
    """Prompts of a file, or of stdin for `-`: one a line, or JSONL with `{"turns": [...]}` (the first turn is taken)
    when the first line that is not blank starts with `{`.

    Raises InputError naming the file and line for what cannot be read, and for a file without prompts.
    """
    if name == "-":
        return parse_prompts(_read(sys.stdin, "stdin"), "stdin")
    try:
        with open(name, encoding="utf-8-sig", newline="") as file:
            return parse_prompts(_read(file, name), name)
    except OSError as error:
        raise InputError(f"--prompts {name}: {error.strerror or error}.") from None


def parse_prompts(text: str, source: str) -> list[PromptLine]:
    """The prompts in `text`; `source` names it in errors."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InputError(f"{source}: holds no prompts; give one a line, or JSONL with \"turns\".")
    if lines[0][1].lstrip().startswith("{"):
        return [_from_json(line, f"{source}, line {number}") for number, line in lines]
    return [PromptLine(line.removesuffix("\r")) for _, line in lines]


def _from_json(line: str, where: str) -> PromptLine:
    try:
        record: Any = parse_json(line)
    except ValueError as error:
        raise InputError(f"{where}: is not valid JSON ({error}).") from None
    turns = record.get("turns") if isinstance(record, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise InputError(f'{where}: expected {{"turns": ["prompt", ...]}}.')
    category = record.get("category")
    return PromptLine(turns[0], category if isinstance(category, str) else None)


def _read(file: TextIO, source: str) -> str:
    try:
        return file.read()
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: is not UTF-8 text ({error.reason} at byte {error.start}).") from None
