"""Other programs, run on the same weights and the same prompt ids as ours."""

import time
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import Tensor

from models.errors import InputError
from models.fuse import slots
from models.transformer import Transformer


class PeerAnswer(NamedTuple):
    """`token_ids` as generated, stop token included; seconds to the first one; tokens/s after it, None if none came."""

    token_ids: list[int]
    ttft_s: float
    decode_tokens_per_s: float | None


class TransformersPeer:
    """The transformers library, not compiled, greedy, over views of our own weights: no second copy, not a bit apart.

    `checkpoint` is the folder or GGUF file that `model` was loaded from; only its config is read again.
    """

    def __init__(self, model: Transformer, checkpoint: Path):
        self.network = model
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        if model.config.rope.freq_factors:
            raise InputError(
                f"{checkpoint}: has rope factors that transformers leaves out of GGUF files; leave out --against "
                "transformers."
            )
        if checkpoint.is_dir():
            config = transformers.AutoConfig.from_pretrained(str(checkpoint))
        else:
            config = transformers.AutoConfig.from_pretrained(str(checkpoint.parent), gguf_file=checkpoint.name)
        weight = model.norm.weight
        with torch.device("meta"):
            skeleton = transformers.AutoModelForCausalLM.from_config(config)
        self.model = type(skeleton).from_pretrained(
            None, config=config, state_dict=_state_dict(model, skeleton), dtype=weight.dtype
        )
        self.model = self.model.to(weight.device).eval()
        # It decodes as many tokens as ours did: what stops it is their number.
        self.model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)

    @torch.inference_mode()
    def generate(self, prompt_ids: list[int], n_tokens: int) -> PeerAnswer:
        """Decode exactly `n_tokens` tokens after the prompt."""
        ids = torch.tensor([prompt_ids], device=self.model.device)
        clock = _Clock()
        started = time.perf_counter()
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_tokens, do_sample=False, streamer=clock
        )
        _, first, *later = clock.times  # the prompt itself is the first thing that a streamer sees
        rate = len(later) / (later[-1] - first) if later else None
        return PeerAnswer(output[0, len(prompt_ids) :].tolist(), first - started, rate)

    @torch.inference_mode()
    def margin(self, ids: list[int]) -> float:
        """By how much the likeliest next token's logit leads the second's, after `ids`."""
        logits = self.model(torch.tensor([ids], device=self.model.device)).logits[0, -1].float()
        best = logits.topk(2).values
        return (best[0] - best[1]).item()


class _Clock:
    """A streamer in the sense of `generate`: notes when each token is known to the host."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


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
