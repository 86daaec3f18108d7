"""The CPU's attention operator: right on every instruction set, each query on its own, compiled once for any bucket."""

import re

import pytest
import torch

from models import layers
from models.cache import dequantize, quantize
from models.layers import FEW_ROWS, attend
from operators import attention

CACHE_ROWS = 2100
SHAPES = [  # (batch, query heads, kv heads, rows, bucket, head size)
    (1, 9, 3, 1, 256, 64),
    (1, 9, 3, 8, 1000, 64),
    (3, 4, 4, 16, 65, 16),
    (2, 8, 2, 5, 63, 80),
    (1, 8, 1, 16, 64, 128),
    (1, 16, 1, 9, 130, 64),  # more queries to a kv head than are weighed at a time
    (2, 3, 3, 2, 1, 32),
    (1, 2, 1, 7, 2000, 256),
    (1, 6, 2, 3, 17, 96),
]
CPU_DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", autouse=True)
def operators():
    if attention.operators() is None:
        pytest.skip("no C++ compiler")


@pytest.fixture(params=attention.PATHS)
def path(request):
    number = attention.PATHS.index(request.param)
    if number >= torch.ops.fastdecode.attention_paths():
        pytest.skip(f"this CPU lacks {request.param}")
    return number


def by_path(path, q, k, v, mask, k_scale=None, v_scale=None):
    return torch.ops.fastdecode.attend(q, k, v, mask, k_scale, v_scale, path)


def example(batch, heads, kv_heads, rows, bucket, dim, dtype=torch.float32, cache_dtype=None, seed=0):
    """q, prefixes of k and v, mask, and scales if `cache_dtype` is int8."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, rows, heads, dim, generator=generator).to(dtype).transpose(1, 2)
    k, v = (torch.randn(batch, kv_heads, CACHE_ROWS, dim, generator=generator) * 2 for _ in "kv")
    mask = torch.rand(batch, rows, bucket, generator=generator) < 0.6
    mask[..., 0] = True
    if cache_dtype == torch.int8:
        (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
        return q, k[:, :, :bucket], v[:, :, :bucket], mask, k_scale[:, :, :bucket], v_scale[:, :, :bucket]
    k, v = (x.to(cache_dtype or dtype)[:, :, :bucket] for x in (k, v))
    return q, k, v, mask


def exact(q, k, v, mask, k_scale=None, v_scale=None):
    """In double precision, by the library."""
    if k_scale is not None:
        k, v = dequantize(k, k_scale, torch.float64), dequantize(v, v_scale, torch.float64)
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k, v, attn_mask=mask[:, None])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_it_is_attention(shape, cache_dtype, path):
    inputs = example(*shape, cache_dtype=cache_dtype)
    y = by_path(path, *inputs)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, exact(*inputs).float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
def test_bf16_queries_give_the_exact_result_rounded_once(cache_dtype, path):
    """But for the few that lie so near the middle of two bf16 numbers that fp32's own error decides."""
    for shape in SHAPES:
        inputs = example(*shape, torch.bfloat16, cache_dtype)
        y, expected = by_path(path, *inputs), exact(*inputs).bfloat16()
        assert y.dtype == torch.bfloat16
        assert (y != expected).float().mean() < 5e-3
        torch.testing.assert_close(y, expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_it_is_the_plain_form(dtype, monkeypatch):
    for shape in SHAPES:
        inputs = example(*shape, dtype)
        y = attend(*inputs)
        with monkeypatch.context() as patch:
            patch.setattr(attention, "takes", lambda *tensors: False)
            plain = attend(*inputs)
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(y, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_scores_may_be_of_any_size(scale, path):
    q, k, v, mask = example(*SHAPES[0])
    inputs = (q * scale, k, v, mask)
    torch.testing.assert_close(by_path(path, *inputs), exact(*inputs).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dim", [64, 80])
def test_a_row_depends_on_nothing_beside_it(dim, cache_dtype, path):
    """Not on other rows, their number, other sequences, the bucket or the threads: to the last bit."""
    length = 300
    dtype = torch.float32 if cache_dtype == torch.float32 else torch.bfloat16
    q, k, v, mask, *scales = example(2, 6, 2, 16, 2000, dim, dtype, cache_dtype)
    mask[:, ::2, length:] = False  # odd rows look beyond what even rows do
    whole = by_path(path, q, k, v, mask, *scales)
    for rows in (1, 2, 3, 5, 8, 13):
        few = by_path(path, q[:, :, :rows], k, v, mask[:, :rows], *scales)
        assert torch.equal(few, whole[:, :, :rows])
    for row in (0, 6, 14):
        for bucket in (length, length + 1, 320, 512, 2000):
            k_part, v_part, *scale_parts = (x[:, :, :bucket] for x in (k, v, *scales))
            one = (q[:, :, row : row + 1], k_part, v_part, mask[:, row : row + 1, :bucket], *scale_parts)
            assert torch.equal(by_path(path, *one)[:, :, 0], whole[:, :, row])
            alone = by_path(path, *(x[1:] for x in one))
            assert torch.equal(alone[:, :, 0], whole[1:, :, row])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(by_path(path, q, k, v, mask, *scales), whole)
    finally:
        torch.set_num_threads(threads)


def test_a_key_that_is_not_looked_at_is_not_there(path):
    """Whatever numbers stand in it."""
    q, k, v, mask = example(1, 4, 2, 3, 200, 64)
    mask[:, :, 150:], mask[:, :, 40] = False, False
    y = by_path(path, q, k, v, mask)
    k[:, :, 40], v[:, :, 40], k[:, :, 150:], v[:, :, 150:] = 1e6, -1e6, -1e6, 1e6
    assert torch.equal(by_path(path, q, k, v, mask), y)


def test_a_query_that_may_look_nowhere_gets_zero(path):
    q, k, v, mask = example(2, 4, 2, 3, 200, 64)
    mask[0, 1] = False
    y = by_path(path, q, k, v, mask)
    assert y[0, :, 1].abs().max() == 0 and y[1, :, 1].abs().max() > 0
    assert by_path(path, q, k, v, torch.zeros_like(mask)).abs().max() == 0


def test_any_strides_are_read(path):
    q, k, v, mask = example(*SHAPES[3])
    y = by_path(path, q, k, v, mask)
    assert torch.equal(by_path(path, q.contiguous(), k.contiguous(), v.contiguous(), mask), y)
    across = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v, mask)]
    assert torch.equal(by_path(path, *across), y)


def test_what_it_does_not_take_is_the_plain_form():
    q, k, v, mask = example(*SHAPES[0])
    assert attention.takes(q, k, v)
    assert not attention.takes(q.half(), k.half(), v.half())
    assert not attention.takes(q[..., :24], k[..., :24], v[..., :24])
    assert not attention.takes(q.requires_grad_(), k, v)
    attend(q, k, v, mask).sum().backward()
    assert q.grad.abs().max() > 0
    with torch.no_grad():
        assert attention.takes(q, k, v)
    with pytest.raises(RuntimeError, match="do not fit"):
        torch.ops.fastdecode.attend(q.detach(), k[:, :, :100], v, mask, None, None)


def test_without_a_compiler_it_is_the_plain_form(monkeypatch):
    inputs = example(*SHAPES[0])
    expected = exact(*inputs).float()
    monkeypatch.setattr(attention, "operators", lambda: None)
    monkeypatch.setattr(torch.ops.fastdecode, "attend", None)
    torch.testing.assert_close(attend(*inputs), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
def test_compiled_with_a_dynamic_bucket_it_is_one_program_that_gives_the_same(cache_dtype):
    @torch.compiler.nested_compile_region
    def region(q, mask, *cache):
        return attend(q, cache[0][:, :, : mask.shape[-1]], cache[1][:, :, : mask.shape[-1]], mask, *scales(mask, cache))

    def scales(mask, cache):
        return [x[:, :, : mask.shape[-1]] for x in cache[2:]]

    def program(q, rows, length, *cache):
        mask = (rows < length)[None].expand(q.shape[0], q.shape[2], -1)
        return region(region(q, mask, *cache), mask, *cache)

    q, k, v, _, *rest = example(1, 6, 2, 8, CACHE_ROWS, 64, torch.bfloat16, cache_dtype)
    compiled = torch.compile(program, fullgraph=True, dynamic=False)
    for count, bucket in enumerate((256, 512, 1024, CACHE_ROWS - 1)):  # the last row is the bin
        rows, length = torch.arange(bucket), torch.tensor(bucket - 3)
        torch._dynamo.mark_dynamic(rows, 0)
        with torch.inference_mode(), torch.compiler.set_stance("fail_on_recompile" if count else "default"):
            assert torch.equal(compiled(q, rows, length, k, v, *rest), program(q, rows, length, k, v, *rest))


def test_the_sources_are_all_named():
    included = {name for file in attention.SOURCES for name in re.findall(r'#include "(.*)"', file.read_text())}
    assert {attention.SOURCES[0].name, *included} == {file.name for file in attention.SOURCES}
    assert attention.MOST_ROWS == layers.FEW_ROWS == FEW_ROWS
