"""The drafter of plain decoding: it proposes nothing, so the tree is the root alone."""

import torch
from torch import Tensor, nn

from fastdecode.drafters import Chunk, Text
from fastdecode.sampling import SamplingContext
from fastdecode.tree import DraftTree
from models.transformer import Hidden


class RootOnly(nn.Module):
    """Proposes nothing and remembers nothing. Drafters without a network of their own inherit the latter."""

    n_nodes = 1
    max_depth = 0
    chain = True
    feature_layers: tuple[int, ...] = ()

    def draft(self, text: Text, root: Tensor, cache_rows: Tensor, context: SamplingContext | None) -> DraftTree:
        """A tree of one node, the root."""
        tokens = root[:, None]
        return DraftTree(tokens, torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool))

    def keep(self, text: Text, hidden: Hidden, path: Tensor) -> None:
        """Nothing is kept."""

    def prefill(self, slot: int, hidden: Hidden, chunk: Chunk) -> None:
        """Nothing is filled."""

    def first(self, n: int) -> "RootOnly":
        """Itself, which keeps nothing of any text."""
        return self

    def copy_slot(self, source: int, target: int) -> None:
        """Nothing is copied."""

    def reusable(self, common: int, length: int) -> int:
        """All that is shared."""
        return common
