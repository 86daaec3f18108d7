"""The one rule that turns logits into a token, for plain decoding, verification and drafting alike.

In fp32, in this order: mask the padded vocabulary; repetition penalty (CTRL) and presence penalty; then at temperature
0 the likeliest token, ties to the lowest id; above 0 top-k, top-p (nucleus, renormalised, keeping the token that
crosses), min-p, and the largest `logit + T · noise` (Gumbel-max). See noise.py for the noise.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdecode.noise import gumbel_noise
from models.errors import InputError

__all__ = [
    "SamplingContext",
    "SamplingOptions",
    "SamplingState",
    "ancestor_presence",
    "choose",
    "filtered",
    "greedy",
    "gumbel_noise",
    "token_presence",
]

RANGES = {  # name -> (lowest, highest, whether the lowest itself is allowed)
    "temperature": (0, math.inf, True),
    "top_k": (0, math.inf, True),
    "top_p": (0, 1, True),
    "min_p": (0, 1, True),
    "repetition_penalty": (0, math.inf, False),
    "presence_penalty": (-math.inf, math.inf, False),
    "seed": (-(2**62), 2**62, True),
}
WHOLE = ("top_k", "seed")
SMALLEST, LARGEST = 1e-30, 1e30  # magnitudes on the device
LARGEST_LOGIT = 3e38


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen; the one place where these values are checked.

    temperature >= 0, 0 is greedy; top_k >= 0, 0 is off; top_p within 0..1, 1 is off and 0 greedy; min_p within 0..1,
    0 is off and 1 greedy; repetition_penalty > 0 over prompt and output, 1 is off; presence_penalty over output, 0 is
    off; seed: a whole number within ±2^62. Numbers may be given as text. Raises InputError naming option, value, range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _checked(field.name, getattr(self, field.name)))

    @property
    def greedy(self) -> bool:
        """Whether these options mean the likeliest token, whatever the noise."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0 or self.min_p == 1

    @property
    def plain_greedy(self) -> bool:
        """Whether the likeliest token is all there is to it: no penalties either."""
        return self.greedy and self.repetition_penalty == 1 and self.presence_penalty == 0


def _checked(name: str, value: Any) -> float | int:
    low, high, includes_low = RANGES[name]
    kind = "a whole number" if name in WHOLE else "a number"
    if name == "seed":
        bounds = "from -2^62 to 2^62"
    elif name == "presence_penalty":
        kind, bounds = "a finite number", "of either sign"
    elif high < math.inf:
        bounds = f"from {low} to {high}"
    else:
        bounds = f"of at least {low}" if includes_low else f"above {low}"
    error = InputError(f"{name} should be {kind} {bounds}, found {value!r}.")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise error
    try:
        number = float(value) if name not in WHOLE or not isinstance(value, int | str) else int(value)
    except (ValueError, OverflowError):
        raise error from None
    if number in (math.inf, -math.inf) or not low <= number <= high or (number == low and not includes_low):
        raise error
    if name in WHOLE and number != int(number):
        raise error
    return int(number) if name in WHOLE else number


class SamplingState(NamedTuple):
    """Options on the device, one entry per sequence, `[B]` each; `seed` is the user's seed plus the prompt's index."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    seed: Tensor

    @staticmethod
    def allocate(batch: int, device: torch.device | str) -> "SamplingState":
        """Greedy options for `batch` sequences, in tensors that stay where they are."""
        default = SamplingOptions()
        dtypes = {name: torch.int64 if name in WHOLE else torch.float32 for name in SamplingState._fields}
        return SamplingState(
            *(torch.full((batch,), getattr(default, name), dtype=dtypes[name], device=device) for name in dtypes)
        )

    def set_row(self, slot: int, options: SamplingOptions, row: int) -> None:
        """Write `options` into `slot`, in place; `row` is the prompt's index in the user's input."""
        for name, tensor in zip(self._fields, self, strict=True):
            value = getattr(options, name)
            # Beyond these an fp32 value changes no choice but overflows, or is lost where denormals are flushed.
            if name == "top_k":
                value = min(value, 2**31)
            elif name in ("repetition_penalty", "temperature") and value:
                value = min(max(value, SMALLEST), LARGEST)
            elif name == "presence_penalty":
                value = min(max(value, -LARGEST), LARGEST)
            tensor[slot] = value
        self.seed[slot] = options.seed + row
        if options.greedy:  # what means greedy is greedy exactly, ties included
            self.temperature[slot] = 0.0


class SamplingContext(NamedTuple):
    """What the tokens of one sampled round are chosen with, by the target and by its drafter alike.

    `noise [B, D+1, V]` fp32: of the tokens at depths 1 .. D+1, since noise belongs to the position that a token takes.
    `seen [B, 1, V]` bool: ids in prompt or output, `seen_output`: in output alone, both before the round.
    """

    noise: Tensor
    options: SamplingState
    seen: Tensor
    seen_output: Tensor


def greedy(logits: Tensor, vocab_size: int) -> Tensor:
    """`logits [B, N, V]` -> `[B, N]` int64: the likeliest id below `vocab_size`, ties to the lowest."""
    return _first_largest(_masked(logits, vocab_size)).clamp_max(vocab_size - 1)


def choose(
    logits: Tensor, options: SamplingState, noise: Tensor, seen: Tensor, seen_output: Tensor, vocab_size: int
) -> Tensor:
    """The chosen token at every node, `[B, N]` int64.

    `logits [B, N, V]` of any float type; `noise [B, N, V]` of the positions that the tokens will take; `seen [B, N, V]`
    (or `[B, 1, V]`) bool: the id occurs in prompt, output or own ancestors; `seen_output`: in output or own ancestors.
    """
    scores = filtered(logits, options, seen, seen_output, vocab_size)
    return _first_largest(scores + options.temperature[:, None, None] * noise)


def filtered(logits: Tensor, options: SamplingState, seen: Tensor, seen_output: Tensor, vocab_size: int) -> Tensor:
    """Logits after penalties and filters, fp32 `[B, N, V]`, -inf where an id is out: what `choose` draws from, with
    probabilities softmax(filtered / T). Shapes as in `choose`."""
    temperature, top_k, top_p, min_p, repetition, presence = (o[:, None, None] for o in options[:6])
    x = _masked(logits, vocab_size)
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = torch.where(seen_output, x - presence, x).clamp_max(LARGEST_LOGIT)
    likeliest = _first_largest(x)[..., None]
    # Probabilities relative to the likeliest token's; a row without any finite logit gives zeros, not NaN.
    peak = x.amax(-1, keepdim=True).clamp_min(-LARGEST_LOGIT)
    relative = ((x - peak) / torch.where(temperature > 0, temperature, 1.0)).exp()
    weights, largest_weight = _whole_weights(relative)
    k = torch.where(top_k > 0, top_k.clamp_max(vocab_size), vocab_size).expand_as(peak)
    k_threshold = _threshold(x, torch.ones_like(weights), k.to(torch.int32))
    total = torch.where(x >= k_threshold, weights, 0).sum(-1, keepdim=True, dtype=torch.int32)
    target = (total.double() * top_p.double()).ceil().to(torch.int32).clamp_min(1)
    limited = top_p < 1  # at 1 even a token whose weight rounds to zero stays
    threshold = torch.where(limited, torch.maximum(_threshold(x, weights, target), k_threshold), k_threshold)
    # Where the likeliest token alone reaches top_p it crosses alone, equals or not; temperature 0 means the same token.
    alone = (temperature == 0) | (limited & (target <= largest_weight))
    only = torch.where(alone, likeliest, -1)
    token_ids = torch.arange(x.shape[-1], device=x.device)
    kept = (x >= threshold) & (relative >= min_p) & ((only < 0) | (token_ids == only))
    return torch.where(kept, x, float("-inf"))


def _whole_weights(relative: Tensor) -> tuple[Tensor, Tensor]:
    """`relative [B, N, V]` within 0..1 -> int32 weights in proportion, and that of a 1, `[B, N, 1]`.

    Sums of whole numbers are exact in whatever order they are made, so that a row's filter depends neither on how many
    rows there are nor on the device. The scale is the power of two that brings a row's sum into 2^29..2^30: shares of
    the probability are rounded at 2^-30.
    """
    total = (relative * 2.0**30).to(torch.int32).sum(-1, keepdim=True, dtype=torch.int64).clamp_min(1 << 30)
    exponent = (total.double().view(torch.int64) >> 52) - 1023  # of a double: floor(log2(total)), exactly
    scale = ((59 - exponent + 127) << 23).to(torch.int32).view(torch.float32)  # 2^(59 - exponent)
    return (relative * scale).round().to(torch.int32), scale.to(torch.int32)


def token_presence(tokens: Tensor, counted: Tensor, vocab_size: int) -> Tensor:
    """`tokens [B, S]` int64, `counted [B, S]` bool -> `[B, V]` bool: which ids occur among those that count."""
    present = torch.zeros(tokens.shape[0], vocab_size + 1, dtype=torch.bool, device=tokens.device)
    return present.scatter(1, torch.where(counted, tokens, vocab_size), True)[:, :vocab_size]


def ancestor_presence(tokens: Tensor, ancestors: Tensor, vocab_size: int) -> Tensor:
    """`tokens [B, N]`, `ancestors [B, N, N]` -> `[B, N, V]` bool: which ids stand at the marked nodes above each."""
    batch, n = tokens.shape
    present = torch.zeros(batch, n, vocab_size + 1, dtype=torch.bool, device=tokens.device)
    return present.scatter(2, torch.where(ancestors, tokens[:, None], vocab_size), True)[..., :vocab_size]


def _masked(logits: Tensor, vocab_size: int) -> Tensor:
    x = logits.float()
    if vocab_size >= x.shape[-1]:
        return x
    return torch.where(torch.arange(x.shape[-1], device=x.device) < vocab_size, x, float("-inf"))


def _first_largest(x: Tensor) -> Tensor:
    """argmax over the last dimension, the lowest index among equals: torch.argmax does not promise which."""
    n = x.shape[-1]
    indices = torch.arange(n, device=x.device)
    return torch.where(x == x.amax(-1, keepdim=True), indices, n - 1).amin(-1)


def _threshold(x: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """The largest fp32 t, `[B, N, 1]`, such that the int32 weights of `x >= t` sum to `target [B, N, 1]` or more.

    A search over the order-preserving integer image of fp32: 16 passes of three comparisons each settle two bits at a
    time, with no sort. Equal values stand or fall together.
    """
    low = torch.full_like(target, LOWEST_KEY, dtype=torch.int64)
    step = torch.full_like(low, 1 << 30)
    for _ in range(16):
        low, step = _narrow(x, weights, target, low, step)
    return _from_key(low)


# One pass is compiled once and called 32 times, instead of being unrolled into 32 kernels.
@torch.compiler.nested_compile_region
def _narrow(x: Tensor, weights: Tensor, target: Tensor, low: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    above = torch.zeros_like(low)
    for quarter in (1, 2, 3):
        sums = torch.where(x >= _from_key(low + quarter * step), weights, 0).sum(-1, keepdim=True, dtype=torch.int32)
        above = above + (sums >= target)
    return low + above * step, step >> 2


LOWEST_KEY = -2139095041  # of -inf
HIGHEST_KEY = 2139095040  # of +inf


def _from_key(key: Tensor) -> Tensor:
    """The fp32 whose bits, read so that integers order as floats do, are `key` (int64, clamped to +inf)."""
    bits = key.clamp_max(HIGHEST_KEY).to(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
