"""Prefill: the keys and values of a prompt, in chunks of a few fixed sizes.

Runs uncompiled: each chunk size would cost a cold start of its own.
"""

import torch

from fastdecode.drafters import Chunk, Drafter
from fastdecode.runner import bucket_sizes
from models.cache import KVCache
from models.transformer import Transformer

CHUNK_SIZES = (32, 128, 512)  # tokens; a prompt of any length is cut into these, the last one padded


def chunk_plan(n_tokens: int) -> list[int]:
    """Chunk sizes that cover `n_tokens`: the largest while they are full, then the smallest that holds the rest."""
    plan = [CHUNK_SIZES[-1]] * (n_tokens // CHUNK_SIZES[-1])
    rest = n_tokens % CHUNK_SIZES[-1]
    return [*plan, next(size for size in CHUNK_SIZES if size >= rest)] if rest else plan


class Prefill:
    """Fills the cache with a prompt, one sequence at a time: no prompt's result depends on its neighbours."""

    def __init__(self, model: Transformer, cache: KVCache, drafter: Drafter):
        self.model, self.cache, self.drafter = model, cache, drafter
        self.buckets = bucket_sizes(cache.bin_row)

    @torch.inference_mode()
    def run(self, slot: int, prompt_ids: list[int], start: int) -> None:
        """Cache all of the prompt of text `slot` but its last token, which is the first root; the first `start` tokens
        are cached already. The drafter sees each chunk, too."""
        device = self.model.norm.weight.device
        cache, end = self.cache.slot(slot), len(prompt_ids) - 1
        for size in chunk_plan(end - start):
            n_real = min(size, end - start)
            bucket = next(b for b in self.buckets if b >= start + n_real)
            padding = [0] * (size - n_real)
            ids = torch.tensor([prompt_ids[start : start + n_real] + padding], device=device)
            next_ids = torch.tensor([prompt_ids[start + 1 : start + n_real + 1] + padding], device=device)
            cache_rows = torch.arange(bucket, device=device)

            offsets = torch.arange(size, device=device)[None]
            positions = (start + offsets).clamp_max(self.model.cos.shape[0] - 1)
            rows = torch.where(offsets < n_real, positions, cache.bin_row)
            mask = cache_rows <= positions[:, :, None]
            taps = self.drafter.feature_layers
            hidden = self.model(ids, positions, rows, mask, cache_rows[None], cache, taps)
            n_pairs = n_real - (start + n_real == end)
            scalars = (torch.tensor(value, device=device) for value in (start, n_real, n_pairs))
            self.drafter.prefill(slot, hidden, Chunk(ids, next_ids, *scalars, cache_rows))
            start += n_real
