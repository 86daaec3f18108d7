"""The CPU operator with 8-bit activations: whole numbers summed exactly, rows apart, and the same bits everywhere."""

import pytest
import torch
from test_cpu import FITTING, KINDS, ROWS, random_weight

from quantize import a8, cpu
from quantize.storage import Quantized


@pytest.fixture(scope="module", autouse=True)
def operators():
    if a8.operators() is None:
        pytest.skip("no C++ compiler")


@pytest.fixture(params=a8.PATHS)
def path(request):
    number = a8.PATHS.index(request.param)
    if number >= torch.ops.fastdecode.a8_paths():
        pytest.skip(f"this CPU lacks {request.param}")
    return number


def by_path(x, packed, path):
    operator = torch.ops.fastdecode.linear_int4_a8 if packed.bits == 4 else torch.ops.fastdecode.linear_int8_a8
    return operator(x, packed.data, path=path)[..., : packed.out_features]


def by_definition(x, weight):
    """Group after group: the exact sum of whole numbers, times both scales, and for 4 bits the minimum times the
    rounded inputs' sum. In double precision, which the result should be an fp32 rounding of."""
    group, total = weight.group_size, 0.0
    values, scale = weight.values().long(), weight.scale.double()
    for first in range(0, x.shape[-1], group):
        part = x[:, first : first + group].float()
        largest = part.abs().amax(-1, keepdim=True)
        q = (part * (torch.full_like(largest, 127.0) / largest)).round().long()
        x_scale, g = (largest / 127.0).double(), first // group
        total = total + (q @ values[:, first : first + group].T) * scale[:, g] * x_scale
        if weight.minimum is not None:
            total = total + q.sum(-1, keepdim=True) * x_scale * weight.minimum[:, g].double()
    return total


@pytest.mark.parametrize(("k", "n", "bits", "group"), FITTING)
def test_it_is_what_the_definition_says(k, n, bits, group, path):
    torch.manual_seed(0)
    weight = random_weight(n, k, bits, group)
    x = torch.randn(9, k)
    expected = by_definition(x, weight)
    y = by_path(x, cpu.pack(weight), path)
    assert y.dtype == torch.float32 and y.shape == (9, n)
    assert (y - expected).norm() < 2e-6 * expected.norm()
    reference = a8.linear_reference(x, cpu.pack(weight))
    assert (reference - expected).norm() < 2e-6 * expected.norm()
    exact = x.double() @ weight.dequantize().double().T
    assert 1e-4 < (y - exact).norm() / exact.norm() < 0.012  # rounding to 127 steps has its price


@pytest.mark.parametrize(("bits", "group"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_stands_alone_and_paths_agree_to_the_last_bit(bits, group, dtype, path):
    torch.manual_seed(1)
    packed = cpu.pack(random_weight(50, 1024, bits, group))
    x = torch.randn(max(ROWS), 1024).to(dtype)
    y = by_path(x, packed, path)
    assert y.dtype == dtype and torch.equal(y, by_path(x, packed, 0))
    for rows in ROWS:
        assert torch.equal(by_path(x[:rows], packed, path), y[:rows]), rows
        assert torch.equal(by_path(x[-rows:], packed, path), y[-rows:]), rows
    x[1:] *= 1e4
    assert torch.equal(by_path(x, packed, path)[0], y[0])


@pytest.mark.parametrize("bits", [4, 8])
def test_the_thread_count_changes_nothing(bits, path):
    packed, x = cpu.pack(random_weight(960, 576, bits, 32)), torch.randn(9, 576)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(by_path(x, packed, path))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], y) for y in results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_inputs_come_through_in_127_steps_and_the_largest_exactly(path, dtype):
    scale = torch.ones(32, 1, dtype=dtype)
    packed = cpu.pack(Quantized(8, 32, torch.eye(32, dtype=torch.int8), scale))
    x = torch.randn(4, 32) * torch.tensor([1e-20, 1.0, 1e20, 3.0])[:, None]
    x[3] = torch.linspace(-127, 127, 32).round()  # whole numbers already
    y = by_path(x, packed, path)
    assert (y - a8.rounded(x, 32)).abs().max() <= 1e-6 * x.abs().max()
    assert ((y - x).abs() <= x.abs().amax(-1, keepdim=True) / 254 * 1.001).all()
    assert torch.equal(y[3], x[3])


def test_nothing_infinity_and_nan(path):
    packed = cpu.pack(random_weight(40, 64, 4, 32))
    x = torch.randn(4, 64)
    x[0], x[1, 5], x[2, 40] = 0.0, float("nan"), float("inf")
    y = by_path(x, packed, path)
    assert (y[0] == 0).all() and y[1].isnan().all() and not y[2].isfinite().any() and y[3].isfinite().all()
    assert (by_path(x[:1] + 1e-38, packed, path) == 0).all()  # less than anything that could matter


def test_what_does_not_fit_is_refused():
    packed = cpu.pack(random_weight(64, 64, 4, 32))
    for x in (torch.randn(1, 96), torch.randn(1, 64).half(), torch.tensor(1.0)):
        with pytest.raises(RuntimeError):
            a8.linear(x, packed)
    with pytest.raises(RuntimeError):
        torch.ops.fastdecode.linear_int4_a8(torch.randn(1, 64), packed.data, path=len(a8.PATHS))


def test_leading_dimensions_strides_and_no_rows():
    packed = cpu.pack(random_weight(50, 64, 8, 32))
    x = torch.randn(2, 64, 3).transpose(1, 2)
    y = a8.linear(x, packed)
    assert y.shape == (2, 3, 50) and torch.equal(y[1, 2], a8.linear(x[1, 2], packed))
    assert a8.linear(x[:, :0], packed).shape == (2, 0, 50)
