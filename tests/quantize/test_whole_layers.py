"""A decoder layer on packed weights is one operator, and to the last bit what its modules are one after the other."""

from dataclasses import replace

import pytest
import torch
from test_cpu import random_weight
from torch import nn

from models.cache import KVCache, write_layer
from models.config import ModelConfig, RopeConfig
from models.layers import DecoderLayer, Linear
from operators import attention
from quantize import a8, cpu
from quantize.linear import QuantizedLinear, round_inputs

CONFIG = ModelConfig(
    "llama", vocab_size=64, hidden_size=192, intermediate_size=256, n_layers=1, n_heads=6, n_kv_heads=2, head_dim=32,
    rms_norm_eps=1e-5, max_position_embeddings=128, rope=RopeConfig(), moe_layers=(False,),
)  # fmt: skip
CACHE_ROWS, BUCKET, BATCH = 96, 64, 2


@pytest.fixture(scope="module", autouse=True)
def operators():
    if cpu.operators() is None or a8.operators() is None or attention.operators() is None:
        pytest.skip("no C++ compiler")


def layer_of(config=CONFIG, dtype=torch.float32, bits=(4, 8, 4, 4)):
    torch.manual_seed(0)
    layer = DecoderLayer(config, 0).to(dtype).eval()
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    for name, n in zip(names, bits, strict=True):
        old = layer.get_submodule(name)
        bias = None if old.bias is None else torch.randn(old.out_features)
        weight = random_weight(old.out_features, old.in_features, n, 32)
        layer.set_submodule(name, QuantizedLinear(weight, torch.device("cpu"), bias))
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    return layer


def arguments(rows, dtype, quantized):
    torch.manual_seed(1)
    x = torch.randn(BATCH, rows, CONFIG.hidden_size).to(dtype)
    places = torch.stack([torch.randperm(BUCKET)[:rows] for _ in range(BATCH)])
    mask = (torch.rand(BATCH, rows, BUCKET) < 0.5).scatter(2, places[..., None], True)
    angles = torch.rand(BATCH, 1, rows, CONFIG.head_dim) * 6
    cache = KVCache(1, BATCH, CONFIG.n_kv_heads, CACHE_ROWS, CONFIG.head_dim, dtype, torch.device("cpu"), quantized)
    old = torch.arange(CACHE_ROWS).expand(BATCH, -1)
    write_layer(cache.layer(0), old, *torch.randn(2, BATCH, CONFIG.n_kv_heads, CACHE_ROWS, CONFIG.head_dim).to(dtype))
    return (x, places, mask, angles.cos(), angles.sin(), *cache.layer(0))


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounds", [False, True])
def test_it_is_its_modules_to_the_last_bit(rows, quantized, dtype, rounds, monkeypatch):
    layer, given = layer_of(dtype=dtype), arguments(rows, dtype, quantized)
    if rounds:
        round_inputs(layer)
    copy = (*given[:5], *(part.clone() for part in given[5:]))
    by_modules = layer.compute_in_region(*copy)
    assert layer.by_operators and all(("_a8" in linear.operator_name) == rounds for linear in layer.linears)
    monkeypatch.setattr(layer, "compute_in_region", None)  # not to be called
    assert torch.equal(layer(*given), by_modules)
    assert all(torch.equal(part, other) for part, other in zip(given[5:], copy[5:], strict=True))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_stands_alone(dtype):
    layer, (x, places, mask, cos, sin, *cache) = layer_of(dtype=dtype), arguments(16, dtype, False)
    together = layer(x, places, mask, cos, sin, *cache)
    for rows in (1, 3, 8, 11):  # the cache has the keys and values of all by now
        part = slice(16 - rows, None)
        alone = layer(x[:, part], places[:, part], mask[:, part], cos[:, :, part], sin[:, :, part], *cache)
        assert torch.equal(alone, together[:, part]), rows


@torch.no_grad()
def test_what_no_operator_can_do_goes_through_the_modules():
    given = arguments(4, torch.float32, False)
    for changes in ({"qkv_bias": True}, {"qk_norm": True}, {"mlp_bias": True}):
        layer = layer_of(replace(CONFIG, **changes))
        assert not layer.by_operators
        assert layer(*given).isfinite().all()
    floats = layer_of()
    floats.mlp.down_proj = Linear(CONFIG.intermediate_size, CONFIG.hidden_size)
    assert not floats.by_operators and floats(*given).isfinite().all()
    many = arguments(17, torch.float32, False)
    layer = layer_of()
    copy = (*many[:5], *(part.clone() for part in many[5:]))
    assert torch.equal(layer(*many), layer.compute_in_region(*copy))  # more rows than the operator takes


@torch.no_grad()
@pytest.mark.parametrize("quantized", [False, True])
def test_compiled_layers_write_into_the_cache_itself(quantized):
    layers = nn.ModuleList([layer_of(), layer_of()])
    x, places, mask, cos, sin, *cache = arguments(3, torch.float32, quantized)
    copy = [part.clone() for part in cache]

    def program(x, places, mask, cos, sin, *cache):
        for shift, layer in enumerate(layers):
            x = layer(x, places + shift, mask, cos, sin, *cache)
        return x

    where = [part.data_ptr() for part in cache]
    y = torch.compile(program, fullgraph=True)(x, places, mask, cos, sin, *cache)
    assert torch.equal(y, program(x, places, mask, cos, sin, *copy))
    assert all(torch.equal(part, other) for part, other in zip(cache, copy, strict=True))
    assert where == [part.data_ptr() for part in cache]
