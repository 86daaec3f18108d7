"""The one rule that turns logits into a token: filters, ties, extremes, and that draws have the right distribution."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from scipy import stats

from fastdecode import noise
from fastdecode.sampling import (
    SamplingOptions,
    SamplingState,
    ancestor_presence,
    choose,
    filtered,
    greedy,
    gumbel_noise,
    token_presence,
)
from models.errors import InputError

UNLIKELY = 1e-3  # seeds are fixed: a p-value below this is a fault, not bad luck


def state_of(*rows: SamplingOptions) -> SamplingState:
    state = SamplingState.allocate(len(rows), "cpu")
    for slot, options in enumerate(rows):
        state.set_row(slot, options, row=0)
    return state


def repeated(options: SamplingOptions, seeds: torch.Tensor) -> SamplingState:
    """The same options for every seed."""
    one = state_of(options)
    return SamplingState(*(t.expand(len(seeds)) for t in one[:-1]), seed=seeds)


def none_seen(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros(logits.shape, dtype=torch.bool)


def random_logits(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def draw(logits: torch.Tensor, options: SamplingOptions, seeds: torch.Tensor, position: int) -> torch.Tensor:
    """One token per seed from `logits [V]` or `[seeds, V]`."""
    rows = logits.expand(len(seeds), logits.shape[-1])[:, None]
    position = torch.full((len(seeds), 1), position)
    vocab = logits.shape[-1]
    none = none_seen(rows)
    return choose(rows, repeated(options, seeds), gumbel_noise(seeds, position, vocab), none, none, vocab)[:, 0]


def distribution(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """The probabilities that `draw` should have, fp64 `[V]`."""
    row = logits[None, None]
    scores = filtered(row, state_of(options), none_seen(row), none_seen(row), logits.shape[-1])
    return (scores[0, 0].double() / options.temperature).softmax(-1)


def chi_square(cells: torch.Tensor, probabilities: torch.Tensor) -> float:
    """p-value of drawn cell numbers; nothing may be drawn where the probability is zero."""
    counts = torch.bincount(cells, minlength=len(probabilities))
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * len(cells)
    assert expected.min() > 5, "the test itself is too thin"
    expected *= len(cells) / expected.sum()  # rounding aside it is that already
    return stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue


# What the user gives


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, bad)
     for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "seed")
     for bad in (math.nan, math.inf, -math.inf, "nan", "inf", "", "warm", True, None, [1], "1,5")]
    + [(name, bad) for name in ("temperature", "top_k", "top_p", "min_p") for bad in (-1, "-1", -1e-9)]
    + [(name, bad) for name in ("top_p", "min_p") for bad in (1.0000001, 2, "50")]
    + [(name, bad) for name in ("top_k", "seed") for bad in (2.5, "2.5")]
    + [("repetition_penalty", bad) for bad in (0, "0", -1.0)]
    + [("seed", bad) for bad in (2**62 + 1, -(2**62) - 1)],
)
def test_what_is_out_of_range_is_refused_in_one_sentence_that_names_option_and_value(name, value):
    with pytest.raises(InputError, match=re.escape(repr(value))) as caught:
        SamplingOptions(**{name: value})
    assert str(caught.value).startswith(name) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [("temperature", "0.0", 0.0), ("temperature", "1e-6", 1e-6), ("temperature", 2, 2.0), ("temperature", 1e300, 1e300),
     ("top_k", "40", 40), ("top_k", 40.0, 40), ("top_k", 0, 0), ("top_k", 10**400, 10**400),
     ("top_p", "0", 0.0), ("top_p", 1, 1.0), ("top_p", 1e-9, 1e-9), ("min_p", "1", 1.0),
     ("repetition_penalty", "0.5", 0.5), ("presence_penalty", "-2", -2.0), ("seed", "17", 17), ("seed", -3, -3)],
)
def test_what_is_in_range_is_taken_as_number_or_as_text(name, value, kept):
    found = getattr(SamplingOptions(**{name: value}), name)
    assert found == kept and type(found) is type(kept)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": "0.0"}, {"top_k": 1}, {"top_p": 0}, {"min_p": 1}, {"top_p": 0, "temperature": 2}]
)
def test_what_means_greedy_gives_the_lowest_of_the_likeliest_whatever_the_noise(options):
    options = SamplingOptions(**{"temperature": 1.0} | options) if options else SamplingOptions()
    assert options.greedy and options.plain_greedy
    logits = torch.zeros(40)
    logits[[7, 21, 30]] = 5.0
    assert draw(logits, options, torch.arange(200), position=3).unique().tolist() == [7]


def test_penalties_keep_greedy_from_being_plain_and_sampling_is_neither():
    assert not SamplingOptions(repetition_penalty=1.1).plain_greedy and SamplingOptions(repetition_penalty=1.1).greedy
    assert not SamplingOptions(presence_penalty=0.1).plain_greedy
    assert not SamplingOptions(temperature=1e-6).greedy and not SamplingOptions(temperature=1, top_p=1e-9).greedy


def test_a_slot_is_written_in_place_and_its_seed_counts_the_prompts_index():
    state = SamplingState.allocate(3, "cpu")
    addresses = [t.data_ptr() for t in state]
    state.set_row(1, SamplingOptions(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=40), row=2)
    assert [t.data_ptr() for t in state] == addresses
    assert state.seed.tolist() == [0, 42, 0] and state.top_k.tolist() == [0, 5, 0]
    assert state.temperature.tolist() == pytest.approx([0, 0.7, 0])
    assert state.top_p.tolist() == pytest.approx([1, 0.9, 1]) and state.min_p.tolist() == pytest.approx([0, 0.1, 0])
    state.set_row(1, SamplingOptions(temperature=0.7, top_k=1), row=0)
    assert state.temperature[1] == 0


# Greedy


def test_ties_in_bf16_go_to_the_lowest_id():
    logits = (random_logits(2, 5, 3000, scale=1.0) * 2).round().bfloat16()  # about a dozen values: ties everywhere
    expected = [[min(i for i, v in enumerate(row) if v == max(row)) for row in rows] for rows in logits.tolist()]
    assert greedy(logits, 3000).tolist() == expected


def test_padded_vocabulary_is_never_chosen():
    logits = random_logits(1, 4, 64)
    logits[..., 50:] = 100.0
    assert (greedy(logits, 50) == logits[..., :50].argmax(-1)).all()
    assert greedy(torch.full((1, 1, 64), math.nan), 50).item() < 50
    seeds = torch.arange(2000)
    rows, none = logits[:, :1].expand(2000, 1, 64), none_seen(logits[:, :1])
    g = gumbel_noise(seeds, torch.full((2000, 1), 9), 64)
    for options in (SamplingOptions(temperature=50.0), SamplingOptions(temperature=1.0, top_k=60, top_p=0.99)):
        chosen = choose(rows, repeated(options, seeds), g, none, none, 50)
        assert chosen.max() < 50 and chosen.unique().numel() > 5


def test_a_greedy_row_beside_sampled_ones_is_exactly_greedy():
    logits = (random_logits(4, 6, 200) * 2).round().bfloat16()
    warm = SamplingOptions(temperature=1.5, seed=3)
    state = state_of(warm, SamplingOptions(), SamplingOptions(temperature=0.9, top_k=1), warm)
    g = gumbel_noise(state.seed, torch.arange(6).expand(4, 6), 200)
    chosen, likeliest = choose(logits, state, g, none_seen(logits), none_seen(logits), 200), greedy(logits, 200)
    assert torch.equal(chosen[1:3], likeliest[1:3]) and not torch.equal(chosen[0], likeliest[0])


# Filters


def reference_filter(logits: np.ndarray, options: SamplingOptions) -> np.ndarray:
    """Which of `logits [V]` stay, by sorting, in fp64; equal logits stand or fall together."""
    kept = np.ones(len(logits), dtype=bool)
    x = logits.astype(np.float64)
    if 0 < options.top_k < len(x):
        kept &= x >= np.sort(x)[-options.top_k]
    p = np.where(kept, np.exp((x - x.max()) / options.temperature), 0.0)
    p /= p.sum()
    if np.float32(options.top_p) < 1:
        order = np.argsort(-p, kind="stable")
        crossing = order[np.searchsorted(np.cumsum(p[order]), np.float32(options.top_p))]
        if crossing == order[0]:
            return np.arange(len(x)) == crossing
        kept &= x >= x[crossing]
    return kept & (p >= np.float32(options.min_p) * p.max())


GRID = itertools.product((0.3, 1.0, 1.7), (0, 2, 13, 400, 10**9), (0.05, 0.5, 0.93, 1.0), (0.0, 0.02, 0.5))


@pytest.mark.parametrize("kind", ["normal", "tied", "masked", "flat", "wide"])
def test_the_filtered_set_is_the_one_that_sorting_gives(kind):
    logits = random_logits(4, 300, seed=5)
    if kind == "tied":
        logits = logits.round()
    elif kind == "masked":
        logits[:, ::3] = -math.inf
    elif kind == "flat":
        logits = logits * 0.01
    elif kind == "wide":
        logits = logits * 30 - 1000
    sizes = set()
    for temperature, top_k, top_p, min_p in GRID if kind == "normal" else itertools.product(
        (0.3, 1.7), (0, 13), (0.5, 0.93, 1.0), (0.0, 0.02)
    ):
        options = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        row = logits[None]
        found = filtered(row, state_of(options), none_seen(row), none_seen(row), 300)[0]
        for x, scores in zip(logits, found, strict=True):
            stays = torch.from_numpy(reference_filter(x.numpy(), options))
            expected = torch.where(stays, x, -math.inf)
            assert torch.equal(scores, expected), (options, int(stays.sum()), int((scores > -math.inf).sum()))
            sizes.add(int(stays.sum()))
    assert len(sizes) > 3


@pytest.mark.parametrize("start", [-3.0, -1e-30, 0.0, 1e-3, 17.0])
def test_top_k_tells_neighbouring_fp32_values_apart(start):
    values = [np.float32(start)]
    for _ in range(39):
        values.append(np.nextafter(values[-1], np.float32(np.inf)))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    logits = torch.from_numpy(np.array(values))[order][None, None]
    for k in (2, 7, 23, 39):
        state = state_of(SamplingOptions(temperature=1.0, top_k=k))
        kept = filtered(logits, state, none_seen(logits), none_seen(logits), 40)
        assert torch.equal(kept[kept > -math.inf].sort().values, logits.flatten().sort().values[-k:])


def test_filters_that_are_off_change_nothing_even_for_vanishing_probabilities():
    logits = torch.linspace(0, -5000, 400)[None, None]
    options = state_of(SamplingOptions(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0))
    assert torch.equal(filtered(logits, options, none_seen(logits), none_seen(logits), 400), logits)


@pytest.mark.parametrize("top_p", [1e-9, 1e-60, 1e-4])
def test_a_top_p_that_one_token_reaches_keeps_one_token_though_others_equal_it(top_p):
    logits = torch.zeros(1, 1, 90)
    logits[..., [11, 12, 70]] = 3.0
    state = state_of(SamplingOptions(temperature=1, top_p=top_p))
    kept = filtered(logits, state, none_seen(logits), none_seen(logits), 90)
    assert (kept > -math.inf).nonzero()[:, 2].tolist() == [11]


@pytest.mark.parametrize("options", [
    {"temperature": 1e-6}, {"temperature": 1e-42}, {"temperature": 1e-300}, {"temperature": 1e300},
    {"top_p": 1e-9}, {"top_p": 1e-300}, {"min_p": 1e-300}, {"min_p": 1 - 1e-12}, {"top_k": 10**30},
    {"repetition_penalty": 1e-60}, {"repetition_penalty": 1e300}, {"presence_penalty": 1e300},
    {"presence_penalty": -1e300},
])
@pytest.mark.parametrize("kind", ["normal", "one finite", "none finite", "infinite", "huge"])
def test_no_extreme_gives_nan_or_an_id_outside_the_vocabulary(options, kind):
    logits = random_logits(1, 2, 60)
    if kind == "one finite":
        logits[...] = -math.inf
        logits[..., 33] = -2.0
    elif kind == "none finite":
        logits[...] = -math.inf
    elif kind == "infinite":
        logits[..., 33] = math.inf
    elif kind == "huge":
        logits = logits.sign() * 3.4e38
    state = state_of(SamplingOptions(**{"temperature": 1.0, "top_p": 0.9} | options))
    seen = torch.arange(60).expand(1, 2, 60) % 2 == 0
    scores = filtered(logits, state, seen, seen, 60)
    assert not scores.isnan().any()
    g = gumbel_noise(state.seed, torch.tensor([[4, 5]]), 60)
    assert not (scores + state.temperature[:, None, None] * g).isnan().any()
    chosen = choose(logits, state, g, seen, seen, 60)
    assert chosen.min() >= 0 and chosen.max() < 60
    if kind in ("one finite", "infinite"):
        assert chosen.unique().tolist() == [33]  # an odd id: no penalty touches it


def test_a_temperature_of_a_millionth_is_greedy_where_nothing_is_tied():
    logits = random_logits(200, seed=8)
    assert draw(logits, SamplingOptions(temperature=1e-6), torch.arange(300), 2).unique() == logits.argmax()


# Penalties


def test_penalties_divide_positive_and_multiply_negative_logits_and_subtract_presence():
    logits = torch.tensor([[[2.0, 2.0, -2.0, -2.0, 1.0, 0.0]]])
    seen = torch.tensor([[[True, False, True, False, True, True]]])
    seen_output = torch.tensor([[[False, False, False, True, True, False]]])
    state = state_of(SamplingOptions(temperature=1.0, repetition_penalty=2.0, presence_penalty=0.25))
    found = filtered(logits, state, seen, seen_output, 6)
    assert found.flatten().tolist() == [1.0, 2.0, -4.0, -2.25, 0.25, 0.0]
    cold = state_of(SamplingOptions(repetition_penalty=2.0))
    chosen = choose(logits, cold, torch.zeros(1, 1, 6), seen, seen_output, 6)
    assert chosen.item() == 1 and greedy(logits, 6).item() == 0


def test_presence_counts_tokens_that_count_and_a_nodes_own_ancestors():
    tokens = torch.tensor([[3, 0, 5, 3], [1, 1, 6, 0]])
    counted = torch.tensor([[True, True, False, True], [False, True, True, False]])
    present = token_presence(tokens, counted, 7)
    assert [row.nonzero().flatten().tolist() for row in present] == [[0, 3], [1, 6]]
    tree = torch.tensor([[4, 2, 0, 6]])  # root, two children, a child of the second
    ancestors = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], dtype=torch.bool)
    way = ancestor_presence(tree, ancestors, 7)[0]
    assert [row.nonzero().flatten().tolist() for row in way] == [[4], [2, 4], [0, 4], [0, 4, 6]]


# Noise


def python_bits(seed: int, position: int, token_id: int) -> int:
    """The hash in unbounded integers; fails where a product would not fit 64 signed bits."""

    def times(x: int, factor: int) -> int:
        assert -(2**63) <= x * factor < 2**63
        return x * factor

    def mix(x: int) -> int:
        x = times(times(x, 0x10001) >> 16, noise.MULTIPLIER_1) & noise.MASK
        return times(times(x, 0x8001) >> 15, noise.MULTIPLIER_2) & noise.MASK

    first, second = noise.FIRST_KEY, noise.SECOND_KEY
    for word in (seed, seed >> 32, position, position >> 32):
        first = mix(word & noise.MASK ^ first)
        second = mix(first + second & noise.MASK)
    x = mix(mix(token_id ^ first) ^ second)
    return x ^ (x >> 16)


def test_the_hash_is_the_same_in_unbounded_integers_and_never_overflows():
    generator = np.random.default_rng(0)
    cases = [(s, p, v) for s in (0, -1, 2**62, -(2**62)) for p in (0, 1, 2**40) for v in (0, 1, 262143)]
    cases += [tuple(int(x) for x in row) for row in generator.integers(0, [2**62, 2**31, 2**18], (300, 3))]
    seeds, positions, ids = torch.tensor(cases).T
    assert noise.random_bits(seeds, positions, ids).tolist() == [python_bits(*case) for case in cases]
    for extreme in (0, 1, noise.MASK, noise.MASK - 1, 0xFFFF0000, 0x80000000):
        largest = max(abs(((extreme * 0x10001) >> 16) * noise.MULTIPLIER_1), (2**32 + 2**17) * abs(noise.MULTIPLIER_2))
        assert largest < 2**63


def test_every_bit_of_seed_position_and_id_changes_half_the_bits():
    base = torch.randint(0, 2**31, (3, 4000), generator=torch.Generator().manual_seed(1))
    base[2] &= 0x3FFFF
    before = noise.random_bits(*base)
    for argument, bits in ((0, range(63)), (1, range(40)), (2, range(18))):
        for bit in bits:
            changed = base.clone()
            changed[argument] ^= 1 << bit
            flipped = before ^ noise.random_bits(*changed)
            share = ((flipped[:, None] >> torch.arange(32)) & 1).double().mean(0)  # 32 output bits, 4,000 tries each
            assert share.sub(0.5).abs().max() < 0.05, (argument, bit)


def test_noise_is_finite_and_falls_from_the_smallest_u_to_the_largest():
    bits = torch.tensor([0, 1, 2, 2**16, 2**31, 2**32 - 2**9, 2**32 - 1])
    values = noise.gumbel(bits)
    assert values.isfinite().all() and (values.diff() <= 0).all()
    u = (bits[:5].double() + 0.5) / 2**32
    assert torch.allclose(values[:5].double(), -torch.log(-torch.log1p(-u)), rtol=1e-6)
    assert values[0].item() == pytest.approx(33 * math.log(2))
    assert values[-1].item() == pytest.approx(-math.log(24 * math.log(2)))


def test_noise_has_gumbel_mean_variance_and_shape():
    values = gumbel_noise(torch.arange(4), torch.tensor([[5, 9]] * 4), 250_000).flatten().double()
    assert values.mean().item() == pytest.approx(np.euler_gamma, abs=4 * math.pi / math.sqrt(6 * len(values)))
    assert values.var().item() == pytest.approx(math.pi**2 / 6, rel=0.01)
    assert stats.kstest(values.numpy()[::7], "gumbel_r").pvalue > UNLIKELY


def test_the_largest_of_a_million_noise_values_has_the_right_distribution():
    n = 1_000_000
    ids = torch.arange(n)
    smallest = torch.stack([noise.random_bits(torch.tensor(seed), torch.tensor(11), ids).amin() for seed in range(150)])
    maxima = noise.gumbel(smallest).double()  # noise falls with the bits
    assert stats.kstest(maxima.numpy(), "gumbel_r", args=(math.log(n), 1.0)).pvalue > UNLIKELY


def test_the_smallest_hash_values_are_as_frequent_as_all_others():
    """They become the largest noise; a mixer that wraps at its end makes them twice as frequent."""
    counts = torch.zeros(3, dtype=torch.int64)
    for seed in range(40):
        bits = noise.random_bits(torch.tensor(seed), torch.tensor(2), torch.arange(500_000))
        counts += torch.stack([(bits < 2**16).sum(), (bits < 2**20).sum(), (bits >= 2**32 - 2**16).sum()])
    expected = 2e7 * torch.tensor([2**-16, 2**-12, 2**-16])
    assert ((counts - expected).abs() < 4 * expected.sqrt()).all(), (counts, expected)


def test_no_two_pairs_of_seed_and_position_share_their_noise():
    # Of 60,000 seeds about 13 pairs share all but the low five bits of a 32-bit key, and so the keys of 32 positions.
    seeds = torch.randint(0, 2**62, (60_000,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(32).expand(60_000, 32)
    rows = noise.random_bits(seeds[:, None, None], positions[:, :, None], torch.arange(2)).view(-1, 2)
    assert (rows[:, 0] << 31 ^ rows[:, 1] >> 1).unique().numel() == len(rows)
    far = gumbel_noise(torch.tensor([5, 5 + 2**32]), torch.tensor([[6, 6 + 2**32]] * 2), 50).view(4, 50)
    assert torch.unique(far, dim=0).shape[0] == 4


# Draws


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others():
    logits, options = random_logits(500, scale=1.0), SamplingOptions(temperature=1.0)
    first, again, other = (
        torch.cat([draw(logits, options, torch.tensor([seed]), position) for position in range(20)])
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and (first != other).sum() > 15 and first.unique().numel() > 15


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 12}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.1}]
)
def test_draws_have_the_processed_distribution(filters):
    logits = random_logits(50, seed=2, scale=1.0)
    options = SamplingOptions(temperature=0.7, **filters)
    probabilities = distribution(logits, options)
    assert (probabilities > 0).sum() == 50 if not filters else (probabilities > 0).sum() < 40
    assert chi_square(draw(logits, options, torch.arange(20_000), position=31), probabilities) > UNLIKELY


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_continuations_of_two_tokens_have_the_joint_distribution(filters):
    """Position p and p + 1 with one seed: the second token depends on the first one through the table alone."""
    start, table = random_logits(6, seed=3, scale=1.0), random_logits(6, 6, seed=4, scale=1.0)
    options = SamplingOptions(temperature=0.9, **filters)
    seeds = torch.arange(40_000)
    first = draw(start, options, seeds, position=17)
    second = draw(table[first], options, seeds, position=18)
    after = torch.stack([distribution(row, options) for row in table])
    joint = distribution(start, options)[:, None] * after
    assert chi_square(first * 6 + second, joint.flatten()) > UNLIKELY


@pytest.mark.parametrize(("seed_step", "position_step"), [(1, 0), (0, 1), (1, -1), (1, 1), (2**32, 0), (0, 2**32)])
def test_rows_and_positions_next_to_each_other_are_independent(seed_step, position_step):
    logits, options = random_logits(6, seed=6, scale=0.8), SamplingOptions(temperature=1.0)
    seeds = torch.arange(0, 60_000, 2)
    one = draw(logits, options, seeds, position=100)
    other = draw(logits, options, seeds + seed_step, position=100 + position_step)
    p = distribution(logits, options)
    assert chi_square(one * 6 + other, torch.outer(p, p).flatten()) > UNLIKELY


# Compiled


def test_compiled_choices_equal_eager_ones_alone_or_among_others_and_options_compile_nothing():
    vocab, padded, nodes = 83, 90, 5
    seen = torch.rand(2, nodes, padded, generator=torch.Generator().manual_seed(0)) > 0.8

    def rule(logits, state, positions, seen):
        g = gumbel_noise(state.seed, positions, padded)
        return choose(logits, state, g, seen, seen, vocab), g

    def node(tensor, n):
        return tensor[:, n : n + 1].contiguous()

    together, alone = (torch.compile(rule, fullgraph=True, dynamic=False) for _ in range(2))
    state = state_of(SamplingOptions(), SamplingOptions())
    logits, positions = random_logits(2, nodes, padded), torch.arange(nodes).expand(2, nodes).contiguous()
    together(logits, state, positions, seen)
    alone(node(logits, 0), state, node(positions, 0), node(seen, 0))
    mixtures = [
        {}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 9}, {"temperature": 1.3, "top_p": 0.85},
        {"temperature": 1.0, "top_k": 30, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
        {"temperature": 2.0, "presence_penalty": 0.4},
    ]
    with torch.compiler.set_stance("fail_on_recompile"):
        for i in range(5 * len(mixtures)):
            for slot in (0, 1):
                options = mixtures[(i - slot) % len(mixtures)]
                state.set_row(slot, SamplingOptions(**options, seed=i), row=slot)
            logits = random_logits(2, nodes, padded, seed=i)
            chosen, g = together(logits, state, positions, seen)
            expected, expected_g = rule(logits, state, positions, seen)
            assert torch.equal(chosen, expected) and torch.allclose(g, expected_g, atol=1e-5)
            for n in range(nodes):
                one, one_g = alone(node(logits, n), state, node(positions, n), node(seen, n))
                assert torch.equal(one, node(chosen, n)) and torch.equal(one_g, node(g, n))


def test_compiled_hashes_are_the_same_integers():
    def hashes(seed, positions):
        return noise.random_bits(seed[:, None, None], positions[:, :, None], torch.arange(1000))

    seed = torch.tensor([0, -1, 2**62, 12345])
    positions = torch.tensor([[0, 1, 2**33]] * 4)
    assert torch.equal(torch.compile(hashes, fullgraph=True)(seed, positions), hashes(seed, positions))
