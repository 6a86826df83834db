"""The matrix as a Markdown table and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thunder_mem.benchmarks.matrix import COMPILERS, MODELS

__all__ = ["draw", "markdown"]

Row = dict[str, Any]
_OURS = ("MemEfficient", "MemEfficient, smallest")
_COLOURS = dict(zip(COMPILERS, ("#8c8c8c", "#e0a030", "#4477aa", "#66aacc", "#bb3344", "#e58c99"), strict=True))


def markdown(rows: Sequence[Row]) -> str:
    """The peaks of all rows in decimal GB, the benchmark's unit, with what failed and how, and the step times.

    Example:
        >>> row = {"model": "gpt2-124m", "checkpointing": True, "loss_inside": True, "compiler": "eager"}
        >>> text = markdown([{**row, "command": "c", "peak_bytes": 2_850_000_000, "device": "cpu", "versions": {}}])
        >>> "| gpt2-124m | on | inside | **2.850** |" in text
        True
    """
    machines = sorted({row["device"] for row in rows if "device" in row})
    lines = [f"Peak of the benchmark's training loop in GB (10^9 bytes) on: {'; '.join(machines)}.", ""]
    lines += _table(rows, _peak, "least")
    times = {name: _time_of(rows, name) for name in ("median_iter_time", "roofline_ms")}
    for name, title in (
        ("median_iter_time", "Median time of a step in ms"),
        ("roofline_ms", "Forward and backward by the roofline in ms (predicted; what Thunder compiles only)"),
    ):
        if times[name]:
            lines += ["", f"{title}:", "", *_table(times[name], lambda row, key=name: row[key], "")]
    failed = [row for row in rows if "error" in row]
    if failed:
        lines += ["", "Failed:", ""]
        lines += [f"- {_name(row)}, {row['compiler']}: `{row['error'].replace('`', '')}`" for row in failed]
    found = [row["versions"] for row in rows if row.get("versions")]
    if found:
        same = {k: sorted({v[k] for v in found if k in v}) for k in dict.fromkeys(k for v in found for k in v)}
        lines += ["", "Versions: " + ", ".join(f"{k} {' and '.join(v)}" for k, v in same.items()) + "."]
    return "\n".join(lines) + "\n"


def _time_of(rows: Sequence[Row], key: str) -> list[Row]:
    return [row for row in rows if row.get(key) is not None]


def _peak(row: Row) -> float:
    return row["peak_bytes"] / 1e9


def _table(rows: Sequence[Row], value: Any, emphasis: str) -> list[str]:
    compilers = [name for name in COMPILERS if any(row["compiler"] == name for row in rows)]
    ratio = bool(emphasis) and "MemEfficient" in compilers and len(compilers) > 1
    head = ["model", "checkpointing", "loss", *compilers, *(["MemEfficient / best peer"] if ratio else [])]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * 3 + "---:|" * (len(head) - 3)]
    for group in _groups(rows):
        by = {row["compiler"]: row for row in group}
        values = {name: value(row) for name, row in by.items() if "error" not in row}
        best = min(values.values(), default=None)
        cells = []
        for name in compilers:
            if name not in by:
                cells.append("")
            elif name not in values:
                cells.append("failed")
            else:
                text = f"{values[name]:.3f}" if emphasis else f"{values[name]:.1f}"
                cells.append(f"**{text}**" if emphasis and values[name] == best else text)
        if ratio:
            peers = [v for name, v in values.items() if name not in _OURS]
            ours = values.get("MemEfficient")
            cells.append(f"{ours / min(peers):.3f}" if ours is not None and peers else "")
        lines.append("| " + " | ".join([*_words(group[0]), *cells]) + " |")
    return lines


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["checkpointing"], row["loss_inside"]), []).append(row)
    names = list(MODELS)
    return [groups[key] for key in sorted(groups, key=lambda k: (names.index(k[0]), not k[1], k[2]))]


def _words(row: Row) -> list[str]:
    checkpointing, loss = ("on" if row["checkpointing"] else "off"), ("inside" if row["loss_inside"] else "outside")
    return [row["model"], checkpointing, loss]


def _name(row: Row) -> str:
    model, checkpointing, loss = _words(row)
    return f"{model}, checkpointing {checkpointing}, loss {loss}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """A panel for each way to train: the peaks of every model as shares of eager's, written above eager's bar in GB."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ways = [way for way in ((True, False), (True, True), (False, False), (False, True)) if _with(rows, *way)]
    compilers = [name for name in COMPILERS if any(row["compiler"] == name for row in rows)]
    figure, axes = plt.subplots(len(ways), 1, figsize=(11, 2.9 * len(ways) + 0.6), layout="constrained", squeeze=False)
    for axis, (checkpointing, loss_inside) in zip(axes[:, 0], ways, strict=True):
        chosen = [row for row in _with(rows, checkpointing, loss_inside) if "error" not in row]
        peaks = {(row["model"], row["compiler"]): _peak(row) for row in chosen}
        models = [name for name in MODELS if any(row["model"] == name for row in chosen)]
        for place, model in enumerate(models):
            mine = {name: peaks[model, name] for name in compilers if (model, name) in peaks}
            base = mine.get("eager", max(mine.values()))
            for name, peak in mine.items():
                x = place + (compilers.index(name) - (len(compilers) - 1) / 2) * 0.14
                axis.bar(x, peak / base, 0.13, color=_COLOURS[name])
            axis.annotate(f"{base:.2f} GB", (place, 1), (0, 2), textcoords="offset points", ha="center", fontsize=7)
        axis.axhline(1, color="#8c8c8c", linewidth=0.6)
        axis.set_xticks(range(len(models)), models, fontsize=8)
        axis.set_ylabel("peak / eager's")
        axis.set_ylim(0, 1.3)
        on, where = ("on" if checkpointing else "off"), ("inside" if loss_inside else "outside")
        axis.set_title(f"checkpointing {on}, loss {where}", loc="left", fontsize=10)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[name]) for name in compilers]
    figure.legend(handles, compilers, ncols=len(compilers), loc="outside upper center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _with(rows: Sequence[Row], checkpointing: bool, loss_inside: bool) -> list[Row]:
    return [row for row in rows if row["checkpointing"] == checkpointing and row["loss_inside"] == loss_inside]
