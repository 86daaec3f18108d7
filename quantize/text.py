"""Texts: what gptq calibrates on, and what perplexity before and after is measured on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints.checkpoint import read_config
from models.config import ModelConfig
from models.errors import InputError
from quantize import a8
from quantize.linear import round_inputs
from quantize.network import load_network
from quantize.perplexity import perplexity

SHIPPED = Path(__file__).with_name("evaluation.txt")
MOST_CHARACTERS = 4_000_000  # read of a calibration file; it takes far fewer to fill the rows
ROW, MOST_TOKENS = 512, 32768  # tokens of a calibration row, and of all
FEWEST = 32  # tokens of a text that calibration can learn anything from
CONTEXT = 1024  # tokens of a window of perplexity


def read_text(file: Path, option: str, most: int = -1) -> str:
    """A text file, or its first `most` characters. Raises InputError, naming the option, when it cannot be read."""
    try:
        with open(file, encoding="utf-8-sig") as opened:
            text = opened.read(most)
    except OSError as error:
        raise InputError(f"{option} {file}: cannot be read ({error.strerror or error}).") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{option} {file}: is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    if not text.strip():
        raise InputError(f"{option} {file}: holds no text.")
    return text


def rows_of(ids: Sequence[int], source: str, row: int = ROW, most: int = MOST_TOKENS) -> Tensor:
    """Token ids of texts, one after another, as rows `[n, row]` of at most `most` tokens, taken evenly from all of
    them; a single shorter row for fewer than `row`. Raises InputError, naming `source`, for too few."""
    if len(ids) < FEWEST:
        raise InputError(f"{source}: has {len(ids)} tokens to calibrate on; give {FEWEST} or more.")
    row = min(row, len(ids))
    rows = torch.tensor(ids[: len(ids) // row * row]).view(-1, row)
    wanted = max(1, most // row)
    return rows if len(rows) <= wanted else rows[torch.linspace(0, len(rows) - 1, wanted).long()]


def own_texts(decoder: Any, count: int, length: int, seed: int = 0) -> list[int]:
    """Token ids of `count` texts of about `length` tokens that the model itself makes up at temperature 1.

    With a chat template: it writes the user's message from the template's opening, and then answers it. Else, it goes
    on from BOS. Raises InputError for a model with neither. `decoder`: a fastdecode Decoder.
    """
    sampling = {"temperature": 1.0, "seed": seed}
    tokenizer, ids = decoder.tokenizer, []
    if tokenizer.chat_template is None:
        if tokenizer.bos_token_id is None:
            raise InputError("The model has neither BOS nor chat template to begin a text; give --calibration FILE.")
        for result in decoder.generate([""] * count, raw=True, max_new_tokens=length, **sampling):
            ids += [tokenizer.bos_token_id, *result.token_ids]
        return ids
    opening = tokenizer.chat_opening()
    asked = decoder.generate([opening] * count, raw=True, max_new_tokens=max(1, length // 4), **sampling)
    messages = [[{"role": "user", "content": result.text.strip() or "Hello."}] for result in asked]
    for message, result in zip(messages, decoder.generate(messages, max_new_tokens=length, **sampling), strict=True):
        ids += [*decoder.encode(message), *result.token_ids]
    return ids


def perplexity_before_and_after(
    source: Path, out: Path, config: ModelConfig, ids: Sequence[int], device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Of the checkpoint `source` and its quantized form `out`, both as floats of `dtype`, on one text."""
    context = min(CONTEXT, config.max_position_embeddings)
    found = []
    for path in (source, out):
        network = load_network(path, read_config(path), device, dtype, quantized=False)
        network.set_rotary(context)
        found.append(perplexity(network, torch.tensor(ids), context))
        del network
    return found[0], found[1]


def perplexity_with_8_bit_activations(
    out: Path, ids: Sequence[int], device: torch.device, dtype: torch.dtype
) -> float | None:
    """Of the quantized checkpoint `out` on one text, as `--quantize w4a8` and `w8a8` compute; None where this device
    has no fast way to."""
    if device.type != "cpu" or not a8.fast():
        return None
    config = read_config(out)
    network = load_network(out, config, device, dtype, quantized=True)
    round_inputs(network)
    context = min(CONTEXT, config.max_position_embeddings)
    network.set_rotary(context)
    return perplexity(network, torch.tensor(ids), context)
