"""Correctness, peaks and step times on the device, in a given number of minutes: ``python -m benchmarks.gpu.run``.

`run.sh` beside it sets the machine up and calls this. All runs share one process, the most telling ones come
first, and rows are written as they come; called again with the same file, it goes on where the time ran out.
With ``--device cpu`` the same on a CPU, scaled down, which is how it is tested.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import thunder
import torch
from rich.console import Console

from benchmarks.gpu.correctness import check
from thunder_mem.benchmarks.machine import machine_kind, versions
from thunder_mem.benchmarks.matrix import COMPILERS, MODELS, Case, runs_on
from thunder_mem.benchmarks.render import markdown
from thunder_mem.benchmarks.rows import load, run_here, save

ITERATIONS = 12
RESERVE_S = 45  # what a row may take that is begun last


def order() -> list[Case]:
    """The runs, the most telling first: longchat with checkpointing, then every model, then without checkpointing."""
    found = [Case("longchat-7b-16k", True, inside, name) for inside in (False, True) for name in COMPILERS]
    for checkpointing in (True, False):
        for inside in (False, True):
            found += [Case(model, checkpointing, inside, name) for model in MODELS for name in COMPILERS]
    return list(dict.fromkeys(found))


def fusion(device: str) -> str:
    """Which fusion executor the runs have, in words."""
    names = [ex.name for ex in thunder.extend.get_default_executors()]
    if "nvfuser" in names:
        return "nvfuser"
    return f"mem_pointwise: nvFuser does not load here ({', '.join(names) or 'no executors'} do)"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/litgpt-cuda.json"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, default=None, help="end after this many new rows")
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * given.minutes
    console = Console(soft_wrap=True)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here", file=sys.stderr)
        return 2
    right = check(given.device)
    about = {"machine": machine_kind(given.device), "versions": versions(), "fusion": fusion(given.device)}
    console.print(about, right)
    rows = load(given.out)
    done = {row["command"] for row in rows if "error" not in row}
    todo = [case for case in order() if runs_on(case.compiler, given.device)]
    todo = [case for case in todo if case.command(given.device, ITERATIONS) not in done]
    for case in todo[: given.rows]:
        if time.monotonic() > deadline - RESERVE_S:
            console.print("out of time: call again to go on")
            break
        row = run_here(case, given.device, ITERATIONS)
        console.print(str(case), row.get("error") or (row["peak_bytes"] / 1e9, row["median_iter_time"]))
        save(given.out, row, **about, correctness=right)
        given.out.with_suffix(".md").write_text(markdown(load(given.out)))
    return int(not all(r["right"] for r in right))


if __name__ == "__main__":
    sys.exit(main())
