"""How long one parameter's step takes on this CPU, and what it holds: ``python -m benchmarks.optimizer_steps``.

Every optimizer that updates each element by itself steps a parameter of 2,048 x 4,096 on one thread: by PyTorch's
single-tensor code over slices, compiled, and by PyTorch's fused kernel where there is one. They take turns. Writes
``benchmarks/results/optimizer_steps.json``, in two minutes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from thunder_mem import measure_peak
from thunder_mem.optimizer.elementwise import BY_ELEMENT
from thunder_mem.optimizer.one_parameter import step_alone

RESULTS = Path(__file__).parent / "results" / "optimizer_steps.json"
SHAPE = 2048, 4096
ROUNDS = 7
WAYS = ("slices", "compiled", "fused")


@dataclass(frozen=True)
class Row:
    """One way to step: its bytes beside parameter, gradient and states, its median seconds, and these by `slices`."""

    optimizer: str
    dtype: str
    way: str
    held_bytes: int
    median_s: float
    ratio: float


def steps(name: str, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """The ways to step such a parameter, warmed up."""
    found: dict[str, Callable[[], None]] = {}
    for way in WAYS:
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(SHAPE, dtype=dtype))
        more = {"fused": True} if way == "fused" else {}
        more |= {"momentum": 0.9} if name == "SGD" else {}
        try:
            optimizer = getattr(torch.optim, name)([p], lr=1e-3, **more)
        except TypeError:  # it has no fused kernel
            continue
        grad, compiled = torch.randn(SHAPE, dtype=dtype), way == "compiled"
        found[way] = partial(step_alone, optimizer, optimizer.param_groups[0], p, grad, compiled=compiled)
        for _ in range(3):
            found[way]()
    return found


def measured(name: str, dtype: torch.dtype) -> list[Row]:
    """The rows of one optimizer."""
    runs = steps(name, dtype)
    times: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(ROUNDS):
        for way, run in runs.items():
            start = time.perf_counter()
            run()
            times[way].append(time.perf_counter() - start)
    usual = times["slices"]
    return [
        Row(
            name,
            str(dtype).removeprefix("torch."),
            way,
            measure_peak(run),
            statistics.median(times[way]),
            statistics.median(own / base for own, base in zip(times[way], usual, strict=True)),
        )
        for way, run in runs.items()
    ]


def main() -> None:
    torch.set_num_threads(1)
    console = Console()
    rows: list[Row] = []
    names = sorted(kind.__name__ for kind in BY_ELEMENT)
    for name, dtype in product(names, (torch.float32, torch.bfloat16)):
        with console.status(f"{name}, {dtype}"):
            rows += measured(name, dtype)
    view = Table(title=f"One step of a parameter of {SHAPE[0]:,} x {SHAPE[1]:,} on one thread")
    for column in ("optimizer", "dtype", "way", "held, bytes", "time, ms", "by slices"):
        view.add_column(column)
    for r in rows:
        view.add_row(r.optimizer, r.dtype, r.way, f"{r.held_bytes:,}", f"{r.median_s * 1e3:.1f}", f"{r.ratio:.2f}")
    console.print(view)
    about = {"command": "python -m benchmarks.optimizer_steps", "torch": torch.__version__, "shape": SHAPE}
    RESULTS.write_text(json.dumps({**about, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
