"""Drafters: what proposes the tokens that the target then checks."""

from typing import Protocol

from torch import Tensor

from fastdecode.tree import DraftTree
from models.transformer import Hidden


class Text(Protocol):
    """What drafters read of a TextState: `tokens [B, columns]` int64, `length [B]` int64, `done [B]` bool."""

    tokens: Tensor
    length: Tensor
    done: Tensor


class Drafter(Protocol):
    """What a round asks of a drafter. Everything runs inside the compiled round: no value is read back to the host.

    `n_nodes` and `max_depth` bound the trees; `chain`: node n always stands at depth n. `feature_layers`: target layers
    whose entering states `keep` needs.
    """

    n_nodes: int
    max_depth: int
    chain: bool
    feature_layers: tuple[int, ...]

    def draft(
        self, text: Text, root: Tensor, cache_rows: Tensor, noise: Tensor | None, temperature: Tensor | None
    ) -> DraftTree:
        """A tree below `root [B]`, the last committed token. `cache_rows [S]` is arange(S), S the bucket.

        `noise [B, D+1, V]` is what the tokens at depths 1 .. D+1 will be chosen with, `temperature [B]` likewise; None
        in greedy rounds.
        """

    def keep(self, text: Text, hidden: Hidden, path: Tensor) -> None:
        """After verification, before text changes: the target's states at the nodes, and the accepted `path [B, D+1]`
        (root first, padded with any node)."""

    def prefill(
        self,
        slot: int,
        hidden: Hidden,
        next_ids: Tensor,
        start: Tensor,
        n_real: Tensor,
        n_pairs: Tensor,
        cache_rows: Tensor,
    ) -> None:
        """After each chunk of the prompt of text `slot`: the target's states, `[1, C, h]` each, at positions from
        `start` on, of which `n_real` are real (scalar tensors). `next_ids [1, C]`: the tokens one further. `n_pairs`:
        n_real, but one less in the last chunk, whose last pair stays pending."""

    def reusable(self, common: int, length: int) -> int:
        """How many tokens of a cached text of `length` need no prefill for a prompt that shares the first `common`."""
