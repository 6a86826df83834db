"""The matrix as a Markdown table and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.litgpt.matrix import COMPILERS, FUSERS, MODELS, OURS

__all__ = ["draw", "markdown"]

Row = dict[str, Any]
_RATIOS = ("MemEfficient / best peer", "the same above parameters, state and inputs")
_COLOURS = dict(
    zip(
        COMPILERS,
        ("#8c8c8c", "#e0a030", "#226633", "#77aa77", "#882288", "#4477aa", "#66aacc", "#bb3344", "#e58c99"),
        strict=True,
    )
)


def markdown(rows: Sequence[Row]) -> str:
    """The peaks of all rows in decimal GB, the benchmark's unit (small ones in MB), what failed, and step times.

    Example:
        >>> row = {"model": "gpt2-124m", "checkpointing": True, "loss_inside": True, "compiler": "eager"}
        >>> text = markdown([{**row, "command": "c", "peak_bytes": 2_850_000_000, "device": "cpu", "versions": {}}])
        >>> "| gpt2-124m | on | inside | **2.850** |" in text
        True
    """
    machines = sorted({row["device"] for row in rows if "device" in row})
    unit, size = _unit(rows)
    lines = [f"Peak of the benchmark's training loop in {unit} ({size:,} bytes) on: {'; '.join(machines)}.", ""]
    lines += _table(rows, lambda row: row["peak_bytes"] / size, "least")
    times = {name: _time_of(rows, name) for name in ("median_iter_time", "roofline_ms")}
    for name, title in (
        ("median_iter_time", "Median time of a step in ms (each run alone, with whatever else the machine did)"),
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


def _unit(rows: Sequence[Row]) -> tuple[str, int]:
    """GB as the benchmark has it, or MB where all rows are small."""
    return ("GB", 10**9) if max((row.get("peak_bytes", 0) for row in rows), default=0) >= 10**9 else ("MB", 10**6)


def _table(rows: Sequence[Row], value: Any, emphasis: str) -> list[str]:
    compilers = [name for name in COMPILERS if any(row["compiler"] == name for row in rows)]
    fusers = [fuser for fuser in FUSERS if emphasis and f"{OURS}, {fuser}" in compilers and len(compilers) > 1]
    ratios = [f"{fuser}: {ratio}" for fuser in fusers for ratio in _RATIOS]
    head = ["model", "checkpointing", "loss", *compilers, *ratios]
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
        for fuser in fusers:
            cells += [_ratio(by, fuser, lambda row: row["peak_bytes"]), _ratio(by, fuser, _above)]
        lines.append("| " + " | ".join([*_words(group[0]), *cells]) + " |")
    return lines


def _above(row: Row) -> int:
    return row["peak_bytes"] - row.get("held_bytes", 0)


def _ratio(by: dict[str, Row], fuser: str, value: Any) -> str:
    """Ours by that of the best peer: eager, torch.compile, and Thunder with the same fuser."""
    others = [f", {other}" for other in FUSERS if other != fuser]
    values = {name: value(row) for name, row in by.items() if "error" not in row}
    peers = [v for name, v in values.items() if not name.startswith(OURS) and not name.endswith(tuple(others))]
    ours = values.get(f"{OURS}, {fuser}")
    return "" if ours is None or not peers else f"{ours / min(peers):.3f}"


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
    """A panel for each way to train: the peaks of every model as shares of eager's, in GB or MB below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ways = [way for way in ((True, False), (True, True), (False, False), (False, True)) if _with(rows, *way)]
    compilers = [name for name in COMPILERS if any(row["compiler"] == name for row in rows)]
    unit, size = _unit(rows)
    most = max(len({row["model"] for row in _with(rows, *way)}) for way in ways)
    figure, axes = plt.subplots(len(ways), 1, figsize=(11, 2.9 * len(ways) + 0.6), layout="constrained", squeeze=False)
    for axis, (checkpointing, loss_inside) in zip(axes[:, 0], ways, strict=True):
        chosen = [row for row in _with(rows, checkpointing, loss_inside) if "error" not in row]
        peaks = {(row["model"], row["compiler"]): row["peak_bytes"] / size for row in chosen}
        models = [name for name in MODELS if any(row["model"] == name for row in chosen)]
        models = [name for name in models if (name, "eager") in peaks]  # else there is nothing to be a share of
        for place, model in enumerate(models):
            for i, name in enumerate(compilers):
                if (model, name) in peaks:
                    share = peaks[model, name] / peaks[model, "eager"]
                    width = 0.84 / len(compilers)
                    at = place + (i - (len(compilers) - 1) / 2) * width
                    axis.bar(at, share, 0.93 * width, color=_COLOURS[name])
        axis.axhline(1, color="#8c8c8c", linewidth=0.6)
        labels = [f"{name}\neager {peaks[name, 'eager']:.2f} {unit}" for name in models]
        axis.set_xticks(range(len(models)), labels, fontsize=8)
        axis.set_xlim(-0.5, most - 0.5)
        axis.set_ylabel("peak / eager's")
        axis.set_ylim(bottom=0)
        on, where = ("on" if checkpointing else "off"), ("inside" if loss_inside else "outside")
        axis.set_title(f"checkpointing {on}, loss {where}", loc="left", fontsize=10)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[name]) for name in compilers]
    figure.legend(handles, compilers, ncols=4, loc="outside upper center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _with(rows: Sequence[Row], checkpointing: bool, loss_inside: bool) -> list[Row]:
    return [row for row in rows if row["checkpointing"] == checkpointing and row["loss_inside"] == loss_inside]
