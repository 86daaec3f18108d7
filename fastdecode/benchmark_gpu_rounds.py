"""`--suite gpu`, parts rounds and memory: captured rounds at the shapes of known models, with random weights."""

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fastdecode.benchmark_gpu_models import Sizes, StubDrafter, TextLoop, prompt_ids, random_network
from fastdecode.drafters.root import RootOnly
from fastdecode.memory import (
    BYTES_A_WEIGHT,
    bytes_per_round,
    cache_bytes_per_token,
    measure_bandwidth,
    weight_bytes,
)
from fastdecode.tree_options import parse_tree
from models.config import ModelConfig
from models.transformer import Transformer

Entry = tuple[str, Callable[[], dict[str, Any]]]
PRECISIONS = ("bf16", "int8", "int4")
TREES = ("none", "chain:3", "chain:5", "chain:7", "static")
ACCEPTANCE = 0.8  # of each draft, given that its parent was accepted: a parameter here, and no figure of any head
MOST_COMMITTED = 8  # tokens of a round, in the deepest of these trees
WARM_ROUNDS = 4
SMALL_CARD = 24e9  # bytes


class Networks:
    """Holds the network that was asked for last, and no other."""

    def __init__(self, device: torch.device, sizes: Sizes):
        self.device, self.sizes = device, sizes
        self.name, self.network = None, None

    def get(self, model: str, precision: str) -> Transformer:
        """A random network in the shape of `model`."""
        if self.name != (model, precision):
            self.name = self.network = None
            free(self.device)
            config = ModelConfig.from_hf(self.sizes.models[model], model)
            self.network = random_network(config, precision, self.device, torch.bfloat16, self.sizes.group)
            self.name = model, precision
        return self.network


def free(device: torch.device) -> None:
    """Give back what nothing refers to any more; what was compiled refers to it in circles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def round_entries(device: torch.device, sizes: Sizes) -> Iterator[Entry]:
    """A measurement for each model, precision and tree; see `measure_rounds`."""
    networks = Networks(device, sizes)
    for model in sizes.models:
        for precision in PRECISIONS:
            for tree in TREES:
                yield f"{model} {precision} {tree}", partial(measure_rounds, networks, model, precision, tree)


def measure_rounds(networks: Networks, model: str, precision: str, tree: str) -> dict[str, Any]:
    """Milliseconds a round and tokens/s of `rounds` rounds behind `context` tokens of an empty cache.

    `acceptance` is given, see GivenAcceptance, and drafting costs nothing: a round here is verification and all that is
    around it. `replays_without_sync`: three replays with torch's check for synchronization set to fail; None where
    nothing is captured.
    """
    sizes, device = networks.sizes, networks.device
    network = networks.get(model, precision)
    vocab = network.config.vocab_size
    drafter = RootOnly() if tree == "none" else StubDrafter(parse_tree(tree), vocab)
    longest = sizes.context + (sizes.rounds + 2 * WARM_ROUNDS) * MOST_COMMITTED
    loop = TextLoop(network, drafter, longest, sizes.compile, ACCEPTANCE)
    loop.start(prompt_ids(sizes.context, vocab), prefill=False)
    bucket = loop.runner.bucket_for(longest - drafter.n_nodes)  # the same for every tree
    started = time.perf_counter()
    loop.runner.step("greedy", bucket)
    loop.drain()
    compile_s = time.perf_counter() - started
    for _ in range(WARM_ROUNDS):
        loop.runner.step("greedy", bucket)
    loop.drain()
    before = int(loop.state.length[0])
    started = time.perf_counter()
    for _ in range(sizes.rounds):
        loop.runner.step("greedy", bucket)
    loop.drain()  # waits for the last round's report
    seconds = time.perf_counter() - started
    after = int(loop.state.length[0])
    bandwidth = measure_bandwidth(device)
    per_round = bytes_per_round(network, drafter, (before + after) / 2, int8_cache=False)
    return {
        "acceptance": None if tree == "none" else ACCEPTANCE,
        "nodes": drafter.n_nodes,
        "context": sizes.context,
        "bucket": bucket,
        "rounds": sizes.rounds,
        "ms_per_round": 1e3 * seconds / sizes.rounds,
        "tau": (after - before) / sizes.rounds,
        "tokens_per_s": (after - before) / seconds,
        "bytes_per_round": round(per_round),
        "bandwidth_gb_s": bandwidth / 1e9,
        "bandwidth_share": per_round * sizes.rounds / seconds / bandwidth,
        "compile_and_capture_s": compile_s if sizes.compile else None,
        "replays_without_sync": replays_without_sync(loop, bucket),
    }


def replays_without_sync(loop: TextLoop, bucket: int) -> bool | None:
    """Whether captured rounds can be replayed with torch's synchronization check set to fail; None without a graph."""
    if ("greedy", bucket) not in loop.runner.graphs:
        return None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            loop.runner.graphs["greedy", bucket][0].replay()
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def memory_entries(device: torch.device, sizes: Sizes) -> Iterator[Entry]:
    """A measurement for each model and precision, with a cache in bf16 and, in 4 bits, one in int8; see
    `measure_memory`."""
    for model in sizes.models:
        for precision in PRECISIONS:
            for int8_cache in (False, True) if precision == "int4" else (False,):
                name = f"{model} {precision}{' int8 cache' if int8_cache else ''}"
                yield name, partial(measure_memory, device, sizes, model, precision, int8_cache)


def measure_memory(
    device: torch.device, sizes: Sizes, model: str, precision: str, int8_cache: bool
) -> dict[str, Any]:
    """Predicted and measured megabytes of weights, cache and captured plain rounds at the model's text length.

    Measured: what torch held at the most in tensors and in all, once the network was packed, and in tensors while it
    was being packed; null on a CPU.
    `fits_24_gb`: what it held in all is no more than 24 GB, which leaves out the driver's own share.
    """
    free(device)
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    held_before = torch.cuda.memory_allocated(device) if on_cuda else 0
    config, tokens = ModelConfig.from_hf(sizes.models[model], model), sizes.text_lengths[model]
    weights = weight_bytes(config, torch.bfloat16)
    if precision in BYTES_A_WEIGHT:
        weights = min(weights, int(weights / 2 * BYTES_A_WEIGHT[precision]))
    cache = tokens * cache_bytes_per_token(config, torch.bfloat16, int8_cache)
    network = random_network(config, precision, device, torch.bfloat16)
    packing = torch.cuda.max_memory_allocated(device) if on_cuda else None
    free(device)
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    loop = TextLoop(network, RootOnly(), tokens, sizes.compile, int8_cache=int8_cache)
    loop.runner.warm_up("greedy")  # captures every bucket, as generating does
    loop.decode(prompt_ids(min(sizes.context, tokens // 2), config.vocab_size), 8)
    allocated = torch.cuda.max_memory_allocated(device) if on_cuda else None
    reserved = torch.cuda.max_memory_reserved(device) if on_cuda else None
    return {
        "text_tokens": tokens,
        "predicted_mb": (weights + cache) / 1e6,
        "predicted_weights_mb": weights / 1e6,
        "weights_mb": sum(p.numel() * p.itemsize for p in network.parameters()) / 1e6,
        "cache_mb": sum(b.numel() * b.itemsize for b in loop.cache.buffers()) / 1e6,
        "held_before_mb": held_before / 1e6,
        "measured_packing_mb": None if packing is None else packing / 1e6,
        "measured_tensors_mb": None if allocated is None else allocated / 1e6,
        "measured_in_all_mb": None if reserved is None else reserved / 1e6,
        "predicted_fits_24_gb": weights + cache <= SMALL_CARD,
        "fits_24_gb": None if reserved is None else reserved <= SMALL_CARD,
    }
