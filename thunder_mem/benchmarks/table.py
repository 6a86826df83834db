"""The whole matrix of models and compilers: ``python -m thunder_mem.benchmarks.table --device simulate:H100-80GB``.

Every run is a process of its own (`thunder_mem.benchmarks.litgpt`), whose command, versions and machine stand in
its row. Rows are written as they come, to ``<results>/litgpt-<device>.json``; started again, the command goes on
where it stopped, and runs again what had failed. Beside the JSON: the table in Markdown, and a chart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from thunder_mem.benchmarks.matrix import COMPILERS, MODELS, Case, cases
from thunder_mem.benchmarks.render import draw, markdown

__all__ = ["load", "main", "run_case"]

Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, then render; 1 if a run failed."""
    given = _parser().parse_args(arguments)
    try:
        todo = cases(given.models, given.compilers, _choices(given.checkpointing), _choices(given.loss_inside))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    path = Path(given.results) / f"litgpt-{given.device.replace(':', '-')}.json"
    rows = load(path)
    console = Console()
    commands = {case: case.command(given.device, given.iterations) for case in todo}
    fresh = set() if given.again else {row["command"] for row in rows if "error" not in row}
    for case, command in commands.items():
        if command in fresh or given.render:
            continue
        row = run_case(case, given.device, given.iterations, given.timeout)
        console.print(f"{case}: {row.get('error') or row['peak_bytes'] / 1e9}")
        rows = [r for r in load(path) if r["command"] != command] + [row]
        _write(path, rows)
    if not rows:
        print(f"no rows in {path}", file=sys.stderr)
        return 2
    path.with_suffix(".md").write_text(markdown(rows))
    draw(rows, path.with_suffix(".png"))
    console.print(f"written: {path}, {path.with_suffix('.md')}, {path.with_suffix('.png')}")
    return int(any("error" in row for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m thunder_mem.benchmarks.table", description=__doc__)
    parser.add_argument("--device", default="simulate:H100-80GB", help="cuda, cpu (scaled down), or simulate:NAME")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--compilers", nargs="+", metavar="COMPILER", help=f"of {', '.join(COMPILERS)}")
    parser.add_argument("--checkpointing", choices=("both", "on", "off"), default="both")
    parser.add_argument("--loss_inside", choices=("both", "on", "off"), default="both")
    parser.add_argument("--iterations", type=int, default=12, help="of each run, where it runs; two are for warming up")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run")
    parser.add_argument("--results", default="benchmarks/results", help="the folder for all that is written")
    parser.add_argument("--again", action="store_true", help="run everything, also what has a row")
    parser.add_argument("--render", action="store_true", help="run nothing, write table and chart from the rows")
    return parser


def _choices(word: str) -> tuple[bool, ...]:
    return {"both": (True, False), "on": (True,), "off": (False,)}[word]


def run_case(case: Case, device: str, iterations: int, timeout_s: float) -> Row:
    """Run one case in a process of its own; a row with its figures, or with `error`, the last line it said."""
    row: Row = {**asdict(case), "command": case.command(device, iterations)}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.json"
        command = [sys.executable, "-m", "thunder_mem.benchmarks.litgpt", *case.arguments(device, iterations)]
        command += ["--return_metrics_as_json", "True", "--json_path", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {**row, "error": f"not done after {timeout_s:.0f} s"}
        row["wall_s"] = round(time.perf_counter() - start, 1)
        if done.returncode or not path.exists():
            said = [line for line in done.stderr.splitlines() if line.strip()]
            return {**row, "error": (said or [f"exit code {done.returncode}"])[-1][:400]}
        return {**row, **json.loads(path.read_text())}


def load(path: Path) -> list[Row]:
    """The rows of a results file; none if there is no such file."""
    return json.loads(path.read_text())["rows"] if path.exists() else []


def _write(path: Path, rows: list[Row]) -> None:
    # In one step, so that a run that is stopped leaves a whole file.
    path.parent.mkdir(parents=True, exist_ok=True)
    order = {case: i for i, case in enumerate(cases())}
    rows = sorted(rows, key=lambda r: order.get(_case(r), len(order)))
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    os.replace(partial, path)


def _case(row: Row) -> Case:
    return Case(row["model"], row["checkpointing"], row["loss_inside"], row["compiler"])


if __name__ == "__main__":
    sys.exit(main())
