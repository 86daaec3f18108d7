"""What the benchmark measures, in which order, so that no measurement spoils another."""

import argparse
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

from fastdecode.benchmark_report import SHORT_DTYPE, Row, as_report, machine
from fastdecode.benchmark_rows import (
    committed,
    comparison,
    decoder_row,
    first_difference,
    mean_length,
    median_of,
    rate_fields,
    ratio,
)
from fastdecode.decoder import Decoder
from fastdecode.drafters.root import RootOnly
from fastdecode.drafting import DEFAULT_TREE, DraftOptions
from fastdecode.loading import check_what_is_built, load, wants_int8_cache
from fastdecode.memory import bytes_per_round, measure_bandwidth, peak_memory_bytes
from fastdecode.options import load_arguments, sampling_arguments
from fastdecode.prompts import SHIPPED, PromptLine, read_prompts
from fastdecode.request import Result
from fastdecode.sampling import SamplingOptions
from fastdecode.startup import measure_startup, set_threads
from fastdecode.tokenizer import load_tokenizer
from fastdecode.tuner import PLAIN, best
from fastdecode.tuning_report import as_table, choice_for
from models.checkpoint import find_checkpoint, read_config
from quantize.linear import QuantizedLinear
from quantize.network import load_network
from quantize.on_the_fly import BITS, quantized_copy

FIRST_TOKEN_LENGTHS = (16, 512, 2000)  # prompt tokens
FIRST_TOKEN_REPEATS = 3
WARM_UP_TOKENS = 16
UNDRAFTED = {"draft": "none", "tree": "auto", "draft_rope_theta": None}


@dataclass
class Program:
    """One of our decoders: plain, or with a draft. `first_tokens`: per prompt length, the text and its runs."""

    decoder: Decoder
    first_tokens: dict[int, tuple[str, list[Result]]]
    results: list[Result]


class Benchmark:
    """One run of the benchmark. Options are checked before anything is loaded; raises InputError."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.console = Console(stderr=True, highlight=False)
        check_what_is_built(quantize=args.quantize)
        wants_int8_cache(args.kv_cache)
        drafting = DraftOptions.parse(args.draft, args.tree, args.draft_rope_theta, args.quantize)
        self.sampling = sampling_arguments(args)
        SamplingOptions(**self.sampling)  # out of range is said before anything is loaded
        lines = read_prompts(str(SHIPPED) if args.prompts is None else args.prompts)
        self.prompts = lines[: args.limit]
        self.source = "\n".join(line.text for line in lines)
        set_threads(args.threads)
        # A head or tree that does not fit is refused before weights are read.
        path = find_checkpoint(args.model)
        self.plan = drafting.plan(read_config(path), load_tokenizer(path), path)
        self.tree = args.tree if args.tree != "auto" else DEFAULT_TREE

    def run(self) -> dict[str, Any]:
        """Measure, printing the predicted ceiling on stdout before the rates; returns the JSON object."""
        args = self.args
        cold_compile_s, warm_start_s = self._startup() if args.startup else (None, None)
        with self.console.status(escape(f"Loading {args.model} …")):
            decoder = load(**{**load_arguments(args), **UNDRAFTED}, note=self._note)
        device = decoder.model.norm.weight.device
        if args.temperature == "model":
            self.sampling = sampling_arguments(args, decoder.suggested_sampling)
        prompts = [decoder.encode(line.text, raw=args.raw, system=args.system) for line in self.prompts]
        programs = [self._warmed_up(decoder)]
        # Before the block that measures bandwidth, and before another program: both would count as ours.
        peaks = [peak_memory_bytes(device)]
        bandwidth = measure_bandwidth(device)
        self._print_ceiling(decoder, bandwidth, prompts)
        if self.plan.drafts:
            if args.tree == "auto":
                self.tree = self._tuned(decoder)
            programs.append(self._warmed_up(decoder.with_drafter(self.plan.with_tree(self.tree))))
            peaks.append(None)  # two decoders are in memory
        peers = {name: _peer(name, decoder, args.model, args.quantize) for name in args.against}

        answers: dict[str, list] = {name: [] for name in peers}
        with self.console.status("Decoding …") as status:
            for peer in peers.values():
                peer.generate(prompts[0], WARM_UP_TOKENS)
            for start in range(0, len(self.prompts), args.batch):
                status.update(f"Decoding, prompt {start + 1} of {len(self.prompts)} …")
                group = self.prompts[start : start + args.batch]
                for program in programs:
                    program.results += self._answer(program.decoder, group, start, max_new_tokens=args.max_new_tokens)
                for name, peer in peers.items():
                    answers[name].append(peer.generate(prompts[start], max(1, committed(programs[0].results[-1]))))

        rows, plain = [], programs[0]
        greedy = SamplingOptions(**self.sampling).plain_greedy
        for program, peak in zip(programs, peaks, strict=True):
            row = decoder_row(program.decoder, program.results, self.prompts, bandwidth)
            row |= comparison(decoder, plain.results, program.results, prompts, greedy)
            row["ttft_s"] = {
                str(n): median_of([r.stats["ttft_s"] for r in found]) for n, (_, found) in program.first_tokens.items()
            }
            row["peak_memory_mb"] = None if peak is None else peak / 1e6
            if program is not plain:
                draft = str(self.plan.path) if args.draft == "auto" else args.draft
                row |= {"draft": draft, "tree": self.tree}
            rows.append(row)
        rows[-1] |= {"cold_compile_s": cold_compile_s, "warm_start_s": warm_start_s}
        for name, peer in peers.items():
            row = self._peer_row(decoder, peer, prompts, plain.results, answers[name], bandwidth)
            ttft = {
                str(n): median_of([peer.generate(decoder.encode(text, raw=True), 1).ttft_s for _ in found])
                for n, (text, found) in plain.first_tokens.items()
            }
            precision = SHORT_DTYPE[decoder.model.norm.weight.dtype]
            rows.append({"program": name, "weights": precision, "kv_cache": precision, **row, "ttft_s": ttft})
        rate = rows[0]["decode_tokens_per_s"]
        finished = [Row(**row, speedup=ratio(row["decode_tokens_per_s"], rate)) for row in rows]
        return as_report(machine(device, bandwidth), args.model, finished)

    def _warmed_up(self, decoder: Decoder) -> "Program":
        """A decoder that has compiled, and its times to first token."""
        with self.console.status("Warming up …"):
            self._answer(decoder, self.prompts[:1], 0, max_new_tokens=WARM_UP_TOKENS)
        with self.console.status("Time to first token …"):
            return Program(decoder, self._first_tokens(decoder), [])

    def _tuned(self, decoder: Decoder) -> str:
        """The best tree here, measured now if it never was; where none beats plain decoding, the best of them."""
        with self.console.status("Measuring which tree pays (minutes the first time) …") as status:
            choice = choice_for(self.plan, decoder, self._note, lambda step: status.update(escape(step)))
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

    def _startup(self) -> tuple[float | None, float]:
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
                return cold, measure_startup(self.args, Path(folder))["total_s"]

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

    def _first_tokens(self, decoder: Decoder) -> dict[int, tuple[str, list[Result]]]:
        """Per prompt length, a text of exactly that many tokens and its runs; none where the context is too short."""
        found = {}
        for length in FIRST_TOKEN_LENGTHS:
            text = None
            if length < decoder.max_seq_len:
                text = text_of_length(length, self.source, lambda text: len(decoder.encode(text, raw=True)))
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

    def _peer_row(self, decoder, peer, prompts, results, answers, bandwidth) -> dict[str, Any]:
        """The fields of a peer's row that come from its answers to the prompts."""
        margins, matched = [], 0
        for ids, ours, theirs in zip(prompts, results, answers, strict=True):
            different = first_difference(ours, theirs.token_ids, decoder.stop_ids)
            if different is None:
                matched += 1
            else:
                margins.append(peer.margin(ids + theirs.token_ids[:different]))
        rates = rate_fields([answer.decode_tokens_per_s for answer in answers])
        per_round = round(bytes_per_round(peer.network, RootOnly(), mean_length(results), int8_cache=False))
        comparable = SamplingOptions(**self.sampling).plain_greedy  # the peer always is
        return {
            **rates,
            "prompts": len(answers),
            "new_tokens": sum(result.stats["new_tokens"] for result in results),
            "tau": 1.0,
            "matched": matched if comparable else None,
            "first_difference_margins": tuple(margins) if comparable else (),
            "bytes_per_round": per_round,
            "bandwidth_share": ratio(rates["decode_tokens_per_s"], bandwidth / per_round),
        }


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


def _peer(name: str, decoder: Decoder, model: str, quantize: str):
    from fastdecode.benchmark_peers import TransformersPeer  # a slow import, and not everybody has it

    path, weight, network = find_checkpoint(model), decoder.model.norm.weight, decoder.model
    if any(isinstance(layer, QuantizedLinear) for layer in network.modules()):  # the same numbers, as floats
        stored = quantized_copy(path, read_config(path), quantize, lambda sentence: None) if quantize in BITS else path
        network = load_network(stored, read_config(stored), weight.device, weight.dtype, quantized=False)
    return {"transformers": TransformersPeer}[name](network, path)
