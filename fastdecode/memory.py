"""Bytes: what a step must read, what fits, what was used, and how fast this machine reads."""

import contextlib
import math
import os
import platform
import sys
import time
from pathlib import Path

import torch
from torch import nn

from checkpoints.checkpoint import open_tensors
from models.cache import SCALE_DTYPE
from models.config import ModelConfig
from models.transformer import Transformer
from quantize.importers import GGUF_TYPES

SHARE_FOR_CACHE = 0.5  # of the memory that the weights leave free, where nobody asked for a length
BYTES_A_WEIGHT = {"int4": 0.8, "w4a8": 0.8, "int8": 1.2, "w8a8": 1.2}  # scales, an 8-bit embedding and norms included
FEWEST_TOKENS = 512  # a shorter text is no use unless it is asked for


def cache_bytes_per_token(config: ModelConfig, dtype: torch.dtype, int8_cache: bool = False) -> int:
    """Bytes of keys and values that one token of one text takes in the cache, their scales included."""
    one = config.head_dim + SCALE_DTYPE.itemsize if int8_cache else config.head_dim * dtype.itemsize
    return 2 * config.n_layers * config.n_kv_heads * one


def weight_bytes_per_round(model: Transformer) -> int:
    """Bytes of weights that a round of one row reads: all of them, but the embedding only where lm_head shares it, and
    of sparse experts only those that one token chooses."""
    total = 0
    for name, parameter in model.named_parameters():
        size = parameter.numel() * parameter.itemsize
        if name.startswith("embed_tokens.") and not model.config.tie_word_embeddings:
            continue
        if ".experts." in name:
            size = size * model.config.n_experts_per_token // model.config.n_experts
        total += size
    return total


def draft_bytes_per_round(drafter: nn.Module) -> int:
    """Bytes of weights that a drafter reads in a round: its network's, once for every level that it drafts."""
    model = getattr(drafter, "model", None)
    if isinstance(model, Transformer):
        return drafter.max_depth * weight_bytes_per_round(model)
    head = getattr(drafter, "head", None)
    if head is None:
        return 0
    read = {p for name, p in head.named_parameters(remove_duplicate=False) if not name.startswith("embed_tokens.")}
    return drafter.max_depth * sum(p.numel() * p.itemsize for p in read)


def bytes_per_round(model: Transformer, drafter: nn.Module, cached_tokens: float, int8_cache: bool) -> float:
    """Bytes that a round has to read: weights, the drafter's once a level, and the keys and values of `cached_tokens`
    tokens, in int8 or in the weights' dtype."""
    weights = weight_bytes_per_round(model) + draft_bytes_per_round(drafter)
    return weights + cached_tokens * cache_bytes_per_token(model.config, model.norm.weight.dtype, int8_cache)


def affordable_tokens(
    config: ModelConfig,
    dtype: torch.dtype,
    batch: int,
    device: torch.device,
    int8_cache: bool = False,
    weights: int | None = None,
) -> tuple[int, int]:
    """How many tokens of each of `batch` texts a cache can hold beside the weights, which are not loaded yet (`weights`
    bytes, by default those of the config in `dtype`): in all of the memory that is free, and in half of it."""
    per_token = cache_bytes_per_token(config, dtype, int8_cache) * batch
    left = max(0, free_bytes(device) - (weight_bytes(config, dtype) if weights is None else weights))
    return left // per_token, int(left * SHARE_FOR_CACHE) // per_token // 64 * 64


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a model's weights, from its config alone."""
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters()) * dtype.itemsize


def expected_weight_bytes(path: Path, config: ModelConfig, dtype: torch.dtype, quantize: str) -> int:
    """Bytes that the weights of a checkpoint will take, `quantize` as in `--quantize`: at most those of floats."""
    floats = weight_bytes(config, dtype)
    count = floats // dtype.itemsize
    if quantize in BYTES_A_WEIGHT:
        return min(floats, int(count * BYTES_A_WEIGHT[quantize]))
    if quantize == "none" or (path.is_dir() and config.quantization is None):
        return floats
    if path.is_dir():
        return min(floats, int(1.2 * sum(file.stat().st_size for file in path.glob("*.safetensors"))))
    kept = [t for t in open_tensors(path, config).values() if t.dtype in GGUF_TYPES and len(t.shape) == 2]
    elements = [math.prod(t.shape) for t in kept]
    packed = sum(n // t.block * t.block_bytes for t, n in zip(kept, elements, strict=True))
    return int(1.05 * packed) + (count - sum(elements)) * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if hasattr(os, "sysconf") else 2**32


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory that this process has held: on the card for CUDA, resident in RAM otherwise; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    with contextlib.suppress(OSError, StopIteration):
        # On Linux getrusage's ru_maxrss begins at what the process that started this one held.
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure_bandwidth(device: torch.device, megabytes: int = 256) -> float:
    """Bytes per second at which `device` reads memory, best of several passes over a block larger than its caches."""
    on_cuda = device.type == "cuda"
    size = min(megabytes * 2**20 * (8 if on_cuda else 1), free_bytes(device) // 2)
    block = torch.ones(max(size, 2**20) // 4, dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(8):
        if on_cuda:
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        block.sum()
        if on_cuda:
            torch.cuda.synchronize(device)
        best = max(best, block.nbytes / (time.perf_counter() - started))
    return best


def cpu_name() -> str:
    """What the CPU calls itself."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
