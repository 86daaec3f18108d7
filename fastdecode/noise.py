"""Gumbel noise from a counter-based hash: a function of (seed, position, token id) and of nothing else.

Because noise belongs to a position and not to a step, a seed gives the same text however the tokens were come by.
"""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
# Multipliers of a 32-bit avalanche mixer (xor-shift, multiply, twice). The second is above 2^31 and is written as its
# negative residue, so that products stay within signed 64 bits and overflow nowhere.
MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B - (1 << 32)
LARGEST_U = 1 - 2.0**-24


def mix(x: Tensor) -> Tensor:
    """Scramble int64 tensors that hold 32-bit values; every input bit reaches every output bit."""
    x = ((x ^ (x >> 16)) * MULTIPLIER_1) & MASK
    x = ((x ^ (x >> 15)) * MULTIPLIER_2) & MASK
    return x ^ (x >> 16)


def random_bits(seed: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """32 random bits, as int64, for every broadcast triple of `seed`, `positions` and `token_ids` (all int64)."""
    key = mix((seed & MASK) ^ 0x9E3779B9)
    key = mix(key ^ (seed >> 32 & MASK))
    key = mix(key ^ (positions & MASK))
    second_key = mix(key ^ 0x5851F42D)  # two keys, so that one collision in 32 bits does not make rows alike
    return mix(mix(key ^ token_ids) ^ second_key)


def gumbel(bits: Tensor) -> Tensor:
    """`-log(-log(1 - u))`, fp32, of u = (bits + 1/2) / 2^32.

    Large noise comes from small u, which fp32 holds exactly; u stays below 1, so that noise is finite.
    """
    u = ((bits.float() + 0.5) * 2.0**-32).clamp_max(LARGEST_U)
    return -torch.log(-torch.log1p(-u))


def gumbel_noise(seed: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """`seed [B]`, `positions [B, P]` (absolute, of the token to be chosen), both int64 -> fp32 `[B, P, V]`."""
    token_ids = torch.arange(vocab_size, device=seed.device)
    return gumbel(random_bits(seed[:, None, None], positions[:, :, None], token_ids))


def gumbel_noise_at(seed: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The same noise at chosen ids: `seed [B]`, `positions [B, P]`, `token_ids [B, P, K]` -> fp32 `[B, P, K]`."""
    return gumbel(random_bits(seed[:, None, None], positions[:, :, None], token_ids))
