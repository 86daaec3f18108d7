"""The int8 cache: what is written, what is read, and what it costs, against loops from the definition."""

import pytest
import torch
from test_reference import assert_close, our_logits, our_model, random_ids
from tiny import reference_model, save_checkpoint

from fastdecode.memory import cache_bytes_per_token
from models.cache import KVCache, dequantize, quantize
from models.layers import FEW_ROWS, attend

BATCH, HEADS, ROWS, DIM = 2, 3, 9, 8


def cache_of(quantized=True, n_layers=2, dtype=torch.float32, batch=BATCH, rows=ROWS, dim=DIM):
    return KVCache(n_layers, batch, HEADS, rows, dim, dtype, torch.device("cpu"), quantized)


def fill(cache, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for buffer in cache.buffers():
        if buffer.dtype == torch.int8:
            buffer.random_(-127, 128, generator=generator)
        else:
            buffer.normal_(generator=generator)


def vectors(n=200, dim=64, seed=0):
    """Random vectors of every size between 1e-6 and 1e6, among them zeros and lonely spikes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=generator) * 10 ** torch.empty(n, 1).uniform_(-6, 6, generator=generator)
    x[0], x[1], x[2] = 0.0, 0.0, -x[2].abs()
    x[1, 5] = 3.0
    return x


def test_codes_and_scales_equal_a_loop_from_the_definition():
    x = vectors(40, 16)
    codes, scales = quantize(x)
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32
    for row, vector in enumerate(x):
        scale = max(abs(value) for value in vector.unbind()) / 127
        assert scales[row] == scale
        for column, value in enumerate(vector.unbind()):
            expected = round((value / scale).item()) if scale else 0  # Python rounds ties to even, too
            assert codes[row, column] == expected


def test_halves_are_rounded_to_even():
    x = torch.tensor([127.0, 0.5, 1.5, -0.5, -1.5, 2.5, 0.49, 0.51])
    assert quantize(x)[0].tolist() == [127, 0, 2, 0, -2, 2, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_value_is_off_by_more_than_half_a_scale(dtype):
    x = vectors().clamp(-6e4, 6e4).to(dtype)
    codes, scales = quantize(x)
    read = dequantize(codes, scales, torch.float32)
    rounding = 4 * torch.finfo(torch.float32).eps * x.float().abs()
    assert ((read - x.float()).abs() <= scales[:, None] / 2 + rounding).all()
    assert (codes.int().abs().amax(-1) == torch.where(x.abs().amax(-1) == 0, 0, 127)).all()


def test_zeros_have_scale_zero_and_read_as_zeros():
    codes, scales = quantize(torch.zeros(2, 3, DIM))
    assert scales.abs().max() == 0 and codes.abs().max() == 0
    assert torch.equal(dequantize(codes, scales, torch.float32), torch.zeros(2, 3, DIM))


def test_values_too_small_for_an_exact_scale_do_not_wrap_around():
    for size in (1e-45, 1e-43, 2.1e-43, 1e-40, 1e-38):
        codes, scale = quantize(torch.tensor([size, -size, 0.0]))
        assert codes[0] >= 0 and codes[1] == -codes[0] and torch.isfinite(scale)


def test_a_value_that_is_no_number_is_not_hidden():
    for value in (float("nan"), float("inf")):
        assert not dequantize(*quantize(torch.tensor([1.0, value])), torch.float32).isfinite().all()


@pytest.mark.parametrize("quantized", [False, True])
def test_moved_rows_hold_the_same_bits_and_others_stay(quantized):
    cache = cache_of(quantized)
    fill(cache)
    before = {name: buffer.clone() for name, buffer in cache.named_buffers()}
    assert len(before) == (8 if quantized else 4)
    source, target = torch.tensor([[3, 5, 7], [4, 4, 6]]), torch.tensor([[3, 4, 5], [1, 8, 2]])
    cache.move_rows(source, target)
    for name, buffer in cache.named_buffers():
        for b in range(BATCH):
            expected = list(before[name][b].unbind(1))
            for s, t in zip(source[b], target[b], strict=True):
                expected[t] = before[name][b][:, s]
            assert torch.equal(buffer[b], torch.stack(expected, 1)), name


def test_a_slot_is_the_same_memory():
    cache = cache_of()
    fill(cache)
    slot = cache.slot(1)
    assert (slot.quantized, slot.rows, slot.bin_row) == (True, ROWS, ROWS - 1)
    for whole, part in zip(cache.layer(1), slot.layer(1), strict=True):
        assert part.shape[0] == 1 and part.data_ptr() == whole[1:].data_ptr()
    slot.move_rows(torch.tensor([[2]]), torch.tensor([[4]]))
    for name, buffer in cache.named_buffers():
        assert torch.equal(buffer[1, :, 4], buffer[1, :, 2]), name
        assert not torch.equal(buffer[0, :, 4], buffer[0, :, 2]), name


@pytest.mark.parametrize("n", [1, 3, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_codes_is_attention_over_what_they_stand_for(n, dtype):
    generator = torch.Generator().manual_seed(n)
    q = torch.randn(BATCH, 6, n, DIM, generator=generator).to(dtype)
    k, v = (torch.randn(BATCH, HEADS, 50, DIM, generator=generator) * 3 for _ in "kv")
    mask = torch.rand(BATCH, n, 50, generator=generator) < 0.4
    mask[0, 0] = n > FEW_ROWS  # a query that may look nowhere
    (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
    out = attend(q, k, v, mask, k_scale, v_scale)
    assert out.dtype == dtype
    read = [dequantize(*pair, torch.float32) for pair in ((k, k_scale), (v, v_scale))]
    expected = attend(q.float(), *read, mask)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dim", "share"), [(64, 0.55), (80, 0.55), (128, 0.55)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantized", [False, True])
def test_bytes_per_token_are_exactly_what_is_allocated(dim, share, dtype, quantized, tmp_path):
    model = our_model(save_checkpoint(reference_model("llama", head_dim=dim), tmp_path)).to(dtype)
    cache = model.new_cache(3, 65, quantized)
    allocated = sum(buffer.nbytes for buffer in cache.buffers())
    assert allocated == 3 * 65 * cache_bytes_per_token(model.config, dtype, quantized)
    if quantized:
        assert allocated <= share * 3 * 65 * cache_bytes_per_token(model.config, torch.bfloat16)


@pytest.mark.parametrize("family", ["llama", "llama-9-heads-on-3", "mistral-window", "qwen3-moe"])
def test_chunks_and_buckets_do_not_matter_and_the_logits_are_near_the_exact_ones(family, tmp_path):
    model = our_model(save_checkpoint(reference_model(family, initializer_range=0.1), tmp_path))
    ids = random_ids(60)
    exact = our_logits(model, ids, [60])[0]
    model.new_cache = lambda batch, rows, make=model.new_cache: make(batch, rows, quantized=True)
    whole = our_logits(model, ids, [60])[0]
    spread = (whole - exact).abs().max() / exact.abs().max()
    assert 1e-4 < spread < 0.1  # another precision, and not another model
    for chunks, bucket in (([60], 64), ([20] + [1] * 40, 256), ([32, 20, 8], 64), ([50] + [2] * 5, 60)):
        # A sum in another order may move a value over the middle between two codes, so this is not fp32's tolerance.
        difference = (our_logits(model, ids, chunks, bucket)[0] - whole).abs().max()
        assert difference <= 0.2 * spread * exact.abs().max(), (chunks, bucket)
    with pytest.raises(AssertionError):
        assert_close(whole, exact)
