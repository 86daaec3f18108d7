"""GPTQ is what its definition says and beats rounding on real inputs; calibration sees what the reference sees."""

import pytest
import torch
import torch.nn.functional as F
from tiny import reference_model, save_checkpoint

from checkpoints.checkpoint import load_weights, read_config
from models.errors import InputError
from models.layers import SparseExperts
from models.transformer import Transformer
from quantize.calibration import LayerwiseCalibration
from quantize.gptq import gptq_matrix, output_error
from quantize.methods import quantize_matrix
from quantize.perplexity import perplexity

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(n_columns, n=2000, seed=1):
    """The second moment of inputs that share directions and differ in size, as activations do."""
    mix = gaussian(n_columns, n_columns, seed=seed) / torch.arange(1, n_columns + 1)[:, None]
    x = gaussian(n, n_columns, seed=seed + 1) @ mix * gaussian(n_columns, seed=seed + 2).exp()
    return 2 / n * x.t() @ x


def by_definition(weight, hessian, bits, group_size, act_order):
    """Optimal brain quantization in a fixed order: after each column, the others move by the least that undoes its
    error, from the inverse over the columns that are left, inverted afresh each time. Groups by range."""
    w, h = weight.double().clone(), hessian.double().clone()
    h.diagonal().add_(0.01 * h.diagonal().mean())
    n = w.shape[1]
    order = h.diagonal().argsort(descending=True).tolist() if act_order else list(range(n))
    low, high = (0, 15) if bits == 4 else (-127, 127)
    q, grids = torch.zeros_like(w), {}

    def grid(start):
        part = w[:, start : start + group_size]
        if bits == 8:
            return (part.abs().amax(1) / 127).half().double(), torch.zeros(len(w), dtype=torch.float64)
        return ((part.amax(1) - part.amin(1)) / 15).half().double(), part.amin(1).half().double()

    if act_order:
        grids = {start: grid(start) for start in range(0, n, group_size)}
    for at, column in enumerate(order):
        left = order[at:]
        if not act_order and column % group_size == 0:
            grids[column] = grid(column)
        scale, minimum = grids[column // group_size * group_size]
        q[:, column] = ((w[:, column] - minimum) / scale).round().clamp(low, high)
        inverse = h[left][:, left].inverse()
        error = (w[:, column] - scale * q[:, column] - minimum) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0]
    return q, torch.stack([grids[start][0] for start in sorted(grids)], 1)


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(("bits", "group_size", "n_columns"), [(4, 32, 160), (4, 128, 256), (8, 64, 192)])
def test_gptq_equals_a_loop_written_from_its_definition(bits, group_size, n_columns, act_order):
    weight, hessian = gaussian(5, n_columns), correlated(n_columns)
    quantized = gptq_matrix(weight, hessian, bits, group_size, act_order, method="rtn")
    q, scale = by_definition(weight, hessian, bits, group_size, act_order)
    same = quantized.values() == q  # in fp32 a number beside a tie may fall on the other side, and move those after it
    assert same.float().mean() > 0.98 and (quantized.values() - q).abs().max() <= (1 if bits == 4 else 4)
    assert (quantized.scale.double() / scale - 1).abs().max() < 0.01


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(("method", "bits"), [("rtn", 4), ("als", 4), ("hqq", 4), ("rtn", 8), ("als", 8)])
def test_inputs_that_are_not_correlated_leave_plain_rounding_with_every_column_in_its_place(method, bits, act_order):
    weight, sizes = gaussian(6, 256), gaussian(256, seed=3).exp()  # a different order of columns than their own
    plain = quantize_matrix(weight, bits, 64, method)
    for hessian in (torch.eye(256), sizes.diag()):
        quantized = gptq_matrix(weight, hessian, bits, 64, act_order, method=method)
        assert torch.equal(quantized.q, plain.q) and torch.equal(quantized.scale, plain.scale)
        assert bits == 8 or torch.equal(quantized.minimum, plain.minimum)
        assert quantized.q.is_contiguous()


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("method", ["rtn", "als"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (8, 64)])
def test_on_correlated_inputs_outputs_are_nearer_than_with_rounding(bits, group_size, method, act_order):
    for seed in range(4):
        weight, hessian = gaussian(40, 256, seed=seed), correlated(256, seed=10 * seed)
        plain = output_error(weight, quantize_matrix(weight, bits, group_size, method), hessian)
        quantized = gptq_matrix(weight, hessian, bits, group_size, act_order, method=method)
        assert output_error(weight, quantized, hessian) < 0.5 * plain


def test_output_error_is_that_of_the_outputs():
    weight, x = gaussian(20, 64), gaussian(500, 64, seed=5)
    quantized = quantize_matrix(weight, 4, 32, "rtn")
    difference = F.linear(x, quantized.dequantize()) - F.linear(x, weight)
    expected = difference.square().sum() / F.linear(x, weight).square().sum()
    assert output_error(weight, quantized, x.t() @ x) == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("act_order", [True, False])
def test_columns_whose_inputs_are_always_zero_spoil_nothing(act_order):
    weight, hessian = gaussian(6, 128), correlated(128)
    for column in (0, 40, 41, 127):
        hessian[column], hessian[:, column] = 0, 0
        weight[:, column] = 1000.0
    quantized = gptq_matrix(weight, hessian, 4, 32, act_order)
    clean = weight.clone()
    clean[:, [0, 40, 41, 127]] = 0
    assert quantized.scale.max() < 1
    assert output_error(weight, quantized, hessian) < output_error(clean, quantize_matrix(clean, 4, 32), hessian)
    assert gptq_matrix(weight, torch.zeros(128, 128), 4, 32, act_order).dequantize().isfinite().all()


def test_dead_columns_do_not_damp_small_inputs():
    """A dead column's stand-in 1 would raise the mean that damping goes by, were the others not brought to 1 first."""
    weight, hessian = gaussian(6, 128), correlated(128)
    hessian[:16], hessian[:, :16] = 0, 0
    small = gptq_matrix(weight, hessian * 2.0**-40, 4, 32)
    assert torch.equal(small.q, gptq_matrix(weight, hessian, 4, 32).q)


@pytest.mark.parametrize("act_order", [True, False])
def test_the_weight_and_the_hessian_are_left_as_they_are(act_order):
    for weight in (gaussian(6, 128), gaussian(128, 6).t(), gaussian(1, 128)):
        hessian = correlated(128)
        before = weight.clone(), hessian.clone()
        quantized = gptq_matrix(torch.nn.Parameter(weight), hessian, 4, 32, act_order)
        assert not quantized.scale.requires_grad
        assert torch.equal(weight, before[0]) and torch.equal(hessian, before[1])


def test_inputs_along_one_line_are_enough():
    x = gaussian(128, seed=7)
    weight, hessian = gaussian(6, 128), torch.outer(x, x)
    assert output_error(weight, gptq_matrix(weight, hessian, 4, 32), hessian) < 1e-4


@pytest.mark.parametrize("hessian", [torch.full((64, 64), float("nan")), torch.eye(32)])
def test_a_hessian_that_cannot_be_used_is_refused_by_the_layers_name(hessian):
    with pytest.raises(InputError, match="layers.3.o_proj.*no finite 64 x 64.*--method als"):
        gptq_matrix(gaussian(4, 64), hessian, 4, 32, name="layers.3.o_proj")


# Calibration


def our_model(reference, folder, max_seq_len=256):
    save_checkpoint(reference, folder)
    config = read_config(folder)
    with torch.device("meta"):
        model = Transformer(config)
    load_weights(model, folder, config, "cpu", torch.float32)
    model.set_rotary(max_seq_len)
    return model


def random_ids(*shape, seed=1):
    return torch.randint(3, 199, shape, generator=torch.Generator().manual_seed(seed))


def moment(x):
    x = x.reshape(-1, x.shape[-1])
    return 2 / len(x) * x.t() @ x


def assert_close(ours, expected):
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("length", [12, 40])
@pytest.mark.parametrize("family", ["llama", "llama-biased", "mistral-window", "qwen3"])
def test_hessians_are_those_of_the_reference_models_inputs(family, length, tmp_path):
    reference = reference_model(family)
    model = our_model(reference, tmp_path)
    ids = random_ids(70, length)  # more than one batch
    seen = {}
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0]))
    with torch.inference_mode():
        states = reference(ids, output_hidden_states=True).hidden_states
    calibration = LayerwiseCalibration(model.config, model.embed_tokens, ids)
    twins = {"self_attn.qkv_proj": "q_proj", "self_attn.o_proj": "o_proj"}
    twins |= {"mlp.gate_up_proj": "gate_proj", "mlp.down_proj": "down_proj"}
    for i, layer in enumerate(model.layers):
        assert_close(torch.cat(calibration.batches), states[i])
        hessians = calibration.layer(i, layer)
        assert set(hessians) == set(twins)
        for name, hessian in hessians.items():
            module, _, _ = name.partition(".")
            assert_close(hessian, moment(seen[f"model.layers.{i}.{module}.{twins[name]}"]))
        calibration.advance(layer)
    assert_close(model.norm(torch.cat(calibration.batches)), states[-1])
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe-mixed"])
def test_hessians_of_experts_are_of_the_tokens_that_they_get(family, tmp_path):
    model = our_model(reference_model(family), tmp_path)
    calibration = LayerwiseCalibration(model.config, model.embed_tokens, random_ids(3, 40))
    for i, layer in enumerate(model.layers):
        hessians = calibration.layer(i, layer)
        if isinstance(layer.mlp, SparseExperts):
            entering = []
            handle = layer.mlp.register_forward_pre_hook(lambda _, args: entering.append(args[1](args[0])))  # noqa: B023
            calibration.advance(layer)
            handle.remove()
            x = torch.cat(entering).flatten(0, 1)
            inner = []
            for token in x:
                for expert in layer.mlp.gate(token).topk(model.config.n_experts_per_token).indices:
                    gate, up = (layer.mlp.experts.gate_up_proj[expert] @ token).chunk(2)
                    inner.append(F.silu(gate) * up)
            assert set(hessians) == {
                "self_attn.qkv_proj",
                "self_attn.o_proj",
                "mlp.experts.gate_up_proj",
                "mlp.experts.down_proj",
            }
            assert_close(hessians["mlp.experts.gate_up_proj"], moment(x))
            assert_close(hessians["mlp.experts.down_proj"], moment(torch.stack(inner)))
        else:
            assert "mlp.gate_up_proj" in hessians
            calibration.advance(layer)


def test_a_layer_out_of_turn_and_unusable_token_ids_are_refused(tmp_path):
    model = our_model(reference_model("llama"), tmp_path)
    calibration = LayerwiseCalibration(model.config, model.embed_tokens, random_ids(2, 20))
    with pytest.raises(ValueError, match="layer 0 comes next"):
        calibration.layer(1, model.layers[1])
    for ids in (random_ids(20), torch.zeros(0, 20, dtype=torch.long), torch.full((1, 5), 199)):
        with pytest.raises(InputError, match="calibration"):
            LayerwiseCalibration(model.config, model.embed_tokens, ids)


# A model that has learnt something


def chains(n, length, seed):
    """Texts in which each token allows three next ones, one of them likely."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 199, (n, 1), generator=generator)
    for _ in range(length - 1):
        branch = torch.multinomial(torch.tensor([0.8, 0.15, 0.05]), n, True, generator=generator)[:, None]
        ids = torch.cat((ids, 3 + (ids[:, -1:] * 7 + branch * 31 + 5) % 196), 1)
    return ids


@pytest.fixture(scope="module")
def trained():
    reference = reference_model("llama", initializer_range=0.08, **SIZES).train()
    optimizer = torch.optim.AdamW(reference.parameters(), 4e-3)
    for step in range(300):
        ids = chains(32, 24, step)
        loss = reference(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1.5  # chance is 5.3, the best 0.6
    return reference.eval()


NAMES = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]


def quantize_layers(model, ids, method, one_pass=True):
    """Every layer of `model` in turn, in place, on what the layers before it, already quantized, give."""
    calibration = LayerwiseCalibration(model.config, model.embed_tokens, ids)
    for i, layer in enumerate(model.layers):
        for part in [NAMES] if one_pass else [[name] for name in NAMES]:
            for name, hessian in calibration.layer(i, layer, part).items():
                weight = layer.get_submodule(name).weight
                if method == "gptq":
                    quantized = gptq_matrix(weight, hessian, 4, 32)
                else:
                    quantized = quantize_matrix(weight, 4, 32, method)
                weight.copy_(quantized.dequantize())
        calibration.advance(layer)


def states_after(model, ids):
    """What leaves the last layer, `[n, length, h]`."""
    calibration = LayerwiseCalibration(model.config, model.embed_tokens, ids)
    for layer in model.layers:
        calibration.advance(layer)
    return torch.cat(calibration.batches)


@torch.no_grad()
def test_matrices_of_a_trained_model_lose_less_with_als_and_less_again_with_gptq(trained, tmp_path):
    """Outputs on texts that were not used to calibrate; GPTQ makes each matrix better, ALS their sum."""
    model = our_model(trained, tmp_path)
    used, others = (LayerwiseCalibration(model.config, model.embed_tokens, chains(64, 24, s)) for s in (1000, 2000))
    lost = {"rtn": [], "als": [], "gptq": []}
    for i, layer in enumerate(model.layers):
        before, held_out = used.layer(i, layer), others.layer(i, layer)
        for name in NAMES:
            weight = layer.get_submodule(name).weight
            lost["gptq"].append(output_error(weight, gptq_matrix(weight, before[name], 4, 32), held_out[name]))
            for method in ("rtn", "als"):
                lost[method].append(output_error(weight, quantize_matrix(weight, 4, 32, method), held_out[name]))
        used.advance(layer)
        others.advance(layer)
    assert sum(lost["als"]) < 0.95 * sum(lost["rtn"])
    assert all(gptq < 0.5 * als for gptq, als in zip(lost["gptq"], lost["als"], strict=True))


@pytest.mark.parametrize("one_pass", [True, False])
@torch.no_grad()
def test_a_trained_model_quantized_layer_by_layer_comes_nearer_with_gptq(trained, one_pass, tmp_path):
    ids, others = chains(64, 24, 1000), chains(64, 24, 2000)
    original = our_model(trained, tmp_path)
    exact = states_after(original, others)
    errors = {}
    for method in ("rtn", "als", "gptq"):
        model = our_model(trained, tmp_path)
        quantize_layers(model, ids, method, one_pass)
        errors[method] = (states_after(model, others) - exact).square().mean().item()
    assert errors["gptq"] < 0.3 * min(errors["als"], errors["rtn"])
    before, after = (perplexity(m, others.flatten(), context=24) for m in (original, model))
    assert after == pytest.approx(before, rel=0.01)
