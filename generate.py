#!/usr/bin/env python3
"""Stream a model's answer: `python generate.py "Why is the sky blue?"`. Options: `python generate.py --help`."""

import sys
from collections.abc import Sequence

from fastdecode.options import Parser, add_model_options, add_sampling_options, run_command

DESCRIPTION = """\
Streams the answer of a language model to stdout; everything else goes to stderr.

  python generate.py "Why is the sky blue?"
  python generate.py --model path/to/checkpoint --temperature 0.7 --seed 1 "Tell me a story."
  python generate.py --chat                        a conversation, one line of stdin per turn
  python generate.py --prompts file.txt --json     one JSON object per prompt
"""


def parse(argv: Sequence[str] | None):
    parser = Parser(prog="generate.py", usage="python generate.py [PROMPT] [options]", description=DESCRIPTION)
    group = parser.add_argument_group("input and output")
    add = group.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="what to answer; without it, prompts are read from stdin")
    add("--prompts", metavar="FILE", help='one prompt a line, or JSONL with {"turns": ["prompt", ...]}; - is stdin')
    add("--chat", action="store_true", help="hold a conversation: one line of stdin per turn, until its end")
    add("--system", metavar="TEXT", help="system message (default: what the chat template says)")
    add("--raw", action="store_true", help="no chat template: the model continues the prompt")
    add("--json", action="store_true", help="one JSON object per prompt instead of text, in input order")
    add("--explain", action="store_true", help=(
        "print predicted memory, precision, and what each draft tree should do (measured in minutes, once), first"))
    add("--show-draft", action="store_true", help="colour the text that drafting won")
    add("--profile", metavar="FILE", help=(
        "write a trace of the first answer's rounds (for ui.perfetto.dev), and a table of where time goes to stderr"))
    add("-h", "--help", action="help", help="show this help and exit")
    add_model_options(parser)
    add_sampling_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    from fastdecode.session import Session  # torch is imported only when there is work for it

    session = Session(args)
    if args.chat:
        session.chat()
    else:
        session.answer_all()


if __name__ == "__main__":
    sys.exit(run_command(main))
