"""New rows on the CPU, turned, stored and attending in one operator: to the last bit what its parts do one by one."""

import pytest
import torch

from models.cache import KVCache, write_layer
from models.layers import attend
from models.rope import rotate
from operators import attention

SHAPES = [  # (batch, query heads, kv heads, rows, bucket, head size)
    (1, 9, 3, 1, 64, 64),
    (1, 9, 3, 8, 100, 64),
    (3, 4, 4, 16, 65, 16),
    (2, 8, 2, 5, 63, 80),
    (1, 8, 1, 3, 64, 128),
]
CACHE_ROWS = 128
KINDS = [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True), (torch.bfloat16, True)]


@pytest.fixture(scope="module", autouse=True)
def operators():
    if attention.operators() is None:
        pytest.skip("no C++ compiler")


def example(shape, dtype, quantized, seed=0):
    """qkv, cos, sin, rows, mask, and a cache that holds something."""
    batch, heads, kv_heads, n, bucket, dim = shape
    torch.manual_seed(seed)
    qkv = (torch.randn(batch, n, (heads + 2 * kv_heads) * dim) * 2).to(dtype)
    angles = torch.rand(batch, 1, n, dim) * 6
    rows = torch.stack([torch.randperm(bucket)[:n] for _ in range(batch)])
    mask = torch.rand(batch, n, bucket) < 0.6
    mask.scatter_(2, rows[..., None], True)
    cache = KVCache(1, batch, kv_heads, CACHE_ROWS, dim, dtype, torch.device("cpu"), quantized)
    old = torch.arange(CACHE_ROWS).expand(batch, -1)
    write_layer(cache.layer(0), old, *torch.randn(2, batch, kv_heads, CACHE_ROWS, dim).to(dtype))
    return qkv, angles.cos(), angles.sin(), rows, mask, cache.layer(0)


def by_parts(qkv, cos, sin, rows, mask, cache, heads):
    batch, n, _ = qkv.shape
    kv_heads, dim = cache[0].shape[1], cache[0].shape[3]
    q, k, v = qkv.view(batch, n, -1, dim).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
    write_layer(cache, rows, rotate(k, cos, sin), v)
    y = attend(rotate(q, cos, sin), *(part[:, :, : mask.shape[-1]] for part in cache[:2]), mask,
               *(part[:, :, : mask.shape[-1]] for part in cache[2:]))
    return y.transpose(1, 2).reshape(batch, n, -1)


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "quantized"), KINDS)
def test_it_is_its_parts_to_the_last_bit(shape, dtype, quantized):
    qkv, cos, sin, rows, mask, cache = example(shape, dtype, quantized)
    copy = tuple(part.clone() for part in cache)
    assert attention.takes_new(qkv, *cache)
    y = attention.attend_new(qkv, cos, sin, rows, mask, *cache)
    assert torch.equal(y, by_parts(qkv, cos, sin, rows, mask, copy, shape[1]))
    assert all(torch.equal(part, other) for part, other in zip(cache, copy, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("quantized", [False, True])
def test_zeros_and_one_table_of_angles_for_all_texts(quantized):
    qkv, cos, sin, rows, mask, cache = example((2, 4, 2, 3, 64, 32), torch.float32, quantized)
    qkv[0] = 0.0
    cos, sin = cos[:1], sin[:1]
    copy = tuple(part.clone() for part in cache)
    y = attention.attend_new(qkv, cos, sin, rows, mask, *cache)
    assert torch.equal(y, by_parts(qkv, cos, sin, rows, mask, copy, 4))
    assert all(torch.equal(part, other) for part, other in zip(cache, copy, strict=True))


@torch.no_grad()
def test_what_does_not_fit_is_refused_and_nothing_is_stored():
    qkv, cos, sin, rows, mask, cache = example((1, 4, 2, 3, 64, 32), torch.float32, False)
    before = tuple(part.clone() for part in cache)
    outside = rows.clone()
    outside[0, -1] = CACHE_ROWS  # after rows that could be stored
    wrong = [
        (qkv[..., :-32], cos, sin, rows[:, :2], mask, *cache),
        (qkv, cos.double(), sin.double(), rows, mask, *cache),
        (qkv, cos, sin, rows.int(), mask, *cache),
        (qkv, cos, sin, outside, mask, *cache),
        (qkv, cos, sin, -1 - rows, mask, *cache),
        (qkv, cos, sin, rows, mask, cache[0].transpose(2, 3), cache[1].transpose(2, 3)),
        (qkv, cos, sin, rows, mask, cache[0].to(torch.int8), cache[1].to(torch.int8)),
        (qkv.half(), cos, sin, rows, mask, *cache),
    ]
    for arguments in wrong:
        with pytest.raises(RuntimeError):
            attention.attend_new(*arguments)
    assert all(torch.equal(part, other) for part, other in zip(cache, before, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("quantized", [False, True])
def test_compiled_it_stores_in_the_cache_itself(quantized):
    qkv, cos, sin, rows, mask, cache = example((1, 4, 2, 3, 64, 32), torch.bfloat16, quantized)
    copy = tuple(part.clone() for part in cache)

    def two(qkv, cos, sin, rows, mask, *cache):
        first = attention.attend_new(qkv, cos, sin, rows, mask, *cache)
        return first, attention.attend_new(qkv + 1, cos, sin, rows + 1, mask, *cache)

    places = [part.data_ptr() for part in cache]
    compiled = torch.compile(two, fullgraph=True)(qkv, cos, sin, rows, mask, *cache)
    plain = two(qkv, cos, sin, rows, mask, *copy)
    assert all(torch.equal(one, other) for one, other in zip((*compiled, *cache), (*plain, *copy), strict=True))
    assert places == [part.data_ptr() for part in cache]
    arguments = (qkv, cos, sin, rows, mask, *cache)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.fastdecode.attend_new.default, arguments, test_utils=checks)
