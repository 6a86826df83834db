"""The main job, seen: ``python -m benchmarks.demo`` (or ``make demo``).

Issue #1337's two functions and a small litgpt training step with checkpoints on the CPU, measured by the profiler:
eager, torch.compile, Thunder as it is, and Thunder with MemEfficient. Prints a table and writes
``build/demo/demo.json`` and ``demo.png``, the live bytes of each over one training step. ``--all`` adds variants whose
paths share an input and the step without checkpoints, and writes to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import matplotlib
import thunder
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.models import (
    Program,
    efficient,
    fan,
    inefficient,
    llama_step,
    shared_efficient,
    shared_inefficient,
)
from thunder_mem import MemEfficient, last_plan
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.runtime.measure import measure_curve

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
BUILD = Path(__file__).parent.parent / "build" / "demo"
MIB = 2**20
QUICK = 3
OURS = [mem_attention_ex, mem_pointwise_ex]

PEERS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda fn: fn,
    "torch.compile": torch.compile,
    "Thunder consecutive": lambda fn: thunder.jit(fn, executors=OURS),
    "Thunder dataflow": lambda fn: thunder.jit(fn, executors=OURS, fusion_type="dataflow"),
    "MemEfficient": lambda fn: thunder.jit(fn, executors=OURS, transforms=[MemEfficient()]),
}
COLOURS = dict(zip(PEERS, ("#8c8c8c", "#e0a030", "#4477aa", "#66aacc", "#bb3344"), strict=True))


@dataclass(frozen=True)
class Row:
    """One program under one compiler: bytes above the start, measured, and what was planned."""

    program: str
    peer: str
    peak_bytes: int
    curve_bytes: tuple[int, ...]
    plan: dict[str, Any] | None = None


@cache
def programs() -> list[Program]:
    """All programs; the first `QUICK` of them without ``--all``."""
    shown = [fan(efficient), fan(inefficient), llama_step(checkpointing=True)]
    return [*shown, fan(shared_efficient), fan(shared_inefficient), llama_step(checkpointing=False)]


def measure(program: Program, peer: str) -> Row:
    """Compile in a first run, which leaves gradients behind, and measure the second."""
    torch.compiler.reset()
    compiled = PEERS[peer](program.fn)
    program.step(compiled)
    curve = tuple(accumulate(measure_curve(program.step, compiled).deltas))
    plan = last_plan(compiled) if peer == "MemEfficient" else None
    summary = (
        {"sort": plan.sort, "chosen": plan.chosen, "candidates": [asdict(c) for c in plan.candidates]} if plan else None
    )
    return Row(program.name, peer, max(curve, default=0), curve, summary)


def measure_nth(nth: int, peer: str) -> Row:
    """The row of one of `programs()`, which no process can send to another."""
    return measure(programs()[nth], peer)


def table(rows: list[Row]) -> Table:
    """Narrow enough for 80 columns: the last one is what the others are compared with."""
    view = Table(title="Peak memory above the start, MiB (measured)", title_justify="left", box=SIMPLE_HEAD)
    view.add_column("program", min_width=16)
    for peer in PEERS:
        words = peer.replace(".", ". ").split()
        view.add_column("\n".join(words), justify="right", no_wrap=True, min_width=max(map(len, words)))
    for name in dict.fromkeys(row.program for row in rows):
        peaks = {row.peer: row.peak_bytes / MIB for row in rows if row.program == name}
        best = min(peaks.values())
        view.add_row(name, *(f"[bold green]{p:.2f}[/]" if p == best else f"{p:.2f}" for p in peaks.values()))
    return view


def draw(rows: list[Row], path: Path) -> None:
    names = list(dict.fromkeys(row.program for row in rows))
    figure, axes = plt.subplots(len(names), 1, figsize=(9, 2.7 * len(names)), layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        for row in (row for row in rows if row.program == name):
            steps = [i / max(1, len(row.curve_bytes) - 1) for i in range(len(row.curve_bytes))]
            width = 2.2 if row.peer == "MemEfficient" else 1.1
            label = f"{row.peer}: {row.peak_bytes / MIB:.2f} MiB"
            axis.plot(steps, [b / MIB for b in row.curve_bytes], color=COLOURS[row.peer], linewidth=width, label=label)
        axis.set_title(name, loc="left", fontsize=10)
        axis.set_ylabel("MiB above start")
        axis.set_xlim(0, 1)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel("progress of one step (share of its allocations and frees)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def settled() -> None:
    """One thread, no processes that compile beside it, and a collector that seldom looks."""
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.cpp.vec_isa_ok = True  # else the compiler is asked what vectors this CPU has, for seconds
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


def measured(console: Console, count: int) -> list[Row]:
    """The rows of the first `count` programs, two at a time: a row's bytes do not depend on what runs beside it."""
    todo = [(nth, peer) for nth in range(count) for peer in PEERS]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ProcessPoolExecutor(2, get_context("fork")) as pool,  # which are settled, too
    ):
        task = progress.add_task("compiling and measuring", total=len(todo))
        rows = {place: pool.submit(measure_nth, *place) for place in reversed(todo)}  # the longest first
        for row in as_completed(rows.values()):
            progress.update(task, advance=1, description=f"{row.result().peer}: {row.result().program}")
            if not console.is_terminal:
                console.print(f"measured {row.result().peer}: {row.result().program}")
    return [rows[place].result() for place in todo]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--all", action="store_true", help="three programs more; to benchmarks/results")
    everything = parser.parse_args().all
    settled()
    console = Console()
    rows = measured(console, len(programs()) if everything else QUICK)
    console.print(table(rows))
    folder = RESULTS if everything else BUILD
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "command": "python -m benchmarks.demo" + " --all" * everything,
        "machine": f"{platform.machine()}, one thread",
        "versions": {"torch": torch.__version__, "thunder": thunder.__version__},
        "rows": [{k: v for k, v in asdict(row).items() if k != "curve_bytes"} for row in rows],
    }
    (folder / "demo.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(rows, folder / "demo.png")
    console.print(f"written: {folder / 'demo.json'}, {folder / 'demo.png'}")


if __name__ == "__main__":
    main()
