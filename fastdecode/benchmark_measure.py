"""What the benchmark measures, in which order, so that no measurement spoils another."""

import argparse
import tempfile
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from fastdecode.benchmark_report import SHORT_DTYPE, Row, as_report, machine
from fastdecode.decoder import Decoder
from fastdecode.loading import check_what_is_built, load
from fastdecode.memory import cache_bytes_per_token, measure_bandwidth, peak_memory_bytes, weight_bytes_per_round
from fastdecode.options import load_arguments, sampling_arguments
from fastdecode.prompts import SHIPPED, PromptLine, read_prompts
from fastdecode.request import Result
from fastdecode.sampling import SamplingOptions
from fastdecode.startup import measure_startup, set_threads
from models.checkpoint import find_checkpoint
from models.errors import InputError

FIRST_TOKEN_LENGTHS = (16, 512, 2000)  # prompt tokens
FIRST_TOKEN_REPEATS = 3
WARM_UP_TOKENS = 16


class Benchmark:
    """One run of the benchmark. Options are checked before anything is loaded; raises InputError."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.console = Console(stderr=True, highlight=False)
        check_what_is_built(quantize=args.quantize, kv_cache=args.kv_cache)
        if args.draft not in ("auto", "none") or args.tree != "auto" or args.draft_rope_theta is not None:
            raise InputError("The benchmark measures plain decoding so far; leave out --draft and --tree.")
        self.sampling = sampling_arguments(args)
        SamplingOptions(**self.sampling)  # out of range is said before anything is loaded
        lines = read_prompts(str(SHIPPED) if args.prompts is None else args.prompts)
        self.prompts = lines[: args.limit]
        self.source = "\n".join(line.text for line in lines)
        set_threads(args.threads)

    def run(self) -> dict[str, Any]:
        """Measure, printing the predicted ceiling on stdout before the rates; returns the JSON object."""
        args = self.args
        cold_compile_s, warm_start_s = self._startup() if args.startup else (None, None)
        with self.console.status(escape(f"Loading {args.model} …")):
            decoder = load(**load_arguments(args), note=self._note)
        if args.temperature == "model":
            self.sampling = sampling_arguments(args, decoder.suggested_sampling)
        prompts = [decoder.encode(line.text, raw=args.raw, system=args.system) for line in self.prompts]
        with self.console.status("Warming up …"):
            self._answer(decoder, self.prompts[:1], 0, max_new_tokens=WARM_UP_TOKENS)
        with self.console.status("Time to first token …"):
            first_tokens = self._first_tokens(decoder)
        # Before the block that measures bandwidth, and before another program: both would count as ours.
        peak = peak_memory_bytes(decoder.model.norm.weight.device)
        bandwidth = measure_bandwidth(decoder.model.norm.weight.device)
        self._print_ceiling(decoder, bandwidth, prompts)
        peers = {name: _peer(name, decoder, args.model) for name in args.against}

        results: list[Result] = []
        answers: dict[str, list] = {name: [] for name in peers}
        with self.console.status("Decoding …") as status:
            for peer in peers.values():
                peer.generate(prompts[0], WARM_UP_TOKENS)
            for start in range(0, len(self.prompts), args.batch):
                status.update(f"Decoding, prompt {start + 1} of {len(self.prompts)} …")
                group = self.prompts[start : start + args.batch]
                results += self._answer(decoder, group, start, max_new_tokens=args.max_new_tokens)
                for name, peer in peers.items():
                    answers[name].append(peer.generate(prompts[start], max(1, _committed(results[-1]))))

        plain = _plain_row(decoder, args, results, self.prompts, bandwidth)
        plain |= {
            "ttft_s": {str(n): _median([r.stats["ttft_s"] for r in found]) for n, (_, found) in first_tokens.items()},
            "peak_memory_mb": None if peak is None else peak / 1e6,
            "cold_compile_s": cold_compile_s,
            "warm_start_s": warm_start_s,
        }
        rows = [Row(**plain)]
        for name, peer in peers.items():
            row = self._peer_row(decoder, peer, prompts, results, answers[name], bandwidth)
            ttft = {
                str(n): _median([peer.generate(decoder.encode(text, raw=True), 1).ttft_s for _ in found])
                for n, (text, found) in first_tokens.items()
            }
            speedup = _ratio(row["decode_tokens_per_s"], plain["decode_tokens_per_s"])
            rows.append(Row(program=name, weights=plain["weights"], **row, ttft_s=ttft, speedup=speedup))
        return as_report(machine(decoder.model.norm.weight.device, bandwidth), args.model, rows)

    def _note(self, sentence: str) -> None:
        self.console.print(sentence, markup=False, soft_wrap=True)

    def _startup(self) -> tuple[float | None, float]:
        """Seconds of compilation with an empty cache, and seconds from command to first token with the filled one.

        Runs before the model is loaded here, so that it is in memory once at a time.
        """
        find_checkpoint(self.args.model)  # a download is no part of a start
        with tempfile.TemporaryDirectory(prefix="fastdecode-cache-") as folder:
            cold = None
            if self.args.compile:
                with self.console.status("Starting a fresh process with an empty compile cache …"):
                    cold = measure_startup(self.args, Path(folder))["compile_s"]
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
        per_round = _bytes_per_round(decoder, length)
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
        rates = _rates([answer.decode_tokens_per_s for answer in answers])
        per_round = round(_bytes_per_round(decoder, _mean_length(results)))
        comparable = SamplingOptions(**self.sampling).plain_greedy  # the peer always is
        return {
            **rates,
            "prompts": len(answers),
            "new_tokens": sum(result.stats["new_tokens"] for result in results),
            "tau": 1.0,
            "matched": matched if comparable else None,
            "first_difference_margins": tuple(margins) if comparable else (),
            "bytes_per_round": per_round,
            "bandwidth_share": _ratio(rates["decode_tokens_per_s"], bandwidth / per_round),
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


def first_difference(ours: Result, theirs: list[int], stop_ids: tuple[int, ...]) -> int | None:
    """Index of the first generated token at which two answers part, a stop token counted; None if they do not."""
    for i, (a, b) in enumerate(zip(ours.token_ids, theirs, strict=False)):
        if a != b:
            return i
    length = len(ours.token_ids)
    return length if ours.finish_reason == "stop" and theirs[length] not in stop_ids else None


def _peer(name: str, decoder: Decoder, model: str):
    from fastdecode.benchmark_peers import TransformersPeer  # a slow import, and not everybody has it

    return {"transformers": TransformersPeer}[name](decoder.model, find_checkpoint(model))


def _plain_row(decoder: Decoder, args, results: list[Result], lines: list[PromptLine], bandwidth) -> dict[str, Any]:
    """The fields of the plain row that come from the answers to the prompts."""
    rates = _rates([result.stats["decode_tokens_per_s"] for result in results])
    tau = _tau(results)
    per_round = round(_bytes_per_round(decoder, _mean_length(results) * args.batch))
    rate = rates["decode_tokens_per_s"]
    categories = {line.category: [] for line in lines if line.category is not None}
    for line, result in zip(lines, results, strict=True):
        if line.category is not None:
            categories[line.category].append(result)
    return {
        **rates,
        "program": "fastdecode",
        "weights": SHORT_DTYPE[decoder.model.norm.weight.dtype],
        "batch": args.batch,
        "prompts": len(results),
        "new_tokens": sum(result.stats["new_tokens"] for result in results),
        "tau": tau,
        "speedup": 1.0,
        "matched": len(results),
        "bytes_per_round": per_round,
        "bandwidth_share": None if rate is None else rate / tau * per_round / bandwidth,
        "tau_by_category": {category: _tau(found) for category, found in categories.items()},
    }


def _committed(result: Result) -> int:
    """Tokens that were decoded: those of the answer, and the stop token that ended it."""
    return result.stats["new_tokens"] + (result.finish_reason == "stop")


def _tau(results: list[Result]) -> float:
    rounds = sum(result.stats["rounds"] for result in results)
    return sum(result.stats["tau"] * result.stats["rounds"] for result in results) / rounds


def _rates(rates: list[float | None]) -> dict[str, float | None]:
    known = [rate for rate in rates if rate is not None]
    return {
        "decode_tokens_per_s": _median(known),
        "decode_tokens_per_s_min": min(known, default=None),
        "decode_tokens_per_s_max": max(known, default=None),
    }


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _mean_length(results: list[Result]) -> float:
    return mean(result.stats["prompt_tokens"] + result.stats["new_tokens"] / 2 for result in results)


def _bytes_per_round(decoder: Decoder, cached_tokens: float) -> float:
    """Bytes that a round has to read: weights, and the keys and values of `cached_tokens` tokens."""
    model = decoder.model
    return weight_bytes_per_round(model) + cached_tokens * cache_bytes_per_token(model.config, model.norm.weight.dtype)
