"""Drafting by lookup: what followed the last few tokens where they stood before (prompt lookup decoding)."""

import torch
from torch import Tensor

from fastdecode.drafters import Text
from fastdecode.drafters.root import RootOnly
from fastdecode.sampling import SamplingContext
from fastdecode.tree import DraftTree, chain_of

LONGEST_MATCH = 3


class NgramDrafter(RootOnly):
    """A chain of `n_tokens` copied from behind the latest earlier place where the last 3, else 2, else 1 tokens stood.

    Where there is no such place, or the copy runs out of text, nodes are invalid. It matches and copies on the device.
    """

    def __init__(self, n_tokens: int):
        super().__init__()
        self.n_nodes, self.max_depth = n_tokens + 1, n_tokens

    def draft(self, text: Text, root: Tensor, cache_rows: Tensor, context: SamplingContext | None) -> DraftTree:
        """A chain below `root [B]`; `cache_rows [S]` is arange(S), which bounds the text so far."""
        return chain_of(root, *look_up(text, root, cache_rows, self.max_depth))


def look_up(
    text: Text, root: Tensor, cache_rows: Tensor, n_tokens: int, shortest: int = 1, longest: int = LONGEST_MATCH
) -> tuple[Tensor, Tensor]:
    """What followed the last `longest`, else fewer, at least `shortest` tokens up to `root [B]` where they stood last.

    `cache_rows [S]` is arange(S), which bounds the text so far. Returns tokens `[B, n_tokens]`, and which of them there
    are: `valid [B, n_tokens]` bool, falling from True to False once.
    """
    batch, n = root.shape[0], cache_rows.shape[0]
    tokens, last = text.tokens[:, :n], (text.length - 1)[:, None]  # [B, S], [B, 1]
    best = torch.full_like(last, -1)
    matches = (cache_rows < last) & (tokens == root[:, None])  # ends of 1-grams before the root
    for back in range(1, longest + 1):
        # Longer matches come later and win; among places of one match length the latest does.
        if back >= shortest:
            place = torch.where(matches, cache_rows, -1).amax(-1, keepdim=True)
            best = torch.where(place >= 0, place, best)
        if back < longest:
            wanted = tokens.gather(1, (last - back).clamp(0, n - 1))  # a finished text may reach beyond the bucket
            shifted = tokens.gather(1, (cache_rows - back).clamp_min(0).expand(batch, -1))
            matches = matches & (cache_rows >= back) & (last >= back) & (shifted == wanted)
    source = best + 1 + torch.arange(n_tokens, device=root.device)
    valid = (best >= 0) & (source <= last)
    return tokens.gather(1, source.clamp(0, n - 1)), valid
