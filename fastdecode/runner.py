"""Runs rounds: compiles them, captures them on a GPU, and hands their reports to the host.

A round is compiled once per program (greedy, sampled); the bucket is a dynamic dimension. On CUDA each (program,
bucket) is captured in a CUDA graph, and the host reads a report one round late so that it never stalls the device.
"""

import inspect
import time
import warnings
from collections import deque
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastdecode.program_cache import available, compile_or_load, stored_file
from fastdecode.round import Round
from operators import attention

SMALLEST_BUCKET = 256


class Report(NamedTuple):
    """What one round did, on the host: per sequence its length, whether it is done, and candidate new tokens.

    The tokens committed by the round are the first `length - previous length` of `new_tokens[b]`, and the first
    `n_drafted[b]` of those were drafted. `seconds`: in drafting, verifying and the rest; None where that is not known.
    """

    length: list[int]
    done: list[bool]
    n_drafted: list[int]
    new_tokens: list[list[int]]
    seconds: tuple[float, float, float] | None = None


def bucket_sizes(rows: int) -> list[int]:
    """Prefixes of a cache of `rows` rows that attention may read: powers of two from 256, then all of it."""
    sizes, size = [], SMALLEST_BUCKET
    while size < rows:
        sizes.append(size)
        size *= 2
    return [*sizes, rows]


def compiled(function):
    """`torch.compile`, as every program here uses it: one graph, compiled apart from other decoders' programs.

    Only what is marked is dynamic: left to itself, torch makes whatever differs from an earlier decoder's program (a
    norm's epsilon, say) a variable, and fails.
    """
    options = {}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # torch >= 2.13
        options["isolate_recompiles"] = True
    return torch.compile(function, fullgraph=True, dynamic=False, **options)


class Runner:
    """Advances a Round, one `step` at a time. `lag` is how many rounds the host's knowledge is behind.

    `program_folder`: where compiled programs are kept between processes; None to keep none.
    """

    def __init__(self, round_: Round, compile: bool, program_folder: Path | None = None):
        self.round = round_
        device = round_.state.tokens.device
        self.on_cuda = device.type == "cuda"
        self.lag = 1 if self.on_cuda else 0
        self.buckets = bucket_sizes(round_.cache.bin_row)
        self.cache_rows = {size: torch.arange(size, device=device) for size in self.buckets}
        if len(self.buckets) > 1:
            for rows in self.cache_rows.values():
                torch._dynamo.mark_dynamic(rows, 0)
        self.programs = {"greedy": round_.greedy, "sampled": round_.sampled}
        self.compile, self.warm = compile, set()  # programs that are ready to run
        # Programs are stored where that has been tried: on the CPU.
        self.program_folder = program_folder if compile and not self.on_cuda and available() else None
        if compile and self.program_folder is None:
            self.programs = {name: compiled(function) for name, function in self.programs.items()}
        self.captures = self.on_cuda and compile
        self.graphs: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.graph_pool = None
        self.in_flight: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self.free_slots: list[Tensor] = []  # pinned host memory, two slots once used

    def bucket_for(self, length: int) -> int:
        """The smallest bucket for a text whose known length is `length`, whatever the rounds in flight may add."""
        drafter = self.round.drafter
        needed = length + (drafter.max_depth + 1) * self.lag + drafter.n_nodes
        return next((size for size in self.buckets if size >= needed), self.buckets[-1])

    def warm_up(self, program: str) -> None:
        """Compile `program` and, on CUDA, capture every bucket. Texts are left as they are."""
        if self.program_folder is not None:
            attention.operators()  # a stored program calls it by name
            with torch.inference_mode(), warnings.catch_warnings():
                # An fp16 scale beside bf16 activations is one loop without vectors, and nothing that a user can change.
                warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")
                example = self.cache_rows[self.buckets[0]]
                self.programs[program] = compile_or_load(self.programs[program], example, self.program_folder)
        state = self.round.state
        done = state.done.clone()
        state.done.fill_(True)  # a round on a finished text changes nothing
        for size in self.buckets if self.captures else self.buckets[:1]:
            self._run(program, size)
        state.done.copy_(done)
        self.warm.add(program)

    def readiness(self, program: str) -> str:
        """"ready" when `program` would run at once, "stored" when it lies on the disk, "missing" when it would have to
        be compiled."""
        if not self.compile or program in self.warm:
            return "ready"
        if self.program_folder is None:
            return "missing"
        return "stored" if self.stored_file(program).is_file() else "missing"

    def stored_file(self, program: str) -> Path:
        """Where the compiled form of `program` is stored, or would be."""
        return stored_file(self.programs[program], self.cache_rows[self.buckets[0]], self.program_folder)

    def step(self, program: str, bucket: int) -> Report | None:
        """Run one round. Returns the report of the round `lag` rounds ago, or None if there was none."""
        started = time.perf_counter_ns()
        report = self._run(program, bucket)
        if not self.on_cuda:
            return _on_host(report)._replace(seconds=self._parts(started, time.perf_counter_ns()))
        slot = self.free_slots.pop() if self.free_slots else torch.empty_like(report, device="cpu").pin_memory()
        slot.copy_(report, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.in_flight.append((slot, event))
        return self.oldest() if len(self.in_flight) > self.lag else None

    def oldest(self) -> Report | None:
        """Wait for the oldest round in flight and return its report; None if nothing is in flight."""
        if not self.in_flight:
            return None
        slot, event = self.in_flight.popleft()
        event.synchronize()
        report = _on_host(slot)
        self.free_slots.append(slot)
        return report

    def _parts(self, started: int, ended: int) -> tuple[float, float, float] | None:
        if self.round.times is None:
            return None
        drafted, verified = self.round.times.tolist()
        return (drafted - started) / 1e9, (verified - drafted) / 1e9, (ended - verified) / 1e9

    @torch.inference_mode()
    def _run(self, program: str, bucket: int) -> Tensor:
        if not self.captures:
            return self.programs[program](self.cache_rows[bucket])
        if (program, bucket) not in self.graphs:
            self.graphs[program, bucket] = self._capture(program, bucket)
        graph, report = self.graphs[program, bucket]
        graph.replay()
        return report

    def _capture(self, program: str, bucket: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Record the round for one bucket. Warm-up and recording run on finished texts, so they commit nothing."""
        state, rows = self.round.state, self.cache_rows[bucket]
        done = state.done.clone()
        state.done.fill_(True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.programs[program](rows)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if self.graph_pool is None:
            self.graph_pool = torch.cuda.graph_pool_handle()  # graphs run one at a time and can share their memory
        with torch.cuda.graph(graph, pool=self.graph_pool):
            report = self.programs[program](rows)
        state.done.copy_(done)
        return graph, report


def _on_host(report: Tensor) -> Report:
    rows = report.tolist()
    return Report([r[0] for r in rows], [bool(r[1]) for r in rows], [r[2] for r in rows], [r[3:] for r in rows])
