"""`python -m fastdecode.startup`: how long a fresh process takes to its first token, stage by stage.

The benchmark runs this as a child, once with an empty compile cache and once with the cache that the first run filled.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fastdecode.options import (
    SAMPLING_DEFAULTS,
    Parser,
    add_model_options,
    add_sampling_options,
    load_arguments,
    run_command,
    sampling_arguments,
    whole_number,
)
from models.errors import InputError

PROMPT = "Why is the sky blue?"
FORWARDED = (
    *("model", "chat_template", "dtype", "quantize", "device", "max_seq_len", "kv_cache", "draft", "tree", "batch"),
    *("lookup", "threads", "temperature", *SAMPLING_DEFAULTS, "seed"),
)
DESCRIPTION = """\
Loads a model, compiles (or lets another process compile, as generate.py does, and waits for it at the end), decodes
one token, and prints the seconds that each stage took as one JSON object:
{"load_s", "compile_s", "first_token_s", "total_s"}; total_s counts from the first line of Python.
"""


def add_threads_option(parser: argparse._ActionsContainer) -> None:
    """Add `--threads N` to a parser or to one of its groups."""
    parser.add_argument("--threads", type=whole_number, metavar="N", help="CPU threads (default: as torch chooses)")


def set_threads(count: int | None) -> None:
    """Use `count` CPU threads, or as many as torch chooses for None; raises InputError for fewer than one."""
    if count is None:
        return
    if count < 1:
        raise InputError(f"--threads should be at least 1, found {count}.")
    import torch

    torch.set_num_threads(count)


def main(argv: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    parser = Parser(prog="python -m fastdecode.startup", description=DESCRIPTION)
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    add_threads_option(parser)
    add_model_options(parser)
    add_sampling_options(parser)
    args = parser.parse_args(argv)
    set_threads(args.threads)

    from fastdecode.background_compile import compile_in_background
    from fastdecode.loading import load
    from fastdecode.sampling import SamplingOptions

    decoder = load(**load_arguments(args))
    loaded = time.perf_counter()
    sampling = sampling_arguments(args, decoder.suggested_sampling if args.temperature == "model" else None)
    options = SamplingOptions(**sampling)
    background = compile_in_background(decoder, options, load_arguments(args)) if args.compile else None
    if args.compile:
        decoder.warm_up(options)
    compiled = time.perf_counter()
    decoder.generate(PROMPT, raw=True, max_new_tokens=1, **sampling)
    finished = time.perf_counter()
    stages = {
        "load_s": loaded - started,
        "compile_s": compiled - loaded,
        "first_token_s": finished - compiled,
        "total_s": finished - started,
    }
    print(json.dumps(stages), flush=True)
    if background is not None:
        background.wait()  # whoever measures next wants a quiet machine, and the program


def measure_startup(args: argparse.Namespace, cache_folder: Path) -> dict[str, float]:
    """Run this module in a child process with the options in `args` and `cache_folder` as its compile cache.

    Returns what the child prints, but `total_s` counts from the command's start, interpreter included. Raises
    InputError with the child's own sentence when it refuses the options, and with its last words when it breaks down.
    """
    options = {name: getattr(args, name) for name in FORWARDED}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    command = [sys.executable, "-m", "fastdecode.startup", *given, "--compile" if args.compile else "--no-compile"]
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache_folder), "TRITON_CACHE_DIR": str(cache_folder / "triton")}
    package_path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **caches, "PYTHONPATH": package_path}
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, env=environment, text=True)
        with child:
            try:
                line = child.stdout.readline()  # written when the first token is there; leaving takes longer
                total = time.perf_counter() - started
                child.wait()
            except BaseException:
                child.kill()
                raise
        if child.returncode == 0:
            return {**json.loads(line), "total_s": total}
        complaints.seek(0)
        said = complaints.read().strip().splitlines() or ["it said nothing"]
    if child.returncode == 2:
        raise InputError(said[-1].removeprefix("error: "))
    raise InputError(
        f"A fresh process ended with exit code {child.returncode} ({said[-1]}); --no-startup measures without it."
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
