"""Does a test fail where a function does nothing? ``python -m tests.mutants planning rewrites``.

First all tests run once, to see which of them call which function. Then each function is emptied, and its tests run
until one fails, those first that are about it. What no test notices is named: a test is missing there, or the
function is not needed. The answers are kept in build/mutants.json, so that only new functions are tried.
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
ANSWERS = ROOT / "build" / "mutants.json"


def note_calls(paths: Iterable[str], slow: bool) -> None:
    """Run the tests of new files, or with `slow` all tests of all these files, and note which functions each calls."""
    files = sorted({str(f.relative_to(ROOT)) for p in paths for f in _test_files(ROOT / p)})
    known = set(map(_file, known_calls()))
    if run := files if slow else [f for f in files if f not in known]:
        command = ["-m", "pytest", "-q", "-p", "tests.mutants.calls", *([] if slow else ["-m", "not slow"]), *run]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=False)


def _test_files(path: Path) -> Iterator[Path]:
    with_other_needs = {"with_nvfuser", "with_triton", "upstream"}
    for file in [path] if path.is_file() else path.rglob("test_*.py"):
        if not with_other_needs & set(file.parts):
            yield file


def tests_by_function(calls: Mapping[str, Call]) -> dict[str, list[str]]:
    """For each function the tests that call it: those of its module's file, then a few of each file in turn.

    Files that call little else come first.
    """
    called_by: dict[str, dict[str, list[str]]] = {}
    all_calls = Counter[str]()
    for test in sorted(calls, key=lambda test: (calls[test]["seconds"], test)):
        all_calls[_file(test)] += len(calls[test]["functions"])
        for name in calls[test]["functions"]:
            called_by.setdefault(name, {}).setdefault(_file(test), []).append(test)
    return {
        name: _in_turn(
            [files[f] for f in sorted(files, key=lambda f: (not _is_about(f, name), -len(files[f]) / all_calls[f], f))]
        )
        for name, files in called_by.items()
    }


def _file(test: str) -> str:
    return test.partition("::")[0]


def _is_about(file: str, name: str) -> bool:
    """Whether a file of tests has a word of the function's module in its name."""
    words = name.partition(":")[0].rpartition(".")[2].split("_")
    return any(word in Path(file).stem.split("_") for word in words)


def _in_turn(of_files: list[list[str]], few: int = 3) -> list[str]:
    longest = max(map(len, of_files))
    return [test for i in range(0, longest, few) for tests in of_files for test in tests[i : i + few]]


def within(seconds: float, tests: list[str], calls: Mapping[str, Call]) -> list[str]:
    """The first of these tests that take no longer than so many seconds together, but at least one."""
    took = accumulate(calls[test]["seconds"] for test in tests)
    return [test for test, until in zip(tests, took, strict=True) if until <= seconds] or tests[:1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", default=["planning", "rewrites", "partition", "fusion"])
    parser.add_argument("--tests", nargs="*", default=["tests"], help="files and folders of tests (default: all)")
    parser.add_argument("--slow", action="store_true", help="run these tests first, the slow ones too")
    parser.add_argument("--seconds", type=float, default=60, help="of tests for one function (default: %(default)s)")
    options = parser.parse_args()
    note_calls(options.tests, options.slow)
    calls = known_calls()
    tests = tests_by_function(calls)
    names = list(functions_of(options.packages))
    known: dict[str, str] = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    left = []
    import_all(sorted({_file(test) for test in calls}))
    for name in names:
        if name in known:
            continue
        called_by = tests.get(name, [])
        caught = caught_by(name, within(options.seconds, called_by, calls)) if called_by else None
        if caught:
            known[name] = caught
            ANSWERS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
        else:
            left.append(name)
        print(f"{caught or ('no test notices' if called_by else 'no test calls')}: {name}", flush=True)
    print(f"{len(names)} functions, {len(left)} of which no test misses:", *left, sep="\n  ")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
