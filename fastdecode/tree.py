"""Draft trees: what a round proposes, as tensors of fixed shape, and the builders that grow them.

A builder says which nodes get children, the drafter finds the children: `plant` the root, `extend` once per level, then
`finish`. Nothing here reads a value back to the host, and every shape is known when compiling.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.errors import InputError

MAX_NODES, MAX_DEPTH = 1024, 64  # a round is unrolled level by level, so larger trees would compile for ever
LEAST_STEP = -1e-4  # a log-probability may round to 0; a child must score below its parent all the same

Path = tuple[int, ...]


class DraftTree(NamedTuple):
    """N nodes per sequence, node 0 the root (the last committed token); parents stand before their children.

    `tokens [B, N]` int64; `parents [B, N]` int64, the root its own parent; `valid [B, N]` bool: an invalid node is
    never accepted (its children must be invalid too).
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor


def chain_of(root: Tensor, drafted: Tensor, valid: Tensor) -> DraftTree:
    """The chain of `drafted [B, K]` tokens below `root [B]`; `valid [B, K]` bool, falling from True to False once."""
    tokens = torch.cat((root[:, None], drafted), dim=1)
    parents = (torch.arange(tokens.shape[1], device=root.device) - 1).clamp_min(0).expand_as(tokens)
    return DraftTree(tokens, parents, torch.cat((torch.ones_like(valid[:, :1]), valid), dim=1))


class Lineage(NamedTuple):
    """What follows from the parents: `depth [B, N]` int64 (root 0), `ancestors [B, N, N]` bool: entry (n, m) is True
    when m is n or stands above it."""

    depth: Tensor
    ancestors: Tensor


def lineage(parents: Tensor, max_depth: int) -> Lineage:
    """Depth and ancestor mask of trees given by `parents [B, N]`; `max_depth` is a bound known when compiling.

    The relation "is or has as parent" is squared until it reaches the root. (Gathers, one per level, end as one
    expression that doubles with each: at depth 15 it took the compiler minutes.)
    """
    nodes = torch.arange(parents.shape[1], device=parents.device)
    ancestors = (nodes == nodes[:, None]) | (nodes == parents[:, :, None])  # [B, N, N]
    for _ in range(max(0, max_depth - 1).bit_length()):
        steps = ancestors.float()
        ancestors = steps @ steps > 0
    return Lineage(ancestors.sum(-1) - 1, ancestors)


def path_to(node: Tensor, tree: Lineage, max_depth: int) -> Tensor:
    """Nodes from the root to `node [B]`, by depth: `[B, max_depth + 1]` int64, padded with the root."""
    n = tree.depth.shape[1]
    above = tree.ancestors.gather(1, node[:, None, None].expand(-1, 1, n))  # [B, 1, N]
    levels = torch.arange(max_depth + 1, device=node.device)[None, :, None]
    at_level = above & (tree.depth[:, None] == levels)  # [B, D+1, N], at most one True along N
    return (at_level * torch.arange(n, device=node.device)).sum(-1)


class Candidates(NamedTuple):
    """The K best children of each of W nodes, best first: `tokens [B, W, K]` int64 (the target's ids), `scores
    [B, W, K]` fp32 log-probabilities given the parent."""

    tokens: Tensor
    scores: Tensor


class Level(NamedTuple):
    """Recorded nodes of one level: `tokens [B, M]`, `parents [B, M]` numbers among all recorded nodes (the root is 0,
    levels follow in order), `scores [B, M]` fp32 log-probabilities given the text."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor


class Growth(NamedTuple):
    """A tree half grown. Its frontier is the W newest nodes that get children: `tokens [B, W]`, `parents [B, W]` (their
    places in the frontier before), `scores [B, W]` fp32, `nodes [B, W]` (numbers among all recorded nodes)."""

    root: Tensor
    tokens: Tensor
    parents: Tensor
    scores: Tensor
    nodes: Tensor
    levels: tuple[Level, ...]


def plant(root: Tensor) -> Growth:
    """A tree of the root alone: `root [B]` token ids."""
    zeros = torch.zeros_like(root[:, None])
    return Growth(root, root[:, None], zeros, zeros.float(), zeros, ())


class StaticTree(nn.Module):
    """A tree of fixed shape (EAGLE-1). A node is a path of child ranks: (0, 2) is the third child of the root's first.

    `top_k`: children looked for at each frontier node. `widths`: frontier widths of levels 1 .. max_depth - 1, the ones
    that the drafter runs. `chain`: node n is the only one of depth n. Raises InputError, naming the path, for what is
    not a tree.
    """

    def __init__(self, paths: Sequence[Sequence[int]]):
        super().__init__()
        checked = _checked(paths)
        by_level = [[p for p in checked if len(p) == depth] for depth in range(1, len(checked[-1]) + 1)]
        self.n_nodes, self.max_depth = len(checked) + 1, len(by_level)
        self.chain = all(len(level) == 1 for level in by_level)
        self.top_k = 1 + max(path[-1] for path in checked)
        number = {(): 0} | {path: n for n, path in enumerate(checked, start=1)}
        has_children = {path[:-1] for path in checked}
        frontier: list[Path] = [()]
        widths = []
        for depth, level in enumerate(by_level, start=1):
            self._constant(f"picked{depth}", [frontier.index(p[:-1]) * self.top_k + p[-1] for p in level])
            self._constant(f"parents{depth}", [number[p[:-1]] for p in level])
            self._constant(f"inner{depth}", [i for i, p in enumerate(level) if p in has_children])
            frontier = [p for p in level if p in has_children]
            widths.append(len(frontier))
        self.widths = tuple(widths[:-1])

    def _constant(self, name: str, values: list[int]) -> None:
        # A buffer, since a tensor made from numbers inside a captured graph would be copied from the host.
        self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)

    def extend(self, growth: Growth, found: Candidates) -> Growth:
        """Record the next level, from the candidates `[B, W, top_k]` of the frontier; its inner nodes are the next."""
        depth = len(growth.levels) + 1
        picked, inner = getattr(self, f"picked{depth}"), getattr(self, f"inner{depth}")
        scores = _below(growth.scores, found.scores).flatten(1)[:, picked]
        tokens = found.tokens.flatten(1)[:, picked]
        level = Level(tokens, getattr(self, f"parents{depth}").expand_as(tokens), scores)
        n_before = 1 + sum(known.tokens.shape[1] for known in growth.levels)
        parents = (picked // self.top_k)[inner]
        return Growth(
            growth.root,
            tokens[:, inner],
            parents.expand(tokens.shape[0], -1),
            scores[:, inner],
            (n_before + inner).expand(tokens.shape[0], -1),
            (*growth.levels, level),
        )

    def finish(self, growth: Growth, valid: Tensor) -> DraftTree:
        """The tree after its last level; `valid [B]` bool: whether anything but the root may be accepted."""
        tokens = torch.cat((growth.root[:, None], *(level.tokens for level in growth.levels)), dim=1)
        parents = torch.cat((torch.zeros_like(tokens[:, :1]), *(level.parents for level in growth.levels)), dim=1)
        return DraftTree(tokens, parents, _with_root(valid, tokens))


class DynamicTree(nn.Module):
    """EAGLE-2's tree (arXiv 2406.16858): the `top_k` best children of each frontier node are recorded, the `top_k` best
    of those are the next frontier, and the `total - 1` best of all recorded nodes stay, with the root.

    `depth` counts as in the public code: depth + 1 levels. Other attributes are StaticTree's. Raises InputError when
    the numbers are out of range, or when fewer than `total` nodes would be recorded.
    """

    def __init__(self, depth: int, top_k: int, total: int):
        super().__init__()
        for name, value, low, high in (
            ("DEPTH", depth, 0, MAX_DEPTH - 1),
            ("TOPK", top_k, 1, MAX_NODES),
            ("TOTAL", total, 2, MAX_NODES),
        ):
            if not low <= value <= high:
                raise InputError(f"dynamic tree: {name} should be a whole number from {low} to {high}, found {value}.")
        recorded = 1 + top_k + depth * top_k**2
        if total > recorded:
            raise InputError(
                f"dynamic tree: TOTAL {total} is more than the {recorded} nodes of DEPTH {depth} and TOPK {top_k}; "
                "lower TOTAL, or raise one of the others."
            )
        self.n_nodes, self.top_k, self.chain = total, top_k, top_k == 1
        self.max_depth = min(depth + 1, total - 1)  # a deeper node could not stay, for want of room for its ancestors
        self.widths = (top_k,) * (self.max_depth - 1)

    def extend(self, growth: Growth, found: Candidates) -> Growth:
        """Record all candidates `[B, W, top_k]` of the frontier; the best of them are the next frontier."""
        scores = _below(growth.scores, found.scores).flatten(1)
        tokens = found.tokens.flatten(1)
        level = Level(tokens, growth.nodes.repeat_interleave(self.top_k, dim=1), scores)
        n_before = 1 + sum(known.tokens.shape[1] for known in growth.levels)
        best = scores.topk(self.top_k, dim=-1)
        return Growth(
            growth.root,
            tokens.gather(1, best.indices),
            best.indices // self.top_k,
            best.values,
            n_before + best.indices,
            (*growth.levels, level),
        )

    def finish(self, growth: Growth, valid: Tensor) -> DraftTree:
        """Keep the best of all levels, in the order of their numbers; see StaticTree.finish."""
        tokens, parents, scores = (torch.cat(parts, dim=1) for parts in zip(*growth.levels, strict=True))
        kept = scores.topk(self.n_nodes - 1, dim=-1).indices.sort(dim=-1).values  # [B, N-1], numbers less 1
        # A parent's new number is how many kept nodes there are up to it; 0 for the root.
        parents = ((kept + 1)[:, None] <= parents.gather(1, kept)[:, :, None]).sum(-1)
        tokens = torch.cat((growth.root[:, None], tokens.gather(1, kept)), dim=1)
        parents = torch.cat((torch.zeros_like(parents[:, :1]), parents), dim=1)
        return DraftTree(tokens, parents, _with_root(valid, tokens))


def _below(parents: Tensor, steps: Tensor) -> Tensor:
    """Scores of children, `[B, W, K]`, each strictly below its parent's, `[B, W]`, whatever the sum rounds to: only so
    are the best nodes a connected tree."""
    parents = parents[:, :, None]
    sums = parents + steps.clamp_max(LEAST_STEP)
    return torch.minimum(sums, torch.nextafter(parents, torch.full_like(parents, -torch.inf)))


def _with_root(valid: Tensor, tokens: Tensor) -> Tensor:
    return valid[:, None] | (torch.arange(tokens.shape[1], device=tokens.device) == 0)


def _checked(paths: Sequence[Sequence[int]]) -> list[Path]:
    """Paths in breadth-first order. Raises InputError for what is not a tree."""
    if not isinstance(paths, list | tuple) or not 1 <= len(paths) < MAX_NODES:
        raise InputError(f"A tree should be a list of 1 to {MAX_NODES - 1} child-rank paths, such as [[0],[1],[0,0]].")
    for path in paths:
        in_range = isinstance(path, list | tuple) and all(type(rank) is int and 0 <= rank < MAX_NODES for rank in path)
        if not in_range or not 1 <= len(path) <= MAX_DEPTH:
            raise InputError(
                f"The tree's path {str(path)[:60]} should be a list of 1 to {MAX_DEPTH} child ranks, whole numbers "
                f"from 0 to {MAX_NODES - 1}; the root is left out."
            )
    known: set[Path] = {()}
    for path in sorted((tuple(path) for path in paths), key=lambda path: (len(path), path)):
        if path in known:
            raise InputError(f"The tree's path {list(path)} is given twice; leave one out.")
        if path[:-1] not in known:
            raise InputError(f"The tree's path {list(path)} has no parent; add {list(path[:-1])}.")
        known.add(path)
    return sorted(known - {()}, key=lambda path: (len(path), path))
