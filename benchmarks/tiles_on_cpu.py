"""What tiles save on this CPU, and what they cost: ``python -m benchmarks.tiles_on_cpu``.

The benchmark's scaled models at eight times their tokens, checkpoints, the loss inside, one thread: the measured peak
with tiles and without, and steps of both timed in turn, in seconds of the processor. In bfloat16 where the processor
multiplies in it, else in float32. Where memory happens to lie is a process' luck: each model runs in two processes of
its own, and in one of them the tiled step is compiled first. Writes ``benchmarks/results/tiles_on_cpu.json``; with a
model and the first to compile, prints what one process finds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import thunder
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import Program
from benchmarks.scaled import EXECUTORS, scaled_model
from thunder_mem import MemEfficient, last_plan, measure_peak

RESULTS = Path(__file__).parent / "results" / "tiles_on_cpu.json"
NAMES = ("longchat-7b-16k", "Llama-3-8B")
TIMES_LONGER = 8
PROCESSES = (False, True)  # whether the tiled step is compiled first
STEPS = 3
HAS_BFLOAT16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
DTYPE = torch.bfloat16 if HAS_BFLOAT16 else torch.float32


@dataclass(frozen=True)
class Found:
    """One process, without tiles and with: bytes above the parameters and their gradients, and seconds of a step."""

    whole_bytes: int
    tiled_bytes: int
    whole_s: float
    tiled_s: float
    tiles: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One model; ratios are of tiled to whole, of the peak above parameters and of the time (median of processes)."""

    model: str
    tokens: int
    bytes_ratio: float
    time_ratio: float
    processes: tuple[Found, ...]


def program(name: str) -> Program:
    """A step of a scaled model over longer sequences."""
    return scaled_model(name, checkpointing=True, times_longer=TIMES_LONGER, dtype=DTYPE)


def find(name: str, tiled_first: bool) -> Found:
    """Both steps compiled, measured, and timed in turn."""
    torch.set_num_threads(1)
    step = program(name)
    compiled, peaks = {}, {}
    for tile in (tiled_first, not tiled_first):
        ours = MemEfficient(strict=True, tile=tile)
        compiled[tile] = thunder.jit(step.fn, executors=EXECUTORS, transforms=[ours])
        for _ in range(2):
            step.step(compiled[tile])
        peaks[tile] = measure_peak(step.step, compiled[tile])
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(STEPS):
        for tile, fn in compiled.items():
            start = time.process_time()
            step.step(fn)
            times[tile].append(time.process_time() - start)
    seconds = (statistics.median(times[tile]) for tile in (False, True))
    tiles = tuple(d.how for d in last_plan(compiled[True]).decisions if d.what == "tiles")
    return Found(peaks[False], peaks[True], *seconds, tiles)


def in_processes(name: str) -> Row:
    """The row of one model."""
    found = []
    for tiled_first in PROCESSES:
        command = [sys.executable, "-m", "benchmarks.tiles_on_cpu", name, *(["tiled"] if tiled_first else [])]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found.append(Found(**json.loads(output.splitlines()[-1])))
    tokens = program(name).args[0].numel()
    bytes_ratio = statistics.median(f.tiled_bytes / f.whole_bytes for f in found)
    time_ratio = statistics.median(f.tiled_s / f.whole_s for f in found)
    return Row(name, tokens, round(bytes_ratio, 4), round(time_ratio, 4), tuple(found))


def main(name: str = "", first: str = "") -> None:
    if name:
        print(json.dumps(asdict(find(name, first == "tiled"))))
        return
    console = Console()
    rows = []
    for name in NAMES:
        with console.status(name):
            rows.append(in_processes(name))
    about = {
        "command": "python -m benchmarks.tiles_on_cpu",
        "threads": 1,
        "dtype": str(DTYPE),
        "torch": torch.__version__,
    }
    RESULTS.write_text(json.dumps(about | {"rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    title = f"2 layers, {TIMES_LONGER} times the benchmark's tokens, checkpoints, loss inside: tiles on this CPU"
    view = Table(title=title)
    for column in ("model", "tokens", "peak above parameters, MiB", "by that without", "time by that without"):
        view.add_column(column)
    for r in rows:
        mib = f"{r.processes[0].tiled_bytes / 2**20:.1f} of {r.processes[0].whole_bytes / 2**20:.1f}"
        view.add_row(r.model, f"{r.tokens:,}", mib, f"{r.bytes_ratio:.2f}", f"{r.time_ratio:.2f}")
    console.print(view)


if __name__ == "__main__":
    main(*sys.argv[1:])
