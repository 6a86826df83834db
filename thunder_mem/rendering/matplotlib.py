"""A timeline as a matplotlib picture for papers and slides, with the storages alive at its peak."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from thunder_mem.memory.outside_input import shortened
from thunder_mem.memory.units import size
from thunder_mem.rendering.curve import columns, labelled, ticks, whole_numbers
from thunder_mem.rendering.document import Life, TimelineView

__all__ = ["COLOURS", "blank_figure", "draw", "write_figure"]

# Distinguishable without red or green, and in grey (Okabe and Ito's palette).
COLOURS = ("#9aa5b1", "#0072b2", "#009e73", "#e69f00", "#cc79a7")
_COLUMNS = 2000
_LIVES = 16
_LABEL_WIDTH = 0.015  # of a label that stands upright, as a share of the picture's width


def blank_figure(width: float, height: float) -> Any:
    """An empty figure of that size in inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'thunder-mem[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: Any, path: pathlib.Path) -> None:
    """Save a figure, without a date or random names inside, so that equal reports give equal files."""
    from matplotlib import rc_context

    date = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix)
    with rc_context({"svg.hashsalt": "thunder_mem"}):
        figure.savefig(path, dpi=150, metadata={date: None} if date else {})


def draw(view: TimelineView | None, path: pathlib.Path) -> None:
    """Draw the device's bytes over the operations, by category, and the largest storages at the peak.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing runs, so there is nothing to draw.
    """
    if view is None:
        raise ValueError("nothing runs in this program, so there is nothing to draw")
    lives = view.lives[:_LIVES]
    figure = blank_figure(11, 4.8 + 0.24 * len(lives))
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4, 0.8 + 0.24 * len(lives)))
    _timeline(view, top)
    _lives(view, lives, bottom)
    write_figure(figure, path)


def _timeline(view: TimelineView, axes: Any) -> None:
    shown = columns(view.device_bytes, _COLUMNS)
    layers = [[layer[p] for p in shown] for layer in view.layers]
    used = [c for c, layer in enumerate(view.layers) if any(layer)]
    axes.stackplot(
        [*shown, view.ops],
        [[*layers[c], layers[c][-1]] for c in used],
        labels=[view.categories[c] for c in used],
        colors=[COLOURS[c] for c in used],
        step="post",
        linewidth=0,
    )
    axes.set_ylim(0, view.peak_bytes * 1.25 or 1)
    axes.set_xlim(0, view.ops)
    axes.set_yticks(ticks(view.peak_bytes), [size(t) for t in ticks(view.peak_bytes)])
    on_left = view.peak < view.ops / 2
    axes.annotate(
        f"{size(view.peak_bytes)} at {view.label(view.peak)}\n{view.place(view.peak)}",
        (view.peak + 0.5, view.peak_bytes),
        (8 if on_left else -8, 6),
        textcoords="offset points",
        ha="left" if on_left else "right",
        fontsize=8,
        parse_math=False,
    )
    axes.plot([view.peak + 0.5], [view.peak_bytes], "v", color="#d55e00", markersize=6, clip_on=False)
    _loops(view, axes)
    start = 0
    for name, count in view.phases:
        if start:
            axes.axvline(start, color="black", linewidth=0.8, linestyle=":")
        axes.text(start + view.ops * 0.004, view.peak_bytes * 1.2, name, fontsize=8, va="center", parse_math=False)
        start += count
    axes.set_title(f"Peak {size(view.peak_bytes)} in the {view.peak_phase}", loc="left", fontsize=11)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.01), ncols=5, fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelbottom=False, labelsize=8)


def _loops(view: TimelineView, axes: Any) -> None:
    """Hatches below each operation that runs part by part, with its parts where there is room."""
    positions = [position for position, _ in view.loops]
    heights = [view.device_bytes[p] for p in positions]
    axes.bar(positions, heights, 1, align="edge", fill=False, hatch="////", edgecolor="#1b1f24", linewidth=0, alpha=0.4)
    for position, parts in labelled(view.loops, _LABEL_WIDTH * view.ops):
        axes.text(
            position + 0.5, view.peak_bytes * 0.02, parts, fontsize=7, rotation=90, ha="center", va="bottom",
            parse_math=False, bbox={"boxstyle": "square,pad=0.1", "color": "white", "alpha": 0.7, "linewidth": 0},
        )  # fmt: skip


def _lives(view: TimelineView, lives: Sequence[Life], axes: Any) -> None:
    for row, life in enumerate(lives):
        length = life.last + 1 - life.born
        axes.barh(row, length, left=life.born, height=0.7, color=COLOURS[life.category], linewidth=0)
    axes.axvline(view.peak + 0.5, color="#d55e00", linewidth=1)
    labels = [f"{size(life.nbytes)}  {_short(life)}" for life in lives]
    axes.set_yticks(range(len(lives)), labels, fontsize=8, parse_math=False)
    axes.invert_yaxis()
    numbers = whole_numbers(view.ops)
    axes.set_xticks([n + 0.5 for n in numbers], [f"#{view.first + n}" for n in numbers])
    rest = len(view.lives) - len(lives)
    axes.set_xlabel("operation" + (f" ({rest} smaller storages at the peak are not shown)" if rest else ""), fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(labelsize=8, left=False)


def _short(life: Life) -> str:
    name = life.name if life.count == 1 else f"{life.count} × {life.name}, …"
    return shortened(name, 34)
