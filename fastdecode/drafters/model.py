"""Drafting with a smaller model of the same tokenizer: a chain, each token chosen as the target would choose it."""

import torch
from torch import Tensor, nn

from fastdecode import sampling
from fastdecode.drafters import Chunk, Text, with_parts
from fastdecode.sampling import SamplingContext
from fastdecode.tree import DraftTree, chain_of
from models.transformer import Hidden, Transformer


class ModelDrafter(nn.Module):
    """A chain of `n_tokens` for each of `batch` texts, by `model`, whose ids mean what the target's do.

    `rows`: rows of the target's cache, bin included, which bound every text; the model's own cache has as many. Row r
    holds the token at position r, as in the target's. `vocab_size`: ids from here on are padding and never drafted.

    When a round begins, every row below the root's predecessor is cached: a round runs the root and all its drafts but
    the last, which is `missing [B]` bool where it was accepted. So each round begins with the last two tokens, of which
    the first is cached only where it is missing: a second time it might be rounded otherwise.
    """

    chain = True
    feature_layers: tuple[int, ...] = ()

    def __init__(self, model: Transformer, n_tokens: int, batch: int, rows: int, vocab_size: int):
        super().__init__()
        self.model, self.vocab_size = model, min(vocab_size, model.config.vocab_size)
        self.n_nodes, self.max_depth = n_tokens + 1, n_tokens
        self.cache = model.new_cache(batch, rows)
        self.register_buffer("missing", torch.zeros(batch, dtype=torch.bool, device=self.cache.k0.device), False)
        model.set_rotary(rows)

    def draft(self, text: Text, root: Tensor, cache_rows: Tensor, context: SamplingContext | None) -> DraftTree:
        """The chain that the model itself would go on with below `root [B]`, by the one rule of sampling.py."""
        last = (text.length - 1)[:, None]  # [B, 1], the root's position
        positions = last + torch.arange(-1, 1, device=root.device)
        token_ids = text.tokens.gather(1, positions.clamp_min(0))
        drafted: list[Tensor] = []
        is_new = torch.stack((self.missing, torch.ones_like(self.missing)), dim=1)
        for depth in range(self.max_depth):
            logits = self._run(token_ids, positions, is_new & ~text.done[:, None], cache_rows)
            is_new = is_new[:, -1:]
            token_ids = self._choose(logits, depth, drafted, context)
            positions = last + (depth + 1)
            drafted.append(token_ids)
        tokens = torch.cat(drafted, dim=1)
        return chain_of(root, tokens, torch.ones_like(tokens, dtype=torch.bool))

    def keep(self, text: Text, hidden: Hidden, path: Tensor) -> None:
        """Note whether the last draft was accepted: it is what is not cached."""
        self.missing.copy_(torch.where(text.done, self.missing, path[:, -1] > 0))

    def prefill(self, slot: int, hidden: Hidden, chunk: Chunk) -> None:
        """Cache one chunk of the prompt of text `slot`."""
        cache = self.cache.slot(slot)
        self.missing[slot] = False
        offsets = torch.arange(chunk.token_ids.shape[1], device=chunk.token_ids.device)[None]
        positions = chunk.start + offsets
        rows = torch.where(offsets < chunk.n_real, positions, cache.bin_row)
        mask = chunk.cache_rows <= positions[:, :, None]
        at = positions.clamp_max(self.model.cos.shape[0] - 1)
        self.model(chunk.token_ids, at, rows, mask, chunk.cache_rows[None], cache)

    def first(self, n: int) -> "ModelDrafter":
        """The same model and memory, for the first `n` texts."""
        return with_parts(self, cache=self.cache.slots(0, n), missing=self.missing[:n])

    def copy_slot(self, source: int, target: int) -> None:
        """Make the cache of text `target` that of text `source`."""
        self.cache.copy_slot(source, target)
        self.missing[target] = self.missing[source]

    def reusable(self, common: int, length: int) -> int:
        """How many tokens of a cached text of `length` need no prefill for a prompt that shares the first `common`."""
        return max(0, min(common, length - 2))

    def _run(self, token_ids: Tensor, positions: Tensor, is_new: Tensor, cache_rows: Tensor) -> Tensor:
        """Cache those of `token_ids [B, N]` at `positions [B, N]` that are new; logits after the last, `[B, 1, V]`."""
        # A text of one token has nothing before its root.
        rows = torch.where(is_new & (positions >= 0), positions, self.cache.bin_row)
        mask = cache_rows <= positions[:, :, None]
        at = positions.clamp(0, self.model.cos.shape[0] - 1)
        hidden = self.model(token_ids, at, rows, mask, cache_rows[None], self.cache)
        return self.model.logits(hidden.last[:, -1:])

    def _choose(self, logits: Tensor, depth: int, drafted: list[Tensor], context: SamplingContext | None) -> Tensor:
        """The token of depth + 1, `[B, 1]`, below the root and the `drafted` ones of depths 1 .. depth."""
        if context is None:
            return sampling.greedy(logits, self.vocab_size)
        vocab = min(logits.shape[-1], context.noise.shape[-1])  # one of the two may have more rows of padding
        seen, seen_output = context.seen[..., :vocab], context.seen_output[..., :vocab]
        if drafted:
            tokens = torch.cat(drafted, dim=1)
            own = sampling.token_presence(tokens, torch.ones_like(tokens, dtype=torch.bool), vocab)[:, None]
            seen, seen_output = seen | own, seen_output | own
        noise = context.noise[:, depth : depth + 1, :vocab]
        return sampling.choose(logits[..., :vocab], context.options, noise, seen, seen_output, self.vocab_size)
