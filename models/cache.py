"""Static KV cache: allocated once, written at rows, read as a prefix; in the activations' dtype, or in int8."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# fp32: whatever the size of the activations, a scale is amax / 127 to the last bit and nothing near zero is lost; fp16
# would save 2 bytes of the D + 4 that a head's key takes.
SCALE_DTYPE = torch.float32
LARGEST_CODE = 127  # symmetric: -128 is not used


class KVCache(nn.Module):
    """Keys and values of every layer, `[B, H_kv, rows, D]` each, zero at first so that unwritten rows stay finite.

    Row r of a sequence holds position r once it is committed. The last row is a bin: padding and finished sequences
    are written there and nothing ever attends it. Buffers keep their addresses, as CUDA graphs need.
    `quantized`: keys and values are int8 codes, whatever `dtype` says, and each has a buffer of scales
    `[B, H_kv, rows]` beside it, one for each token and head; see `quantize`.
    """

    def __init__(
        self,
        n_layers: int,
        batch: int,
        n_kv_heads: int,
        rows: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        quantized: bool = False,
    ):
        super().__init__()
        self.n_layers, self.rows, self.quantized = n_layers, rows, quantized
        shape = (batch, n_kv_heads, rows, head_dim)
        parts = {"k": (shape, dtype), "v": (shape, dtype)}
        if quantized:
            parts = {"k": (shape, torch.int8), "v": (shape, torch.int8)}
            parts |= {"k_scale": (shape[:3], SCALE_DTYPE), "v_scale": (shape[:3], SCALE_DTYPE)}
        self.parts = tuple(parts)
        for i in range(n_layers):
            for name, (size, kind) in parts.items():
                self.register_buffer(f"{name}{i}", torch.zeros(size, dtype=kind, device=device), persistent=False)

    @property
    def bin_row(self) -> int:
        return self.rows - 1

    def layer(self, i: int) -> tuple[Tensor, ...]:
        """Keys and values of layer `i`; then the scales of each, if the cache is quantized."""
        return tuple(getattr(self, f"{name}{i}") for name in self.parts)

    def move_rows(self, source: Tensor, target: Tensor) -> None:
        """Copy rows `source [B, D]` to rows `target [B, D]` in every layer, all read before any is written.

        Codes and scales are copied as they are: nothing is rounded twice.
        """
        batch = torch.arange(source.shape[0], device=source.device)[:, None]
        for buffer in self.buffers():
            write_rows(buffer, target, buffer[batch, :, source].transpose(1, 2))

    def slot(self, b: int) -> "KVCache":
        """The same memory, seen as the cache of sequence `b` alone (batch 1): prefill fills one sequence at a time."""
        return self.slots(b, b + 1)

    def slots(self, start: int, stop: int) -> "KVCache":
        """The same memory, seen as the cache of sequences `start` to `stop` - 1."""
        view = KVCache.__new__(KVCache)
        nn.Module.__init__(view)
        view.n_layers, view.rows, view.quantized, view.parts = self.n_layers, self.rows, self.quantized, self.parts
        for name, buffer in self.named_buffers():
            view.register_buffer(name, buffer[start:stop], persistent=False)
        return view

    def copy_slot(self, source: int, target: int) -> None:
        """Make sequence `target`'s keys and values those of sequence `source`."""
        for buffer in self.buffers():
            buffer[target] = buffer[source]


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x [..., D]` as int8 codes `[..., D]` and scales `[...]`: `x = scale * code`, off by half a scale at most.

    A scale is the largest magnitude of its D values, over 127; that of zeros is 0, and so are their codes. Codes are
    rounded to the nearest, ties to even.
    """
    x = x.to(SCALE_DTYPE)
    scale = x.abs().amax(-1) / LARGEST_CODE
    steps = x / torch.where(scale == 0, 1.0, scale)[..., None]
    # Without the clamp, values so small that their scale has lost its last bits would wrap around.
    return steps.round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8), scale


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`codes [..., D]` times `scale [...]`, multiplied in fp32: `[..., D]` in `dtype`."""
    return (codes.to(SCALE_DTYPE) * scale[..., None]).to(dtype)


def write_layer(layer: Sequence[Tensor], rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Store `k, v [B, H_kv, N, D]` at `rows [B, N]` (int64) of what `KVCache.layer` gave, in place."""
    new = (k, v)
    if len(layer) == 4:
        (k_codes, k_scale), (v_codes, v_scale) = quantize(k), quantize(v)
        new = (k_codes, v_codes, k_scale, v_scale)
    for buffer, values in zip(layer, new, strict=True):
        write_rows(buffer, rows, values)


def write_rows(cache: Tensor, rows: Tensor, values: Tensor) -> None:
    """Store `values [B, H, N, ...]` at `rows [B, N]` (int64) of `cache [B, H, R, ...]`, in place."""
    batch = torch.arange(rows.shape[0], device=rows.device)[:, None]
    cache[batch, :, rows] = values.transpose(1, 2).to(cache.dtype)
