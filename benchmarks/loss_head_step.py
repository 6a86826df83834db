"""A small training step with its loss inside: ``python -m benchmarks.loss_head_step``.

The litgpt step of `benchmarks.demo` (2 Blocks, T=1024, D=256, bfloat16) with V=8000 and the mean cross
entropy inside, with and without checkpointing: peak bytes above the start by the profiler, for eager,
torch.compile, Thunder and MemEfficient. Writes ``benchmarks/results/loss_head_step.json``.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import thunder
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import llama_step
from thunder_mem import MemEfficient
from thunder_mem.runtime.measure import measure_peak

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
VOCAB = 8000

PEERS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda fn: fn,
    "torch.compile": torch.compile,
    "Thunder": thunder.jit,
    "MemEfficient": lambda fn: thunder.jit(fn, transforms=[MemEfficient(strict=True)]),
}


@dataclass(frozen=True)
class Row:
    """One contender: bytes above the start, measured in its third step, where gradients exist."""

    checkpointing: bool
    peer: str
    peak_bytes: int


def measure(peer: str, checkpointing: bool) -> Row:
    torch.compiler.reset()
    program = llama_step(vocab=VOCAB, checkpointing=checkpointing, loss_inside=True)
    compiled = PEERS[peer](program.fn)
    for _ in range(2):
        program.step(compiled)
    return Row(checkpointing, peer, measure_peak(program.step, compiled))


def main() -> None:
    torch.set_num_threads(2)
    console = Console()
    rows = [measure(peer, checkpointing) for checkpointing in (True, False) for peer in PEERS]
    view = Table("checkpointing", *PEERS, title="Peak memory above the start, MiB (measured)", title_justify="left")
    for checkpointing in (True, False):
        peaks = (f"{row.peak_bytes / MIB:.2f}" for row in rows if row.checkpointing == checkpointing)
        view.add_row("on" if checkpointing else "off", *peaks)
    console.print(view)
    RESULTS.mkdir(exist_ok=True)
    record = {
        "command": "python -m benchmarks.loss_head_step",
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "thunder": thunder.__version__},
        "vocab": VOCAB,
        "rows": [asdict(row) for row in rows],
    }
    path = RESULTS / "loss_head_step.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"written: {path}")


if __name__ == "__main__":
    main()
