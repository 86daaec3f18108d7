"""The state of a batch of texts on the device: everything that a round reads and writes between two prompts."""

import torch
from torch import Tensor, nn

from fastdecode.sampling import SamplingOptions, SamplingState


class TextState(nn.Module):
    """Static buffers, so that a compiled and captured round finds them where they were.

    `tokens [B, columns]` int64: prompt and output, the last column a bin; as many as the cache has rows, so that every
    bucket of rows is a bucket of tokens too. `length [B]`: tokens committed; the last of
    them is the root, chosen but not cached. `prompt_length [B]`. `limit [B]`: length at which the text must stop.
    `done [B]` bool: nothing more is committed. `stop_ids [K]` int64 (-1 matches nothing).
    """

    def __init__(self, batch: int, max_seq_len: int, columns: int, stop_ids: tuple[int, ...], device):
        super().__init__()
        self.batch, self.max_seq_len = batch, max_seq_len

        def buffer(name: str, *shape: int, fill: int | bool = 0):
            dtype = torch.bool if isinstance(fill, bool) else torch.int64
            self.register_buffer(name, torch.full(shape, fill, dtype=dtype, device=device), persistent=False)

        buffer("tokens", batch, columns)
        buffer("length", batch, fill=1)
        buffer("prompt_length", batch, fill=1)
        buffer("limit", batch, fill=1)
        buffer("done", batch, fill=True)
        self.register_buffer("stop_ids", torch.tensor(stop_ids or (-1,), device=device), persistent=False)
        self.sampling = SamplingState.allocate(batch, device)

    @property
    def bin_column(self) -> int:
        return self.tokens.shape[1] - 1

    def start(self, slot: int, prompt_ids: list[int], limit: int, options: SamplingOptions, row: int) -> None:
        """Put a prompt into `slot`; `row` is its index in the user's input, which its noise is keyed by."""
        self.tokens[slot, : len(prompt_ids)] = torch.tensor(prompt_ids, device=self.tokens.device)
        self.length[slot] = len(prompt_ids)
        self.prompt_length[slot] = len(prompt_ids)
        self.limit[slot] = limit
        self.sampling.set_row(slot, options, row)
        self.done[slot] = False

    def stop(self, slot: int) -> None:
        """Commit nothing more in `slot`."""
        self.done[slot] = True

    def first(self, n: int) -> "TextState":
        """The same memory, seen as the state of the first `n` texts."""
        view = TextState.__new__(TextState)
        nn.Module.__init__(view)
        view.batch, view.max_seq_len = n, self.max_seq_len
        for name, buffer in self.named_buffers():
            view.register_buffer(name, buffer if name == "stop_ids" else buffer[:n], persistent=False)
        view.sampling = SamplingState(*(values[:n] for values in self.sampling))
        return view

    def copy_slot(self, source: int, target: int) -> None:
        """Make text `target` go on where text `source` stands."""
        for values in (self.tokens, self.length, self.prompt_length, self.limit, self.done, *self.sampling):
            values[target] = values[source]

    def committed(self) -> Tensor:
        """`[B, columns]` bool: which columns of `tokens` hold committed tokens."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.length[:, None]
