"""A report as a picture for papers and slides, drawn by matplotlib: the timeline, and who is alive at its peak."""

from __future__ import annotations

import pathlib
from typing import Any

from thunder_mem.report.curve import columns, ticks
from thunder_mem.report.facts import CATEGORIES
from thunder_mem.report.report import Report, Tenant
from thunder_mem.sizes import size

__all__ = ["COLOURS", "draw"]

# Told apart by people who see no red or no green, and in grey (Okabe and Ito's palette).
COLOURS = ("#9aa5b1", "#0072b2", "#009e73", "#e69f00", "#cc79a7")
_COLUMNS = 2000
_TENANTS = 16


def draw(report: Report, path: pathlib.Path) -> None:
    """Draw what the device holds over the operations, by category, and the largest storages at the peak.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing runs, so there is nothing to draw.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'thunder-mem[plot]'") from error
    if report.peak is None:
        raise ValueError("nothing runs in this program, so there is nothing to draw")
    tenants = report.tenants[:_TENANTS]
    figure = Figure(figsize=(11, 4.8 + 0.24 * len(tenants)), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4, 0.8 + 0.24 * len(tenants)))
    _timeline(report, top)
    _lives(report, tenants, bottom)
    # No date and no random names inside, so that equal reports give equal files.
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "thunder_mem"}):
        figure.savefig(path, dpi=150, metadata=metadata)


def _timeline(report: Report, axes: Any) -> None:
    assert report.peak is not None
    live = report.prediction.device_bytes
    shown = columns(live, _COLUMNS)
    layers = [[layer[p] for p in shown] for layer in report.layers]
    used = [c for c, layer in enumerate(report.layers) if any(layer)]
    axes.stackplot(
        [*shown, len(live)],
        [[*layers[c], layers[c][-1]] for c in used],
        labels=[CATEGORIES[c] for c in used],
        colors=[COLOURS[c] for c in used],
        step="post",
        linewidth=0,
    )
    first = report.prediction.timeline[0].index
    at = report.peak.index - first
    axes.set_ylim(0, report.peak_bytes * 1.25 or 1)
    axes.set_xlim(0, len(live))
    axes.set_yticks(ticks(report.peak_bytes), [size(t) for t in ticks(report.peak_bytes)])
    on_left = at < len(live) / 2
    axes.annotate(
        f"{size(report.peak_bytes)} at {report.peak.op} #{report.peak.index}\n{report.peak.place}",
        (at + 0.5, report.peak_bytes),
        (8 if on_left else -8, 6),
        textcoords="offset points",
        ha="left" if on_left else "right",
        fontsize=8,
        parse_math=False,
    )
    axes.plot([at + 0.5], [report.peak_bytes], "v", color="#d55e00", markersize=6, clip_on=False)
    start = 0
    for phase in report.phases:
        if start:
            axes.axvline(start, color="black", linewidth=0.8, linestyle=":")
        axes.text(
            start + len(live) * 0.004, report.peak_bytes * 1.2, phase.name, fontsize=8, va="center", parse_math=False
        )
        start += phase.ops
    axes.set_title(f"Peak {size(report.peak_bytes)} in the {report.peak.phase}", loc="left", fontsize=11)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.01), ncols=5, fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelbottom=False, labelsize=8)


def _lives(report: Report, tenants: tuple[Tenant, ...], axes: Any) -> None:
    assert report.peak is not None
    timeline = report.prediction.timeline
    first = timeline[0].index
    for row, t in enumerate(tenants):
        born, last = max(t.born - first, 0), min(t.last - first, len(timeline) - 1)
        axes.barh(row, last + 1 - born, left=born, height=0.7, color=COLOURS[CATEGORIES.index(t.category)], linewidth=0)
    axes.axvline(report.peak.index - first + 0.5, color="#d55e00", linewidth=1)
    labels = [f"{size(t.nbytes)}  {_short(t)}" for t in tenants]
    axes.set_yticks(range(len(tenants)), labels, fontsize=8, parse_math=False)
    axes.invert_yaxis()
    rest = len(report.tenants) - len(tenants)
    axes.set_xlabel("operation" + (f" ({rest} smaller storages at the peak are not shown)" if rest else ""), fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(labelsize=8, left=False)


def _short(t: Tenant) -> str:
    names = t.names[0] if t.count == 1 else f"{t.count} × {t.names[0]}, …"
    return names if len(names) <= 34 else f"{names[:33]}…"
