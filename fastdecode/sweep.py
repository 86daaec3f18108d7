"""`python -m fastdecode.sweep`: every tree that a draft can grow, measured beside what the tuner expects of it.

Measures the tuner's numbers afresh and stores its choice, so that this is also how to choose again.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from fastdecode.options import Parser, add_model_options, load_arguments, run_command, whole_number
from fastdecode.startup import add_threads_option, set_threads
from models.errors import InputError

DESCRIPTION = """\
Decodes the same prompts greedily with every tree, one prompt after another and on each all trees in turns, and shows
tokens per round, milliseconds per round and tokens/s beside what `--tree auto` expects. Prints a table, and one JSON
object as the last line of stdout; progress goes to stderr. Every tree compiles a program of its own: minutes, once.

  python -m fastdecode.sweep --draft ngram
  python -m fastdecode.sweep --model TARGET --draft HEAD --trees chain:1 chain:4 static
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    usage = "python -m fastdecode.sweep --draft DRAFT [options]"
    parser = Parser(prog="python -m fastdecode.sweep", usage=usage, description=DESCRIPTION)
    group = parser.add_argument_group("measuring")
    add = group.add_argument
    add("--trees", nargs="+", metavar="SHAPE", help=(
        "trees to measure, as --tree names them (default: chain:1 to 8; with a head static and dynamic ones, too)"))
    add("--prompts", metavar="FILE", help="JSONL, or one prompt a line (default: the set that comes with the package)")
    add("--limit", type=whole_number, default=8, metavar="N", help="use N prompts, spread over the file (default: 8)")
    add("--max-new-tokens", type=whole_number, default=128, metavar="N", help="answer length at most (default: 128)")
    add_threads_option(group)
    add("-h", "--help", action="help", help="show this help and exit")
    add_model_options(parser)
    parser.set_defaults(batch=1)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    for option, value in (("--limit", args.limit), ("--max-new-tokens", args.max_new_tokens)):
        if value < 1:
            raise InputError(f"{option} should be at least 1, found {value}.")
    if args.draft == "none":
        raise InputError("A sweep needs a draft; give --draft ngram, or the folder of a head or model.")
    if args.tree != "auto":
        raise InputError("A sweep takes its trees from --trees; leave --tree out.")
    set_threads(args.threads)
    from fastdecode.sweep_measure import Sweep  # torch is imported only when there is work for it

    report, table = Sweep(args, load_arguments(args)).run()
    print(table)
    print(json.dumps(report, allow_nan=False))


if __name__ == "__main__":
    sys.exit(run_command(main))
