"""Gumbel noise from a counter-based hash: a function of (seed, position, token id) and of nothing else.

Because noise belongs to a position and not to a step, a seed gives the same text however the tokens were come by.
"""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
# Multipliers of a 32-bit avalanche mixer. The second is above 2^31 and is written as its negative residue: the largest
# product, (2^32 + 2^17) * 2^31, then stays within signed 64 bits, whose overflow C++ leaves undefined.
MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B - (1 << 32)
FIRST_KEY, SECOND_KEY = 0x9E3779B9, 0x5851F42D
LARGEST_U = 1 - 2.0**-24


def mix(x: Tensor) -> Tensor:
    """Scramble int64 tensors that hold 32-bit values; every input bit reaches every output bit.

    `(x * (2^s + 1)) >> s` is `x + (x >> s)`, and reads x once. Written with x twice, the expression would double at
    every step of Inductor's inlining: a chain of mixers took 20 to 60 seconds to compile.
    """
    x = (((x * 0x10001) >> 16) * MULTIPLIER_1) & MASK
    return (((x * 0x8001) >> 15) * MULTIPLIER_2) & MASK


def random_bits(seed: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """32 random bits, as int64, for every broadcast triple of `seed`, `positions` and `token_ids` (all int64)."""
    # Two lanes of 32 bits: where the first of two (seed, position) pairs collide, what it held before tells them apart.
    first, second = FIRST_KEY, SECOND_KEY
    for word in (seed & MASK, (seed >> 32) & MASK, positions & MASK, (positions >> 32) & MASK):
        first = mix(word ^ first)
        second = mix((first + second) & MASK)
    x = mix(mix(token_ids ^ first) ^ second)
    # The mixer's sums wrap for a few values, and a multiplication has spread those; this last step is a bijection, so
    # that the smallest values, which become the largest noise, are as frequent as all others.
    return x ^ (x >> 16)


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
