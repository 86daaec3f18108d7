"""The GPU suite's plumbing, on the CPU with tiny shapes: what it says is right, and it goes on where it was."""

import json

import pytest
import torch

from fastdecode import benchmark_gpu
from fastdecode.benchmark_gpu import run_parts, start_report
from fastdecode.benchmark_gpu_exact import Plain, compare_tiny
from fastdecode.benchmark_gpu_kernels import measure, product_of
from fastdecode.benchmark_gpu_models import (
    LLAMA_2_7B,
    LLAMA_3_1_8B,
    Sizes,
    StubDrafter,
    TextLoop,
    llama,
    prompt_ids,
    random_matrix,
    random_network,
)
from fastdecode.benchmark_gpu_rounds import Networks, measure_memory, measure_rounds
from fastdecode.drafters.root import RootOnly
from fastdecode.memory import weight_bytes
from fastdecode.tree_options import parse_tree
from models.config import ModelConfig
from models.errors import InputError
from quantize.linear import QuantizedLinear

CPU = torch.device("cpu")
TINY = llama(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=128, max_position_embeddings=2048,
)  # fmt: skip
SIZES = Sizes(
    shapes=((64, 128),), row_counts=(1, 4), models={"tiny": TINY}, text_lengths={"tiny": 256}, tiny=TINY, context=32,
    rounds=8, new_tokens=12, compile=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_demo(monkeypatch, tmp_path):
    """No demo model is in the cache, so that nothing large is loaded."""
    monkeypatch.setattr("fastdecode.benchmark_gpu_exact.cache_folder", lambda: tmp_path / "empty")


def report():
    return start_report(CPU, None)


def test_every_part_runs_and_every_measurement_is_in_the_file(tmp_path):
    file = tmp_path / "gpu.json"
    found = report()
    run_parts(found, benchmark_gpu.PARTS, CPU, SIZES, file)
    assert json.loads(file.read_text()) == found
    assert list(found) == ["machine", "model", "rows", "parts"] and found["rows"] == []
    assert {"device", "power_limit_w", "torch", "bandwidth_gb_s", "cuda", "triton", "card"} <= set(found["machine"])
    assert {name: part["complete"] for name, part in found["parts"].items()} == dict.fromkeys(benchmark_gpu.PARTS, True)
    entries = {name: part["entries"] for name, part in found["parts"].items()}
    assert len(entries["kernels"]) == 5 and len(entries["rounds"]) == 15
    assert len(entries["exact"]) == 15 and len(entries["memory"]) == 4
    for entry in entries["exact"].values():
        assert entry["matched"] == entry["answers"] == 8


def test_what_the_file_holds_is_not_measured_again_and_failures_are(tmp_path, monkeypatch):
    file, calls = tmp_path / "gpu.json", []

    def entries(device, sizes):
        for name in "abc":
            yield name, lambda name=name: calls.append(name) or {"value": name}

    monkeypatch.setattr(benchmark_gpu, "PARTS", {"kernels": entries})
    found = report()
    found["parts"]["kernels"] = {"complete": False, "entries": {"a": {"value": "old"}, "b": {"error": "no memory"}}}
    run_parts(found, ["kernels"], CPU, SIZES, file)
    assert calls == ["b", "c"]
    assert found["parts"]["kernels"]["entries"]["a"] == {"value": "old"} and found["parts"]["kernels"]["complete"]
    run_parts(start_report(CPU, file), ["kernels"], CPU, SIZES, file)
    assert calls == ["b", "c"]


def test_a_failure_is_written_down_and_costs_no_other_figure(monkeypatch):
    monkeypatch.setattr(
        benchmark_gpu, "PARTS", {"kernels": lambda device, sizes: iter([("bad", lambda: 1 / 0), ("good", dict)])}
    )
    found = report()
    run_parts(found, ["kernels"], CPU, SIZES, None)
    part = found["parts"]["kernels"]
    assert part["entries"] == {"bad": {"error": "ZeroDivisionError: division by zero"}, "good": {}}
    assert not part["complete"]


def test_a_part_that_runs_out_of_time_is_left_incomplete(monkeypatch):
    monkeypatch.setattr(benchmark_gpu, "PARTS", {"kernels": lambda device, sizes: iter([("a", dict), ("b", dict)])})
    found = report()
    run_parts(found, ["kernels"], CPU, SIZES, None, limit_s=-1)
    assert found["parts"]["kernels"]["entries"] == {} and not found["parts"]["kernels"]["complete"]
    run_parts(found, ["kernels"], CPU, SIZES, None)
    assert found["parts"]["kernels"]["complete"]


@pytest.mark.parametrize("content", ["{}", "no JSON", '{"machine": {"device": "a card", "torch": "1"}, "parts": {}}'])
def test_another_machines_file_is_not_continued(tmp_path, content):
    file = tmp_path / "gpu.json"
    file.write_text(content)
    with pytest.raises(InputError, match="give another file"):
        start_report(CPU, file)
    assert file.read_text() == content


@pytest.mark.parametrize("kind", ["bf16", "int4-g32", "int8-g64"])
def test_a_kernels_figures_belong_together(kind):
    found = measure(kind, 64, 128, CPU, (1, 4))
    expected = {"bf16": 2 * 64 * 128, "int4-g32": 64 * 64 + 64 * 4 * 4, "int8-g64": 64 * 128 + 64 * 2 * 2}
    assert found["weight_bytes"] == expected[kind] == product_of(kind, 64, 128, CPU)[0]
    assert set(found["us"]) == {"1", "4"}
    for n, us in found["us"].items():
        assert found["gb_s"][n] == pytest.approx(found["weight_bytes"] / us / 1e3)
        assert found["share_of_bandwidth"][n] == pytest.approx(found["gb_s"][n] / found["bandwidth_gb_s"])
    assert found["same_bits"] or kind == "bf16"


@pytest.mark.parametrize("bits", [4, 8])
def test_a_random_matrix_lies_around_zero_with_the_spread_that_is_meant(bits):
    weight = random_matrix(bits, 32, 256, 256, CPU).dequantize()
    assert abs(weight.mean()) < 0.002 and 0.015 < weight.std() < 0.03


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_a_random_network_decodes_in_the_precision_that_it_names(precision):
    network = random_network(ModelConfig.from_hf(TINY), precision, CPU, torch.bfloat16)
    quantized = [m for m in network.modules() if isinstance(m, QuantizedLinear)]
    assert {m.bits for m in quantized} == {"bf16": set(), "int8": {8}, "int4": {4, 8}}[precision]
    assert not any(p.is_meta for p in network.parameters())
    answer = TextLoop(network, RootOnly(), 256, compile=False).decode(prompt_ids(9, 128), 10)
    assert len(answer) == 10 and all(0 <= token < 128 for token in answer)


@pytest.mark.parametrize("tree", ["chain:3", "static", "dynamic:2,2,6"])
def test_given_acceptance_is_what_rounds_reach(tree):
    network = random_network(ModelConfig.from_hf(TINY), "bf16", CPU, torch.bfloat16)
    depth = parse_tree(tree).max_depth
    taus = []
    for share in (0.0, 0.5, 1.0):
        loop = TextLoop(network, StubDrafter(parse_tree(tree), 128), 1024, False, share)
        loop.start(prompt_ids(8, 128), prefill=False)
        for _ in range(60):
            loop.runner.step("greedy", loop.runner.bucket_for(1000))
        taus.append((int(loop.state.length[0]) - 8) / 60)
    assert taus[0] < 1.2 and taus[2] == depth + 1  # a drafted token may be what the network says, by chance
    assert taus[1] == pytest.approx(sum(0.5**d for d in range(depth + 1)), rel=0.25)


def test_rounds_state_what_was_given_and_what_came_of_it():
    networks = Networks(CPU, SIZES)
    plain = measure_rounds(networks, "tiny", "int8", "none")
    assert (plain["acceptance"], plain["nodes"], plain["tau"], plain["replays_without_sync"]) == (None, 1, 1.0, None)
    drafted = measure_rounds(networks, "tiny", "int8", "chain:3")
    assert (drafted["acceptance"], drafted["nodes"], drafted["context"]) == (0.8, 4, 32)
    assert 1 < drafted["tau"] <= 4 and drafted["bucket"] == plain["bucket"]
    assert drafted["tokens_per_s"] == pytest.approx(1e3 * drafted["tau"] / drafted["ms_per_round"])


def test_a_chain_that_says_something_else_is_found_out(monkeypatch):
    from fastdecode.round import Round

    choose = Round.choose

    def wrong(self, logits, tree, family, context):
        chosen = choose(self, logits, tree, family, context)
        return chosen if chosen.shape[1] == 1 else chosen.clamp_max(40)

    plain = Plain(CPU, SIZES)
    assert compare_tiny(plain, "bf16", 3)["matched"] == 8
    monkeypatch.setattr(Round, "choose", wrong)
    assert compare_tiny(plain, "bf16", 3)["matched"] < 8


def test_drafts_are_accepted_where_exactness_is_checked():
    found = compare_tiny(Plain(CPU, SIZES), "bf16", 5)
    assert found["tau"]["known"] > 2


def test_predicted_memory_is_weights_and_cache():
    found = measure_memory(CPU, SIZES, "tiny", "bf16", int8_cache=False)
    cache = 256 * 2 * 2 * 2 * 16 * 2
    weights = weight_bytes(ModelConfig.from_hf(TINY), torch.bfloat16)
    assert found["predicted_mb"] == pytest.approx((weights + cache) / 1e6)
    assert found["weights_mb"] == pytest.approx(weights / 1e6)
    assert found["cache_mb"] == pytest.approx(cache / 1e6, rel=0.3)  # and the bin, in whole blocks of rows
    assert found["measured_in_all_mb"] is None and found["fits_24_gb"] is None and found["predicted_fits_24_gb"]


def test_the_shapes_are_those_of_the_models_that_they_name():
    sizes = [weight_bytes(ModelConfig.from_hf(config), torch.bfloat16) / 2e9 for config in (LLAMA_2_7B, LLAMA_3_1_8B)]
    assert sizes == [pytest.approx(6.738, abs=0.001), pytest.approx(8.030, abs=0.001)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_part_runs_captured_on_a_card():
    from dataclasses import replace

    device = torch.device("cuda")
    found = start_report(device, None)
    run_parts(found, benchmark_gpu.PARTS, device, replace(SIZES, compile=True), None)
    for part in found["parts"].values():
        assert not [entry for entry in part["entries"].values() if "error" in entry]
    assert all(entry["replays_without_sync"] for entry in found["parts"]["rounds"]["entries"].values())
