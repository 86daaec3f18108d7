"""Prefill: the keys and values of a prompt, in chunks of a few fixed sizes.

Runs uncompiled: each chunk size would cost a cold start of its own, for a few milliseconds of overhead per chunk.
"""

import torch

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

    def __init__(self, model: Transformer, cache: KVCache):
        self.model, self.cache = model, cache
        self.buckets = bucket_sizes(cache.bin_row)

    @torch.inference_mode()
    def run(self, slot: int, token_ids: list[int], start: int) -> None:
        """Cache `token_ids[start:]` of sequence `slot`, whose first `start` tokens are cached already."""
        device = self.model.norm.weight.device
        cache = self.cache.slot(slot)
        for size in chunk_plan(len(token_ids) - start):
            ids = token_ids[start : start + size]
            padded = torch.tensor([ids + [0] * (size - len(ids))], device=device)
            bucket = next(b for b in self.buckets if b >= start + len(ids))
            cache_rows = torch.arange(bucket, device=device)
            first, n_real = torch.tensor(start, device=device), torch.tensor(len(ids), device=device)
            self._chunk(padded, first, n_real, cache_rows, cache)
            start += len(ids)

    def _chunk(self, token_ids, start, n_real, cache_rows, cache: KVCache) -> None:
        """`token_ids [1, C]` at positions start.., the first `n_real` of them real; padding goes to the bin row."""
        offsets = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        positions = (start + offsets).clamp_max(self.model.cos.shape[0] - 1)
        rows = torch.where(offsets < n_real, positions, cache.bin_row)
        mask = cache_rows <= positions[:, :, None]
        self.model(token_ids, positions, rows, mask, cache_rows[None], cache)
