"""`python -m fastdecode.acceptance`: how many tokens a round is worth, with several drafts and trees side by side."""

import argparse
import json
import sys
from collections.abc import Sequence

from fastdecode.options import Parser, add_model_options, load_arguments, run_command, whole_number
from fastdecode.startup import add_threads_option, set_threads
from models.errors import InputError

DESCRIPTION = """\
Decodes the same prompts with every draft and tree, greedily and sampled, and shows the tokens per round (tau), the
share of rounds that accepted more than 0, 1, 2 ... drafts, and the answers that are plain decoding's. Prints a table,
and one JSON object as the last line of stdout; progress, and every row as it is found, goes to stderr. No speed is
measured: --batch makes it quicker.

  python -m fastdecode.acceptance --drafts ngram models/heads/smollm2-135m-eagle3 --trees chain:5 dynamic:5,4,16
  python -m fastdecode.acceptance --drafts HEAD --temperatures 1 --noise scores ranks none
"""
NOISE = ("scores", "ranks", "none")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    usage = "python -m fastdecode.acceptance --drafts DRAFT [DRAFT ...] [options]"
    parser = Parser(prog="python -m fastdecode.acceptance", usage=usage, description=DESCRIPTION)
    group = parser.add_argument_group("measuring")
    add = group.add_argument
    add("--drafts", nargs="+", required=True, metavar="DRAFT", help="drafts to measure, as --draft names them")
    add("--trees", nargs="+", default=["chain:5"], metavar="SHAPE", help=(
        "trees to measure, as --tree names them (default: chain:5); a draft for chains alone leaves out the others"))
    add("--lookups", nargs="+", type=whole_number, default=[0, 2], metavar="N", help=(
        "a head's chains with each of these as --lookup; 0 is the head alone (default: 0 2)"))
    add("--temperatures", nargs="+", default=["0", "1"], metavar="T", help="temperatures to decode at (default: 0 1)")
    add("--noise", nargs="+", default=["scores"], metavar="HOW", help=(
        "at temperatures above 0, what a head takes of the noise that the target chooses with: scores (default) "
        "ranks children by it and scores a dynamic tree's nodes, ranks does not score, none does neither"))
    add("--prompts", metavar="FILE", help="JSONL, or one prompt a line (default: the set that comes with the package)")
    add("--limit", type=whole_number, default=20, metavar="N", help="use N prompts, spread over the file (default: 20)")
    add("--max-new-tokens", type=whole_number, default=128, metavar="N", help="answer length at most (default: 128)")
    add("--batch", type=whole_number, default=1, metavar="N", help="prompts decoded at a time (default: 1)")
    add("--seed", type=whole_number, default=0, metavar="N", help="of sampled answers (default: 0)")
    add_threads_option(group)
    add("-h", "--help", action="help", help="show this help and exit")
    add_model_options(parser)
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot be measured, before anything is loaded: InputError."""
    for option, value in (("--limit", args.limit), ("--max-new-tokens", args.max_new_tokens)):
        if value < 1:
            raise InputError(f"{option} should be at least 1, found {value}.")
    for how in args.noise:
        if how not in NOISE:
            raise InputError(f"--noise should be of {', '.join(NOISE)}, found {how!r}.")
    if args.draft != "auto" or args.tree != "auto" or args.lookup is not None:
        raise InputError(
            "What drafts is taken from --drafts, --trees and --lookups; leave --draft, --tree and --lookup out."
        )
    for draft in args.drafts:
        if draft in ("none", "auto"):
            raise InputError(f"--drafts {draft}: plain decoding is measured anyway; name heads, models or ngram.")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    check(args)
    set_threads(args.threads)
    from fastdecode.acceptance_measure import Acceptance  # torch is imported only when there is work for it

    report, table = Acceptance(args, load_arguments(args)).run()
    print(table)
    print(json.dumps(report, allow_nan=False))


if __name__ == "__main__":
    sys.exit(run_command(main))
