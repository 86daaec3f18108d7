"""llama.cpp on the same GGUF file, through its Python bindings (pip package llama-cpp-python)."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import torch

from checkpoints.checkpoint import open_tensors
from fastdecode.benchmark_peers import PeerAnswer
from fastdecode.benchmark_rows import margin
from fastdecode.memory import cache_bytes_per_token
from models.errors import InputError
from models.transformer import Transformer


class LlamaCppPeer:
    """llama.cpp, greedy, with torch's number of threads and its own defaults otherwise (keys and values in fp16).

    `model` is our network of the same file: it says by how much tokens lead. `longest`: tokens that a text may have.
    `stop_ids` end a text. Raises InputError for a file that llama.cpp cannot load.
    """

    def __init__(self, model: Transformer, file: Path, stop_ids: Sequence[int], longest: int):
        self.network, self.stop_ids = model, frozenset(stop_ids)
        threads = torch.get_num_threads()
        try:
            self.llama = llama_cpp.Llama(
                str(file),
                n_ctx=longest,
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=-1 if model.norm.weight.is_cuda else 0,
                verbose=False,
            )
        except (ValueError, RuntimeError) as error:
            raise InputError(f"--against llama.cpp: it cannot load {file} ({error}); leave it out.") from error
        tensors = open_tensors(file, model.config)
        tied = "lm_head.weight" not in tensors
        self.weight_bytes = sum(
            math.prod(tensor.shape) // tensor.block * tensor.block_bytes
            for name, tensor in tensors.items()
            if tied or name != "embed_tokens.weight"
        )
        kinds = Counter(t.dtype for name, t in tensors.items() if name.startswith("layers.") and len(t.shape) == 2)
        self.row = {"program": "llama.cpp", "weights": kinds.most_common(1)[0][0].lower(), "kv_cache": "fp16"}

    def generate(self, prompt_ids: list[int], n_tokens: int) -> PeerAnswer:
        """Decode `n_tokens` tokens after the prompt, of which nothing is kept from before; fewer if a stop token comes,
        which is the last one then."""
        self.llama.reset()  # else what a prompt shares with the one before would not be computed again
        found, times = [], []
        started = time.perf_counter()
        for token in self.llama.generate(prompt_ids, temp=0.0, repeat_penalty=1.0):
            times.append(time.perf_counter())
            found.append(token)
            if len(found) == n_tokens or token in self.stop_ids:
                break
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
        return PeerAnswer(found, times[0] - started, rate, len(found))

    def margin(self, ids: list[int]) -> float:
        """By how much the likeliest next token leads the second in our own network, after `ids`."""
        return margin(self.network, ids, int8_cache=False)

    def bytes_per_round(self, cached_tokens: float) -> float:
        """Bytes of the file's weights, and of the keys and values of `cached_tokens` tokens in fp16."""
        return self.weight_bytes + cached_tokens * cache_bytes_per_token(self.network.config, torch.float16)
