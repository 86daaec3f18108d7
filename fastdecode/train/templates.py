"""`python -m fastdecode.train.templates N`: N prompts of many kinds, as JSONL for `--data`.

What a small target makes up by itself is mostly questions of one kind; a head that has seen letters, code, sums, tables
and stories as well drafts better for people who ask for those. Kinds are drawn evenly, then their parts.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastdecode.options import Parser, run_command, whole_number
from models.errors import InputError

FILE = Path(__file__).with_name("templates.json")

DESCRIPTION = """\
Prints N different prompts of many kinds (letters, stories, code, sums, explanations, extraction ...), one JSON object a
line, for the trainer's --data. The same seed gives the same prompts. With --words, their first words only, for
--beginnings: the target finishes each in its own way.

  python -m fastdecode.train.templates 5000 > prompts.jsonl
  python -m fastdecode.train.templates 5000 --words 2-8 > beginnings.jsonl
"""


class Templates(NamedTuple):
    """`kinds`: templates of prompts, kind by kind. `parts`: what may stand in their gaps, by name."""

    kinds: Sequence[Sequence[str]]
    parts: Mapping[str, Sequence[str]]


def shipped() -> Templates:
    """The templates that come with the package."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    return Templates(list(stored["kinds"].values()), stored["parts"])


def prompts(count: int, seed: int = 0, templates: Templates | None = None) -> Iterator[str]:
    """`count` different prompts. Raises InputError when the templates (None: the shipped ones) have no more."""
    kinds, parts = templates or shipped()
    rng = np.random.default_rng(seed)
    seen: set[str] = set()
    barren = 0
    while len(seen) < count:
        kind = kinds[rng.integers(len(kinds))]
        text = filled(kind[rng.integers(len(kind))], parts, rng)
        barren = barren + 1 if text in seen else 0
        if barren == 10_000:
            raise InputError(f"The templates give no more than {len(seen)} different prompts; ask for fewer.")
        if text not in seen:
            seen.add(text)
            yield text


def filled(template: str, parts: Mapping[str, Sequence[str]], rng: np.random.Generator) -> str:
    """`template` with every `{part}` replaced by one of `parts`, which may hold gaps again; `{n:LOW-HIGH}` is a whole
    number. The same part twice gives two draws."""
    text = ""
    while "{" in template:
        before, _, rest = template.partition("{")
        name, _, template = rest.partition("}")
        if name.startswith("n:"):
            low, high = map(int, name[2:].split("-"))
            value = str(rng.integers(low, high + 1))
        else:
            value = filled(parts[name][rng.integers(len(parts[name]))], parts, rng)
        text += before + value
    return text + template


def first_words(text: str, words: tuple[int, int], rng: np.random.Generator) -> str:
    """As many words of `text` as `rng` draws from the bounds, always short of the whole."""
    found = text.split(" ")
    return " ".join(found[: min(int(rng.integers(words[0], words[1] + 1)), max(1, len(found) - 1))])


def bounds(text: str) -> tuple[int, int]:
    """LOW-HIGH, as --words takes it."""
    low, _, high = text.partition("-")
    if not (low.isascii() and low.isdigit() and high.isascii() and high.isdigit() and 1 <= int(low) <= int(high) < 1e6):
        raise argparse.ArgumentTypeError(f"should be LOW-HIGH, as 2-8, found {text!r}")
    return int(low), int(high)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    usage = "python -m fastdecode.train.templates N [--seed S] [--words LOW-HIGH]"
    parser = Parser(prog="python -m fastdecode.train.templates", usage=usage, description=DESCRIPTION)
    parser.add_argument("count", type=whole_number, metavar="N", help="how many prompts")
    parser.add_argument("--seed", type=whole_number, default=0, metavar="S", help="which ones (default: 0)")
    parser.add_argument("--words", type=bounds, metavar="LOW-HIGH", help="only so many first words of each")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    for option, value in (("N", args.count), ("--seed", args.seed)):
        if value < 0:
            raise InputError(f"{option} should be at least 0, found {value}.")
    rng = np.random.default_rng(args.seed)
    for text in prompts(args.count, args.seed):
        text = text if args.words is None else first_words(text, args.words, rng)
        print(json.dumps({"prompt": text}, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(run_command(main))
