"""A checkpoint, quantized: one matrix at a time, or with gptq one decoder layer at a time, from file to file."""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn

from checkpoints.checkpoint import set_parameters
from models.layers import DecoderLayer
from quantize.calibration import LayerwiseCalibration
from quantize.files import quantization_config
from quantize.gptq import gptq_matrix
from quantize.methods import quantize_matrix, relative_error, rows_at_a_time
from quantize.plan import DRAFT, Options, Piece, Plan
from quantize.report import MatrixResult, Report
from quantize.storage import Quantized
from quantize.writer import CheckpointWriter, new_folder, write_text

COPIED = ("*.json", "*.jinja", "*.model", "tokenizer*", "merges.txt", "LICENSE*", "NOTICE*")
NOT_COPIED = ("config.json", "*.index.json")

Progress = Callable[[str, int], None]  # a tensor's name, and how many weights are done with it
Done = tuple[Piece, Tensor | Quantized, MatrixResult | None]


@dataclass(frozen=True)
class Job:
    """A plan, where it goes inside the new folder, and files that go beside it, by name."""

    plan: Plan
    place: str = ""
    files: Mapping[str, bytes] | None = None  # None: those beside the source's weights


def quantize_checkpoint(
    plan: Plan,
    out: Path,
    options: Options,
    *,
    token_ids: Tensor | None = None,
    head: Plan | None = None,
    files: Mapping[str, bytes] | None = None,
    progress: Progress = lambda name, n_weights: None,
) -> Report:
    """Write the quantized checkpoint of `plan` to the folder `out`, and that of `head` to `out/draft`.

    `token_ids [n, length]`: texts to calibrate on, for gptq. `files`: what goes beside the weights of a source that is
    no folder (its tokenizer). Held in memory at any time: one matrix and its quantized form; with gptq one decoder
    layer in fp32, its Hessians, and the texts' states. Raises InputError for what cannot be read, quantized or
    written; `out` then is as it was.
    """
    started = time.perf_counter()
    jobs = [Job(plan, "", files)] + ([Job(head, DRAFT)] if head else [])
    results: list[MatrixResult] = []
    with new_folder(out) as folder:
        for job in jobs:
            place = folder / job.place
            place.mkdir(exist_ok=True)
            with CheckpointWriter(place, [p.entry for p in job.plan.pieces], options.shard_bytes) as writer:
                uses_calibration = any(p.bits and p.method == "gptq" for p in job.plan.pieces)
                steps = _by_layer(job.plan, token_ids) if uses_calibration else _by_matrix(job.plan.pieces)
                for piece, value, result in steps:
                    writer.add(piece.name, value)
                    progress(job.place + piece.name, torch.Size(piece.shape).numel())
                    if result is not None:
                        results.append(result.within(job.place))
            _write_rest(job, place, options)
        after = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    kept = tuple(job.place + p.name for job in jobs for p in job.plan.pieces if p.is_matrix and not p.bits)
    before = sum(job.plan.bytes_before for job in jobs)
    dropped = tuple(sentence for job in jobs for sentence in job.plan.dropped)
    return Report(tuple(results), kept, dropped, before, after, time.perf_counter() - started)


def _write_rest(job: Job, place: Path, options: Options) -> None:
    """config.json, and the files beside the weights."""
    if job.files is None and job.plan.path.is_dir():
        for file in sorted(job.plan.path.iterdir()):
            wanted = any(file.match(pattern) for pattern in COPIED) and not any(map(file.match, NOT_COPIED))
            if wanted and file.is_file():
                shutil.copyfile(file, place / file.name)
    for name, content in (job.files or {}).items():
        write_text(place / name, content)
    method = "als" if job.place and options.method == "gptq" else options.method
    ours = {"quantization_config": quantization_config(options.bits, options.group_size, method)}
    write_text(place / "config.json", json.dumps(job.plan.config_json | ours, indent=2, ensure_ascii=False) + "\n")


def _by_matrix(pieces: Iterable[Piece]) -> Iterator[Done]:
    for piece in pieces:
        if not piece.bits:
            yield piece, piece.read(), None
            continue
        weight = piece.read(piece.working_dtype)
        quantized = quantize_matrix(weight, piece.bits, piece.group_size, piece.method, piece.name)
        result = _result(piece, weight, quantized)
        del weight  # before the next one is read
        yield piece, quantized, result


@torch.no_grad()
def _by_layer(plan: Plan, token_ids: Tensor) -> Iterator[Done]:
    """gptq: each layer is filled with the original weights, sees the texts as the quantized layers before it pass them
    on, and passes them on with its own quantized weights. Embedding and lm_head have no such inputs: `piece.method`."""
    calibration = None
    for layer, pieces in groupby(plan.pieces, key=lambda piece: piece.layer):
        if layer is not None:
            if calibration is None:
                raise ValueError("the embedding comes before the layers")
            yield from _layer(plan, layer, list(pieces), calibration)
            continue
        for piece, value, result in _by_matrix(pieces):
            yield piece, value, result
            if piece.slot.parameter == "embed_tokens.weight":
                embedding = nn.Embedding(*piece.shape, device="meta")
                weight = value.dequantize() if isinstance(value, Quantized) else value.float()
                set_parameters(embedding, {"weight": weight})
                calibration = LayerwiseCalibration(plan.config, embedding, token_ids)
                del embedding, weight


def _layer(plan: Plan, index: int, pieces: list[Piece], calibration: LayerwiseCalibration) -> Iterator[Done]:
    """One decoder layer of `plan`, whose `pieces` fill it."""
    with torch.device("meta"):
        layer = DecoderLayer(plan.config, index).eval()
    prefix = f"layers.{index}."
    filled = {name: torch.empty(p.shape) for name, p in layer.named_parameters()}
    for piece in pieces:
        piece.source.copy_to(filled[piece.slot.parameter.removeprefix(prefix)][piece.slot.index])
    set_parameters(layer, filled)
    hessians = calibration.layer(index, layer)
    for piece in pieces:
        if not piece.bits:
            yield piece, piece.read(), None
            continue
        parameter = piece.slot.parameter.removeprefix(prefix)
        weight, hessian = filled[parameter][piece.slot.index], hessians[parameter.removesuffix(".weight")]
        quantized = gptq_matrix(weight, hessian, piece.bits, piece.group_size, name=piece.name)
        result = _result(piece, weight, quantized)
        weight.copy_(quantized.dequantize())  # the layer passes the texts on with these
        yield piece, quantized, result
    hessians.clear()
    calibration.advance(layer)


def _result(piece: Piece, weight: Tensor, quantized: Quantized) -> MatrixResult:
    length = sum(rows.double().square().sum().item() for rows in weight.split(rows_at_a_time(weight)))
    return MatrixResult(
        piece.name, piece.slot.parameter, relative_error(weight, quantized), length, weight.numel(), quantized.n_bytes
    )
