"""Drafters: what proposes the tokens that the target then checks."""

import copy
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn

from fastdecode.sampling import SamplingContext
from fastdecode.tree import DraftTree
from models.transformer import Hidden

ROW_MULTIPLE = 64  # cache rows are rounded up to this, so that every bucket is a whole number of vectors


def cache_rows_for(max_seq_len: int, n_nodes: int) -> int:
    """Rows of a cache for texts of `max_seq_len` tokens and trees of `n_nodes`, the bin included."""
    return -(-(max_seq_len + n_nodes) // ROW_MULTIPLE) * ROW_MULTIPLE + 1


M = TypeVar("M", bound=nn.Module)


def with_parts(module: M, **parts: Any) -> M:
    """A second `module` that shares everything with the first but `parts`: submodules and buffers by their names."""
    other = copy.copy(module)
    other._modules, other._buffers = dict(module._modules), dict(module._buffers)
    for name, part in parts.items():
        setattr(other, name, part)
    return other


class Text(Protocol):
    """What drafters read of a TextState: `tokens [B, columns]` int64, `length [B]` int64, `done [B]` bool."""

    tokens: Tensor
    length: Tensor
    done: Tensor


class Chunk(NamedTuple):
    """A piece of a prompt: `token_ids [1, C]` at positions from `start` on, of which the first `n_real` are real (both
    scalar tensors), and `next_ids [1, C]`, the tokens one further. `n_pairs`: n_real, but one less in the prompt's last
    chunk, whose last pair of feature and next token is left to the first round. `cache_rows [S]` is arange(S), S at
    least `start + n_real`."""

    token_ids: Tensor
    next_ids: Tensor
    start: Tensor
    n_real: Tensor
    n_pairs: Tensor
    cache_rows: Tensor


class Drafter(Protocol):
    """What a round asks of a drafter. Everything runs inside the compiled round: no value is read back to the host.

    `n_nodes` and `max_depth` bound the trees; `chain`: node n always stands at depth n. `feature_layers`: target layers
    whose entering states `keep` needs.
    """

    n_nodes: int
    max_depth: int
    chain: bool
    feature_layers: tuple[int, ...]

    def draft(self, text: Text, root: Tensor, cache_rows: Tensor, context: SamplingContext | None) -> DraftTree:
        """A tree below `root [B]`, the last committed token. `cache_rows [S]` is arange(S), S the bucket. `context`:
        what the target will choose with; None in greedy rounds."""

    def keep(self, text: Text, hidden: Hidden, path: Tensor) -> None:
        """After verification, before text changes: the target's states at the nodes, and the accepted `path [B, D+1]`
        (root first, padded with any node)."""

    def prefill(self, slot: int, hidden: Hidden, chunk: Chunk) -> None:
        """After each chunk of the prompt of text `slot`: the target's states there, `[1, C, h]` each."""

    def first(self, n: int) -> "Drafter":
        """The same drafter and the same memory, for the first `n` texts of the batch alone."""

    def copy_slot(self, source: int, target: int) -> None:
        """Make what is kept of text `target` that of text `source`."""

    def reusable(self, common: int, length: int) -> int:
        """How many tokens of a cached text of `length` need no prefill for a prompt that shares the first `common`."""
