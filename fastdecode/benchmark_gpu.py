"""`--suite gpu`: what only a CUDA card can show, in parts that can be interrupted and go on where they were.

Needs no network and no model. Every measurement is written to the output file when it is made; what the file holds
already is left out.
"""

import contextlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from checkpoints.json_text import parse_json
from fastdecode.benchmark_gpu_exact import exact_entries
from fastdecode.benchmark_gpu_kernels import kernel_entries
from fastdecode.benchmark_gpu_models import Sizes
from fastdecode.benchmark_gpu_rounds import free, memory_entries, round_entries
from fastdecode.benchmark_report import as_report, as_text, machine, write_atomically
from fastdecode.loading import choose_device
from fastdecode.memory import measure_bandwidth
from models.errors import InputError

Entry = tuple[str, Callable[[], dict[str, Any]]]
PARTS: Mapping[str, Callable[[torch.device, Sizes], Iterator[Entry]]] = {
    "kernels": kernel_entries,
    "rounds": round_entries,
    "exact": exact_entries,
    "memory": memory_entries,
}
# A part takes under eight minutes: none of its measurements begins later than this, and none takes minutes.
PART_LIMIT_S = 5.5 * 60
QUERY = ("name", "driver_version", "power.limit", "clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu")


def run_suite(output: str | None, parts: Sequence[str], device_name: str = "auto") -> None:
    """Measure `parts`, leaving out what the file `output` holds, and print the JSON object. Raises InputError without a
    CUDA device, and for a file that another card or torch has made."""
    if not torch.cuda.is_available():
        raise InputError("--suite gpu needs a CUDA device, and this machine or this build of torch has none.")
    device = choose_device(device_name)
    if device.type != "cuda":
        raise InputError(f"--suite gpu measures a CUDA device; leave out --device {device_name}.")
    report = start_report(device, None if output is None else Path(output))
    run_parts(report, parts, device, Sizes(), None if output is None else Path(output))
    print(as_text(report))


def start_report(device: torch.device, output: Path | None) -> dict[str, Any]:
    """The object in the file `output`, if it is there, else one without any part: `machine` with card, power cap,
    clocks and versions, and `parts`, `model` and `rows` being the other suites'."""
    here = machine(device, measure_bandwidth(device)) | versions() | {"card": card_state(device)}
    if output is None or not output.is_file():
        return {**as_report(here, None, []), "parts": {}}
    try:
        known = parse_json(output.read_text(encoding="utf-8"))
        theirs = {key: known["machine"][key] for key in ("device", "torch")}
        dict(known["parts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--output {output}: is no result of --suite gpu; give another file.") from error
    if theirs != {key: here[key] for key in theirs}:
        raise InputError(f"--output {output}: was made by {theirs}, which is not this machine; give another file.")
    return known


def run_parts(
    report: dict[str, Any], parts: Iterable[str], device: torch.device, sizes: Sizes, output: Path | None,
    limit_s: float = PART_LIMIT_S,
) -> None:  # fmt: skip
    """Fill `report["parts"]`: per part `complete`, `card` (its clocks at the end) and `entries` by name. An entry that
    failed is `{"error": …}` and is tried again the next time; a part that runs out of time is left incomplete."""
    for name in parts:
        part = report["parts"].setdefault(name, {"complete": False, "entries": {}})
        if part["complete"]:
            _say(f"{name}: in the file already")
            continue
        started = time.perf_counter()
        left_out = 0
        for entry, measure in PARTS[name](device, sizes):
            if "error" not in part["entries"].get(entry, {"error": ""}):
                continue
            if time.perf_counter() - started > limit_s:
                left_out += 1
                continue
            part["entries"][entry] = measured(measure)
            _say(f"{name}: {entry}: {json.dumps(part['entries'][entry])[:160]}")
            torch._dynamo.reset()  # torch before 2.13 counts the programs of all entries as one's recompilations
            _write(output, report)
        measure = None  # it refers to the part's last network
        part["complete"] = not left_out and not any("error" in found for found in part["entries"].values())
        part["card"] = card_state(device)
        free(device)
        if left_out:
            _say(f"{name}: {left_out} measurements left for the next run; give the same command again")
        _write(output, report)


def measured(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` returns, or why it failed: one failure does not cost the other figures."""
    try:
        return measure()
    except Exception as error:  # out of memory, a kernel that does not compile: both are findings
        return {"error": f"{type(error).__name__}: {str(error).strip()[:500]}"}


def versions() -> dict[str, str | None]:
    """What else figures depend on."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda, "triton": None}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["triton"] = metadata.version("triton")
    return found


def card_state(device: torch.device) -> dict[str, str] | None:
    """Name, driver, power cap in W, clocks in MHz and temperature, as the driver's own tool tells them; None without
    it."""
    if device.type != "cuda":
        return None
    card = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", "-i", card]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(QUERY, (value.strip() for value in told.strip().split(",")), strict=False))


def _write(output: Path | None, report: Mapping[str, Any]) -> None:
    if output is not None:
        write_atomically(output, as_text(report) + "\n")


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
