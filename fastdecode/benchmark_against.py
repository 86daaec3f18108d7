"""`--against`: which other programs there are, each in turns with ours on every prompt, and a row for each."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.checkpoint import read_config
from fastdecode.benchmark_rows import first_difference, mean_length, median_of, rate_fields, ratio
from fastdecode.decoder import Decoder
from fastdecode.request import Result
from models.transformer import Transformer
from quantize.linear import QuantizedLinear
from quantize.network import load_network
from quantize.on_the_fly import BITS, quantized_copy

WARM_UP_TOKENS = 16
MODES = {"transformers": "eager", "transformers-compiled": "compiled", "transformers-lookup": "lookup"}
WARM_UP_LIMIT_S = 300.0  # for torch.compile in another program; an eager one is done in seconds


@dataclass
class Contender:
    """Another program and its answers so far. `peer` is None where it does not run here; `note` says why."""

    row: Mapping[str, str | None]
    peer: Any = None  # a benchmark_peers.Peer
    note: str | None = None
    answers: list = field(default_factory=list)

    def answer(self, prompt_ids: list[int], n_tokens: int) -> None:
        """Take a turn."""
        if self.peer is not None:
            self.answers.append(self.peer.generate(prompt_ids, n_tokens))


def contenders(
    names: Sequence[str], decoder: Decoder, path: Path, quantize: str, prompt: list[int], longest: int, reach: int
) -> list[Contender]:
    """The programs in `names`, warmed up on `prompt`. `path`: the checkpoint; `quantize`: how ours was loaded.

    `longest`: tokens of the longest text that is decoded; `reach`: of any text, those for the first token included.
    """
    found, network = [], None
    for name in names:
        if name == "llama.cpp":
            from fastdecode.benchmark_llama import LlamaCppPeer  # not everybody has it

            peer = LlamaCppPeer(decoder.model, path, decoder.stop_ids, reach)
        else:
            from fastdecode.benchmark_peers import TransformersPeer  # a slow import, and not everybody has it

            network = network or _as_floats(decoder.model, path, quantize)
            peer = TransformersPeer(network, path, MODES[name], longest)
        found.append(_warmed_up(peer, prompt))
    return found


def contender_row(
    contender: Contender,
    decoder: Decoder,
    prompts: Sequence[list[int]],
    results: Sequence[Result],
    first_tokens: Mapping[int, tuple[list[int], int]],
    bandwidth: float,
    comparable: bool,
) -> dict[str, Any]:
    """The fields of a program's row. `results`: plain decoding's, of the same `prompts`; `first_tokens`: per prompt
    length, the prompt and how often to measure it; `bandwidth` in bytes/s; `comparable`: ours took the likeliest token,
    as the others do."""
    peer, answers = contender.peer, contender.answers
    if peer is None:
        return {**contender.row, "ttft_s": dict.fromkeys(map(str, first_tokens)), "note": contender.note}
    margins, matched = [], 0
    for ids, ours, theirs in zip(prompts, results, answers, strict=True):
        different = first_difference(ours, theirs.token_ids, decoder.stop_ids)
        if different is None:
            matched += 1
        elif comparable:
            margins.append(peer.margin(ids + theirs.token_ids[:different]))
    rates = rate_fields([answer.decode_tokens_per_s for answer in answers])
    per_round = round(peer.bytes_per_round(mean_length(results)))
    tau = sum(len(a.token_ids) for a in answers) / sum(a.rounds for a in answers)
    ends_in_stop = sum(a.token_ids[-1] in decoder.stop_ids for a in answers)
    return {
        **contender.row,
        **rates,
        "prompts": len(answers),
        "new_tokens": sum(len(a.token_ids) for a in answers) - ends_in_stop,
        "ttft_s": {
            str(n): median_of([peer.generate(ids, 1).ttft_s for _ in range(repeats)])
            for n, (ids, repeats) in first_tokens.items()
        },
        "tau": tau,
        "matched": matched if comparable else None,
        "first_difference_margins": tuple(margins),
        "bytes_per_round": per_round,
        "bandwidth_share": ratio(rates["decode_tokens_per_s"], bandwidth / per_round * tau),
        "note": contender.note,
    }


def _as_floats(model: Transformer, path: Path, quantize: str) -> Transformer:
    """`model` itself, or the same numbers as floats where it has quantized matrices."""
    if not any(isinstance(layer, QuantizedLinear) for layer in model.modules()):
        return model
    stored = quantized_copy(path, read_config(path), quantize, lambda sentence: None) if quantize in BITS else path
    weight = model.norm.weight
    return load_network(stored, read_config(stored), weight.device, weight.dtype, quantized=False)


def _warmed_up(peer: Any, prompt: list[int]) -> Contender:
    """A program that has answered once. One that compiles may fail at that, or take for ever: its row says so."""
    compiles = peer.row.get("mode") == "compiled"
    started = time.perf_counter()
    try:
        with time_limit(WARM_UP_LIMIT_S) if compiles else contextlib.nullcontext():
            peer.generate(prompt, WARM_UP_TOKENS)
    except TimeoutError:
        return Contender(peer.row, None, f"not measured: compiling took more than {WARM_UP_LIMIT_S:.0f} s")
    except Exception as error:  # whatever it is, it is the other program's, and no reason to lose the other rows
        if not compiles:
            raise
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        return Contender(peer.row, None, f"not measured: compiling failed ({said})")
    note = f"its first answer, with compiling, took {time.perf_counter() - started:.0f} s" if compiles else None
    return Contender(peer.row, peer, note)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`; nothing where signals cannot interrupt (threads, Windows)."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
