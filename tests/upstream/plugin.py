"""A pytest plugin: run each test without and with `MemEfficient` injected, and write down what it gave.

``pytest -p tests.upstream.plugin --upstream-record FOLDER --upstream-only FILE ...``

A test runs with the transform first: what passes is no regression, and need not run without. What does not
pass runs without, and if it passes there, on all sides. The sides follow each other within one test, so that
importing and collecting, which take longer than many tests, happen once.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from _pytest.runner import runtestprotocol

from tests.upstream.records import PLAIN, SIDES, Record, append, falls_in, own_sides

if TYPE_CHECKING:
    from tests.upstream.inject import Injection

__all__: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("upstream")
    group.addoption("--upstream-record", type=Path, help="folder of the lines, a file for each test file")
    group.addoption("--upstream-only", type=Path, help="a file of test ids, one a line; others are deselected")
    group.addoption("--upstream-list", type=Path, help="write the ids of all tests to this file")
    group.addoption("--upstream-compiled", type=float, default=0.0, help="share of tests with compiled regions")
    group.addoption("--upstream-all", action="store_true", help="without first, then all sides, whatever passes")
    group.addoption("--upstream-plain", action="store_true", help="without even importing thunder_mem")
    group.addoption("--upstream-seconds", type=int, default=120, help="of the processor, after which a test has failed")


def short_id(item: pytest.Item) -> str:
    """The test's id, with the file's name alone."""
    file, _, rest = item.nodeid.partition("::")
    return f"{file.rsplit('/', 1)[-1]}::{rest}"


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Thunder 0.2.6 writes ``parametrize("device,", ["cpu"])``, which pytest 9 takes for a tuple of one."""
    parametrize = metafunc.parametrize

    def without_comma(names, *args, **kwargs):
        return parametrize(names.rstrip(",") if isinstance(names, str) else names, *args, **kwargs)

    metafunc.parametrize = without_comma  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if path := config.option.upstream_list:
        path.write_text("".join(f"{short_id(i)}\n" for i in items))
    if path := config.option.upstream_only:
        wanted = set(path.read_text().splitlines())
        items[:] = [i for i in items if short_id(i) in wanted]


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    if config.option.upstream_plain:
        config.pluginmanager.register(_Recorder(config))
    elif config.option.upstream_record:
        from tests.fuzzing.quick_thunder import claimed_once, looked_up_once
        from tests.upstream.inject import injected

        stack = ExitStack()
        config.add_cleanup(stack.close)
        stack.enter_context(looked_up_once())
        stack.enter_context(claimed_once())
        config.pluginmanager.register(_Sides(config, stack.enter_context(injected())))


class _Recorder:
    """Runs a test once, and writes down what it gave."""

    def __init__(self, config: pytest.Config) -> None:
        self._folder: Path = config.option.upstream_record
        self._seconds: int = config.option.upstream_seconds
        self._reports: list[tuple[str, str]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        append(self._folder, self.run(item, PLAIN, nextitem))
        return True

    def run(self, item: pytest.Item, side: str, nextitem: pytest.Item | None) -> Record:
        id = short_id(item)
        append(self._folder, Record(id, side, "started"))
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)  # the same data on every side
        self._reports, started = [], time.perf_counter()
        with _limit(self._seconds):
            runtestprotocol(item, nextitem=nextitem, log=True)
        outcome, cause = next(((o, c) for o, c in self._reports if o != "passed"), ("passed", ""))
        return Record(id, side, outcome, seconds=round(time.perf_counter() - started, 2), cause=cause)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = yield
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        cause = ""
        if call.excinfo:
            lines = str(call.excinfo.value).strip().splitlines() or [""]
            cause = f"{call.excinfo.typename}: {lines[0][:300]}"
        self._reports.append((outcome, cause))
        return report


class _Sides(_Recorder):
    """Runs a test on its sides, and where it does not pass on the others."""

    def __init__(self, config: pytest.Config, injection: Injection) -> None:
        super().__init__(config)
        self._compiled: float = config.option.upstream_compiled
        self._all: bool = config.option.upstream_all
        self._injection = injection

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        from tests.upstream.inject import uncompiled

        id = short_id(item)
        compiled = falls_in(id, self._compiled, "compiled")

        def passes(side: str) -> bool:
            torch._dynamo.reset()  # what one side compiled is not for the next
            self._injection.side, programs = side, self._injection.programs
            try:
                with nullcontext() if compiled else uncompiled():
                    record = self.run(item, side, nextitem)
            finally:
                self._injection.side = SIDES[0]
            append(self._folder, replace(record, programs=self._injection.programs - programs, compiled=compiled))
            return record.outcome == "passed"

        if (self._all or not all(passes(side) for side in own_sides(id))) and passes(SIDES[0]):
            for side in SIDES[1:]:
                passes(side)
        return True


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Raise within after so many seconds of the processor's, or ten times as many by the clock."""

    def expired(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError("the test took too long")

    before = [(s, signal.signal(s, expired)) for s in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before:
            signal.signal(signum, handler)
