"""Command-line options that generate.py and the benchmark share, and the one way a command ends.

Imports no torch, so that --help answers at once. Values that need checking stay text here; the objects that they are
for check them.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from models.errors import InputError

SAMPLING_DEFAULTS = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one sentence on stderr, exit code 2, and whose help keeps its lines."""

    def __init__(self, **kwargs: Any):
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False, allow_abbrev=False, **kwargs
        )

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        """See argparse's. Raises InputError for `--name=--`, of which argparse makes an empty list."""
        args = sys.argv[1:] if args is None else list(args)
        for argument in args[: args.index("--")] if "--" in args else args:
            name, _, value = argument.partition("=")
            if name.startswith("--") and value == "--":
                self.error(f"argument {name}: expected a value, found '--'")
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message[:1].upper()}{message[1:]}; see --help.")


def whole_number(text: str) -> int:
    """An int from the command line; argparse names the option when it is none."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"should be a whole number, found {text!r}") from None


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What is loaded, in which precision, and where it runs."""
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", default="smollm2-135m", metavar="NAME", help=(
        "smollm2-135m (the demo model, fetched once; the default), a folder in the Hugging Face layout, a .gguf file, "
        "or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct"))
    add("--chat-template", metavar="NAME", help="vicuna, or a Jinja file, instead of the checkpoint's own template")
    add("--dtype", default="auto", metavar="TYPE", help=(
        "auto (default: bfloat16 where the hardware has it), bfloat16, float16, float32"))
    add("--quantize", default="auto", metavar="HOW", help=(
        "auto (default: as stored), none (dequantize), int4, int8 (quantized once, and kept in the cache), w4a8, w8a8 "
        "(activations in 8 bits as well, on a CPU: faster where several rows are verified, answers differ a little)"))
    add("--device", default="auto", metavar="WHERE", help="auto (default), cpu, cuda, cuda:N")
    add("--max-seq-len", type=whole_number, metavar="N", help=(
        "tokens that prompt and answer may have together (default: the model's limit, or what memory allows)"))
    add("--kv-cache", default="auto", metavar="TYPE", help=(
        "auto (default: like --dtype), int8 (about half of bfloat16's memory; answers differ a little)"))
    add("--compile", default=True, action=argparse.BooleanOptionalAction, help=(
        "compile the round (default); --no-compile starts sooner and decodes slower"))
    group = parser.add_argument_group("drafting")
    add = group.add_argument
    add("--draft", default="auto", metavar="NAME", help=(
        "auto (default: the head in draft/ inside the model's folder, else the one in models/heads/ that was trained "
        "for this model, else none), none, ngram (copies from the text so far), or an EAGLE head or a small model of "
        "the same tokenizer: a folder or a hub id"))
    add("--tree", default="auto", metavar="SHAPE", help=(
        "auto (default: the fastest here, where --explain or the benchmark measured that, else a chain of 3), chain:K "
        "(K drafted tokens), static (EAGLE-1's 25), static:FILE (JSON list of child-rank paths), "
        "dynamic:DEPTH,TOPK,TOTAL; ngram and models take chains only"))
    add("--lookup", type=whole_number, metavar="N", help=(
        "where the last N tokens or more stood before, a head's chain takes what followed them there, and the head "
        "drafts the rest (default: 2); 0: the head drafts everything"))
    add("--draft-rope-theta", metavar="X", help="rotary base of the draft head (default: the head's config)")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How each token is chosen, and where the answer ends."""
    add = parser.add_argument_group("choosing tokens").add_argument
    add("--temperature", default="0", metavar="T", help=(
        "0 (default) takes the likeliest token; above 0 samples; 'model' takes the sampling values of the checkpoint's "
        "generation_config.json"))
    add("--top-k", metavar="K", help="sample among the K likeliest tokens (default: off)")
    add("--top-p", metavar="P", help="sample among the likeliest tokens that hold P of the probability (default: off)")
    add("--min-p", metavar="P", help="leave out tokens below P times the likeliest one's probability (default: off)")
    add("--repetition-penalty", metavar="X", help="above 1 avoids tokens of prompt and answer (default: 1.0)")
    add("--presence-penalty", metavar="X", help="above 0 avoids tokens of the answer (default: 0.0)")
    add("--seed", type=whole_number, metavar="N", help="same seed, same text (default: random, and printed)")
    parser.set_defaults(seed_is_random=False)
    add = parser.add_argument_group("length and stops").add_argument
    add("--max-new-tokens", type=whole_number, default=256, metavar="N", help="answer length at most (default: 256)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT; may be repeated")
    add("--batch", type=whole_number, default=1, metavar="N", help="prompts decoded at a time (default: 1)")


def load_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `fastdecode.load` in parsed options."""
    names = ("model", "chat_template", "dtype", "quantize", "device", "max_seq_len", "kv_cache", "compile", "draft")
    return {name: getattr(args, name) for name in (*names, "tree", "lookup", "draft_rope_theta", "batch")}


def sampling_arguments(args: argparse.Namespace, suggested: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields of SamplingOptions: what the user gave, over what the checkpoint suggests where that is asked for.

    `--temperature model` without `suggested` (nothing is loaded yet) counts as 0.
    """
    values: dict[str, Any] = {"temperature": 0 if args.temperature == "model" else args.temperature}
    values |= SAMPLING_DEFAULTS
    values |= suggested or {}
    values |= {name: getattr(args, name) for name in SAMPLING_DEFAULTS if getattr(args, name) is not None}
    if args.seed is None:
        args.seed, args.seed_is_random = int.from_bytes(os.urandom(4)) >> 1, True
    values["seed"] = args.seed
    return values


def run_command(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 2 after one sentence about bad input, 130 when interrupted.

    A reader that closes the pipe (`| head`) has seen enough: that is success.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")  # answers hold any character, whatever the locale
    try:
        main(argv)
        sys.stdout.flush()
        return 0
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it exits; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
