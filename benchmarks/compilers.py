"""Step times of all compilers, in turn in one process: ``python -m benchmarks.compilers``.

The small litgpt step and the scaled models of the benchmark's matrix, all with the loss inside, in float32 on one
thread, and the small step in bfloat16, too: eager, torch.compile, Thunder with the package's executors, and
MemEfficient as `thunder.jit` has it by default. Every round runs each, so that what else the machine does falls on all.
Each runs twice, and the second step counts: as in a training loop it finds the memory and the caches that the same
program left. The order is by chance. A step's time is that of its process, without others that share the core. The
median of the rounds' ratios counts, with its 95 % interval by bootstrap: where that holds 1, the difference is within
the noise. The ratio of the shortest steps stands beside it.
Each program runs in a process of its own. Writes ``benchmarks/results/compilers.json`` after each program; names of
programs (``"gpt2-124m, checkpointing on"``) measure these again. With ``one`` before a name, prints what one process
finds.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import thunder
import torch
from rich.console import Console
from scipy.stats import bootstrap

from benchmarks.litgpt.matrix import MODELS
from benchmarks.models import Program, llama_step
from benchmarks.scaled import EXECUTORS, scaled_model
from thunder_mem import MemEfficient

RESULT = Path(__file__).parent / "results" / "compilers.json"
OURS = "MemEfficient"
FEWEST_ROUNDS, MOST_ROUNDS, SECONDS = 9, 61, 120  # as many as fill these seconds


def compilers() -> dict[str, Callable[[Any], Callable[..., Any]]]:
    return {
        "eager": lambda fn: fn,
        "torch.compile": torch.compile,
        "Thunder": lambda fn: thunder.jit(fn, executors=EXECUTORS),
        OURS: lambda fn: thunder.jit(fn, transforms=[MemEfficient(strict=True)]),
    }


def programs() -> dict[str, Callable[[], Program]]:
    """How to make each program."""
    small = {
        f"llama V=8000{dtyped}, checkpointing {on}": lambda on=on, dtype=dtype: llama_step(
            vocab=8000, loss_inside=True, checkpointing=on == "on", dtype=dtype
        )
        for dtyped, dtype in (("", torch.float32), (" in bfloat16", torch.bfloat16))
        for on in ("on", "off")
    }
    models = {
        f"{name}, checkpointing {on}": lambda name=name, on=on: scaled_model(name, on == "on", dtype=torch.float32)
        for on in ("on", "off")
        for name in MODELS
    }
    return small | models


def compare(program: Program) -> dict[str, object]:
    """A program under each compiler that takes it: median milliseconds, and ratios of our steps to theirs.

    An error of MemEfficient is raised, because then nothing is compared.
    """
    compiled: dict[str, Callable[..., Any]] = {}
    failed: dict[str, str] = {}
    round_s = 0.0
    for name, compiler in compilers().items():
        try:
            fn = compiler(program.fn)
            program.step(fn)  # compiles
            round_s += _step_seconds(program, fn)
        except Exception as error:  # which peers take a program is part of the result
            if name == OURS:
                raise
            failed[name] = type(error).__name__
        else:
            compiled[name] = fn
    rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(SECONDS / (2 * round_s))))
    times: dict[str, list[float]] = {name: [] for name in compiled}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(compiled), len(compiled)):
            program.step(compiled[name])
            times[name].append(_step_seconds(program, compiled[name]))
    peers = [name for name in compiled if name != OURS]
    paired = {peer: [a / b for a, b in zip(times[OURS], times[peer], strict=True)] for peer in peers}
    return {
        "rounds": rounds,
        "median_ms": {name: round(statistics.median(found) * 1e3, 1) for name, found in times.items()},
        "median_ratio": {peer: round(statistics.median(paired[peer]), 3) for peer in peers},
        "interval": {peer: _interval(paired[peer]) for peer in peers},
        "ratio_of_minima": {peer: round(min(times[OURS]) / min(times[peer]), 3) for peer in peers},
        "failed": failed,
    }


def _interval(ratios: list[float]) -> list[float]:
    """The 95 % interval of the ratios' median."""
    found = bootstrap((ratios,), np.median, n_resamples=999, method="percentile", rng=0).confidence_interval
    return [round(float(found.low), 3), round(float(found.high), 3)]


def _step_seconds(program: Program, fn: Callable[..., Any]) -> float:
    start = time.process_time()
    program.step(fn)
    return time.process_time() - start


def main(*names: str) -> None:
    torch.set_num_threads(1)
    if names[:1] == ("one",):
        print(json.dumps(compare(programs()[names[1]]())))
        return
    record = {
        "command": "python -m benchmarks.compilers",
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "dtype": "float32, if the program names no other",
        "threads": 1,
        "torch": torch.__version__,
    }
    before = json.loads(RESULT.read_text())["rows"] if names and RESULT.exists() else []
    rows = {row["program"]: row for row in before}
    for name in names or programs():
        command = [sys.executable, "-m", "benchmarks.compilers", "one", name]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows[name] = {"program": name, **json.loads(output.splitlines()[-1])}
        Console().print(rows[name])
        RESULT.write_text(json.dumps(record | {"rows": list(rows.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
