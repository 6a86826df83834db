"""One function emptied in a process of its own, and the tests that call it: which of them fails first?

The process is a fork of one that has imported everything, which saves most of a trial's time.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
import time
from collections.abc import Sequence
from select import select

import pytest

from tests.mutants.functions import PACKAGE, empty

__all__ = ["FIXED", "caught_by", "import_all"]

SECONDS = 300
FIXED = "cannot be emptied"


def import_all(files: Sequence[str] = ()) -> None:
    """What every trial would import, Thunder after `compat`, without which it does not import with newer PyTorch.

    Args:
        files: of tests, which pytest imports.
    """
    for library in ("thunder_mem.compat", "thunder", "torch._inductor.compile_fx", "hypothesis", "litgpt"):
        importlib.import_module(library)
    for module in pkgutil.walk_packages([str(PACKAGE)], "thunder_mem."):
        if not module.name.endswith(("__main__", ".transformers")):
            importlib.import_module(module.name)
    if files:
        pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *files])


def caught_by(name: str, tests: list[str]) -> str | None:
    """The first of these tests that fails where the function is empty; None if all pass; `FIXED` if it cannot be."""
    read, write = os.pipe()
    if not (process := os.fork()):
        try:
            os.close(read)
            _try(name, tests, write)
        finally:
            os._exit(0)
    os.close(write)
    said = _all_that_is_said(read, process)
    os.close(read)
    os.waitpid(process, 0)
    if not said:
        raise RuntimeError(f"pytest runs none of {', '.join(tests)}")
    what, _, test = said.strip().rpartition("\n")[2].partition(" ")
    return {"passed": None, "fixed": FIXED}.get(what, test)  # a test that hangs, or takes the process along, is caught


def _all_that_is_said(read: int, process: int) -> str:
    said, end = b"", time.monotonic() + SECONDS
    while select([read], [], [], max(0, end - time.monotonic()))[0]:
        if not (more := os.read(read, 65536)):
            return said.decode()
        said += more
    os.kill(process, signal.SIGKILL)
    return said.decode()


class _Teller:
    """Says which test runs and whether it fails, a line each."""

    def __init__(self, to: int) -> None:
        self.to = to

    def say(self, what: str, test: str = "") -> None:
        os.write(self.to, f"{what} {test}\n".encode())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.say("runs", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.say("failed", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say("failed", report.nodeid)


def _try(name: str, tests: list[str], to: int) -> None:
    teller = _Teller(to)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    if not empty(name):
        return teller.say("fixed")
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], plugins=[teller])
    if status == pytest.ExitCode.OK:
        teller.say("passed")
    return None
