"""`python -m fastdecode.benchmark`: how fast is it here, and is the output really the same?

The command line alone: it checks what was asked before torch or a model is loaded. What is measured is in
benchmark_measure.py, how it is written down in benchmark_report.py.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from checkpoints.download import DEMO_NAME
from fastdecode.options import Parser, add_model_options, add_sampling_options, run_command, whole_number
from fastdecode.startup import add_threads_option
from models.errors import InputError

DESCRIPTION = """\
Measures a model on this machine: time to first token, decode tokens/s without prompt and compilation, start-up time,
peak memory, and how near the rate comes to what the memory's bandwidth allows. Prints a table, and one JSON object as
the last line of stdout; progress goes to stderr.

  python -m fastdecode.benchmark
  python -m fastdecode.benchmark --model path/to/checkpoint --prompts prompts.jsonl --limit 20
  python -m fastdecode.benchmark --against llama.cpp,transformers --output result.json --plot result.png
  python -m fastdecode.benchmark --suite gpu --output gpu.json
"""

# What --against can name: the module that it needs, and the package that brings it.
PEERS = {
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
    "transformers": ("transformers", "transformers"),
    "transformers-compiled": ("transformers", "transformers"),
    "transformers-lookup": ("transformers", "transformers"),
}
SUITES = ("quick", "full", "gpu")
PARTS = ("kernels", "rounds", "exact", "memory")  # of --suite gpu
PROMPTS = {"quick": 8, "full": 20, "gpu": 8}  # by default


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    usage = "python -m fastdecode.benchmark [options]"
    parser = Parser(prog="python -m fastdecode.benchmark", usage=usage, description=DESCRIPTION)
    group = parser.add_argument_group("measuring")
    add = group.add_argument
    add("--prompts", metavar="FILE", help=(
        'JSONL with {"category", "turns": ["prompt", ...]}, or one prompt a line; - is stdin (default: a set of 40 in '
        "eight categories that comes with the package)"))
    add("--limit", type=whole_number, metavar="N", help="use the first N prompts (default: 8; full: 20)")
    add("--against", default="", metavar="LIST", help=(
        "also measure other programs on the same weights and prompts, in turns with ours: transformers (eager), "
        "transformers-compiled (static cache), transformers-lookup (its prompt lookup), llama.cpp (GGUF files only)"))
    add("--suite", default="quick", metavar="NAME", help=(
        "quick (default: plain, and the draft if there is one); full (lookup too, dequantized weights too, the rate at "
        "200 and 2,000 tokens of context); gpu (kernels, captured rounds, exactness and memory on a CUDA card, without "
        "any model)"))
    add("--part", default="", metavar="NAME", help=(
        "of --suite gpu, only this: kernels, rounds, exact or memory (default: all)"))
    add("--startup", default=True, action=argparse.BooleanOptionalAction, help=(
        "start two fresh processes to measure cold compilation and a warm start (default); --no-startup skips that"))
    add("--output", metavar="FILE", help=(
        "write the JSON object to FILE too; --suite gpu leaves out what FILE holds already"))
    add("--plot", metavar="FILE", help="draw decode tokens/s, median and extremes, as a PNG (needs matplotlib)")
    add_threads_option(group)
    add("--system", metavar="TEXT", help="system message (default: what the chat template says)")
    add("--raw", action="store_true", help="no chat template: the model continues the prompts")
    add("-h", "--help", action="help", help="show this help and exit")
    add_model_options(parser)
    add_sampling_options(parser)
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot be measured, before anything is loaded: InputError. Splits `args.against` into names."""
    if args.suite not in SUITES:
        raise InputError(f"--suite should be one of {', '.join(SUITES)}, found {args.suite!r}.")
    args.limit = PROMPTS[args.suite] if args.limit is None else args.limit
    for option, value in (("--limit", args.limit), ("--max-new-tokens", args.max_new_tokens)):
        if value < 1:
            raise InputError(f"{option} should be at least 1, found {value}.")
    if args.raw and args.system is not None:
        raise InputError("--system needs the chat template, which --raw leaves out; give one of them.")
    args.against = tuple(dict.fromkeys(name.strip() for name in args.against.split(",") if name.strip()))
    for name in args.against:
        if name not in PEERS:
            raise InputError(f"--against {name} is not built yet; {', '.join(PEERS)} can be given.")
        module, package = PEERS[name]
        if importlib.util.find_spec(module) is None:
            raise InputError(
                f"--against {name} needs a package that is not installed here; run `pip install {package}`."
            )
    if "llama.cpp" in args.against and not (args.model == DEMO_NAME or args.model.endswith(".gguf")):
        raise InputError("--against llama.cpp reads GGUF files only; give one as --model, or the demo model.")
    if args.against and (args.batch != 1 or args.stop):
        raise InputError("--against compares one text at a time up to its stop token; leave out --batch and --stop.")
    for option, file in (("--output", args.output), ("--plot", args.plot)):
        if file is not None and (Path(file).is_dir() or not Path(file).absolute().parent.is_dir()):
            raise InputError(f"{option} {file}: cannot be written; give a file in a folder that exists.")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib, which is not installed here; run `pip install matplotlib`.")
    if args.part and args.suite != "gpu":
        raise InputError("--part is for --suite gpu; leave it out.")
    if args.suite == "gpu":
        if args.part and args.part not in PARTS:
            raise InputError(f"--part should be one of {', '.join(PARTS)}, found {args.part!r}.")
        if args.against or args.plot is not None:
            raise InputError("--suite gpu measures no other programs and draws nothing; leave out --against, --plot.")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    check(args)
    if args.suite == "gpu":
        from fastdecode.benchmark_gpu import run_suite  # torch is imported only when there is work for it

        run_suite(args.output, [args.part] if args.part else PARTS, args.device)
        return
    from fastdecode.benchmark_measure import Benchmark
    from fastdecode.benchmark_report import as_table, as_text, write_atomically

    report = Benchmark(args).run()
    if args.plot is not None:
        from fastdecode.benchmark_plot import chart

        write_atomically(Path(args.plot), chart(report))
    text = as_text(report)
    if args.output is not None:
        write_atomically(Path(args.output), text + "\n")
    print(as_table(report))
    print(text)


if __name__ == "__main__":
    sys.exit(run_command(main))
