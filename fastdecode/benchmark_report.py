"""What the benchmark writes down: the machine, a row per program, the table and the JSON object."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.box import ASCII2
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastdecode.memory import cpu_name
from models.errors import InputError

SHORT_DTYPE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Row:
    """One program's figures; the fields are the JSON's keys, in its order. None: not measured.

    Rates are tokens/s of one text, over the prompts; `new_tokens` is their sum. `matched`: prompts whose tokens equal
    plain decoding's. `kv_cache`: the precision of keys and values.
    `bytes_per_round`: what a round has to read at the least. Times in seconds or, where named so, ms. `speedup`: over
    plain fastdecode in the same precision (other programs: as the model was loaded first). `mode`: how another program
    ran: eager, compiled. `note`: why a row has no figures, or what they need said. `lookup`: see --lookup; None without
    a head.
    """

    program: str
    weights: str
    kv_cache: str
    draft: str = "none"
    tree: str | None = None
    batch: int = 1
    prompts: int = 0
    new_tokens: int = 0
    decode_tokens_per_s: float | None = None
    decode_tokens_per_s_min: float | None = None
    decode_tokens_per_s_max: float | None = None
    ttft_s: Mapping[str, float | None] = field(default_factory=dict)
    tau: float | None = None
    accept_by_depth: tuple[float, ...] = ()
    speedup: float | None = None
    matched: int | None = None
    first_difference_margins: tuple[float, ...] = ()
    draft_ms: float | None = None
    verify_ms: float | None = None
    rest_ms: float | None = None
    bytes_per_round: int | None = None
    bandwidth_share: float | None = None
    peak_memory_mb: float | None = None
    cold_compile_s: float | None = None
    warm_start_s: float | None = None
    tau_by_category: Mapping[str, float] = field(default_factory=dict)
    mode: str | None = None
    note: str | None = None
    lookup: int | None = None


def machine(device: torch.device, bandwidth: float | None) -> dict[str, Any]:
    """What the figures were measured on. `bandwidth` in bytes/s, None where it was not measured."""
    on_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else "cpu",
        "power_limit_w": _power_limit(device) if on_cuda else None,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": torch.__version__,
        "bandwidth_gb_s": None if bandwidth is None else round(bandwidth / 1e9, 2),
    }


def as_report(machine: Mapping[str, Any], model: str, rows: list[Row]) -> dict[str, Any]:
    """The JSON object, as plain Python values."""
    return {"machine": dict(machine), "model": model, "rows": [asdict(row) for row in rows]}


def as_text(report: Mapping[str, Any]) -> str:
    """The report as one line of JSON."""
    return json.dumps(report, allow_nan=False)


def as_table(report: Mapping[str, Any]) -> str:
    """The report for people: a column per program, a line per figure, those left out that nothing was measured for."""
    rows = report["rows"]
    table = Table(box=ASCII2)
    table.add_column(Text(str(report["model"])))
    for row in rows:
        table.add_column(Text(row_name(row)), justify="right")
    for label, cells in _lines(rows):
        if any(cells):
            table.add_row(label, *(cell or "-" for cell in cells))
    out = io.StringIO()
    in_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if in_terminal else 100
    console = Console(file=out, force_terminal=in_terminal, width=width)
    console.print(table)
    for row in rows:
        if row["note"]:
            console.print(f"{row_name(row)}: {row['note']}", markup=False, soft_wrap=True)
    for found in report.get("context", []):
        rates = found["decode_tokens_per_s"].items()
        said = [f"{rate:.1f} tokens/s behind {n} tokens" for n, rate in rates if rate is not None]
        if found["ms_per_1000_rows"] is not None:
            said.append(f"{found['ms_per_1000_rows']:.2f} ms a token for 1,000 cached tokens more")
        console.print(f"{found['weights']}, {found['kv_cache']} cache: {'; '.join(said) or '-'}", soft_wrap=True)
    return out.getvalue().rstrip("\n")


def row_name(row: Mapping[str, Any]) -> str:
    """A row's program in a few words."""
    draft = "" if row["draft"] == "none" else f" {Path(row['draft']).name} {row['tree']}"
    draft += f" lookup {row['lookup']}" if row.get("lookup") else ""
    cache = "" if row["kv_cache"] == row["weights"] else f" {row['kv_cache']} cache"
    mode = f" {row['mode']}" if row["mode"] else ""
    return f"{row['program']}{mode} {row['weights']}{cache}{draft}"


def _lines(rows: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    def each(template: str, *keys: str) -> list[str]:
        found = [[row[key] for key in keys] for row in rows]
        return ["" if any(value is None for value in values) else template.format(*values) for values in found]

    lengths = list(rows[0]["ttft_s"])
    first_token = [
        (f"first token after {n} prompt tokens, s", [_seconds(row["ttft_s"].get(n)) for row in rows]) for n in lengths
    ]
    drafted = [row for row in rows if row["accept_by_depth"]]
    names = dict.fromkeys(name for row in drafted for name in row["tau_by_category"])
    categories = [
        (f"  {name}", ["" if row["tau_by_category"].get(name) is None else f"{row['tau_by_category'][name]:.2f}"
                       for row in rows])
        for name in names
    ]
    accepted = [
        (f"rounds that accepted more than {d} drafts", [
            f"{row['accept_by_depth'][d]:.0%}" if d < len(row["accept_by_depth"]) else "" for row in rows])
        for d in range(max((len(row["accept_by_depth"]) for row in drafted), default=0))
    ]
    margins = [", ".join(f"{m:.3f}" for m in sorted(row["first_difference_margins"])[:8]) for row in rows]
    differences = [("  lead of the top token where others part", margins)]
    return [
        ("decode tokens/s, median", each("{:.1f}", "decode_tokens_per_s")),
        ("  slowest prompt", each("{:.1f}", "decode_tokens_per_s_min")),
        ("  fastest prompt", each("{:.1f}", "decode_tokens_per_s_max")),
        ("  against plain fastdecode", each("{:.2f}x", "speedup")),
        ("  share of memory bandwidth", each("{:.0%}", "bandwidth_share")),
        ("prompts", each("{}", "prompts")),
        ("  with the same tokens as plain", each("{}", "matched")),
        ("new tokens", each("{}", "new_tokens")),
        *differences,
        ("tokens per round", each("{:.2f}", "tau")),
        *categories,
        *accepted,
        ("drafting, ms a round", each("{:.1f}", "draft_ms")),
        ("verifying, ms a round", each("{:.1f}", "verify_ms")),
        ("the rest, ms a round", each("{:.1f}", "rest_ms")),
        *first_token,
        ("compile with an empty cache, s", each("{:.1f}", "cold_compile_s")),
        ("second start to first token, s", each("{:.1f}", "warm_start_s")),
        ("peak memory, MB", each("{:,.0f}", "peak_memory_mb")),
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` (text in UTF-8) to `path`, which has either its old content or all of the new. Raises InputError
    if it cannot."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        try:
            with open(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            os.chmod(temporary, 0o644)  # mkstemp's files are for their owner alone
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error}).") from error


def _power_limit(device: torch.device) -> float | None:
    """The card's power cap in watts, as the driver's own tool tells it; None where that is not installed."""
    command = ["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader,nounits"]
    card = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        told = subprocess.run([*command, "-i", card], capture_output=True, text=True, timeout=20, check=True)
        return float(told.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
