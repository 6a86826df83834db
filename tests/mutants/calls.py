"""Which test calls which function: a plugin of pytest, ``-p tests.mutants.calls``.

Each function of the package is compiled with one statement more, which notes its name. The notes go into
build/mutants-calls.json, in place of what the same files' tests noted before. Only tests that pass are kept.
"""

from __future__ import annotations

import ast
import builtins
import json
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import TypedDict

import pytest

from tests.mutants.functions import PACKAGE, module_name, named_functions

__all__ = ["CALLS", "Call", "known_calls"]

CALLS = PACKAGE.parent / "build" / "mutants-calls.json"
_NOTE = "_thunder_mem_calls"


class Call(TypedDict):
    """A test's seconds of the processor, and the functions that it calls."""

    seconds: float
    functions: list[str]


_called: set[str] = set()
_calls: dict[str, Call] = {}


def known_calls() -> dict[str, Call]:
    """By the test's name."""
    return json.loads(CALLS.read_text()) if CALLS.exists() else {}


def noting(source: str, path: Path) -> ast.Module:
    """The module, in which each function notes its name when it is called."""
    tree = ast.parse(source)
    for name, node in named_functions(tree.body):
        note = ast.parse(f"{_NOTE}({f'{module_name(path)}:{name}'!r})").body[0]
        for part in ast.walk(note):
            ast.copy_location(part, node.body[0])
        node.body.insert(1 if ast.get_docstring(node, clean=False) is not None else 0, note)
    return tree


_get_code = SourceFileLoader.get_code


def _code_with_notes(loader: SourceFileLoader, name: str) -> CodeType | None:
    path = Path(loader.get_filename(name))
    if PACKAGE not in path.parents:
        return _get_code(loader, name)
    return compile(noting(path.read_text(encoding="utf-8"), path), str(path), "exec", dont_inherit=True)


def pytest_load_initial_conftests() -> None:
    """Before `tests/conftest.py` imports parts of the package, whose calls would not be noted."""
    setattr(builtins, _NOTE, _called.add)
    SourceFileLoader.get_code = _code_with_notes  # type: ignore[method-assign]


def pytest_runtest_logstart(nodeid: str) -> None:
    _called.clear()
    _calls[nodeid] = {"seconds": 0.0, "functions": []}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != "passed":
        _calls.pop(report.nodeid, None)
    elif report.nodeid in _calls:
        seconds = dict(report.user_properties).get("seconds", 0.0)
        _calls[report.nodeid] = {"seconds": round(seconds, 2), "functions": sorted(_called)}


def pytest_runtest_logfinish(nodeid: str) -> None:
    _write()


def _write(every: int = 20) -> None:
    if len(_calls) % every == 0:
        files = {test.partition("::")[0] for test in _calls}
        others = {test: call for test, call in known_calls().items() if test.partition("::")[0] not in files}
        CALLS.parent.mkdir(exist_ok=True)
        CALLS.write_text(json.dumps(others | _calls) + "\n")


def pytest_sessionfinish() -> None:
    _write(1)
