"""What the benchmark measures, in which order, so that no measurement spoils another."""

import argparse
import gc
import tempfile
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from checkpoints.checkpoint import find_checkpoint, read_config
from fastdecode.benchmark_against import WARM_UP_TOKENS, contender_row, contenders
from fastdecode.benchmark_context import CONTEXTS, context_rates
from fastdecode.benchmark_report import Row, as_report, machine
from fastdecode.benchmark_rows import committed, comparison, decoder_row, median_of, ratio, weights_name
from fastdecode.decoder import Decoder
from fastdecode.drafting import DEFAULT_TREE, DraftOptions, DraftPlan
from fastdecode.loading import check_quantize, load, wants_int8_cache
from fastdecode.memory import bytes_per_round, measure_bandwidth, peak_memory_bytes
from fastdecode.options import load_arguments, sampling_arguments
from fastdecode.prompts import SHIPPED, PromptLine, read_prompts
from fastdecode.request import Result
from fastdecode.sampling import SamplingOptions
from fastdecode.startup import measure_startup, set_threads
from fastdecode.tokenizer import load_tokenizer
from fastdecode.tuner import PLAIN, best
from fastdecode.tuning_report import as_table, choice_for

FIRST_TOKEN_LENGTHS = (16, 512, 2000)  # prompt tokens
FIRST_TOKEN_REPEATS = 3
UNDRAFTED = {"draft": "none", "tree": "auto", "lookup": None, "draft_rope_theta": None}


@dataclass(frozen=True)
class Draft:
    """A draft that is measured beside plain decoding, as `--draft` and `--tree` name it."""

    plan: DraftPlan
    name: str
    tree: str  # auto: the tuner's choice


@dataclass
class Program:
    """One of our decoders: plain, or with a draft. `first_tokens`: per prompt length, the text and its runs."""

    decoder: Decoder
    first_tokens: dict[int, tuple[str, list[Result]]]
    results: list[Result]
    draft: Draft | None = None
    peak: int | None = None  # bytes


class Benchmark:
    """One run of the benchmark. Options are checked before anything is loaded; raises InputError.

    The suite `full` adds lookup beside the draft that was asked for, dequantized weights beside those as stored, and
    the rate at long contexts.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.full = args, args.suite == "full"
        self.console = Console(stderr=True, highlight=False)
        check_quantize(args.quantize)
        wants_int8_cache(args.kv_cache)
        asked = DraftOptions.parse(args.draft, args.tree, args.draft_rope_theta, args.quantize, args.lookup)
        self.sampling = sampling_arguments(args)
        SamplingOptions(**self.sampling)  # out of range is said before anything is loaded
        lines = read_prompts(str(SHIPPED) if args.prompts is None else args.prompts)
        self.prompts = lines[: args.limit]
        self.source = "\n".join(line.text for line in lines)
        set_threads(args.threads)
        # A head or tree that does not fit is refused before weights are read.
        self.path = find_checkpoint(args.model)
        config, tokenizer = read_config(self.path), load_tokenizer(self.path)
        self.drafts = []
        if self.full and args.draft != "ngram":
            plan = DraftOptions.parse("ngram", "auto", None, args.quantize).plan(config, tokenizer, self.path)
            self.drafts.append(Draft(plan, "ngram", DEFAULT_TREE))
        plan = asked.plan(config, tokenizer, self.path)
        if plan.drafts:
            self.drafts.append(Draft(plan, str(plan.path) if args.draft == "auto" else args.draft, args.tree))

    def run(self) -> dict[str, Any]:
        """Measure, printing the predicted ceiling on stdout before the rates; returns the JSON object."""
        args = self.args
        startup = self._startup() if args.startup else {}
        decoder = self._load(args.quantize)
        device = decoder.model.norm.weight.device
        if args.temperature == "model":
            self.sampling = sampling_arguments(args, decoder.suggested_sampling)
        rows, contexts, bandwidth = self._measure(decoder, args.quantize, args.against, startup)
        quantized = weights_name(decoder.model).startswith("int")
        del decoder
        if self.full and quantized and args.quantize != "none":
            gc.collect()  # what a decoder compiled refers to it in circles, and two models may not fit
            if device.type == "cuda":
                torch.cuda.empty_cache()
            more, more_contexts, _ = self._measure(self._load("none"), "none", (), {}, bandwidth)
            for row in more:
                row["peak_memory_mb"] = None  # of this process, which has held the first model, too
            rows, contexts = rows + more, contexts + more_contexts
        report = as_report(machine(device, bandwidth), args.model, [Row(**row) for row in rows])
        return {**report, "context": contexts} if self.full else report

    def _load(self, quantize: str) -> Decoder:
        with self.console.status(escape(f"Loading {self.args.model} …")):
            return load(**{**load_arguments(self.args), **UNDRAFTED, "quantize": quantize}, note=self._note)

    def _measure(
        self, decoder: Decoder, quantize: str, against: tuple[str, ...], startup: dict, bandwidth: float | None = None
    ) -> tuple[list[dict], list[dict], float]:
        """The rows of one precision, its rates at long contexts (full suite only), and the memory's bandwidth."""
        args, device = self.args, decoder.model.norm.weight.device
        prompts = [decoder.encode(line.text, raw=args.raw, system=args.system) for line in self.prompts]
        plain = self._warmed_up(decoder)
        # Before the block that measures bandwidth, and before another program: both would count as ours.
        plain.peak = peak_memory_bytes(device)
        bandwidth = bandwidth or measure_bandwidth(device)
        self._print_ceiling(decoder, bandwidth, prompts)
        drafts = [self._settled(draft, decoder) for draft in self.drafts]
        programs = [plain, *(self._warmed_up(decoder.with_drafter(d.plan), d) for d in drafts)]
        longest = max(map(len, prompts)) + args.max_new_tokens
        reach = max(longest, *(n + 1 for n, (_, runs) in plain.first_tokens.items() if runs), 0)
        with self.console.status("Warming up other programs …"):
            others = contenders(against, decoder, self.path, quantize, prompts[0], longest, reach)
        with self.console.status("Decoding …") as status:
            for start in range(0, len(self.prompts), args.batch):  # every program has its turn at every prompt
                status.update(f"Decoding, prompt {start + 1} of {len(self.prompts)} …")
                group = self.prompts[start : start + args.batch]
                for program in programs:
                    program.results += self._answer(program.decoder, group, start, max_new_tokens=args.max_new_tokens)
                for other in others:
                    other.answer(prompts[start], max(1, committed(plain.results[-1])))

        greedy = SamplingOptions(**self.sampling).plain_greedy
        rows = [self._row(program, plain, prompts, bandwidth, greedy) for program in programs]
        rows[-1 if len(programs) > 1 and not self.full else 0] |= startup
        encoded = {
            n: (decoder.encode(text, raw=True) if runs else [], len(runs))
            for n, (text, runs) in plain.first_tokens.items()
        }
        with self.console.status("Time to first token, other programs …"):
            rows += [
                contender_row(other, decoder, prompts, plain.results, encoded, bandwidth, greedy) for other in others
            ]
        rate = rows[0]["decode_tokens_per_s"]
        rows = [{**row, "speedup": ratio(row.get("decode_tokens_per_s"), rate)} for row in rows]
        contexts = []
        if self.full:
            texts = {n: self._text_of(n, decoder) for n in CONTEXTS}
            with self.console.status("Decoding at long contexts …"):
                contexts = context_rates(decoder, texts)
        return rows, contexts, bandwidth

    def _row(self, program: Program, plain: Program, prompts, bandwidth: float, greedy: bool) -> dict[str, Any]:
        row = decoder_row(program.decoder, program.results, self.prompts, bandwidth)
        row |= comparison(plain.decoder, plain.results, program.results, prompts, greedy)
        row["ttft_s"] = {
            str(n): median_of([r.stats["ttft_s"] for r in runs]) for n, (_, runs) in program.first_tokens.items()
        }
        # With a draft, two decoders are in memory.
        row["peak_memory_mb"] = None if program.peak is None else program.peak / 1e6
        draft = program.draft
        if draft is None:
            return row
        lookup = None if draft.plan.head is None else draft.plan.lookup
        return {**row, "draft": draft.name, "tree": draft.tree, "lookup": lookup}

    def _warmed_up(self, decoder: Decoder, draft: Draft | None = None) -> Program:
        """A decoder that has compiled, and its times to first token."""
        with self.console.status("Warming up …"):
            if self.args.batch > 1:
                decoder.warm_up_sizes(SamplingOptions(**self.sampling))
            self._answer(decoder, self.prompts[:1], 0, max_new_tokens=WARM_UP_TOKENS)
        with self.console.status("Time to first token …"):
            return Program(decoder, self._first_tokens(decoder), [], draft)

    def _settled(self, draft: Draft, decoder: Decoder) -> Draft:
        """The draft with a tree, which the tuner chooses where none was named."""
        if draft.tree != "auto":
            return draft
        tree = self._tuned(draft.plan, decoder)
        return Draft(draft.plan.with_tree(tree), draft.name, tree)

    def _tuned(self, plan: DraftPlan, decoder: Decoder) -> str:
        """The best tree here, measured now if it never was; where none beats plain decoding, the best of them."""
        with self.console.status("Measuring which tree pays (minutes the first time) …") as status:
            choice = choice_for(plan, decoder, self._note, lambda step: status.update(escape(step)))
        if choice is None:
            return DEFAULT_TREE
        self.console.print(as_table(choice))
        if choice.tree != PLAIN:
            return choice.tree
        tree = best([row for row in choice.rows if row.tree != PLAIN]).tree
        self._note(f"The drafted row is of {tree}, which is expected to lose least.")
        return tree

    def _note(self, sentence: str) -> None:
        self.console.print(sentence, markup=False, soft_wrap=True)

    def _startup(self) -> dict[str, float | None]:
        """Seconds of compilation with an empty cache, and seconds from command to first token with the filled one.

        Runs before the model is loaded here, so that it is in memory once at a time.
        """
        find_checkpoint(self.args.model)  # a download is no part of a start
        with tempfile.TemporaryDirectory(prefix="fastdecode-cache-") as folder:
            with self.console.status("Starting a fresh process with an empty compile cache …"):
                cold = measure_startup(self.args, Path(folder))["compile_s"] if self.args.compile else None
                if not self.args.compile:
                    measure_startup(self.args, Path(folder))  # operators are built at a first start, too
            with self.console.status("Starting a fresh process …"):
                warm = measure_startup(self.args, Path(folder))["total_s"]
        return {"cold_compile_s": cold, "warm_start_s": warm}

    def _answer(self, decoder: Decoder, lines: list[PromptLine], first_index: int, **options: Any) -> list[Result]:
        args = self.args
        return decoder.generate(
            [line.text for line in lines],
            first_index=first_index,
            stop=args.stop,
            raw=args.raw,
            system=args.system,
            **self.sampling,
            **options,
        )

    def _text_of(self, n_tokens: int, decoder: Decoder) -> str | None:
        """A text of exactly `n_tokens` tokens; None where there is none, or the context is too short."""
        if n_tokens >= decoder.max_seq_len:
            return None
        return text_of_length(n_tokens, self.source, lambda text: len(decoder.encode(text, raw=True)))

    def _first_tokens(self, decoder: Decoder) -> dict[int, tuple[str, list[Result]]]:
        """Per prompt length, a text of exactly that many tokens and its runs; none where the context is too short."""
        found = {}
        for length in FIRST_TOKEN_LENGTHS:
            text = self._text_of(length, decoder)
            runs = range(FIRST_TOKEN_REPEATS if text is not None else 0)
            results = [decoder.generate(text, raw=True, max_new_tokens=1, **self.sampling) for _ in runs]
            found[length] = (text or "", results)
        return found

    def _print_ceiling(self, decoder: Decoder, bandwidth: float, prompts: list[list[int]]) -> None:
        args, device = self.args, decoder.model.norm.weight.device
        threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
        length = mean(min(len(ids) + args.max_new_tokens / 2, decoder.max_seq_len) for ids in prompts)
        per_round = bytes_per_round(decoder.model, decoder.runner.round.drafter, length, decoder.cache.quantized)
        print(
            f"predicted ceiling: {bandwidth / per_round:.1f} tokens/s for one text without a draft "
            f"({bandwidth / 1e9:.1f} GB/s measured, {per_round / 1e6:,.0f} MB a round; {device}{threads}, "
            f"torch {torch.__version__})",
            flush=True,
        )


def text_of_length(n_tokens: int, source: str, count: Callable[[str], int]) -> str | None:
    """A part of `source`, repeated if need be, that is exactly `n_tokens` tokens by `count`; None if there is none."""
    for _ in range(16):
        if count(source) >= n_tokens:
            break
        source += "\n" + source
    words = [0, *(i + 1 for i, character in enumerate(source[:2000]) if character.isspace())]
    for start in words[:50]:  # where a text is cut decides whether a count can be met
        text = source[start:]
        end = bisect_left(range(len(text) + 1), n_tokens, key=lambda end, text=text: count(text[:end]))
        if end <= len(text) and count(text[:end]) == n_tokens:
            return text[:end]
    return None
