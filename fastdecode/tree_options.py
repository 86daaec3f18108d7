"""What `--tree` can say: a chain, EAGLE-1's tree, a tree from a file, EAGLE-2's dynamic tree."""

import re
from pathlib import Path

from checkpoints.json_text import parse_json
from fastdecode.tree import DynamicTree, StaticTree
from models.errors import InputError

# EAGLE-1's tree of 25 drafted nodes (`mc_sim_7b_63` in its code); a digit is a child's rank.
EAGLE1_TREE = """
    0 1 2 3
    00 01 02 10 11 20 21 30
    000 001 002 010 011 020 021 100
    0000 0001 0002
    00000 00001
"""

FORMS = "chain:K, static, static:FILE or dynamic:DEPTH,TOPK,TOTAL"

TreeBuilder = StaticTree | DynamicTree


def chain(n_tokens: int) -> StaticTree:
    """`n_tokens` drafted tokens, one after another: n_tokens + 1 nodes."""
    return StaticTree([(0,) * depth for depth in range(1, n_tokens + 1)])


def eagle1_tree() -> StaticTree:
    """EAGLE-1's 25 nodes and the root."""
    return StaticTree([[int(rank) for rank in path] for path in EAGLE1_TREE.split()])


def parse_tree(text: str) -> TreeBuilder:
    """The builder that a `--tree` option names. Raises InputError, saying what is wrong, before any model is needed."""
    kind, _, rest = text.partition(":")
    if kind == "static":
        return StaticTree(read_paths(Path(rest))) if ":" in text else eagle1_tree()
    numbers = [int(number) for number in rest.split(",")] if re.fullmatch(r"\d{1,9}(,\d{1,9})*", rest, re.ASCII) else []
    if kind == "chain" and len(numbers) == 1:
        if not 1 <= numbers[0] <= 64:
            raise InputError(f"--tree {text}: a chain should have 1 to 64 drafted tokens.")
        return chain(numbers[0])
    if kind == "dynamic" and len(numbers) == 3:
        return DynamicTree(*numbers)
    raise InputError(f"--tree should be {FORMS}, found {text!r}.")


def read_paths(file: Path) -> list[list[int]]:
    """A tree from a JSON file: a list of child-rank paths, the root left out, as in [[0],[1],[0,0]].

    Raises InputError when the file cannot be read, or naming it when its paths are not a tree.
    """
    try:
        paths = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--tree static:{file}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise InputError(f"--tree static:{file}: is not JSON ({error}).") from error
    try:
        StaticTree(paths)
    except InputError as error:
        raise InputError(f"--tree static:{file}: {error}") from error
    return paths
