"""Peaks and step times of the matrix, in a given number of minutes: ``python -m benchmarks.gpu.matrix``.

The last step of `benchmarks.gpu.run`. All runs share one process, the most telling ones come first, and rows are
written as they come; called again with the same file, it goes on where the time ran out. With ``--device cpu``
the same on a CPU, scaled down.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.gpu.book import STOPPED
from benchmarks.litgpt.machine import machine_kind, versions
from benchmarks.litgpt.matrix import COMPILERS, MODELS, Case, runs_on
from benchmarks.litgpt.render import markdown
from benchmarks.litgpt.rows import load, run_here, save

ITERATIONS = 12
RESERVE_S = 45  # what a row may take that is begun last


def order() -> list[Case]:
    """The runs, the most telling first: longchat with checkpointing, then every model, then without checkpointing."""
    found = [Case("longchat-7b-16k", True, inside, name) for inside in (False, True) for name in COMPILERS]
    for checkpointing in (True, False):
        for inside in (False, True):
            found += [Case(model, checkpointing, inside, name) for model in MODELS for name in COMPILERS]
    return list(dict.fromkeys(found))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.matrix", description=__doc__)
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
    about = {"machine": machine_kind(given.device), "versions": versions()}
    rows = load(given.out)
    done = {row["command"] for row in rows if "error" not in row}
    todo = [case for case in order() if runs_on(case.compiler, given.device)]
    todo = [case for case in todo if case.command(given.device, ITERATIONS) not in done]
    failed = False
    for case in todo[: given.rows]:
        if time.monotonic() > deadline - RESERVE_S:
            console.print("out of time: call again to go on")
            return STOPPED
        row = run_here(case, given.device, ITERATIONS)
        console.print(str(case), row.get("error") or (row["peak_bytes"] / 1e9, row["median_iter_time"]))
        save(given.out, row, **about)
        given.out.with_suffix(".md").write_text(markdown(load(given.out)))
        failed = failed or "error" in row
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
