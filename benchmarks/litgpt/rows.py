"""Runs of the matrix and the files that keep them."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.litgpt.command import parse
from benchmarks.litgpt.harness import run
from benchmarks.litgpt.matrix import Case, cases
from tests.fuzzing.quick_thunder import interpreted_quickly

__all__ = ["Row", "load", "metrics_here", "metrics_of", "run_apart", "run_here", "save"]

Row = dict[str, Any]
"""A case, its command, and the benchmark's metrics, or `error`, why there are none."""


def run_apart(case: Case, device: str, iterations: int, timeout_s: float) -> Row:
    """Run one case in a process of its own; `error` is the end of what it said, or that time ran out."""
    row = _begin(case, device, iterations)
    with _timed(row):
        row |= metrics_of(case.arguments(device, iterations), timeout_s)
    return row


def metrics_of(arguments: list[str], timeout_s: float) -> Row:
    """The benchmark's metrics for its arguments, in a process of its own; or `error`, as in `run_apart`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.json"
        command = [sys.executable, "-m", "benchmarks.litgpt", *arguments, *_to(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {timeout_s:.0f} s"}
        if done.returncode or not path.exists():
            said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("frame #")]
            return {"error": " ".join(said[-3:] or [f"exit code {done.returncode}"])[:1000]}
        return _metrics(path)


def run_here(case: Case, device: str, iterations: int) -> Row:
    """Run one case in this process, which spares the imports; what earlier ones left on a GPU is in the row."""
    row = _begin(case, device, iterations)
    row["left_by_earlier_rows_bytes"] = _let_go(device)
    with _timed(row):
        row |= metrics_here(case.arguments(device, iterations))
    return row


def metrics_here(arguments: list[str]) -> Row:
    """The benchmark's metrics for its arguments, in this process; or `error`, the first line of what was raised.

    For a simulated device Thunder's interpreter looks globals up; it gives the same traces in less time.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.json"
        try:
            options, given = parse([*arguments, *_to(path)])
            with interpreted_quickly() if options.simulated else nullcontext():
                run(options, **given)
            return _metrics(path)
        except Exception as error:  # an exhausted device, or what a compiler cannot do: the next row may
            traceback.clear_frames(error.__traceback__)
            return {"error": (f"{type(error).__name__}: {error}".splitlines() or ["?"])[0][:400]}


def _begin(case: Case, device: str, iterations: int) -> Row:
    return {**asdict(case), "command": case.command(device, iterations)}


def _to(path: Path) -> list[str]:
    return ["--return_metrics_as_json", "True", "--json_path", str(path)]


def _metrics(path: Path) -> Row:
    metrics = json.loads(path.read_text())
    metrics["compile"] = metrics.pop("compiler")  # a row's own `compiler` says more
    return metrics


@contextmanager
def _timed(row: Row) -> Iterator[None]:
    start = time.perf_counter()
    yield
    row["wall_s"] = round(time.perf_counter() - start, 1)


def _let_go(device: str) -> int:
    """Drop what earlier runs left; returns the bytes on the GPU that stay nevertheless, and count in the next peak."""
    torch._dynamo.reset()
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def load(path: Path) -> list[Row]:
    """The rows of a results file; none if there is no such file."""
    return json.loads(path.read_text())["rows"] if path.exists() else []


def save(path: Path, row: Row, **about: Any) -> None:
    """Put a row into a results file, in the matrix's order, in place of the row of the same case.

    Args:
        path: the file; it is replaced in one step, so that a run that is stopped leaves a whole one.
        row: the new row.
        about: what else the file says, beside its rows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    record = json.loads(path.read_text()) if path.exists() else {}
    order = {case: i for i, case in enumerate(cases())}
    rows = [r for r in record.get("rows", []) if _case(r) != _case(row)] + [row]
    rows.sort(key=lambda r: order.get(_case(r), len(order)))
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**record, **about, "rows": rows}, indent=1) + "\n")
    os.replace(partial, path)


def _case(row: Row) -> Case:
    return Case(row["model"], row["checkpointing"], row["loss_inside"], row["compiler"])
