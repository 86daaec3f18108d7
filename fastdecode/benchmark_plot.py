"""The benchmark's report as a picture."""

import io
from collections.abc import Mapping
from typing import Any

from fastdecode.benchmark_report import row_name


def chart(report: Mapping[str, Any]) -> bytes:
    """A PNG file: a bar for each row's median decode tokens/s, with whiskers to its slowest and fastest prompt. Needs
    matplotlib. Rows without a rate keep their place, with no bar and what they have to say."""
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    rows = report["rows"]
    figure = Figure(figsize=(9, 1.2 + 0.55 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    axes.set_yticks(places, [row_name(row) for row in rows])
    axes.invert_yaxis()  # the first row on top
    right = max((row["decode_tokens_per_s_max"] or 0.0 for row in rows), default=0.0) or 1.0
    for place, row in zip(places, rows, strict=True):
        rate = row["decode_tokens_per_s"]
        if rate is None:
            axes.text(0, place, f" {row['note'] or 'no rate'}"[:90], va="center", fontsize="small")
            continue
        low, high = row["decode_tokens_per_s_min"], row["decode_tokens_per_s_max"]
        color = "tab:blue" if row["program"] == "fastdecode" else "tab:gray"
        axes.barh(place, rate, xerr=[[rate - low], [high - rate]], color=color, capsize=3)
        axes.text(high + 0.01 * right, place, f"{rate:.1f}", va="center", fontsize="small")
    axes.set_xlim(0, 1.1 * right)
    axes.set_xlabel("decode tokens/s, median; whiskers: slowest and fastest prompt")
    machine = report["machine"]
    axes.set_title(f"{report['model']}, {machine['device']}, {machine['cpu']}", fontsize="small")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()
