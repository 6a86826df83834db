"""Does a test fail where a function does nothing? ``python -m tests.mutants planning rewrites``.

First all tests run once, to see which of them call which function. Then each function is emptied, and its tests run
until one fails, those that ran few functions first. What no test notices is named: a test is missing there, or the
function is not needed. The answers are kept in build/mutants.json, so that the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from coverage import CoverageData

from tests.mutants.mutate import PACKAGE, functions_of
from tests.mutants.plugin import VARIABLE

ROOT = PACKAGE.parent
BUILD = ROOT / "build"
COVERAGE = BUILD / "mutants.coverage"
ANSWERS = BUILD / "mutants.json"
SECONDS = 600


def record() -> None:
    """Run all tests that are not slow, and note which lines each of them runs."""
    settings = BUILD / "mutants.rc"
    settings.write_text(f"[run]\ndata_file = {COVERAGE}\nparallel = true\nsource = thunder_mem\n")
    command = ["-m", "pytest", "-q", "-m", "not slow", "-n", "2", "--dist", "loadfile", "--cov", "--cov-report="]
    command += [f"--cov-config={settings}", "--cov-context=test"]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=False)


def tests_by_function(names: list[str]) -> dict[str, list[str]]:
    """For each function the tests that run a line of its body, those first that run the fewest functions."""
    data = CoverageData(str(COVERAGE))
    data.read()
    found: dict[str, set[str]] = {}
    for name in names:
        module, _, qualified = name.partition(":")
        path = ROOT / Path(*module.split(".")).with_suffix(".py")
        lines = _body(path, qualified)
        contexts = data.contexts_by_lineno(str(path))
        found[name] = {c.partition("|")[0] for line in lines for c in contexts.get(line, ()) if c}
    breadth = Counter(test for tests in found.values() for test in tests)
    return {name: sorted(tests, key=lambda t: (breadth[t], t)) for name, tests in found.items()}


def _body(path: Path, qualified: str) -> range:
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in qualified.split("."):
        node = next(n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part)
        body = node.body
    return range(body[0].lineno, (node.end_lineno or body[0].lineno) + 1)


def survives(name: str, tests: list[str], most: int) -> str:
    """ "noticed", "unnoticed", "unreached" by any test, or "skipped" where the function cannot be emptied."""
    if not tests:
        return "unreached"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "tests.mutants.plugin", "-p", "no:cacheprovider"]
    environment = {**os.environ, VARIABLE: name, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, *tests[:most]], cwd=ROOT, env=environment, capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return "noticed"  # a search that finds no end
    return {0: "unnoticed", 5: "skipped"}.get(done.returncode, "noticed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", default=["planning", "rewrites", "partition", "fusion"])
    parser.add_argument("--most", type=int, default=40, help="tests that run for one function (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="ask anew what no test noticed")
    options = parser.parse_args()
    BUILD.mkdir(exist_ok=True)
    if not COVERAGE.exists():
        record()
    names = list(functions_of(options.packages))
    known = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    for name, tests in tests_by_function(names).items():
        if name not in known or (options.again and known[name] in ("unnoticed", "unreached")):
            known[name] = survives(name, tests, options.most)
            ANSWERS.write_text(json.dumps(known, indent=1) + "\n")
            print(f"{known[name]:10} {name}", flush=True)
    left = [name for name in names if known[name] in ("unnoticed", "unreached")]
    print(f"{len(names)} functions, {len(left)} of which no test misses:", *left, sep="\n  ")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
