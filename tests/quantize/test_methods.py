"""Each method computes what its definition says, keeps to what is stored, and says what it cannot do."""

import math

import pytest
import torch

from models.errors import InputError
from quantize import methods
from quantize.methods import METHODS, quantize_matrix, relative_error
from quantize.storage import Quantized

CASES = [(m, b, g) for m in METHODS for b in (4, 8) for g in (32, 64, 128) if (m, b) != ("hqq", 8)]


def gaussian(out=6, n_columns=256, seed=0, size=0.02):
    return torch.randn(out, n_columns, generator=torch.Generator().manual_seed(seed)) * size


# The definitions, one group and one number at a time. fp16 rounding is Python's own, through a tensor of one number.


def half(x):
    return torch.tensor(x, dtype=torch.float64).half().item()


def nearest(w, scale, minimum, bits):
    low, high = (0, 15) if bits == 4 else (-127, 127)
    return [min(high, max(low, round((x - minimum) / scale))) for x in w]


def squared(w, scale, minimum, q):
    return sum((scale * n + minimum - x) ** 2 for x, n in zip(w, q, strict=True))


def scalar_range(w, bits):
    return (max(map(abs, w)) / 127, 0.0) if bits == 8 else ((max(w) - min(w)) / 15, min(w))


def scalar_rtn(w, bits):
    return tuple(map(half, scalar_range(w, bits)))


def scalar_als(w, bits):
    best = None
    for ratio in (1.0, 0.88, 0.76) if bits == 4 else (1.0,):
        scale, minimum = scalar_range(w, bits)
        middle = minimum + 7.5 * scale if bits == 4 else 0.0
        scale *= ratio
        scale, minimum = half(scale), half(middle - 7.5 * scale) if bits == 4 else 0.0
        q = nearest(w, scale, minimum, bits)
        error = squared(w, scale, minimum, q)
        for _ in range(20):
            w_mean, q_mean = (sum(w) / len(w), sum(q) / len(q)) if bits == 4 else (0.0, 0.0)
            new_scale = half(
                sum((n - q_mean) * (x - w_mean) for x, n in zip(w, q, strict=True)) / sum((n - q_mean) ** 2 for n in q)
            )
            new_minimum = half(w_mean - new_scale * q_mean) if bits == 4 else 0.0
            q = nearest(w, new_scale, new_minimum, bits)
            if squared(w, new_scale, new_minimum, q) >= error:
                break
            scale, minimum, error = new_scale, new_minimum, squared(w, new_scale, new_minimum, q)
        if best is None or error < best[0]:
            best = error, scale, minimum
    return best[1:]


def scalar_hqq(w, bits):
    scale, minimum = scalar_rtn(w, bits)
    best, least, beta = minimum, math.inf, 10.0
    for _ in range(21):
        q = nearest(w, scale, minimum, bits)
        errors = [x - (scale * n + minimum) for x, n in zip(w, q, strict=True)]
        if sum(map(abs, errors)) < least:
            least, best = sum(map(abs, errors)), minimum
        shrunk = [math.copysign(max(0, abs(e) - abs(e) ** (0.7 - 1) / beta), e) if e else 0.0 for e in errors]
        zeros = [n - (x - s) / scale for n, x, s in zip(q, w, shrunk, strict=True)]
        minimum = half(-scale * sum(zeros) / len(zeros))
        beta *= 1.01
    return scale, best


SCALAR = {"rtn": scalar_rtn, "als": scalar_als, "hqq": scalar_hqq}


@pytest.mark.parametrize(("method", "bits", "group_size"), CASES)
def test_every_method_equals_a_loop_written_from_its_definition(method, bits, group_size):
    weight = gaussian(3, size=2.0 if method == "hqq" else 0.02)  # large errors, so that shrinking leaves some
    quantized = quantize_matrix(weight, bits, group_size, method)
    for row, w_row in enumerate(weight.double().tolist()):
        for group in range(256 // group_size):
            w = w_row[group * group_size : (group + 1) * group_size]
            scale, minimum = SCALAR[method](w, bits)
            assert quantized.scale[row, group].item() == scale
            assert bits == 8 or quantized.minimum[row, group].item() == minimum
            q = quantized.values()[row, group * group_size : (group + 1) * group_size].tolist()
            assert q == nearest(w, scale, minimum, bits)


@pytest.mark.parametrize(("bits", "group_size"), [(b, g) for b in (4, 8) for g in (32, 64, 128)])
def test_als_is_never_worse_than_rtn_in_any_group(bits, group_size):
    heavy = gaussian(64, seed=1) * gaussian(64, seed=2, size=1.0).exp()  # outliers, as real weights have
    for weight in (gaussian(64), heavy, heavy + 0.3, heavy.bfloat16().float()):
        rtn, als = (quantize_matrix(weight, bits, group_size, method) for method in ("rtn", "als"))
        rtn, als = ((q.dequantize() - weight).square().view(64, -1, group_size).sum(-1) for q in (rtn, als))
        assert (als <= rtn * 1.00001).all()
        assert als.sum() < rtn.sum() * (0.9 if bits == 4 else 1)


def test_gaussian_weights_lose_what_the_literature_says():
    """Squared relative error, x 1e-3, in groups of 32 and 128: RTN 6.11 and 9.99, HQQ 5.71 and 9.51, a clip search
    with least squares 5.21 and 8.55; none may be worse than that."""
    weight = gaussian(256, 1024)
    expected = {("rtn", 32): 6.11, ("rtn", 128): 9.99, ("hqq", 32): 5.71, ("hqq", 128): 9.51}
    for (method, group_size), figure in (expected | {("als", 32): 5.21, ("als", 128): 8.55}).items():
        error = relative_error(weight, quantize_matrix(weight, 4, group_size, method))
        assert error * 1e3 <= figure * 1.01
        assert method != "rtn" or error * 1e3 >= figure * 0.99


@pytest.mark.parametrize("method", METHODS)
def test_chunks_of_rows_change_nothing(method, monkeypatch):
    weight = gaussian(37)
    whole = quantize_matrix(weight, 4, 64, method)
    monkeypatch.setattr(methods, "CHUNK", 3 * 256)
    parts = quantize_matrix(weight, 4, 64, method)
    assert all(torch.equal(getattr(whole, x), getattr(parts, x)) for x in ("q", "scale", "minimum"))
    assert relative_error(weight, parts) == pytest.approx(
        ((weight - whole.dequantize()).double().square().sum() / weight.double().square().sum()).item(), rel=1e-9
    )


@pytest.mark.parametrize(("method", "bits", "group_size"), CASES)
def test_groups_of_one_value_and_of_zeros_come_back(method, bits, group_size):
    weight = gaussian()
    weight[0] = 0
    weight[1] = 0.1
    weight[2, :128] = -0.3
    weight[3, 128:] = 0
    quantized = quantize_matrix(weight, bits, group_size, method)
    assert quantized.scale.dtype == torch.float16
    result = quantized.dequantize()
    assert result.isfinite().all() and (result[0] == 0).all() and (result[3, 128:] == 0).all()
    assert (result[1] - 0.1).abs().max() < 1e-4 and (result[2, :128] + 0.3).abs().max() < 3e-4


def test_groups_without_a_range_round_to_zero_and_not_to_something_undefined():
    grid = methods.Grid(torch.zeros(2, 1), torch.tensor([[0.0], [0.1]]))
    assert (methods.round_to(torch.tensor([[0.0] * 32, [0.11] * 32]), grid, 4) == 0).all()


def test_rounding_stops_at_the_least_and_the_greatest_number():
    for bits, ends in ((4, [0, 15]), (8, [-127, 127])):
        grid = methods.Grid(torch.ones(1, 1), torch.zeros(1, 1))
        assert methods.round_to(torch.tensor([[-500.0, 500.0]]), grid, bits).tolist() == [ends]


def test_an_all_zero_matrix_stays_zero():
    for method, bits, group_size in CASES:
        quantized = quantize_matrix(torch.zeros(4, 128), bits, group_size, method)
        assert quantized.scale.dtype == torch.float16 and (quantized.dequantize() == 0).all()
        assert relative_error(torch.zeros(4, 128), quantized) == 0


@pytest.mark.parametrize(("method", "bits", "group_size"), CASES)
@pytest.mark.parametrize("size", [1e-25, 1e-9, 1e7, 1e36])
def test_weights_outside_the_range_of_fp16_get_fp32_parameters(method, bits, group_size, size):
    weight = gaussian(size=size)
    quantized = quantize_matrix(weight, bits, group_size, method)
    assert quantized.scale.dtype == torch.float32 and quantized.dequantize().isfinite().all()
    assert bits == 8 or quantized.minimum.dtype == torch.float32
    assert relative_error(weight, quantized) < (0.012 if bits == 4 else 1e-4)


def test_a_range_far_from_zero_gets_fp32_parameters():
    """1000 ± 0.02: fp16 has only whole halves there."""
    weight = 1000 + gaussian()
    for method in METHODS:
        quantized = quantize_matrix(weight, 4, 32, method)
        assert quantized.scale.dtype == torch.float32
        assert (quantized.dequantize() - weight).abs().max() < 0.01


def test_one_overflowing_group_makes_the_matrix_fp32_and_a_few_tiny_ones_do_not():
    weight = gaussian()
    weight[1, :32] = gaussian(1, 32, size=1e-9)
    weight[2] *= 1e-12
    quantized = quantize_matrix(weight, 4, 32, "als")
    assert quantized.scale.dtype == quantized.minimum.dtype == torch.float16
    assert quantized.dequantize()[2].abs().max() < 1e-7
    weight[3, 40:50] = 1e6  # a scale of 66667
    assert quantize_matrix(weight, 4, 32, "als").scale.dtype == torch.float32


@pytest.mark.parametrize("method", METHODS)
def test_parameters_of_bf16_weights_that_ask_for_gradients_are_quantized_as_their_values(method):
    weight = torch.nn.Parameter(gaussian().bfloat16())
    quantized = quantize_matrix(weight, 4, 32, method)
    assert torch.equal(quantized.q, quantize_matrix(weight.detach().float(), 4, 32, method).q)
    assert not quantized.scale.requires_grad and relative_error(weight, quantized) < 0.01


def test_values_lie_within_their_range_and_the_shape_is_kept():
    for method, bits, group_size in CASES:
        quantized = quantize_matrix(gaussian(5, size=1.0), bits, group_size, method)
        low, high = (0, 15) if bits == 4 else (-127, 127)
        assert quantized.shape == (5, 256) and quantized.scale.shape == (5, 256 // group_size)
        assert quantized.values().min() >= low and quantized.values().max() <= high
        assert quantized.q.dtype == (torch.uint8 if bits == 4 else torch.int8)
        assert (quantized.minimum is None) == (bits == 8)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_the_layers_name(value):
    weight = gaussian()
    weight[4, 77] = value
    with pytest.raises(InputError, match="layers.7.mlp.down_proj"):
        quantize_matrix(weight, 4, 32, "als", name="layers.7.mlp.down_proj")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "awq"}, "rtn, als, hqq"),
        ({"bits": 3}, "4, 8"),
        ({"bits": 8, "method": "hqq"}, "zero points"),
        ({"group_size": 96}, "groups of 32 or 64 or 128 fit"),
        ({"weight": torch.zeros(2, 2, 64)}, r"shape \[2, 2, 64\]"),
        ({"weight": torch.zeros(0, 64)}, r"shape \[0, 64\]"),
    ],
)
def test_what_cannot_be_done_is_said(settings, said):
    with pytest.raises(InputError, match=said):
        quantize_matrix(**{"weight": gaussian(), "bits": 4, "group_size": 32, "method": "als", **settings})


def test_relative_error_is_squared_and_weighs_all_rows_alike():
    weight = torch.tensor([[1.0] * 32, [3.0] * 32])
    stored = Quantized(8, 32, torch.tensor([[1] * 32, [2] * 32], dtype=torch.int8), torch.ones(2, 1).half())
    assert relative_error(weight, stored) == pytest.approx(1 / 10)
