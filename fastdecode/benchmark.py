"""`python -m fastdecode.benchmark`: how fast is it here, and is the output really the same?

The command line alone: it checks what was asked before torch or a model is loaded. What is measured is in
benchmark_measure.py, how it is written down in benchmark_report.py.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from fastdecode.options import Parser, add_model_options, add_sampling_options, run_command, whole_number
from fastdecode.startup import add_threads_option
from models.errors import InputError

DESCRIPTION = """\
Measures a model on this machine: time to first token, decode tokens/s without prompt and compilation, start-up time,
peak memory, and how near the rate comes to what the memory's bandwidth allows. Prints a table, and one JSON object as
the last line of stdout; progress goes to stderr.

  python -m fastdecode.benchmark
  python -m fastdecode.benchmark --model path/to/checkpoint --prompts prompts.jsonl --limit 20
  python -m fastdecode.benchmark --against transformers --output result.json
"""

PEERS = ("transformers",)
SUITES = ("quick", "full", "gpu")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    usage = "python -m fastdecode.benchmark [options]"
    parser = Parser(prog="python -m fastdecode.benchmark", usage=usage, description=DESCRIPTION)
    group = parser.add_argument_group("measuring")
    add = group.add_argument
    add("--prompts", metavar="FILE", help=(
        'JSONL with {"category", "turns": ["prompt", ...]}, or one prompt a line; - is stdin (default: a set of 40 in '
        "eight categories that comes with the package)"))
    add("--limit", type=whole_number, default=8, metavar="N", help="use the first N prompts (default: 8)")
    add("--against", default="", metavar="LIST", help=(
        "also measure other programs on the same weights and prompts, in turns with ours: transformers"))
    add("--suite", default="quick", metavar="NAME", help="quick (default); full and gpu are not built yet")
    add("--startup", default=True, action=argparse.BooleanOptionalAction, help=(
        "start two fresh processes to measure cold compilation and a warm start (default); --no-startup skips that"))
    add("--output", metavar="FILE", help="write the JSON object to FILE too")
    add("--plot", metavar="FILE", help="draw the result (not built yet)")
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
    if args.suite != "quick":
        raise InputError(f"--suite {args.suite} is not built yet; leave it out, or give quick.")
    if args.plot is not None:
        raise InputError("--plot is not built yet; leave it out.")
    for option, value in (("--limit", args.limit), ("--max-new-tokens", args.max_new_tokens)):
        if value < 1:
            raise InputError(f"{option} should be at least 1, found {value}.")
    if args.raw and args.system is not None:
        raise InputError("--system needs the chat template, which --raw leaves out; give one of them.")
    args.against = tuple(dict.fromkeys(name.strip() for name in args.against.split(",") if name.strip()))
    for name in args.against:
        if name not in PEERS:
            raise InputError(f"--against {name} is not built yet; only {', '.join(PEERS)} can be given.")
        if importlib.util.find_spec(name) is None:
            raise InputError(f"--against {name} needs a package that is not installed here; run `pip install {name}`.")
    if args.against and (args.batch != 1 or args.stop):
        raise InputError("--against compares one text at a time up to its stop token; leave out --batch and --stop.")
    if args.output is not None and (Path(args.output).is_dir() or not Path(args.output).absolute().parent.is_dir()):
        raise InputError(f"--output {args.output}: cannot be written; give a file in a folder that exists.")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    check(args)
    from fastdecode.benchmark_measure import Benchmark  # torch is imported only when there is work for it
    from fastdecode.benchmark_report import as_table, as_text, write_atomically

    report = Benchmark(args).run()
    text = as_text(report)
    if args.output is not None:
        write_atomically(Path(args.output), text + "\n")
    print(as_table(report))
    print(text)


if __name__ == "__main__":
    sys.exit(run_command(main))
