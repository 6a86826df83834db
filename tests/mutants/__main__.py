"""Does a test fail where a function does nothing? ``python -m tests.mutants planning rewrites``.

First all tests run once, to see which of them call which function. Then each function is emptied, and its tests run
until one fails, those of short files first. What no test notices is named: a test is missing there, or the function
is not needed. The answers are kept in tests/mutants/answers.json, so that only new functions are tried.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path

from tests.mutants.calls import Call, known_calls
from tests.mutants.functions import PACKAGE, functions_of
from tests.mutants.trial import caught_by, import_all

ROOT = PACKAGE.parent
ANSWERS = Path(__file__).parent / "answers.json"


def note_calls(paths: Iterable[str]) -> None:
    """Run the tests of these files that are not slow, and note which functions each of them calls."""
    files = sorted({str(f.relative_to(ROOT)) for p in paths for f in _test_files(ROOT / p)})
    missing = [f for f in files if not any(test.startswith(f) for test in known_calls())]
    if missing:
        command = ["-m", "pytest", "-q", "-m", "not slow", "-p", "tests.mutants.calls", *missing]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=False)


def _test_files(path: Path) -> Iterator[Path]:
    with_other_needs = {"with_nvfuser", "with_triton", "upstream"}
    for file in [path] if path.is_file() else path.rglob("test_*.py"):
        if not with_other_needs & set(file.parts):
            yield file


def tests_by_function(calls: Mapping[str, Call]) -> dict[str, list[str]]:
    """For each function the tests that call it: those of short files first, as a file's fixtures take time, too."""
    found: dict[str, list[str]] = {}
    files: dict[str, float] = Counter()
    for test, call in calls.items():
        files[test.partition("::")[0]] += call["seconds"]
    for test in sorted(calls, key=lambda test: (files[test.partition("::")[0]], calls[test]["seconds"], test)):
        for name in calls[test]["functions"]:
            found.setdefault(name, []).append(test)
    return found


def within(seconds: float, tests: list[str], calls: Mapping[str, Call]) -> list[str]:
    """The first of these tests that take no longer than so many seconds together."""
    took = accumulate(calls[test]["seconds"] for test in tests)
    return [test for test, until in zip(tests, took, strict=True) if until <= seconds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", default=["planning", "rewrites", "partition", "fusion"])
    parser.add_argument("--tests", nargs="*", default=["tests"], help="files and folders of tests (default: all)")
    parser.add_argument("--seconds", type=float, default=60, help="of tests for one function (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="try also what is known to be caught")
    options = parser.parse_args()
    note_calls(options.tests)
    calls = known_calls()
    tests = tests_by_function(calls)
    names = list(functions_of(options.packages))
    known: dict[str, str] = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    left = []
    import_all()
    for name in names:
        answer = known.get(name, "")
        if answer and (not options.again or not answer.startswith("tests/")):
            continue
        before = [answer] if answer else []
        caught = (
            caught_by(name, before + within(options.seconds, tests.get(name, []), calls)) if tests.get(name) else None
        )
        if caught:
            known[name] = caught
        else:
            known.pop(name, None)
            left.append(name)
        ANSWERS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
        print(f"{caught or 'no test notices' if tests.get(name) else 'no test calls'}: {name}", flush=True)
    print(f"{len(names)} functions, {len(left)} of which no test misses:", *left, sep="\n  ")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
