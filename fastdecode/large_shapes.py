"""`python -m fastdecode.large_shapes`: rounds of a 7B or 8B model on this CPU, without its weights.

How fast a round is does not depend on the values of weights, so these are random, made in place. On a CUDA device the
benchmark's `--suite gpu` does this and more.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from fastdecode.options import Parser, run_command, whole_number
from fastdecode.startup import add_threads_option, set_threads
from models.errors import InputError

DESCRIPTION = """\
Decodes with random weights in the shape of a known model on the CPU, by plain rounds and by trees of drafts that cost
nothing, and shows milliseconds a round beside what its bytes take at this machine's measured bandwidth. Prints a table,
and one JSON object as the last line of stdout. Which drafts are accepted is given, and no figure of any head.

  python -m fastdecode.large_shapes --model llama-2-7b --precisions int4 w4a8 --group-size 128
"""
MODELS = ("llama-2-7b", "llama-3.1-8b")
PRECISIONS = ("int4", "w4a8", "int8", "w8a8")
GOAL = 0.6  # of the bandwidth, for the column beside which the rounds of several nodes are read


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m fastdecode.large_shapes", usage="%(prog)s [options]", description=DESCRIPTION)
    add = parser.add_argument_group("measuring").add_argument
    add("--model", choices=MODELS, default="llama-2-7b", help="whose shape (default: llama-2-7b)")
    add("--precisions", nargs="+", choices=PRECISIONS, default=["int4", "w4a8"], metavar="NAME", help=(
        f"of {', '.join(PRECISIONS)} (default: int4 w4a8)"))
    add("--group-size", type=whole_number, choices=(32, 64, 128), default=128, metavar="N", help=(
        "columns that share a scale: 32, 64 or 128 (default)"))
    add("--trees", nargs="+", default=["none", "chain:7"], metavar="SHAPE", help=(
        "as --tree names them (default: none chain:7, that is rounds of 1 row and of 8)"))
    add("--context", type=whole_number, default=200, metavar="N", help="cached tokens (default: 200)")
    add("--rounds", type=whole_number, default=12, metavar="N", help="to take the time of (default: 12)")
    add_threads_option(parser.add_argument_group("machine"))
    add("-h", "--help", action="help", help="show this help and exit")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.rounds < 1:
        raise InputError(f"--rounds should be at least 1, found {args.rounds}.")
    set_threads(args.threads)
    import torch  # only when there is work for it

    from fastdecode.benchmark_gpu_models import Sizes
    from fastdecode.benchmark_gpu_rounds import Networks, measure_rounds
    from fastdecode.benchmark_report import machine
    from fastdecode.memory import measure_bandwidth
    from fastdecode.tree_options import parse_tree

    for tree in args.trees:
        if tree != "none":
            parse_tree(tree)
    device = torch.device("cpu")
    networks = Networks(device, Sizes(context=args.context, rounds=args.rounds, group=args.group_size))
    found = []
    print(f"{'':24}{'rows':>6}{'ms a round':>12}{'bytes, ms':>12}{'bandwidth':>12}{f'/ bytes at {GOAL:.0%}':>16}")
    for precision in args.precisions:
        for tree in args.trees:
            row = measure_rounds(networks, args.model, precision, tree)
            least = row["bytes_per_round"] / row["bandwidth_gb_s"] / 1e6
            of_goal = row["ms_per_round"] / (least / GOAL)
            found.append({"precision": precision, "tree": tree, "of_bytes_at_goal": of_goal, **row})
            print(
                f"{precision + ' ' + tree:24}{row['nodes']:6}{row['ms_per_round']:12.1f}{least:12.1f}"
                f"{row['bandwidth_share']:12.0%}{of_goal:15.2f}x",
                flush=True,
            )
    about = {"model": args.model, "group_size": args.group_size, "goal": GOAL}
    print(json.dumps({**about, "machine": machine(device, measure_bandwidth(device)), "rows": found}, allow_nan=False))


if __name__ == "__main__":
    sys.exit(run_command(main))
