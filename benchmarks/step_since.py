"""The time of a training step beside that of an older commit: ``python -m benchmarks.step_since``.

The small llama step of `benchmarks.step_in_backward` on this CPU, with AdamW, one thread, float32 and bfloat16. The
baseline is the last commit without updates in the backward: its backward, then `optimizer.step()` of the foreach
variant. Each contender is a process that runs one step when it is told to, so all take turns in one run; a step that
is not timed comes before each that is. Ratios are medians of pairs of neighbours. Alone, five contenders take six
minutes. Writes ``benchmarks/results/step_since.json``.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "step_since.json"
BEFORE = "56cc896"
BASELINE, TODAY = "then, foreach", "foreach"
CONTENDERS = (BASELINE, TODAY, "StepInBackward", "StepInBackward, fused", "StepInBackward, compiled")


@dataclass(frozen=True)
class Row:
    """Seconds of a step: the median and the least; its time by that of `BASELINE`, and of the same today."""

    dtype: str
    contender: str
    median_s: float
    least_s: float
    by_then: float
    by_today: float


def serve(name: str, dtype: torch.dtype) -> None:
    """One contender: a step for each line of the standard input, its seconds to the standard output.

    It runs with the package and the models of its own commit.
    """
    import thunder

    from benchmarks.models import llama_step
    from thunder_mem import MemEfficient
    from thunder_mem.executors import mem_attention_ex, mem_pointwise_ex

    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    program = llama_step(loss_inside=True, vocab=2048, dtype=dtype)
    how = {"foreach": name.endswith("foreach"), "fused": name.endswith("fused")}
    optimizer: Any = torch.optim.AdamW(program.fn.parameters(), lr=1e-3, **how)
    given = {}
    if name.startswith("StepInBackward"):
        from thunder_mem import StepInBackward

        given["optimizer"] = optimizer = StepInBackward(optimizer, compiled=name.endswith("compiled"))
    # As `benchmarks.scaled.EXECUTORS`, which the older commit does not have.
    fn = thunder.jit(
        program.fn, executors=[mem_attention_ex, mem_pointwise_ex], transforms=[MemEfficient(strict=True, **given)]
    )

    def step() -> float:
        start = time.perf_counter()
        fn(*program.args).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    step(), step(), step()
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        step()  # its memory is in the cache again
        print(step(), file=answers, flush=True)


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "--detach", folder, commit], cwd=REPOSITORY, check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=REPOSITORY, check=True)


@contextmanager
def contender(root: Path, name: str, dtype: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is ready to step."""
    command = [sys.executable, str(Path(__file__)), "--serve", name, dtype]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=root, env=environment, **pipes)
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{name} of {root} did not start")
        yield process
    finally:
        process.kill()


def measure(then: Path, dtype: str, rounds: int) -> list[Row]:
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(contender(then if name == BASELINE else REPOSITORY, name, dtype))
            for name in CONTENDERS
        }
        times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for turn in range(rounds):
            for name in CONTENDERS if turn % 2 else reversed(CONTENDERS):
                print(file=running[name].stdin, flush=True)
                times[name].append(float(running[name].stdout.readline()))
    rows = []
    for name, own in times.items():
        ratios = (statistics.median(map(operator.truediv, own, times[base])) for base in (BASELINE, TODAY))
        rows.append(Row(dtype, name, statistics.median(own), min(own), *ratios))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--before", default=BEFORE, help="the older commit; another than the default writes no results")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve[0], getattr(torch, given.serve[1]))
        return
    with worktree(given.before) as then:
        rows = [row for dtype in ("float32", "bfloat16") for row in measure(then, dtype, given.rounds)]
    view = Table(title=f"Small llama's step with AdamW on this CPU; then is {given.before}")
    for column in ("dtype", "step", "median, ms", "least, ms", "by then", "by foreach"):
        view.add_column(column)
    for r in rows:
        times = f"{r.median_s * 1e3:.1f}", f"{r.least_s * 1e3:.1f}", f"{r.by_then:.3f}", f"{r.by_today:.3f}"
        view.add_row(r.dtype, r.contender, *times)
    Console().print(view)
    if given.before == BEFORE:
        found = {"command": "python -m benchmarks.step_since", "torch": torch.__version__, "before": BEFORE}
        RESULTS.write_text(json.dumps({**found, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
