"""load(): the one way to build a Decoder."""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkpoints.checkpoint import find_checkpoint, read_config, read_generation_config
from fastdecode.chat import read_chat_template
from fastdecode.compiler import can_compile, prepare_operators
from fastdecode.decoder import Decoder
from fastdecode.drafting import DEFAULT_TREE, DraftOptions, DraftPlan
from fastdecode.memory import FEWEST_TOKENS, affordable_tokens, cache_bytes_per_token, expected_weight_bytes
from fastdecode.program_cache import stored_programs
from fastdecode.tokenizer import load_tokenizer
from fastdecode.tree_choice import choice_key, read_choice
from fastdecode.tuner import PLAIN
from models.config import ModelConfig
from models.errors import InputError
from quantize.on_the_fly import BITS, load_as

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

Note = Callable[[str], None]


def load(
    model: str = "smollm2-135m",
    *,
    draft: str = "auto",
    tree: str = "auto",
    lookup: int | None = None,
    draft_rope_theta: str | float | None = None,
    quantize: str = "auto",
    kv_cache: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    max_seq_len: int | None = None,
    batch: int = 1,
    compile: bool = True,
    compile_cache: bool = True,
    chat_template: str | None = None,
    note: Note = lambda sentence: None,
) -> Decoder:
    """Build a Decoder for `model`: a folder, a `.gguf` file, a hub id, or `smollm2-135m`.

    `draft`: auto (the head in `draft/` of the model's folder, else one that ships for this model in models/heads/, else
    none), none, ngram, or the folder or hub id of an EAGLE head or of a small model; `tree`: auto (what the benchmark
    or --explain measured to be fastest here, be it no draft; else a chain of 3), chain:K, static, static:FILE or
    dynamic:DEPTH,TOPK,TOTAL; `lookup`: a head's chain takes what followed the last so many tokens, or more, where they
    stood before (None: 2; 0: never); `draft_rope_theta`: another rotary base for the head.
    `quantize`: auto (weights as stored), none (dequantized), int8 or int4 (quantized once, and kept in the cache), or
    w8a8 or w4a8 (and activations in 8 bits, on a CPU).
    `dtype`: auto (bfloat16 where the hardware has it), bfloat16, float16, float32. `device`: auto, cpu, cuda, cuda:N.
    `kv_cache`: auto (keys and values in `dtype`) or int8, which takes about half of bfloat16's memory.
    `max_seq_len`: tokens that a text may have, prompt and answer; None for the model's limit or what memory allows.
    `batch`: texts decoded at a time. `chat_template`: a named template or a file, instead of the checkpoint's.
    `compile_cache`: keep compiled programs beside torch's own compile cache, for the next start. `note` receives
    sentences that the user should read. Raises InputError for anything that cannot be honoured, before weights are
    read where that can be known.
    """
    check_quantize(quantize)
    int8_cache = wants_int8_cache(kv_cache)
    drafting = DraftOptions.parse(draft, tree, draft_rope_theta, quantize, lookup)
    place = choose_device(device)
    precision = choose_dtype(dtype, place)
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise InputError(f"--batch should be a whole number of at least 1, found {batch!r}.")
    template = None if chat_template is None else read_chat_template(chat_template)

    path = find_checkpoint(model)
    config = read_config(path)
    tokenizer = load_tokenizer(path, template)
    generation = read_generation_config(path)
    plan = drafting.plan(config, tokenizer, path)
    if max(tokenizer.stop_token_ids, default=0) >= config.vocab_size:
        raise InputError(f"{path}: the tokenizer names token ids beyond the model's vocabulary of {config.vocab_size}.")
    if compile and not can_compile():
        note("No working C++ compiler was found, so rounds run uncompiled and slower; install g++, or set CXX.")
        compile = False
    expected = expected_weight_bytes(path, config, precision, quantize)
    limit = _text_limit(config, max_seq_len, precision, batch, place, int8_cache, expected, note)
    stop_ids = (*config.eos_token_ids, *_eos_ids(generation))

    preparation = prepare_operators() if compile and place.type == "cpu" else None
    network = load_as(path, config, place, precision, quantize, note)
    if preparation is not None:
        preparation.join()
    program_folder = stored_programs() if compile_cache else None
    chosen = plan
    if tree == "auto" and plan.drafts and program_folder is not None:
        chosen = _tuned(plan, choice_key(plan, network, batch, int8_cache, compile), program_folder, note)
    drafter = chosen.build(network, limit, batch, min(tokenizer.vocab_size, config.vocab_size))
    decoder = Decoder(
        network,
        tokenizer,
        stop_ids=stop_ids,
        max_seq_len=limit,
        batch=batch,
        compile=compile,
        drafter=drafter,
        program_folder=program_folder,
        int8_cache=int8_cache,
    )
    decoder.suggested_sampling = _suggested_sampling(generation)
    decoder.plan = plan
    return decoder


def _tuned(plan: DraftPlan, key: dict[str, Any], folder: Path, note: Note) -> DraftPlan:
    """The plan with the tree that was chosen for it, if one was. Nothing is measured here."""
    choice = read_choice(folder, key)
    if choice is None:
        return plan
    if choice.tree == PLAIN:
        note(f"Drafting does not pay here, as measured, so nothing is drafted; --tree {DEFAULT_TREE} drafts anyway.")
    return plan.with_tree(choice.tree)


def check_quantize(quantize: str) -> None:
    """Raises InputError for what `--quantize` does not know."""
    accepted = ("auto", "none", *BITS)
    if quantize not in accepted:
        raise InputError(f"--quantize should be {', '.join(accepted)}, found {quantize!r}.")


def wants_int8_cache(kv_cache: str) -> bool:
    """What `--kv-cache` says. Raises InputError for a name that is none."""
    if kv_cache not in ("auto", "int8"):
        raise InputError(f"--kv-cache should be auto or int8, found {kv_cache!r}.")
    return kv_cache == "int8"


def _suggested_sampling(generation: dict[str, Any]) -> dict[str, Any]:
    """Sampling values in a generation_config.json that would change the output, as fields of SamplingOptions."""
    found = {name: generation[name] for name in SAMPLING_FIELDS if generation.get(name) is not None}
    if generation.get("do_sample") is True:
        found.setdefault("temperature", 1.0)  # what the reference library means by its absence
    if generation.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"}
    neutral = {"repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return {name: value for name, value in found.items() if neutral.get(name) != value}


def choose_device(name: str) -> torch.device:
    """The device of `--device`, made the current one if it is a GPU; auto: CUDA where there is one. Raises InputError
    for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, colon, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (colon and (kind == "cpu" or not (index.isascii() and index.isdecimal()))):
        raise InputError(f"--device should be auto, cpu, cuda or cuda:N, found {name!r}.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"--device {name}: this machine or this build of torch has no CUDA device; use --device cpu.")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InputError(f"--device {name}: there are only {torch.cuda.device_count()} CUDA devices.")
    if kind == "cuda":
        torch.cuda.set_device(int(index or 0))  # streams, events and graph captures mean the current device
        return torch.device("cuda", int(index or 0))
    return torch.device(kind)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of `--dtype`; auto: bfloat16 where the hardware has it, else float16 on a GPU and float32 on a CPU.
    Raises InputError for another name."""
    if name == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        on_arm = platform.machine() in ("aarch64", "arm64") and torch.backends.mkldnn.is_available()
        has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported() if on_arm else torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if has_bf16 else torch.float32
    if name not in DTYPES:
        raise InputError(f"--dtype should be auto, {', '.join(DTYPES)}, found {name!r}.")
    return DTYPES[name]


def _text_limit(
    config: ModelConfig,
    asked: int | None,
    dtype: torch.dtype,
    batch: int,
    device: torch.device,
    int8_cache: bool,
    weights: int,
    note: Note,
) -> int:
    """Tokens that a text may have: what was asked for if the model and the memory allow it, else as many as they do."""
    limit = config.max_position_embeddings
    if asked is not None:
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < 2:
            raise InputError(f"--max-seq-len should be a whole number of at least 2, found {asked!r}.")
        if asked > limit and config.rope.kind != "dynamic":
            raise InputError(f"--max-seq-len {asked} is beyond the model's limit of {limit} positions.")
        limit = asked
    fits, comfortable = affordable_tokens(config, dtype, batch, device, int8_cache, weights)
    if asked is None and comfortable < limit and fits >= FEWEST_TOKENS:
        limit = max(comfortable, FEWEST_TOKENS)
        note(f"Memory allows texts of {limit} tokens; --max-seq-len asks for another length.")
    if limit > fits:
        needed = cache_bytes_per_token(config, dtype, int8_cache) * batch * limit / 1e9
        raise InputError(
            f"The cache for {batch} texts of {limit} tokens takes {needed:,.1f} GB, more than the memory that is free; "
            f"give a smaller --max-seq-len or --batch{'' if int8_cache else ', or --kv-cache int8'}."
        )
    return limit


def _eos_ids(generation: dict[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise InputError(f"generation_config.json: eos_token_id should be token ids, found {value!r}.")
    return tuple(ids)
