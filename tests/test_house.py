"""The order of the house: imports go one way, the core stays small, and a file stays one idea."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEVELS = ["operators", "models", "checkpoints", "quantize", "fastdecode"]  # each may import itself and those before it
CORE = ["models", "fastdecode/drafters"] + [
    f"fastdecode/{name}.py" for name in ("round", "tree", "tree_options", "sampling", "runner", "decoder")
]
CORE_LINES, FILE_LINES = 3000, 330


def sources(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def imported(file: Path) -> set[str]:
    """The first parts of the names of all modules that a file imports, wherever it does so."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_imports_go_one_way(level):
    allowed = set(LEVELS[: level + 1])
    for file in sources(LEVELS[level]):
        above = set(LEVELS) if file.name == "__main__.py" else set()  # a command line may import anything
        assert imported(file) & {*LEVELS, "generate"} <= allowed | above, file


def test_the_core_stays_small():
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for place in CORE for file in sources(place)}
    assert len(lines) >= 20
    assert sum(lines.values()) < CORE_LINES


def test_files_are_short():
    for place in (*LEVELS, "generate.py"):
        for file in sources(place):
            assert len(file.read_text(encoding="utf-8").splitlines()) <= FILE_LINES, file
