"""The tuner's choice for people: measured now if it has to be, and the table that it was chosen from."""

from collections.abc import Callable

import torch
from rich.table import Table

from fastdecode.decoder import Decoder
from fastdecode.drafting import DraftPlan
from fastdecode.tree_choice import Choice
from fastdecode.tuner import PLAIN
from fastdecode.tuning import choose_tree, known_choice

Note = Callable[[str], None]


def choice_for(plan: DraftPlan, decoder: Decoder, note: Note, progress: Note, named: str = "auto") -> Choice | None:
    """The stored choice, or one that is measured now and stored; None, with a note, where memory is too short for that.

    `named`: a tree that the user asked for, which is to be among the rows.
    """
    choice = known_choice(plan, decoder)
    also = [] if named == "auto" else [named]
    if choice is None or not {row.tree for row in choice.rows}.issuperset(also):
        if decoder.compile:
            note("Which tree pays here was not measured before: that compiles a few programs and takes minutes, once.")
        try:
            choice = choose_tree(plan, decoder, progress, also)
        except torch.OutOfMemoryError:
            note("Memory is too short to measure which tree pays; a smaller --max-seq-len makes room.")
            return None
    if choice.tree == PLAIN:
        note("Drafting does not pay here: plain decoding is expected to be the fastest.")
    return choice


def as_table(choice: Choice, named: str = "auto") -> Table:
    """What each tree is expected to do in a round (times in ms), the chosen one marked, and the one asked for."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("tree", "nodes", "tokens", "draft", "verify", "ms/round", "tokens/s", ""):
        table.add_column(name, justify="left" if name in ("tree", "") else "right", no_wrap=True)
    for row in choice.rows:
        marks = ["chosen"] * (row.tree == choice.tree) + ["asked for"] * (row.tree == named)
        times = (f"{1e3 * seconds:.2f}" for seconds in (row.draft_s, row.verify_s, row.round_s))
        table.add_row(
            row.tree, str(row.nodes), f"{row.tokens:.2f}", *times, f"{row.tokens_per_s:.1f}", ", ".join(marks)
        )
    return table
