"""Which tests run, by how long they take, and what each of them took.

`--third K` leaves the slow tests of two thirds out, so that three runs cover all. `--longest S` fails a run in which a
test that is not marked slow takes more than S seconds. Seconds are of the processor, in the test's own process:
another process on the same machine does not count. With `--longest` a test that took too long runs a second time, and
the shorter time counts: the first test of a process that imports a library, or compiles the first kernel of a machine,
pays for all later ones. That time is then divided by how much slower than usual the processor is at that moment.
"""

from __future__ import annotations

import time
import zlib
from operator import attrgetter
from typing import NamedTuple

import pytest
from _pytest.runner import runtestprotocol

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_runtest_logreport",
    "pytest_runtest_protocol",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
]

THIRDS = 3
_SHOWN = 10
_USUAL_S = 0.013
"""What `_work` takes on an idle core; under load, or on a slower one, it was 0.026."""


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
    others = [i for i in items if _is_slow(i) and third_of(i.nodeid) != third]
    config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = [i for i in items if i not in left_out]


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """As pytest runs a test, with the seconds that it took in the report of its teardown."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports, seconds = _timed(item, nextitem)
    longest = item.config.getoption("longest")
    if longest is not None and seconds > longest and not _is_slow(item):
        item._initrequest()  # type: ignore[attr-defined]  # fixtures anew, as pytest-rerunfailures does it
        seconds = min(seconds, _timed(item, nextitem)[1]) / _slowness()
    for report in reports:
        report.user_properties.append(("seconds", seconds))
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _timed(item: pytest.Item, nextitem: pytest.Item | None) -> tuple[list[pytest.TestReport], float]:
    """The reports of one run, and the processor's seconds with its fixtures."""
    start = time.process_time()
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    return reports, time.process_time() - start


def _slowness() -> float:
    """How many times longer than usual this processor takes for the same Python now; 1 for a faster one."""
    return max(1.0, min(_work() for _ in range(5)) / _USUAL_S)


def _work() -> float:
    start = time.process_time()
    found: dict[int, str] = {}
    for i in range(100_000):
        found[i % 1000] = str(i)
    return time.process_time() - start


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


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
