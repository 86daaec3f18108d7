"""`--suite gpu`, part kernels: the operator for int4 and int8 weights against bf16 and tinygemm, by number of rows."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastdecode.benchmark_gpu_models import WEIGHT_SPREAD, Sizes, copies_beyond_cache, random_matrix
from fastdecode.memory import measure_bandwidth
from quantize.kernels import pack_tinygemm, tinygemm_linear
from quantize.linear import QuantizedLinear

Product = Callable[[Tensor], Tensor]
Entry = tuple[str, Callable[[], dict[str, Any]]]
REPEATS = 20


def kernel_entries(device: torch.device, sizes: Sizes) -> Iterator[Entry]:
    """A measurement for each shape and kind of weights; see `measure`."""
    kinds = ["bf16", "int4-g32", "int4-g128", "int8-g32", "int8-g128"]
    if device.type == "cuda":
        kinds += ["tinygemm-g32", "tinygemm-g128"]
    for n_out, n_columns in sizes.shapes:
        for kind in kinds:
            yield f"{n_out}x{n_columns} {kind}", partial(measure, kind, n_out, n_columns, device, sizes.row_counts)


@torch.inference_mode()
def measure(
    kind: str, n_out: int, n_columns: int, device: torch.device, row_counts: tuple[int, ...]
) -> dict[str, Any]:
    """Microseconds of one product by number of rows, by copies of the matrix in turn, more than the cache holds.

    `weight_bytes`; `gb_s`: those bytes over the time; `share_of_bandwidth`: of what was measured a moment before;
    `same_bits`: whether the first row's result is the same bits beside any number of others.
    """
    n_bytes, make = product_of(kind, n_out, n_columns, device)
    products = [make() for _ in range(copies_beyond_cache(n_bytes, device))]
    bandwidth = measure_bandwidth(device)
    x = torch.randn(max(row_counts), n_columns, device=device).to(torch.bfloat16)
    alone = products[0](x[:1])
    found: dict[str, Any] = {"weight_bytes": n_bytes, "copies": len(products), "bandwidth_gb_s": bandwidth / 1e9}
    found |= {"us": {}, "gb_s": {}, "share_of_bandwidth": {}, "same_bits": True}
    for n in row_counts:
        rows = x[:n].contiguous()
        found["same_bits"] &= torch.equal(products[0](rows)[:1], alone)
        seconds = seconds_a_call([partial(product, rows) for product in products], device)
        found["us"][str(n)] = 1e6 * seconds
        found["gb_s"][str(n)] = n_bytes / seconds / 1e9
        found["share_of_bandwidth"][str(n)] = n_bytes / seconds / bandwidth
    return found


def product_of(kind: str, n_out: int, n_columns: int, device: torch.device) -> tuple[int, Callable[[], Product]]:
    """Bytes of a random matrix of this kind, and what makes one and returns the product with it."""
    if kind == "bf16":

        def make_float() -> Product:
            weight = torch.empty(n_out, n_columns, dtype=torch.bfloat16, device=device).normal_(std=WEIGHT_SPREAD)
            return lambda x: F.linear(x, weight)

        return 2 * n_out * n_columns, make_float
    name, _, group = kind.partition("-g")
    bits = 8 if name == "int8" else 4
    parameters = n_out * n_columns // int(group) * (2 if bits == 8 else 4)  # scale, minimum: fp16

    def make_quantized() -> Product:
        matrix = random_matrix(bits, int(group), n_out, n_columns, device)
        if name == "tinygemm":
            return partial(tinygemm_linear, packed=pack_tinygemm(matrix))
        return QuantizedLinear(matrix, device)

    return n_out * n_columns * bits // 8 + parameters, make_quantized


def seconds_a_call(calls: list[Callable[[], Any]], device: torch.device, repeats: int = REPEATS) -> float:
    """Seconds that one of `calls` takes where they follow each other, the median of `repeats` runs of them all. On CUDA
    they run as one captured graph, as in a round: no launch is in the figure."""
    if device.type != "cuda":
        for call in calls:
            call()
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            for call in calls:
                call()
            times.append(time.perf_counter() - started)
        return median(times) / len(calls)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]  # so that no result is written over another
    graph.replay()
    times = []
    for _ in range(repeats):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / 1e3)
    del kept
    return median(times) / len(calls)
