"""How conversations become padded batches: which are held out, which stand together, in what order.

Everything is a function of the seed and the epoch, so that a resumed run meets the batches that the first would have.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fastdecode.train.features import Batch

if TYPE_CHECKING:
    from fastdecode.train.store import Conversation

BUCKET = 32  # tokens: lengths that round up to the same multiple are mixed at random


def split(
    conversations: "Sequence[Conversation]", max_length: int, share: float, seed: int
) -> tuple[list[int], list[int]]:
    """Indices of the conversations to train on, and of those held out.

    Only conversations with an answer within `max_length` count. A conversation's lot hangs on its index and the seed
    alone: more data later never moves one from one side to the other.
    """
    lots = np.random.default_rng((seed, 0)).random(len(conversations))
    # A token is predicted from pairs before it, so that answers in the first two tokens teach nothing.
    usable = [i for i, c in enumerate(conversations) if c.answer[2:max_length].any()]
    held_out = [i for i in usable if lots[i] < share]
    if not held_out and len(usable) > 1:
        held_out = [min(usable, key=lambda i: lots[i])]
    kept = set(held_out)
    return [i for i in usable if i not in kept], held_out


def plan_epoch(indices: Sequence[int], lengths: Sequence[int], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of an epoch, in order: lists out of `indices`, whose `lengths` are given beside them.

    A batch takes at most `tokens` tokens, padding included, or is one conversation. Like stands with like, so that
    little is padding; who exactly, and the order of batches, is drawn anew every epoch.
    """
    rng = np.random.default_rng((seed, 1, epoch))
    buckets = -(-np.asarray(lengths) // BUCKET)
    drawn = rng.permutation(len(indices))
    order = drawn[np.argsort(buckets[drawn], kind="stable")]
    batches: list[list[int]] = []
    longest = 0
    for i in order:
        longest = max(longest, lengths[i])
        if not batches or (len(batches[-1]) + 1) * longest > tokens:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(indices[i])
    return [batches[i] for i in rng.permutation(len(batches))]


def collate(conversations: "Sequence[Conversation]", max_length: int, device: torch.device | str = "cpu") -> Batch:
    """Conversations, cut at `max_length` tokens and padded to the longest, as a Batch on `device`."""
    cut = [(c.token_ids[:max_length], c.answer[:max_length]) for c in conversations]
    shape = (len(cut), max(len(ids) for ids, _ in cut))
    token_ids, answer, real = np.zeros(shape, np.int64), np.zeros(shape, bool), np.zeros(shape, bool)
    for row, (ids, said) in enumerate(cut):
        token_ids[row, : len(ids)], answer[row, : len(ids)], real[row, : len(ids)] = ids, said, True
    return Batch(*(torch.from_numpy(part).to(device) for part in (token_ids, answer, real)))
