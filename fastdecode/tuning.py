"""Measures what the tuner calculates with: what rounds cost on this device, and how many drafts they accept.

A few chains are compiled, and for trees one comb: a chain whose every node has siblings, so that one decode shows how
often each rank is right. Costs are timed on a finished text, where a round does all its work and commits nothing; each
program takes turns with plain decoding, and what counts is their ratio, so that a machine that slows down meanwhile
makes none of them look dear.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from fastdecode.decoder import Decoder
from fastdecode.drafting import DraftPlan
from fastdecode.prompts import SHIPPED, read_prompts
from fastdecode.runner import Report
from fastdecode.sampling import SamplingOptions
from fastdecode.tree import DraftTree, Growth, StaticTree
from fastdecode.tree_choice import Choice, choice_key, read_choice, store_choice
from fastdecode.tree_options import parse_tree
from fastdecode.tuner import CHAINS, PLAIN, TREES, Acceptance, Costs, best, chain_acceptance, expect

LONGEST = 8
MEASURED_CHAINS = (LONGEST, 5, 3, 1)
RANKS = 4  # as many siblings as EAGLE-1's tree looks at
LEAST_TURNS = 12

Progress = Callable[[str], None]


class Effort(NamedTuple):
    """How much is decoded and for how long each program is timed: prompts, new tokens of each, seconds."""

    prompts: int = 8
    new_tokens: int = 96
    seconds: float = 2.5


class Timed(NamedTuple):
    """Medians of a round, as multiples of a plain one: the whole, and drafting where that is known."""

    whole: float
    draft: float | None


class RecordedTree(StaticTree):
    """A static tree that leaves the tokens it drafted last in `drafted [B, N]` int64."""

    def __init__(self, paths: Sequence[Sequence[int]], batch: int):
        super().__init__(paths)
        self.register_buffer("drafted", torch.zeros(batch, self.n_nodes, dtype=torch.int64), persistent=False)

    def finish(self, growth: Growth, valid: Tensor) -> DraftTree:
        """See StaticTree.finish."""
        tree = super().finish(growth, valid)
        self.drafted.copy_(tree.tokens)
        return tree


def comb() -> list[tuple[int, ...]]:
    """A chain of 8 whose nodes have 3 siblings each, but the last one 2: 32 nodes with the root."""
    return [(0,) * depth + (rank,) for depth in range(LONGEST) for rank in range(RANKS)][:-1]


def trees_to_choose_from(plan: DraftPlan, decoder: Decoder) -> tuple[str, ...]:
    """Trees whose output is plain decoding's own: chains always; others in fp32, where tests show it, with a head."""
    exact = decoder.model.norm.weight.dtype == torch.float32 and not decoder.cache.quantized
    return (*CHAINS, *TREES) if exact and plan.head is not None else CHAINS


def known_choice(plan: DraftPlan, decoder: Decoder) -> Choice | None:
    """The stored choice for a decoder and its draft, if there is one."""
    folder = decoder.program_folder
    return None if folder is None else read_choice(folder, _key(plan, decoder))


def choose_tree(
    plan: DraftPlan,
    decoder: Decoder,
    progress: Progress = lambda sentence: None,
    also: Sequence[str] = (),
    effort: Effort = Effort(),  # noqa: B008  (a NamedTuple cannot be changed)
) -> Choice:
    """Measure, choose, and store the choice beside the decoder's programs. Minutes where nothing is compiled yet.

    `plan` is a draft for the model of `decoder`, which must not be in the middle of a text; `also`: trees that are
    shown but not chosen. Raises torch.OutOfMemoryError where two more decoders do not fit.
    """
    allowed = trees_to_choose_from(plan, decoder)
    names = tuple(dict.fromkeys((*allowed, *also)))
    costs, acceptance = measure(plan, decoder, any(not parse_tree(n).chain for n in names), progress, effort)
    rows = expect(names, costs, acceptance)
    choice = Choice(best([row for row in rows if row.tree in (PLAIN, *allowed)]).tree, rows)
    if decoder.program_folder is not None:
        store_choice(decoder.program_folder, _key(plan, decoder), choice)
    return choice


def measure(
    plan: DraftPlan, decoder: Decoder, with_ranks: bool, progress: Progress, effort: Effort
) -> tuple[Costs, Acceptance]:
    """Costs by chain length and nodes; acceptance by depth, and `with_ranks` by rank among siblings."""
    is_plain = decoder.runner.round.drafter.max_depth == 0
    plain = decoder if is_plain else decoder.with_drafter(plan.with_tree(PLAIN))
    prompts = calibration_prompts(decoder, effort)
    progress("Compiling and timing plain decoding …")
    for _ in _decode(plain, prompts[0], effort.new_tokens):
        pass

    chains, alone, found = {}, [], None
    for n_drafts in MEASURED_CHAINS:
        progress(f"Compiling and timing chain:{n_drafts} …")
        other = decoder.with_drafter(plan.with_tree(f"chain:{n_drafts}"))
        accepted = []
        for ids in reversed(prompts if n_drafts == LONGEST else prompts[:1]):  # all are timed on the first
            rounds = [report.n_drafted[0] for _, report in _decode(other, ids, effort.new_tokens)]
            accepted += rounds[:-1] or rounds  # the last one was cut short by the text's end
        found = chain_acceptance(accepted, LONGEST) if n_drafts == LONGEST else found
        chains[n_drafts] = _take_turns(plain, other, effort.seconds, alone)
    wide = lookup = None
    if with_ranks:
        progress("Compiling and timing a tree …")
        tree = RecordedTree(comb(), decoder.batch)
        other = decoder.with_drafter(replace(plan, options=replace(plan.options, tree=tree)))
        found = _rank_acceptance(other, prompts, effort.new_tokens)
        wide = _take_turns(plain, other, effort.seconds, alone)
        if wide.draft is None:  # the device does not tell the parts: a draft for nothing shows what verifying takes
            options = replace(plan.options, draft="ngram", tree=parse_tree(f"chain:{LONGEST}"))
            other = decoder.with_drafter(DraftPlan(options, plan.target))
            for _ in _decode(other, prompts[0], effort.new_tokens):
                pass
            lookup = _take_turns(plain, other, effort.seconds, alone)
    return _costs(chains, wide, lookup, median(alone)), found


def calibration_prompts(decoder: Decoder, effort: Effort) -> list[list[int]]:
    """Token ids of shipped prompts, spread over their categories; their ends, where the context is short."""
    lines = read_prompts(str(SHIPPED))
    room = max(1, decoder.max_seq_len - effort.new_tokens)
    chosen = lines[:: max(1, len(lines) // effort.prompts)][: effort.prompts]
    return [decoder.encode(line.text)[-room:] for line in chosen]


def _costs(chains: dict[int, Timed], wide: Timed | None, lookup: Timed | None, plain_s: float) -> Costs:
    """Seconds from ratios to plain decoding's median."""
    longest = chains[LONGEST]
    a_level = 0.0 if lookup is None else max(0.0, longest.whole - lookup.whole) / LONGEST
    draft, verify = {0: 0.0}, {1: plain_s}
    for n_drafts, timed in chains.items():
        draft[n_drafts] = plain_s * (a_level * n_drafts if timed.draft is None else timed.draft)
        verify[n_drafts + 1] = plain_s * timed.whole - draft[n_drafts]
    if wide is not None:
        verify[len(comb()) + 1] = plain_s * (wide.whole - (LONGEST * a_level if wide.draft is None else wide.draft))
    return Costs(draft, verify)


def _decode(decoder: Decoder, ids: list[int], n_tokens: int) -> Iterator[tuple[int, Report]]:
    """Decode one text greedily, waiting for each round: its length before a round, and what the round reports."""
    decoder.warm_up(SamplingOptions())
    decoder.cached_ids[0] = []  # what the cache held is overwritten
    decoder.prefill.run(0, ids, 0)
    decoder.state.start(0, ids, min(len(ids) + n_tokens, decoder.max_seq_len), SamplingOptions(), 0)
    length, done = len(ids), False
    while not done:
        report = _round(decoder, length)
        yield length, report
        length, done = report.length[0], report.done[0]


def _round(decoder: Decoder, length: int) -> Report:
    runner = decoder.runner
    return runner.step("greedy", runner.bucket_for(length)) or runner.oldest()


def _rank_acceptance(decoder: Decoder, prompts: list[list[int]], n_tokens: int) -> Acceptance:
    """How often the comb's candidates of each depth and rank were what came next, where its chain was right so far."""
    tree = decoder.runner.round.drafter.tree
    hits, reached = [[0] * RANKS for _ in range(LONGEST)], [0] * LONGEST
    for ids in reversed(prompts):
        rounds = [(start, tree.drafted[0].tolist()) for start, _ in _decode(decoder, ids, n_tokens)]
        tokens = decoder.state.tokens[0, : int(decoder.state.length[0])].tolist()
        for start, drafted in rounds:
            for depth, token in enumerate(tokens[start : start + LONGEST]):
                siblings = drafted[1 + RANKS * depth :][:RANKS]
                reached[depth] += 1
                if token in siblings:
                    hits[depth][siblings.index(token)] += 1
                if token != siblings[0]:
                    break
    return tuple(tuple(n / max(1, all_) for n in ranks) for ranks, all_ in zip(hits, reached, strict=True))


def _take_turns(plain: Decoder, other: Decoder, seconds: float, alone: list[float]) -> Timed:
    """Rounds of both on their finished texts, in turns, for `seconds` but at least 12 each. Returns medians, over the
    turns, of `other` as a multiple of plain decoding's round just before, whose own seconds are added to `alone`."""
    lengths = [int(decoder.state.length[0]) for decoder in (plain, other)]
    wholes: list[float] = []
    drafts: list[float] = []
    started = time.perf_counter()
    while len(wholes) < LEAST_TURNS or time.perf_counter() - started < seconds:
        before = time.perf_counter()
        _round(plain, lengths[0])
        between = time.perf_counter()
        report = _round(other, lengths[1])
        base = between - before
        alone.append(base)
        wholes.append((time.perf_counter() - between) / base)
        if report.seconds is not None:
            drafts.append(report.seconds[0] / base)
    return Timed(median(wholes), median(drafts) if drafts else None)


def _key(plan: DraftPlan, decoder: Decoder) -> dict:
    return choice_key(plan, decoder.model, decoder.batch, decoder.cache.quantized, decoder.compile)
