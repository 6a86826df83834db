"""The whole matrix of models and compilers: ``python -m benchmarks.litgpt.table --device simulate:H100-80GB``.

Every run is a process of its own (`benchmarks.litgpt`), whose command, versions and machine stand in
its row. Rows are written as they come, to ``<results>/litgpt-<device>.json``; started again, the command goes on
where it stopped, and runs again what had failed. Beside the JSON: the table in Markdown, and a chart.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.litgpt.matrix import COMPILERS, MODELS, cases, runs_on
from benchmarks.litgpt.render import draw, markdown
from benchmarks.litgpt.rows import load, run_apart, run_here, save

__all__ = ["RESULTS", "main"]

RESULTS = Path(__file__).parents[1] / "results"


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, then render; 1 if a run failed, 2 if there is nothing to run or render."""
    given = _parser().parse_args(arguments)
    try:
        todo = cases(given.models, given.compilers, _choices(given.checkpointing), _choices(given.loss_inside))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    todo = [case for case in todo if runs_on(case.compiler, given.device)]
    path = Path(given.results) / f"litgpt-{given.device.replace(':', '-')}.json"
    console = Console(soft_wrap=True)
    done = set() if given.again else {row["command"] for row in load(path) if "error" not in row}
    for case in todo:
        if given.render or case.command(given.device, given.iterations) in done:
            continue
        if given.one_process:
            row = run_here(case, given.device, given.iterations)
        else:
            row = run_apart(case, given.device, given.iterations, given.timeout)
        console.print(f"{case}: {row.get('error') or row['peak_bytes'] / 1e9}")
        save(path, row)
    rows = load(path)
    if not rows:
        print(f"no rows in {path}", file=sys.stderr)
        return 2
    path.with_suffix(".md").write_text(markdown(rows))
    draw(rows, path.with_suffix(".png"))
    console.print(f"written: {path}, {path.with_suffix('.md')}, {path.with_suffix('.png')}")
    return int(any("error" in row for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.litgpt.table", description=__doc__)
    parser.add_argument("--device", default="simulate:H100-80GB", help="cuda, cpu (scaled down), or simulate:NAME")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--compilers", nargs="+", metavar="COMPILER", help=f"of {', '.join(COMPILERS)}")
    parser.add_argument("--checkpointing", choices=("both", "on", "off"), default="both")
    parser.add_argument("--loss_inside", choices=("both", "on", "off"), default="both")
    parser.add_argument("--iterations", type=int, default=12, help="of each run, where it runs; two are for warming up")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run, in a process of its own")
    parser.add_argument("--one_process", action="store_true", help="all runs in this process: spares the imports")
    parser.add_argument("--results", default="benchmarks/results", help="the folder for all that is written")
    parser.add_argument("--again", action="store_true", help="run everything, also what has a row")
    parser.add_argument("--render", action="store_true", help="run nothing, write table and chart from the rows")
    return parser


def _choices(word: str) -> tuple[bool, ...]:
    return {"both": (True, False), "on": (True,), "off": (False,)}[word]


if __name__ == "__main__":
    sys.exit(main())
