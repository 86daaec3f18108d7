"""What CPU operators do around a product: norms, gates and residuals, as plain torch has them, each row by itself."""

import pytest
import torch
import torch.nn.functional as F
from test_cpu import ROWS, random_weight
from torch import nn

from models.layers import surrounded
from quantize import a8, cpu
from quantize.linear import QuantizedLinear

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}  # bf16: plain torch rounds more often


@pytest.fixture(scope="module", autouse=True)
def operators():
    if cpu.operators() is None or a8.operators() is None:
        pytest.skip("no C++ compiler")


def example(before, dtype, rows=6, k=576, n=96, seed=0):
    torch.manual_seed(seed)
    layer = QuantizedLinear(random_weight(n, k, 4, 32), torch.device("cpu"))
    norm = nn.RMSNorm(k, EPS).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(k) * 0.2 + 1)
    x = (torch.randn(rows, 2 * k if before == "gate" else k) * 3).to(dtype)
    given = {"norm": norm} if before == "norm" else {"gate": True} if before == "gate" else {}
    return layer, x, given, torch.randn(rows, n).to(dtype)


def in_double(layer, x, given, residual):
    """The layer's own matrix, and everything around it in double precision."""
    x = x.double()
    if "norm" in given:
        weight = given["norm"].weight.double()
        x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
    if "gate" in given:
        gate, up = x.chunk(2, dim=-1)
        x = F.silu(gate) * up
    return x @ layer.dequantize().double().T + residual.double()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", ["nothing", "norm", "gate"])
def test_it_is_what_plain_torch_says(before, dtype):
    layer, x, given, residual = example(before, dtype)
    y = layer.surrounded(x, **given, residual=residual)
    exact = in_double(layer, x, given, residual)
    assert y.dtype == dtype and y.shape == residual.shape
    assert (y - exact).norm() < TOLERANCE[dtype] * exact.norm()
    plain = surrounded(layer, x, given.get("norm"), "gate" in given, residual)
    assert (y - exact).norm() <= 1.2 * (plain - exact).norm()  # no worse than the modules one after the other


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", ["norm", "gate"])
def test_what_comes_before_is_the_input_that_the_product_would_get(before, dtype):
    """To the last bit where the product takes each input as it is: by an identity, and a residual of zeros."""
    _, x, given, _ = example(before, dtype, k=64)
    identity = QuantizedLinear(cpu_identity(64), torch.device("cpu"))
    y = identity.surrounded(x, **given, residual=torch.zeros(6, 64, dtype=dtype))
    assert torch.equal(y, identity.surrounded(x, **given))
    exact = in_double(identity, x, given, torch.zeros(6, 64))
    assert ((y - exact).abs() <= exact.abs() * (4e-7 if dtype == torch.float32 else 2**-8) + 1e-30).all()


def cpu_identity(n):
    from quantize.storage import Quantized

    return Quantized(8, 64, torch.eye(n, dtype=torch.int8), torch.ones(n, n // 64))


@torch.no_grad()
@pytest.mark.parametrize("linear", [cpu, a8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", ["norm", "gate"])
def test_each_row_stands_alone(before, dtype, linear):
    layer, x, given, residual = example(before, dtype, rows=max(ROWS))
    layer.rounds_input = linear is a8
    y = layer.surrounded(x, **given, residual=residual)
    for rows in ROWS:
        assert torch.equal(layer.surrounded(x[:rows], **given, residual=residual[:rows]), y[:rows])
        assert torch.equal(layer.surrounded(x[-rows:], **given, residual=residual[-rows:].contiguous()), y[-rows:])


@torch.no_grad()
@pytest.mark.parametrize("before", ["norm", "gate"])
def test_paths_with_8_bit_activations_agree_to_the_last_bit(before):
    layer, x, given, residual = example(before, torch.bfloat16)
    weight, eps = (given["norm"].weight, EPS) if before == "norm" else (None, 0.0)
    results = [
        a8.operator(4)(x, layer.data, weight, eps, before == "gate", residual, path)
        for path in range(torch.ops.fastdecode.a8_paths())
    ]
    assert all(torch.equal(results[0], y) for y in results)


@torch.no_grad()
def test_gates_of_any_size_and_what_is_no_number():
    layer = QuantizedLinear(cpu_identity(64), torch.device("cpu"))
    gate = torch.zeros(64)
    gate[:9] = torch.tensor([-1e30, -200.0, -88.5, -20.0, -1e-20, 20.0, 100.0, 1e30, 0.5])
    x = torch.cat((gate, torch.full((64,), 2.0)))[None]
    exact = (F.silu(gate.double()) * 2).float()
    assert torch.allclose(layer.surrounded(x, gate=True)[0], exact, rtol=4e-7, atol=2e-8)
    x[0, 3] = float("nan")
    assert layer.surrounded(x, gate=True).isnan().any()


@torch.no_grad()
def test_leading_dimensions_and_layers_that_cannot():
    layer, x, given, residual = example("norm", torch.float32)
    apart = layer.surrounded(x, **given, residual=residual)
    together = layer.surrounded(x.view(2, 3, -1), **given, residual=residual.view(2, 3, -1))
    assert torch.equal(together, apart.view(2, 3, -1))
    assert torch.equal(layer.surrounded(x, **given, residual=residual.T.contiguous().T), apart)
    with_bias = QuantizedLinear(random_weight(96, 576, 4, 32), torch.device("cpu"), bias=torch.ones(96))
    expected = residual + with_bias(given["norm"](x))
    assert torch.equal(with_bias.surrounded(x, **given, residual=residual), expected)
    narrow = QuantizedLinear(random_weight(50, 576, 4, 32), torch.device("cpu"))
    assert torch.equal(narrow.surrounded(x, **given), narrow(given["norm"](x)))


def test_what_does_not_fit_is_refused():
    layer, x, given, residual = example("norm", torch.float32)
    weight = given["norm"].weight.detach()
    for arguments in (
        (x, layer.data, weight[:-1], EPS),
        (x, layer.data, weight.bfloat16(), EPS),
        (x, layer.data, weight, EPS, True),
        (x, layer.data, None, 0.0, True),
        (x, layer.data, None, 0.0, False, residual[:-1]),
        (x, layer.data, None, 0.0, False, residual.bfloat16()),
    ):
        for operator in (cpu.operator(4), a8.operator(4)):
            with pytest.raises(RuntimeError):
                operator(*arguments)


@torch.no_grad()
@pytest.mark.parametrize("linear", [cpu, a8])
def test_torch_compile_takes_it(linear):
    layer, x, given, residual = example("norm", torch.bfloat16)
    layer.rounds_input = linear is a8
    arguments = (x, layer.data, given["norm"].weight, EPS, False, residual)
    torch.library.opcheck(linear.operator(4).default, arguments, test_utils=("test_schema", "test_faketensor"))
