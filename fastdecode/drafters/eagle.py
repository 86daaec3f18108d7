"""Drafting with an EAGLE head: catch up on what was committed, then grow a tree, one head pass per level.

The head runs on pairs (feature f_i, token t_{i+1}) at position i. With the root at position r, all pairs below r are
committed; those that the head has not run yet are pending, and their last one answers with the root's children.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from fastdecode.drafters import Chunk, Text, with_parts
from fastdecode.drafters.ngram import look_up
from fastdecode.sampling import SamplingContext
from fastdecode.tree import Candidates, DraftTree, plant
from fastdecode.tree_options import TreeBuilder
from models.cache import KVCache
from models.eagle import DraftHead
from models.errors import InputError
from models.transformer import Hidden

LONGEST_MATCH = 4  # tokens by which one earlier place is preferred to another

Noise = Literal["scores", "ranks", "none"]


class EagleState(nn.Module):
    """What an EAGLE drafter remembers of a batch of texts.

    `cache`: the head's keys and values; rows 0 .. scratch - 1 are the tree's, pair i lies in row scratch + i, the last
    row is a bin. `filled [B]` int64: pairs 0 .. filled - 1 are cached. `pending [B, D+1, h]`: features of the pairs
    from `filled` on.
    """

    def __init__(self, cache: KVCache, pending: Tensor, filled: Tensor):
        super().__init__()
        self.cache = cache
        self.register_buffer("pending", pending, persistent=False)
        self.register_buffer("filled", filled, persistent=False)

    def slots(self, start: int, stop: int) -> "EagleState":
        """The same memory, seen as the state of sequences `start` to `stop` - 1."""
        return EagleState(self.cache.slots(start, stop), self.pending[start:stop], self.filled[start:stop])


class EagleDrafter(nn.Module):
    """Drafts for `batch` texts with `head`; the tree's shape is the builder's.

    `rows`: rows of the target's cache, bin included, which bound every text. `noise`: what a draft at T > 0 takes of
    the noise that the target will choose with: "scores" (children are ranked by it, and a node of a dynamic tree adds
    `log_softmax(log q / T + noise)` to its parent's score), "ranks" (a node adds log q) or "none" (log q alone).
    `lookup`: where the last tokens, this many or more, stood before, a chain takes what followed them, and the head
    drafts what is missing, as SuffixDecoding (arXiv 2411.04975) joins the two; 0 leaves everything to the head.
    Raises InputError when the tree asks for more children of a node than the head's vocabulary has.
    """

    def __init__(
        self, head: DraftHead, tree: TreeBuilder, batch: int, rows: int, noise: Noise = "scores", lookup: int = 0
    ):
        super().__init__()
        self.noise, self.lookup = noise, lookup
        if tree.top_k > head.config.draft_vocab_size:
            raise InputError(
                f"The tree asks for the {tree.top_k} best children of a node, but the head's vocabulary has "
                f"{head.config.draft_vocab_size} tokens; give a narrower tree."
            )
        place = head.layers[0].post_attention_layernorm.weight
        self.head, self.tree = head, tree.to(place.device)
        self.n_nodes, self.max_depth, self.chain = tree.n_nodes, tree.max_depth, tree.chain
        self.feature_layers = head.feature_layers
        self.scratch = sum(tree.widths)
        pending = torch.zeros(batch, self.max_depth + 1, head.config.layer.hidden_size, device=place.device)
        self.state = EagleState(
            head.new_cache(batch, self.scratch + rows),
            pending.to(place.dtype),
            torch.zeros(batch, dtype=torch.int64, device=place.device),
        )
        head.set_rotary(rows)

    def draft(
        self, text: Text, root: Tensor, cache_rows: Tensor, context: SamplingContext | None = None
    ) -> DraftTree:
        """A tree below `root [B]`, the last committed token of each text.

        `cache_rows [S]` is arange(S), S the bucket. Candidates are ranked by log q, or where `context` has a
        temperature T > 0 by `log q / T + noise`, as the target will choose (see `noise` of the class). With no pair
        pending (a text of one token) only the root is valid.
        """
        position = text.length - 1  # [B], the root's
        valid = position > self.state.filled
        features, for_logits = self._catch_up(text, position, cache_rows)
        committed = (cache_rows < position[:, None])[:, None]  # [B, 1, S]
        above = torch.zeros(root.shape[0], 1, self.scratch, dtype=torch.bool, device=root.device)
        growth, first_row = plant(root), 0
        copied = None
        if self.lookup:
            copied = look_up(text, root, cache_rows, self.max_depth, self.lookup, max(self.lookup, LONGEST_MATCH))
        for depth in range(self.max_depth):
            if depth:
                # Frontier nodes of this depth: each attends the committed pairs, its ancestors' rows, and its own.
                width = self.tree.widths[depth - 1]
                rows = first_row + torch.arange(width, device=root.device)
                is_own = rows[:, None] == torch.arange(self.scratch, device=root.device)  # [W, scratch]
                features = _take(features, growth.parents)
                above = _take(above, growth.parents) | is_own
                mask = torch.cat((above, committed.expand(-1, width, -1)), dim=-1)
                positions = self._positions(position[:, None] + (depth - 1)).expand(-1, width)
                features, for_logits = self.head(
                    growth.tokens, features, positions, rows.expand_as(growth.tokens), mask, self.state.cache
                )
                first_row += width
            candidates = self._candidates(for_logits, depth, context)
            if copied is not None:
                tokens, there = (values[:, depth, None, None] for values in copied)
                candidates = Candidates(torch.where(there, tokens, candidates.tokens), candidates.scores)
            growth = self.tree.extend(growth, candidates)
        return self.tree.finish(growth, valid)

    def keep(self, text: Text, hidden: Hidden, path: Tensor) -> None:
        """Remember the features of the accepted nodes, `path [B, D+1]` (root first, padded with any node), of the
        target's states at the tree's nodes. Call it after `draft` and before the text's length and `done` change."""
        taken = Hidden(_take(hidden.last, path), tuple(_take(states, path) for states in hidden.entering))
        features = self.head.fuse(taken).to(self.state.pending.dtype)
        self.state.pending.copy_(torch.where(text.done[:, None, None], self.state.pending, features))

    def prefill(self, slot: int, hidden: Hidden, chunk: Chunk) -> None:
        """Run the pairs of one chunk of the prompt of text `slot`. A prompt of one token has none.

        `hidden`: the target's states of the chunk, `[1, C, h]` each. Of its pairs the first `n_pairs` are run; the
        prompt's last one stays pending.
        """
        state = self.state.slots(slot, slot + 1)
        features = self.head.fuse(hidden)
        offsets = torch.arange(chunk.next_ids.shape[1], device=chunk.next_ids.device)[None]
        positions = self._positions(chunk.start + offsets)
        rows = torch.where(offsets < chunk.n_pairs, self.scratch + positions, state.cache.bin_row)
        self.head(chunk.next_ids, features, positions, rows, self._causal(positions, chunk.cache_rows), state.cache)
        last = (chunk.n_real - 1).expand(1, 1)
        state.pending[:, :1] = _take(features, last).to(state.pending.dtype)
        state.filled.copy_((chunk.start + chunk.n_pairs).expand(1))

    def first(self, n: int) -> "EagleDrafter":
        """The same head and memory, for the first `n` texts."""
        return with_parts(self, state=self.state.slots(0, n))

    def copy_slot(self, source: int, target: int) -> None:
        """Make what is kept of text `target` that of text `source`."""
        self.state.cache.copy_slot(source, target)
        for values in (self.state.pending, self.state.filled):
            values[target] = values[source]

    def reusable(self, common: int, length: int) -> int:
        """How many tokens of a cached text of `length` need no prefill for a prompt that shares the first `common`.

        One less than are shared, since the pair at the border needs its feature again, and not those of which pairs may
        still be pending.
        """
        return max(0, min(common - 1, length - 1 - (self.max_depth + 1)))

    def _catch_up(self, text: Text, position: Tensor, cache_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Run the pending pairs. Returns what the head says at the last one: `fed_back, for_logits [B, 1, h]`."""
        state, width = self.state, self.state.pending.shape[1]
        n_pending = (position - state.filled)[:, None]  # [B, 1]
        offsets = torch.arange(width, device=position.device)[None]
        positions = self._positions(state.filled[:, None] + offsets)  # [B, D+1]
        tokens = text.tokens.gather(1, positions + 1)
        is_real = (offsets < n_pending) & ~text.done[:, None]
        rows = torch.where(is_real, self.scratch + positions, state.cache.bin_row)
        fed_back, for_logits = self.head(
            tokens, state.pending, positions, rows, self._causal(positions, cache_rows), state.cache
        )
        last = (n_pending - 1).clamp(0, width - 1)
        state.filled.copy_(torch.where(text.done, state.filled, position))
        return _take(fed_back, last), _take(for_logits, last)

    def _causal(self, positions: Tensor, cache_rows: Tensor) -> Tensor:
        """`[B, N, scratch + S]`: a pair at `positions [B, N]` attends the pairs up to itself, and no scratch row."""
        mask = cache_rows <= positions[:, :, None]
        return torch.cat((mask.new_zeros(*positions.shape, self.scratch), mask), dim=-1)

    def _positions(self, positions: Tensor) -> Tensor:
        # Drafts near the end of the context may point beyond it; they are never committed.
        return positions.clamp_max(self.head.cos.shape[0] - 2)

    def _candidates(self, for_logits: Tensor, depth: int, context: SamplingContext | None) -> Candidates:
        """The best children of nodes of `depth`, whose states are `for_logits [B, W, h]`."""
        logits = self.head.logits(for_logits).float()
        ranks = logits
        if context is not None and self.noise != "none":
            drawn = self.head.at_drafted(context.noise[:, depth])[:, None]  # [B, 1, draft_vocab]
            temperature = context.options.temperature[:, None, None]
            samples = temperature > 0
            ranks = torch.where(samples, logits / torch.where(samples, temperature, 1.0) + drawn, logits)
        if self.tree.top_k == 1:
            best, ids = ranks.max(-1, keepdim=True)  # unlike topk, the compiler fuses it
        else:
            best, ids = ranks.topk(self.tree.top_k, dim=-1)
        if self.noise == "scores":
            return Candidates(self.head.target_ids(ids), best - ranks.logsumexp(-1, keepdim=True))
        return Candidates(self.head.target_ids(ids), logits.log_softmax(-1).gather(-1, ids))


def _take(values: Tensor, index: Tensor) -> Tensor:
    """Rows `index [B, M]` of `values [B, N, X]`: `[B, M, X]`."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[-1]))
