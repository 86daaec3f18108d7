"""What the sweep measures: all trees on the same prompts, in turns, and the tuner's expectation of each."""

import argparse
import io
from collections.abc import Sequence
from typing import Any

from rich.box import ASCII2
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastdecode.benchmark_report import machine
from fastdecode.benchmark_rows import tau_of, weights_name
from fastdecode.drafting import DraftOptions
from fastdecode.loading import load
from fastdecode.memory import measure_bandwidth
from fastdecode.prompts import SHIPPED, read_prompts
from fastdecode.request import Result
from fastdecode.tree_choice import Choice
from fastdecode.tuner import CHAINS, PLAIN, TREES, Expectation
from fastdecode.tuning import choose_tree, trees_to_choose_from
from models.errors import InputError


class Sweep:
    """One sweep. Trees are checked before anything is loaded; raises InputError."""

    def __init__(self, args: argparse.Namespace, load_options: dict[str, Any]):
        self.args, self.load_options = args, load_options
        self.console = Console(stderr=True, highlight=False)
        for tree in args.trees or ():
            DraftOptions.parse(args.draft, tree, args.draft_rope_theta, args.quantize, args.lookup)
        lines = read_prompts(str(SHIPPED) if args.prompts is None else args.prompts)
        self.prompts = [line.text for line in lines[:: max(1, len(lines) // args.limit)]][: args.limit]

    def run(self) -> tuple[dict[str, Any], str]:
        """Measure. Returns the JSON object and a table for people."""
        args = self.args
        with self.console.status(escape(f"Loading {args.model} …")):
            # The plan is this decoder's, but nothing is drafted with it: it decodes plainly.
            decoder = load(**{**self.load_options, "tree": "chain:1"} if args.draft != "auto" else self.load_options)
        plan = decoder.plan
        if not plan.drafts:
            raise InputError("No draft fits this model; give --draft ngram, or the folder of a head or model.")
        names = args.trees or (*CHAINS, *(TREES if plan.head is not None else ()))
        plans = {name: plan.with_tree(name) for name in (PLAIN, *names)}
        decoder = decoder.with_drafter(plans[PLAIN])
        with self.console.status("Tuning …") as status:
            choice = choose_tree(plan, decoder, lambda step: status.update(escape(step)), names)
            allowed = (PLAIN, *trees_to_choose_from(plan, decoder))
            programs = {PLAIN: decoder}
            for name in names:
                status.update(escape(f"Compiling {name} …"))
                programs[name] = decoder.with_drafter(plans[name])
            results: dict[str, list[Result]] = {name: [] for name in programs}
            for program in programs.values():
                program.generate(self.prompts[0], max_new_tokens=8)
            for number, prompt in enumerate(self.prompts, 1):
                for name, program in programs.items():
                    status.update(escape(f"Prompt {number} of {len(self.prompts)}, {name} …"))
                    results[name].append(program.generate(prompt, max_new_tokens=args.max_new_tokens))
        report = compare(choice, results, allowed)
        device = decoder.model.norm.weight.device
        facts = {"machine": machine(device, measure_bandwidth(device)), "model": args.model}
        facts |= {"draft": str(plan.path or args.draft), "lookup": args.lookup, "weights": weights_name(decoder.model)}
        return facts | report, as_table(report)


def compare(choice: Choice, results: dict[str, Sequence[Result]], allowed: Sequence[str]) -> dict[str, Any]:
    """Rows of measured and expected figures, the choice, and its measured rate as a share of the best one's among
    the trees that may be chosen. Rates are of all prompts together."""
    expected: dict[str, Expectation] = {row.tree: row for row in choice.rows}
    plain = [(r.token_ids, r.finish_reason) for r in results[PLAIN]]
    rows = []
    for name, found in results.items():
        tau, rate, hope = tau_of(found), pooled_rate(found), expected[name]
        rows.append({
            "tree": name,
            "nodes": hope.nodes,
            "allowed": name in allowed,
            "expected_tokens": hope.tokens,
            "tau": tau,
            "expected_round_ms": 1e3 * hope.round_s,
            "round_ms": None if rate is None else 1e3 * tau / rate,
            "expected_tokens_per_s": hope.tokens_per_s,
            "decode_tokens_per_s": rate,
            "matched": sum((r.token_ids, r.finish_reason) == p for r, p in zip(found, plain, strict=True)),
            "prompts": len(found),
        })
    rates = {row["tree"]: row["decode_tokens_per_s"] for row in rows if row["allowed"] and row["decode_tokens_per_s"]}
    fastest = max(rates, key=rates.get, default=None)
    share = rates[choice.tree] / rates[fastest] if choice.tree in rates else None
    return {"chosen": choice.tree, "best": fastest, "share_of_best": share, "rows": rows}


def pooled_rate(results: Sequence[Result]) -> float | None:
    """Tokens/s over all answers that have a rate, each weighed by its time."""
    known = [r.stats for r in results if r.stats["decode_tokens_per_s"]]
    seconds = sum(s["new_tokens"] / s["decode_tokens_per_s"] for s in known)
    return sum(s["new_tokens"] for s in known) / seconds if seconds else None


def as_table(report: dict[str, Any]) -> str:
    """The report for people."""
    table = Table(box=ASCII2)
    for name in ("tree", "nodes", "tokens", "expected", "round ms", "expected", "tokens/s", "expected", "same", ""):
        table.add_column(name, justify="left" if name in ("tree", "") else "right", no_wrap=True)
    for row in report["rows"]:
        name = row["tree"]
        marks = [word for word, tree in (("chosen", report["chosen"]), ("best", report["best"])) if tree == name]
        marks += [] if row["allowed"] else ["not plain's bits"]
        figures = [
            *(row["tau"], row["expected_tokens"], row["round_ms"], row["expected_round_ms"]),
            *(row["decode_tokens_per_s"], row["expected_tokens_per_s"]),
        ]
        cells = ["-" if value is None else f"{value:.2f}" for value in figures]
        table.add_row(name, str(row["nodes"]), *cells, f"{row['matched']}/{row['prompts']}", ", ".join(marks))
    out = io.StringIO()
    Console(file=out, width=110).print(table)
    share = report["share_of_best"]
    end = "" if share is None else f"chosen: {report['chosen']}, {share:.1%} of the best that may be chosen"
    return out.getvalue() + end
