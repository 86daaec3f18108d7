"""Rotary position embeddings (RoFormer), half-split as in Hugging Face checkpoints, and their long-context schedules.

linear: position interpolation; dynamic: NTK-aware base; llama3: Llama-3.1's frequency bands; yarn: arXiv 2309.00071.
"""

import math

import torch
from torch import Tensor

from models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_seq_len: int) -> Tensor:
    """fp32 `[head_dim / 2]`: radians per position for each pair of channels.

    `max_seq_len` matters to a dynamic rope only: cached keys keep the base that they were made with, so the base is
    fixed once, for the longest text that the cache can hold.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    theta = rope.theta
    if rope.kind == "dynamic":
        trained = rope.original_max_position_embeddings
        length = max(max_seq_len, trained)
        theta *= (rope.factor * length / trained - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    inv_freq = 1.0 / theta**exponent
    if rope.kind == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.kind == "llama3":
        inv_freq = _llama3(inv_freq, rope)
    elif rope.kind == "yarn":
        inv_freq = _yarn(inv_freq, rope, head_dim)
    if rope.freq_factors:
        inv_freq = inv_freq / torch.tensor(rope.freq_factors)
    return inv_freq


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are interpolated, short ones kept, those between blended."""
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    slow, fast = wavelength > original / low, wavelength < original / high
    return torch.where(slow, inv_freq / rope.factor, torch.where(fast, inv_freq, blended))


def _yarn(inv_freq: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Interpolate channels that turn fewer than beta_slow times over the trained length, keep those above beta_fast."""

    def channel(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (
            2 * math.log(rope.theta)
        )

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return inv_freq / rope.factor * (1 - keep) + inv_freq * keep


def rotary_table(rope: RopeConfig, head_dim: int, max_seq_len: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each fp32 `[max_seq_len, head_dim]`, for positions 0..max_seq_len-1 (both halves alike)."""
    angles = torch.arange(max_seq_len, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim, max_seq_len)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `x [B, H, N, D]` by `cos, sin [B, 1, N, D]` (fp32); the result has x's dtype and is rounded once."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
