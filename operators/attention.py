"""Attention of a few queries on the CPU: the operator of attention.cpp, built on first use.

Keys and values are read once for all rows and for all query heads that share them. A query's result is bitwise the same
beside any others, at any number of rows, in any bucket, and at any thread count.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor

from operators import native

SOURCES = (
    *map(Path(__file__).with_name, ("attention.cpp", "attention_path.h", "new_rows.h", "whole_layers.h", "stamp.h")),
    native.EACH_CPU,  # the first includes the rest
)
PATHS = ("plain", "avx2", "avx512", "bf16")  # as in attention.cpp; each CPU has the first few
MOST_ROWS = 16
LARGEST_HEAD = 256


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None
) -> Tensor:
    """`q [B, H, N, D]` over `k, v [B, H_kv, S, D]` (prefixes of a cache are read in place) -> `[B, H, N, D]`.

    `mask [B, N, S]` bool: where a query may look; one that may look nowhere gets zero. `k_scale, v_scale [B, H_kv, S]`:
    what int8 k and v are multiplied by. For what `takes` says yes to; RuntimeError for anything else. Call
    `operators()` before a stored program that contains this is loaded.
    """
    return torch.ops.fastdecode.attend(q, k, v, mask, k_scale, v_scale)


def attend_new(qkv: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, mask: Tensor, *cache: Tensor) -> Tensor:
    """`qkv [B, N, (H + 2 H_kv) D]`, a layer's new queries, keys and values -> what its queries mix, `[B, N, H D]`.

    Queries and keys are turned by `cos, sin [B, 1, N, D]` (fp32); keys and values are stored at `rows [B, N]` (int64)
    of `cache` (what KVCache.layer gives), which `mask [B, N, S]` then looks at. To the last bit what `rope.rotate`,
    `cache.write_layer` and `attend` do. For what `takes_new` says yes to; RuntimeError for anything else.
    """
    return torch.ops.fastdecode.attend_new(qkv, cos, sin, rows, mask, *cache)


def takes_new(x: Tensor, k: Tensor, v: Tensor, *scales: Tensor) -> bool:
    """Whether `attend_new` is there, and is for rows like those of `x [B, N, any]` and such a cache."""
    return k.dtype in (x.dtype, torch.int8) and takes(x[:, None], k, v)


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the operator is there and is for such tensors (shapes as for `attend`). It has no gradients."""
    n, head_dim = q.shape[2], k.shape[3]
    known = q.dtype in (torch.bfloat16, torch.float32) and k.dtype in (torch.bfloat16, torch.float32, torch.int8)
    fits = q.device.type == "cpu" and n <= MOST_ROWS and head_dim % 16 == 0 and head_dim <= LARGEST_HEAD
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return known and k.dtype == v.dtype and fits and not learns and available()


@torch.compiler.assume_constant_result  # else the compiler would trace into building it
def available() -> bool:
    """Whether the C++ operator is there; the first call builds it."""
    return operators() is not None


@functools.cache
def operators() -> Path | None:
    """Build, where it is not in the user's cache, and load attention.cpp; its library, or None where that cannot be
    done. Also tells torch.compile the shape of what its operators return."""
    library = native.load(SOURCES)
    if library is not None:
        torch.library.register_fake("fastdecode::attend", _output_like)
        torch.library.register_fake("fastdecode::attend_new", _output_of_new)
        torch.library.register_fake("fastdecode::decoder_layers", _output_of_layers)
        torch.library.register_fake("fastdecode::stamp", lambda times, index, after: None)
    return library


def _output_like(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, path: int = -1
) -> Tensor:
    batch, n_heads, n, head_dim = q.shape
    return q.new_empty(batch, n, n_heads, head_dim).transpose(1, 2)


def _output_of_new(
    qkv: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, mask: Tensor, k: Tensor, *rest: object, **named: object
) -> Tensor:
    _, n_kv_heads, _, head_dim = k.shape
    return qkv.new_empty(*qkv.shape[:-1], qkv.shape[-1] - 2 * n_kv_heads * head_dim)


def _output_of_layers(x: Tensor, *rest: object, **named: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
