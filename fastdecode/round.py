"""One round: draft, verify, accept, commit, as one tensor program of fixed shape.

Plain decoding is the round whose tree is its root. Nothing here reads a value back to the host, and no shape depends
on data, so the whole round compiles as one graph and can be captured.
"""

import torch
from torch import Tensor, nn

from fastdecode import sampling
from fastdecode.clock import stamp_operator
from fastdecode.drafters import Drafter
from fastdecode.state import TextState
from fastdecode.tree import DraftTree, Lineage, lineage, path_to
from models.cache import KVCache
from models.transformer import Hidden, Transformer


class Round(nn.Module):
    """Advances every text of a batch by at least one token. Holds what it needs; writes `state` and `cache` in place.

    `vocab_size`: ids at or above it are padding rows of the embedding and are never chosen.
    """

    def __init__(self, model: Transformer, cache: KVCache, state: TextState, drafter: Drafter, vocab_size: int):
        super().__init__()
        self.model, self.cache, self.state = model, cache, state
        self.drafter, self.vocab_size = drafter, vocab_size
        self.stamp, times = None, None
        if drafter.max_depth and state.length.device.type == "cpu":
            self.stamp, times = stamp_operator(), torch.zeros(2, dtype=torch.int64)
        self.register_buffer("times", times, persistent=False)  # when drafting and verifying ended, ns

    def greedy(self, cache_rows: Tensor) -> Tensor:
        """A round at temperature 0 without penalties. See `advance`."""
        return self.advance(cache_rows, sampled=False)

    def sampled(self, cache_rows: Tensor) -> Tensor:
        """A round with everything a user can ask for, temperature 0 included. See `advance`."""
        return self.advance(cache_rows, sampled=True)

    def advance(self, cache_rows: Tensor, sampled: bool) -> Tensor:
        """Draft, verify, accept, commit.

        `cache_rows [S]` int64 is arange(S); S is the bucket, the part of the cache that attention reads. Returns a
        report for the host, `[B, D + 4]` int64: length, done, how many of the committed tokens were drafted, and the
        D+1 tokens that this round may have committed, drafted ones first.
        """
        state = self.state
        root_position = state.length - 1  # [B]
        root = state.tokens.gather(1, root_position[:, None])[:, 0]
        context = self.sampling_context() if sampled else None
        tree = self.drafter.draft(state, root, cache_rows, context)
        if self.stamp is not None:
            self.stamp(self.times, 0, tree.tokens)
        family = lineage(tree.parents, self.drafter.max_depth)

        hidden = self.verify(tree, family, cache_rows)
        chosen = self.choose(self.model.logits(hidden.last), tree, family, context)
        if self.stamp is not None:
            self.stamp(self.times, 1, chosen)

        path, n_accepted = self.accept(tree, family, chosen)
        self.drafter.keep(state, hidden, path)
        return self.commit(tree, chosen, path, n_accepted)

    def sampling_context(self) -> sampling.SamplingContext:
        """What the target will choose with, and the drafter may rank its candidates by."""
        state, vocab, device = self.state, self.model.config.vocab_size, self.state.length.device
        positions = state.length[:, None] + torch.arange(self.drafter.max_depth + 1, device=device)
        noise = sampling.gumbel_noise(state.sampling.seed, positions, vocab)
        committed = state.committed()
        is_output = committed & (torch.arange(committed.shape[1], device=device) >= state.prompt_length[:, None])
        seen, seen_output = (sampling.token_presence(state.tokens, c, vocab)[:, None] for c in (committed, is_output))
        return sampling.SamplingContext(noise, state.sampling, seen, seen_output)

    def verify(self, tree: DraftTree, family: Lineage, cache_rows: Tensor) -> Hidden:
        """One forward pass of the target over the tree's nodes."""
        state, n = self.state, tree.tokens.shape[1]
        first = (state.length - 1)[:, None]  # [B, 1]: the root's position and cache row
        nodes = torch.arange(n, device=first.device)
        positions = (first + family.depth).clamp_max(self.model.cos.shape[0] - 1)
        rows = torch.where(state.done[:, None], self.cache.bin_row, first + nodes)
        # A node attends what was committed before the root, and its own ancestors among the nodes.
        node_of_row = cache_rows[None] - first  # [B, S]
        is_node = (node_of_row >= 0) & (node_of_row < n)
        node_of_row = node_of_row.clamp(0, n - 1)
        among_nodes = family.ancestors.gather(2, node_of_row[:, None].expand(-1, n, -1)) & is_node[:, None]
        mask = (cache_rows < first)[:, None] | among_nodes
        key_positions = torch.where(is_node, first + family.depth.gather(1, node_of_row), cache_rows)
        taps = self.drafter.feature_layers
        return self.model(tree.tokens, positions, rows, mask, key_positions, self.cache, taps)

    def choose(
        self, logits: Tensor, tree: DraftTree, family: Lineage, context: sampling.SamplingContext | None
    ) -> Tensor:
        """The target's own next token at every node, `[B, N]`: the one rule of sampling.py. `context` is None in greedy
        rounds."""
        if context is None:
            return sampling.greedy(logits, self.vocab_size)
        vocab, seen, seen_output = logits.shape[-1], context.seen, context.seen_output
        noise = context.noise.gather(1, family.depth[:, :, None].expand(-1, -1, vocab))
        if self.drafter.max_depth:
            # Not the root: it is committed, and of the prompt in a text's first round, which is no output.
            is_draft = torch.arange(tree.tokens.shape[1], device=logits.device) > 0
            drafted = sampling.ancestor_presence(tree.tokens, family.ancestors & is_draft, vocab)
            seen, seen_output = seen | drafted, seen_output | drafted
        return sampling.choose(logits, context.options, noise, seen, seen_output, self.vocab_size)

    def accept(self, tree: DraftTree, family: Lineage, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Walk down from the root while a child is what its parent chose.

        Returns the path of accepted nodes `[B, D+1]` (root first, padded with it) and how many drafts it holds `[B]`.
        """
        agrees = tree.valid & (tree.tokens == chosen.gather(1, tree.parents))
        agrees = agrees | (torch.arange(agrees.shape[1], device=agrees.device) == 0)  # the root stands
        accepted = (agrees[:, None] | ~family.ancestors).all(-1)
        reach = torch.where(accepted, family.depth, -1)  # [B, N]
        n_accepted = reach.amax(-1)
        nodes = torch.arange(reach.shape[1], device=reach.device)
        deepest = torch.where(reach == n_accepted[:, None], nodes, reach.shape[1]).amin(-1)  # the first of them
        return path_to(deepest, family, self.drafter.max_depth), n_accepted

    def commit(self, tree: DraftTree, chosen: Tensor, path: Tensor, n_accepted: Tensor) -> Tensor:
        """Append what was accepted and the choice after it, as far as stops, budget and context allow."""
        state, depth = self.state, self.drafter.max_depth
        steps = torch.arange(depth + 1, device=path.device)[None]  # [1, D+1]
        bonus = chosen.gather(1, path.gather(1, n_accepted[:, None]))  # [B, 1]
        drafted = tree.tokens.gather(1, path.roll(-1, dims=1))
        new_tokens = torch.where(steps < n_accepted[:, None], drafted, bonus)  # [B, D+1]

        if not self.drafter.chain:
            first = (state.length - 1)[:, None]
            keep = (steps <= n_accepted[:, None]) & ~state.done[:, None]
            source = torch.where(keep, first + path, self.cache.bin_row)
            self.cache.move_rows(source, torch.where(keep, first + steps, self.cache.bin_row))

        count = torch.minimum(n_accepted + 1, state.limit - state.length)
        is_stop = (new_tokens[:, :, None] == state.stop_ids).any(-1) & (steps < count[:, None])
        first_stop = torch.where(is_stop, steps, depth + 1).amin(-1)
        count = torch.minimum(count, first_stop + 1)
        count = torch.where(state.done, 0, count)

        columns = torch.where(steps < count[:, None], state.length[:, None] + steps, state.bin_column)
        state.tokens.scatter_(1, columns, new_tokens)
        stopped = first_stop < count
        state.length.add_(count)
        state.done.logical_or_(stopped | (state.length >= state.limit))
        counts = torch.stack((state.length, state.done.long(), torch.minimum(n_accepted, count)), dim=1)
        return torch.cat((counts, new_tokens), dim=1)
