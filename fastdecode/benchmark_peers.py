"""Other programs, run on the same weights and the same prompt ids as ours: what one is, and the transformers library.

llama.cpp is in benchmark_llama.py; which programs there are, and their rows, in benchmark_against.py.
"""

import copy
import functools
import time
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import transformers
from torch import Tensor

from checkpoints.fuse import slots
from fastdecode.benchmark_report import SHORT_DTYPE
from fastdecode.drafters.root import RootOnly
from fastdecode.memory import bytes_per_round
from models.errors import InputError
from models.transformer import Transformer

LOOKUP_TOKENS = 10  # drafted at a time at most: what the library's documentation suggests


class PeerAnswer(NamedTuple):
    """`token_ids` as generated, stop token included; seconds to the first one; tokens/s after the first round, None if
    none came; `rounds`: forward passes that committed tokens."""

    token_ids: list[int]
    ttft_s: float
    decode_tokens_per_s: float | None
    rounds: int


class Peer(Protocol):
    """What the benchmark asks of another program. `row`: the fields of its Row that say what it is."""

    row: dict[str, str | None]

    def generate(self, prompt_ids: list[int], n_tokens: int) -> PeerAnswer:
        """Decode `n_tokens` tokens after the prompt, greedily; fewer only where a stop token ends the text."""

    def margin(self, ids: list[int]) -> float:
        """By how much the likeliest next token's logit leads the second's, after `ids`."""

    def bytes_per_round(self, cached_tokens: float) -> float:
        """Bytes that one of its rounds has to read at the least."""


class TransformersPeer:
    """The transformers library, greedy, over views of our own weights: no second copy, not a bit apart.

    `checkpoint` is the folder or GGUF file that `model` was loaded from; only its config is read again. `mode`: eager;
    compiled (torch.compile over a static cache of `longest` tokens); lookup (its prompt lookup decoding, eager).
    """

    def __init__(self, model: Transformer, checkpoint: Path, mode: str = "eager", longest: int = 0):
        self.network = model
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        if model.config.rope.freq_factors:
            raise InputError(
                f"{checkpoint}: has rope factors that transformers leaves out of GGUF files; leave out --against "
                "transformers."
            )
        config = copy.deepcopy(_config(checkpoint))
        weight = model.norm.weight
        with torch.device("meta"):
            skeleton = transformers.AutoModelForCausalLM.from_config(config)
        self.model = type(skeleton).from_pretrained(
            None, config=config, state_dict=_state_dict(model, skeleton), dtype=weight.dtype
        )
        self.model = self.model.to(weight.device).eval()
        precision = SHORT_DTYPE[weight.dtype]
        self.row = {"program": "transformers", "weights": precision, "kv_cache": precision, "mode": mode}
        if mode == "lookup":
            self.row |= {"draft": "prompt-lookup", "tree": f"chain:{LOOKUP_TOKENS}", "mode": "eager"}
        # It decodes as many tokens as ours did: what stops it is their number.
        self.model.generation_config = transformers.GenerationConfig(
            do_sample=False, pad_token_id=0, **_settings(mode, longest)
        )

    @torch.inference_mode()
    def generate(self, prompt_ids: list[int], n_tokens: int) -> PeerAnswer:
        """Decode exactly `n_tokens` tokens after the prompt."""
        ids = torch.tensor([prompt_ids], device=self.model.device)
        clock = _Clock()
        started = time.perf_counter()
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_tokens, do_sample=False, streamer=clock
        )
        first, *later = clock.times[1:]  # the prompt itself is the first thing that a streamer sees
        rate = sum(clock.counts[2:]) / (later[-1] - first) if later else None
        return PeerAnswer(output[0, len(prompt_ids) :].tolist(), first - started, rate, 1 + len(later))

    @torch.inference_mode()
    def margin(self, ids: list[int]) -> float:
        """By how much the likeliest next token's logit leads the second's, after `ids`."""
        logits = self.model(torch.tensor([ids], device=self.model.device)).logits[0, -1].float()
        best = logits.topk(2).values
        return (best[0] - best[1]).item()

    def bytes_per_round(self, cached_tokens: float) -> float:
        """Bytes of our weights, as floats, and of the keys and values of `cached_tokens` tokens."""
        return bytes_per_round(self.network, RootOnly(), cached_tokens, int8_cache=False)


class _Clock:
    """A streamer in the sense of `generate`: notes when tokens are known to the host, and how many."""

    def __init__(self):
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


@functools.lru_cache(maxsize=1)
def _config(checkpoint: Path) -> transformers.PretrainedConfig:
    """The config of a folder or GGUF file, of which the library reads all: once for all modes."""
    if checkpoint.is_dir():
        return transformers.AutoConfig.from_pretrained(str(checkpoint))
    return transformers.AutoConfig.from_pretrained(str(checkpoint.parent), gguf_file=checkpoint.name)


def _settings(mode: str, longest: int) -> dict:
    """What a GenerationConfig says for a mode."""
    if mode == "lookup":
        return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    if mode == "compiled":
        compile_config = transformers.CompileConfig()
        compile_config._compile_all_devices = True  # its own switch for CPUs, where it would stay uncompiled
        return {"cache_implementation": "static", "max_cache_len": longest, "compile_config": compile_config}
    return {}


def _state_dict(model: Transformer, skeleton: torch.nn.Module) -> dict[str, Tensor]:
    """Our fused parameters under the reference's names, as views. A tied head is left to the reference to tie."""
    parameters = dict(model.named_parameters())
    places = slots(parameters, model.config)
    found = {}
    for name in skeleton.state_dict():
        slot = places.get(name.removeprefix("model."))
        if slot is not None:
            found[name] = parameters[slot.parameter][slot.index]
    return found
