"""Draft trees: what a round proposes, as tensors of fixed shape."""

from typing import NamedTuple

import torch
from torch import Tensor


class DraftTree(NamedTuple):
    """N nodes per sequence, node 0 the root (the last committed token); parents stand before their children.

    `tokens [B, N]` int64; `parents [B, N]` int64, the root its own parent; `valid [B, N]` bool: an invalid node is
    never accepted (its children must be invalid too).
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor


class Lineage(NamedTuple):
    """What follows from the parents: `depth [B, N]` int64 (root 0), `ancestors [B, N, N]` bool: entry (n, m) is True
    when m is n or stands above it."""

    depth: Tensor
    ancestors: Tensor


def lineage(parents: Tensor, max_depth: int) -> Lineage:
    """Depth and ancestor mask of trees given by `parents [B, N]`; `max_depth` is a bound known when compiling."""
    n = parents.shape[1]
    ancestors = torch.eye(n, dtype=torch.bool, device=parents.device).expand(parents.shape[0], n, n)
    for _ in range(max_depth):
        above = ancestors.gather(1, parents[:, :, None].expand(-1, -1, n))
        ancestors = ancestors | above
    return Lineage(ancestors.sum(-1) - 1, ancestors)


def path_to(node: Tensor, tree: Lineage, max_depth: int) -> Tensor:
    """Nodes from the root to `node [B]`, by depth: `[B, max_depth + 1]` int64, padded with the root."""
    n = tree.depth.shape[1]
    above = tree.ancestors.gather(1, node[:, None, None].expand(-1, 1, n))  # [B, 1, N]
    levels = torch.arange(max_depth + 1, device=node.device)[None, :, None]
    at_level = above & (tree.depth[:, None] == levels)  # [B, D+1, N], at most one True along N
    return (at_level * torch.arange(n, device=node.device)).sum(-1)
