"""What `python -m fastdecode.acceptance` measures: each draft with each tree at each temperature, one after another."""

import argparse
import gc
import io
from dataclasses import replace
from typing import Any

from rich.box import ASCII2
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from checkpoints.checkpoint import find_checkpoint, read_config
from fastdecode.benchmark_report import machine
from fastdecode.benchmark_rows import accept_by_depth, comparison, tau_of, weights_name
from fastdecode.drafting import DraftOptions, DraftPlan
from fastdecode.loading import load
from fastdecode.prompts import SHIPPED, read_prompts
from fastdecode.request import Result
from fastdecode.sampling import SamplingOptions
from fastdecode.tokenizer import load_tokenizer
from fastdecode.tree_options import parse_tree


class Acceptance:
    """One run. Drafts and trees are checked before weights are read; raises InputError."""

    def __init__(self, args: argparse.Namespace, load_options: dict[str, Any]):
        self.args, self.load_options = args, load_options
        self.console = Console(stderr=True, highlight=False)
        lines = read_prompts(str(SHIPPED) if args.prompts is None else args.prompts)
        self.prompts = [line.text for line in lines[:: max(1, len(lines) // args.limit)]][: args.limit]
        self.sampling = {t: SamplingOptions(temperature=t, seed=args.seed) for t in args.temperatures}
        trees = [(tree, parse_tree(tree).chain) for tree in args.trees]
        path = find_checkpoint(args.model)
        config, tokenizer = read_config(path), load_tokenizer(path)
        self.plans: list[tuple[str, str, DraftPlan]] = []
        for draft in args.drafts:
            theta, quantize = args.draft_rope_theta, args.quantize
            plan = DraftOptions.parse(draft, "chain:1", theta, quantize).plan(config, tokenizer, path)
            for tree, chain in trees:
                if plan.head is None or not chain:
                    self.plans += [(draft, tree, plan.with_tree(tree))] if chain or plan.head is not None else []
                    continue
                for lookup in dict.fromkeys(args.lookups):
                    options = DraftOptions.parse(draft, tree, theta, quantize, lookup)
                    self.plans.append((draft, tree, replace(plan, options=options)))

    def run(self) -> tuple[dict[str, Any], str]:
        """Measure. Returns the JSON object and a table for people."""
        with self.console.status(escape(f"Loading {self.args.model} …")) as status:
            decoder = load(**{**self.load_options, "draft": "none"})
            encoded = [decoder.encode(prompt) for prompt in self.prompts]
            rows = []
            plain = {}
            for t in self.sampling:
                status.update(f"Plain decoding at temperature {t} …")
                plain[t] = self._answers(decoder, t)
            for draft, tree, plan in self.plans:
                for noise in self.args.noise if plan.head is not None else ("none",):
                    sampled_only = noise != self.args.noise[0] and plan.head is not None
                    temperatures = [t for t in self.sampling if float(t) > 0 or not sampled_only]
                    if not temperatures or (noise == "ranks" and plan.options.tree.chain):  # a chain has no scores
                        continue
                    drafted = decoder.with_drafter(plan, noise=noise)
                    for t in temperatures:
                        status.update(escape(f"{draft}, {tree}, temperature {t} …"))
                        found = self._answers(drafted, t)
                        same = comparison(decoder, plain[t], found, encoded, self.sampling[t].plain_greedy)
                        rows.append(_row(draft, tree, plan, t, noise, found) | same)
                        self._show(rows[-1])
                    del drafted
                    gc.collect()  # what a decoder compiled refers to it in circles
        device = decoder.model.norm.weight.device
        facts = {"machine": machine(device, None), "model": self.args.model, "weights": weights_name(decoder.model)}
        report = {**facts, "prompts": len(self.prompts), "new_tokens": self.args.max_new_tokens, "rows": rows}
        return report, as_table(report)

    def _show(self, row: dict[str, Any]) -> None:
        """A row as soon as it is known: a long run that is stopped leaves what it found."""
        line = "  ".join(_cells(row, len(self.prompts)))
        self.console.print(line, markup=False, soft_wrap=True)

    def _answers(self, decoder, temperature: str) -> list[Result]:
        return decoder.generate(
            self.prompts, max_new_tokens=self.args.max_new_tokens, temperature=temperature, seed=self.args.seed
        )


def _row(draft: str, tree: str, plan: DraftPlan, temperature: str, noise: str, found: list[Result]) -> dict[str, Any]:
    return {
        "draft": draft,
        "tree": tree,
        "lookup": None if plan.head is None else plan.lookup,
        "temperature": float(temperature),
        "noise": noise if float(temperature) > 0 else None,
        "tau": tau_of(found),
        "accept_by_depth": accept_by_depth(found),
    }


def _cells(row: dict[str, Any], prompts: int) -> tuple[str, ...]:
    shares = " ".join(f"{share:.2f}" for share in row["accept_by_depth"])
    same = f"{row['matched']}/{prompts}"
    lookup = "-" if row["lookup"] is None else str(row["lookup"])
    how = (row["draft"], row["tree"], lookup, f"{row['temperature']:g}", row["noise"] or "-")
    return (*how, f"{row['tau']:.2f}", same, shares)


def as_table(report: dict[str, Any]) -> str:
    """The report for people."""
    table = Table(box=ASCII2)
    last = "rounds that accepted more than 0, 1, 2 ... drafts"
    for name in ("draft", "tree", "lookup", "T", "noise", "tau", "same", last):
        is_number = name in ("lookup", "T", "tau", "same")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name != "draft")
    for row in report["rows"]:
        table.add_row(*map(escape, _cells(row, report["prompts"])))
    out = io.StringIO()
    Console(file=out, width=140).print(table)
    return out.getvalue().rstrip()
