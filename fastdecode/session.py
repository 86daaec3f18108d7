"""What generate.py does between its options and its exit code: gather prompts, load, stream, report."""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.color import ColorSystem
from rich.console import Console
from rich.markup import escape
from rich.style import Style

from fastdecode.background_compile import compile_in_background
from fastdecode.decoder import Piece, Prompt
from fastdecode.detokenizer import StopStrings
from fastdecode.drafting import DraftOptions
from fastdecode.loading import check_quantize, load, wants_int8_cache
from fastdecode.memory import bytes_per_round, cache_bytes_per_token, measure_bandwidth, peak_memory_bytes
from fastdecode.options import load_arguments, sampling_arguments
from fastdecode.profiling import RoundProfile
from fastdecode.prompts import read_prompts
from fastdecode.request import Result, Span
from fastdecode.sampling import SamplingOptions
from models.errors import InputError

MB = 1e6
DRAFTED = "green"


class Session:
    """One run of generate.py. Options are checked before anything is loaded; raises InputError."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.console = Console(stderr=True, highlight=False)
        self.screen = Console()
        self._check_options()
        self.sampling = sampling_arguments(args)
        self.options = SamplingOptions(**self.sampling)  # out of range is said before anything is loaded
        self.prompts = [] if args.chat else self._prompts()
        with self.console.status(escape(f"Loading {args.model} …")):
            self.decoder = load(**load_arguments(args), note=self.note)
        self._suggested_sampling()
        if args.explain:
            self._explain()
            self._explain_tree()
        first = args.chat or len(self.prompts) == 1  # who waits for one answer
        if args.compile and not (first and self._compiles_in_background()):
            with self.console.status("Compiling (about half a minute the first time, seconds after that) …"):
                self.decoder.warm_up(self.options)
        if args.show_draft:
            nodes = self.decoder.runner.round.drafter.n_nodes
            self.note(f"{DRAFTED}: won by drafting" if nodes > 1 else "Nothing is drafted; give --draft.")
        if not self.options.greedy and args.seed_is_random:
            self.note(f"seed {self.options.seed}")

    def note(self, sentence: str) -> None:
        """Tell the user something, on stderr."""
        self.console.print(sentence, markup=False, soft_wrap=True)

    def write(self, spans: Iterable[Span]) -> None:
        """Show text, letter by letter as it is; what drafting won is coloured where that was asked for and can be
        seen."""
        coloured = self.args.show_draft and self.screen.color_system is not None and not self.screen.no_color
        style = Style.parse(DRAFTED)
        for span in spans:
            won = coloured and span.drafted
            sys.stdout.write(style.render(span.text, color_system=ColorSystem.STANDARD) if won else span.text)

    def answer_all(self) -> None:
        """Answer every prompt, in input order, streaming the first one that is not finished."""
        results: list[Result] = []
        started = time.perf_counter()
        for spans, result in in_order(self._run(self.prompts), len(self.prompts)):
            if not self.args.json:
                self.write(spans)
                if result is not None:
                    last = len(results) == len(self.prompts) - 1
                    sys.stdout.write("\n" if last else "\n\n")
            elif result is not None:
                print(json.dumps(as_json(result), ensure_ascii=False))
            sys.stdout.flush()
            if result is not None:
                results.append(result)
        self._report(results, time.perf_counter() - started)

    def chat(self) -> None:
        """A conversation: each line of stdin is a turn; the cache keeps what the turns have in common."""
        messages: list[dict[str, str]] = []
        for turn, line in enumerate(self._turns()):
            messages.append({"role": "user", "content": line})
            result = None
            for piece in self._run([list(messages)], keep_prefix=True, first_index=turn):
                if not self.args.json:
                    self.write(piece.spans)
                    sys.stdout.flush()
                result = piece.result
            messages.append({"role": "assistant", "content": result.text})
            print(json.dumps({**as_json(result), "prompt": line}, ensure_ascii=False) if self.args.json else "")
            sys.stdout.flush()
            self._report([result])

    def _run(self, prompts: list[Prompt], **more: Any) -> Iterator[Piece]:
        args = self.args
        pieces = self.decoder.run(
            prompts,
            max_new_tokens=args.max_new_tokens,
            stop=args.stop,
            raw=args.raw,
            system=args.system,
            **self.sampling,
            **more,
        )
        return pieces if self.profile is None or self.profile.table else self.profile.watch(pieces)

    def _check_options(self) -> None:
        args = self.args
        check_quantize(args.quantize)
        wants_int8_cache(args.kv_cache)
        DraftOptions.parse(args.draft, args.tree, args.draft_rope_theta, args.quantize, args.lookup)
        self.profile = None if args.profile is None else RoundProfile(Path(args.profile))
        if args.show_draft and args.json:
            raise InputError("--show-draft colours text, and --json prints none of it; give one of them.")
        if args.prompt is not None and args.prompts is not None:
            raise InputError("PROMPT and --prompts were both given; give one of them.")
        if args.chat and (args.raw or args.prompts is not None or args.batch != 1):
            raise InputError("--chat cannot go with --raw, --prompts or --batch; leave those out.")
        if args.raw and args.system is not None:
            raise InputError("--system needs the chat template, which --raw leaves out; give one of them.")
        StopStrings(tuple(args.stop))
        if args.max_new_tokens < 1:
            raise InputError(f"--max-new-tokens should be at least 1, found {args.max_new_tokens}.")
        if args.prompt is None and args.prompts is None and not args.chat and sys.stdin.isatty():
            raise InputError('There is no prompt; give one ("Why is the sky blue?"), --prompts FILE, or --chat.')

    def _prompts(self) -> list[str]:
        if self.args.prompt is not None:
            return [self.args.prompt]
        return [line.text for line in read_prompts(self.args.prompts or "-")]

    def _turns(self) -> Iterator[str]:
        if self.args.prompt is not None:
            yield self.args.prompt
        while True:
            if sys.stdin.isatty():
                self.console.print("> ", end="")
            try:
                line = sys.stdin.readline()
            except UnicodeDecodeError as error:
                raise InputError(f"stdin: is not UTF-8 text ({error.reason}).") from None
            if not line:
                return
            if line.strip():
                yield line.rstrip("\r\n")

    def _suggested_sampling(self) -> None:
        """Apply the checkpoint's sampling values if that was asked for; else say that they were left out."""
        suggested = self.decoder.suggested_sampling
        if self.args.temperature == "model":
            self.sampling = sampling_arguments(self.args, suggested)
            self.options = SamplingOptions(**self.sampling)
            if not suggested:
                self.note("The checkpoint suggests no sampling values, so the likeliest token is taken.")
        elif suggested:
            values = ", ".join(f"{name} {value}" for name, value in suggested.items())
            self.note(f"The checkpoint suggests {values}; not applied (--temperature model applies them).")

    def _compiles_in_background(self) -> bool:
        """Let another process compile, if this can go without; asked for figures, wait for what they are about."""
        if self.args.explain or self.profile is not None:
            return False
        if compile_in_background(self.decoder, self.options, load_arguments(self.args)) is None:
            return False
        self.note("Rounds run uncompiled, and slower, until a process in the background has compiled them (minutes).")
        return True

    def _explain(self) -> None:
        decoder, weight = self.decoder, self.decoder.model.norm.weight
        weights = sum(p.numel() * p.itemsize for p in decoder.model.parameters())
        cache = sum(b.numel() * b.itemsize for b in decoder.cache.buffers())
        drafter = decoder.runner.round.drafter
        own = {*drafter.parameters(), *drafter.buffers()} - set(decoder.model.parameters())
        drafting = sum(t.numel() * t.itemsize for t in own)
        per_token = cache_bytes_per_token(decoder.model.config, weight.dtype, decoder.cache.quantized)
        precision, kind = (str(t.dtype).removeprefix("torch.") for t in (weight, decoder.cache.k0))
        self.note(
            f"precision {precision} on {weight.device}; weights {weights / MB:,.0f} MB; "
            f"cache {kind} {cache / MB:,.0f} MB for {decoder.batch} × {decoder.max_seq_len} tokens "
            f"({per_token / 1e3:,.1f} kB a token); "
            f"draft {self.args.draft}, {drafter.n_nodes} nodes a round, {drafting / MB:,.0f} MB; "
            f"predicted memory {(weights + cache + drafting) / MB:,.0f} MB beside the program itself"
        )

    def _explain_tree(self) -> None:
        """Show what each tree should do, measured now if it never was, and take the best if nobody named another."""
        from fastdecode.tuning_report import as_table, choice_for  # only here: nothing is measured before other answers

        decoder, plan, tree = self.decoder, self.decoder.plan, self.args.tree
        if plan is None or not plan.drafts:
            return
        with self.console.status("Measuring which tree pays (minutes the first time) …") as status:
            choice = choice_for(plan, decoder, self.note, lambda step: status.update(escape(step)), tree)
        if choice is None:
            return
        self.console.print(as_table(choice, plan.options.tree_name))
        if tree == "auto":
            self.decoder = decoder.with_drafter(plan.with_tree(choice.tree))

    def _report(self, results: list[Result], seconds: float = 0.0) -> None:
        """One line: prompt, first token, rate, memory, and how near the rate comes to the memory's ceiling. `seconds`:
        what all the answers took, prompts included; 0 where that is of no interest."""
        stats = [r.stats for r in results]
        rates = [s["decode_tokens_per_s"] for s in stats if s["decode_tokens_per_s"]]
        if self.profile is not None:
            file, table, self.profile = self.profile.file, self.profile.table, None
            self.note(f"{table}\n{file}: the trace" if table else f"{file}: not written, there was one round only.")
        parts = [
            f"prompt {sum(s['prompt_tokens'] for s in stats)} tokens",
            f"first token {sum(s['ttft_s'] for s in stats) / len(stats):.2f} s",
            f"{sum(s['new_tokens'] for s in stats)} new tokens ({results[-1].finish_reason})",
        ]
        if rates:
            rate = sum(rates) / len(rates)
            parts.append(f"decode {rate:.1f} tokens/s")
            if self.decoder.batch > 1 and len(results) > 1 and seconds:
                together = sum(s["new_tokens"] for s in stats) / seconds
                parts[-1] += f" a text, {together:.1f} together with their prompts"
            tau = sum(s["tau"] for s in stats) / len(stats)
        if rates and self.decoder.runner.round.drafter.max_depth:
            parts.append(f"{tau:.2f} tokens per round, {rate / tau:.1f} rounds/s")
            if stats[0]["draft_ms"] is not None:
                draft_ms, verify_ms = (sum(s[key] for s in stats) / len(stats) for key in ("draft_ms", "verify_ms"))
                parts.append(f"{draft_ms:.1f} ms drafting and {verify_ms:.1f} ms verifying a round")
        if not hasattr(self, "bandwidth"):  # measured once, after a look at the peak that it would raise
            device = self.decoder.model.norm.weight.device
            self.peak, self.bandwidth = peak_memory_bytes(device), measure_bandwidth(device)
        peak = self.peak
        if peak is not None:
            parts.append(f"peak memory {peak / MB:,.0f} MB")
        if rates:
            parts.append(self._share_of_ceiling(rate / tau, stats))
        self.note(" · ".join(parts))

    def _share_of_ceiling(self, rounds_per_s: float, stats: list[dict[str, Any]]) -> str:
        """A round costs at least the reading of all weights and of the cached text; what does the memory allow?"""
        decoder = self.decoder
        mean_length = sum(s["prompt_tokens"] + s["new_tokens"] / 2 for s in stats) / len(stats)
        drafter, cached = decoder.runner.round.drafter, mean_length * decoder.batch
        per_round = bytes_per_round(decoder.model, drafter, cached, decoder.cache.quantized)
        share = rounds_per_s * per_round / self.bandwidth
        return f"{share:.0%} of what {self.bandwidth / 1e9:.1f} GB/s allow"


def in_order(pieces: Iterator[Piece], count: int) -> Iterator[tuple[list[Span], Result | None]]:
    """Pieces of many answers, in input order: an answer that is not first in line waits its turn."""
    waiting: list[list[Piece]] = [[] for _ in range(count)]
    current = 0
    for piece in pieces:
        waiting[piece.index].append(piece)
        while current < count and waiting[current]:
            ready, waiting[current] = waiting[current], []
            yield [span for p in ready for span in p.spans], ready[-1].result
            if ready[-1].result is None:
                break
            current += 1


def as_json(result: Result) -> dict[str, Any]:
    """The JSON object of one answer."""
    return {
        "prompt": result.prompt,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        **result.stats,
    }
