"""Static KV cache: allocated once, written at rows, read as a prefix."""

import torch
from torch import Tensor, nn


class KVCache(nn.Module):
    """Keys and values of every layer, `[B, H_kv, rows, D]` each, zero at first so that unwritten rows stay finite.

    Row r of a sequence holds position r once it is committed. The last row is a bin: padding and finished sequences
    are written there and nothing ever attends it. Buffers keep their addresses, as CUDA graphs need.
    """

    def __init__(self, n_layers: int, batch: int, n_kv_heads: int, rows: int, head_dim: int, dtype, device):
        super().__init__()
        self.n_layers = n_layers
        self.rows = rows
        shape = (batch, n_kv_heads, rows, head_dim)
        for i in range(n_layers):
            self.register_buffer(f"k{i}", torch.zeros(shape, dtype=dtype, device=device), persistent=False)
            self.register_buffer(f"v{i}", torch.zeros(shape, dtype=dtype, device=device), persistent=False)

    @property
    def bin_row(self) -> int:
        return self.rows - 1

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values of layer `i`."""
        return getattr(self, f"k{i}"), getattr(self, f"v{i}")

    def move_rows(self, source: Tensor, target: Tensor) -> None:
        """Copy rows `source [B, D]` to rows `target [B, D]` in every layer, all read before any is written."""
        for buffer in self.buffers():
            index = source[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
            write_rows(buffer, target, buffer.gather(2, index))

    def slot(self, b: int) -> "KVCache":
        """The same memory, seen as the cache of sequence `b` alone (batch 1): prefill fills one sequence at a time."""
        view = KVCache.__new__(KVCache)
        nn.Module.__init__(view)
        view.n_layers, view.rows = self.n_layers, self.rows
        for name, buffer in self.named_buffers():
            view.register_buffer(name, buffer[b : b + 1], persistent=False)
        return view


def write_rows(cache: Tensor, rows: Tensor, values: Tensor) -> None:
    """Store `values [B, H, N, D]` at `rows [B, N]` (int64) of `cache [B, H, R, D]`, in place."""
    batch = torch.arange(rows.shape[0], device=rows.device)[:, None]
    cache[batch, :, rows] = values.transpose(1, 2).to(cache.dtype)
