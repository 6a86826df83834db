"""Which tests run, by how long they take, and what each of them took.

`--third K` leaves the slow tests of two thirds out, so that three runs cover all. `--longest S` fails a run in which a
test that is not marked slow takes more than S seconds. Seconds are of the processor, in the test's own process:
another process on the same machine does not count.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

import pytest

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_runtest_logreport",
    "pytest_runtest_makereport",
    "pytest_runtest_protocol",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
]

THIRDS = 3
_SHOWN = 10
_STARTED = pytest.StashKey[float]()


class _Took(NamedTuple):
    seconds: float
    name: str
    slow: bool


_took: list[_Took] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("durations of tests")
    group.addoption("--third", type=int, choices=range(THIRDS), help="of the slow tests only this third, 0 to 2")
    group.addoption("--longest", type=float, metavar="S", help="fail if a test not marked slow takes more seconds")


def third_of(name: str) -> int:
    """Which third a test is in, by its name, so that it stays there whatever tests come and go."""
    return zlib.crc32(name.encode()) % THIRDS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    third = config.getoption("third")
    if third is None:
        return
    others = [i for i in items if i.get_closest_marker("slow") and third_of(i.nodeid) != third]
    config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = [i for i in items if i not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_STARTED] = time.process_time()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """With each report of a test the seconds since it began, its fixtures' included."""
    report = yield
    seconds = time.process_time() - item.stash[_STARTED]
    report.user_properties = [("seconds", seconds)]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _took.append(_Took(dict(report.user_properties)["seconds"], report.nodeid, "slow" in report.keywords))


def _too_long(config: pytest.Config) -> list[_Took]:
    """On the process that starts the others, which hears of all tests."""
    longest = config.getoption("longest")
    if longest is None or hasattr(config, "workerinput"):
        return []
    return [t for t in _took if not t.slow and t.seconds > longest]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section(f"the {_SHOWN} slowest tests, in seconds of the processor")
    for test in sorted(_took, key=attrgetter("seconds"), reverse=True)[:_SHOWN]:
        terminalreporter.line(f"{test.seconds:6.1f} {test.name}")
    for test in _too_long(config):
        limit = config.getoption("longest")
        terminalreporter.line(f"over {limit:g} s: {test.name}: make it shorter, or mark it slow", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _too_long(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
