"""Which tests run, by how long they take, and what each of them took.

Of a test marked `sampled(N)` all cases but N are slow. N cases are enough to see that something broke.

`--part K` runs an eighth of the slow tests, so that eight runs cover all. `--longest S` fails a run in which a
test that is not marked slow takes more than S seconds. Seconds are of the processor, in the test's own process:
another process on the same machine does not count. With `--longest` a test that took too long runs a second time, and
the shorter time counts: the first test of a process that imports a library, or compiles the first kernel of a machine,
pays for all later ones. That time is then divided by how much slower than usual the processor is at that moment.
Collections of garbage do not count: they look at all that earlier tests of the process keep.
"""

from __future__ import annotations

import gc
import time
import zlib
from collections import defaultdict
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

PARTS = 8
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
    group.addoption("--part", type=int, choices=range(PARTS), help="of the slow tests only this eighth, 0 to 7")
    group.addoption("--longest", type=float, metavar="S", help="fail if a test not marked slow takes more seconds")


def _in_part(part: int, items: list[pytest.Item]) -> set[pytest.Item]:
    """The slow tests of a part, which is found by their names: they stay there whatever other tests come and go.

    Cases of one test, which take about as long as each other, are shared out. All that is marked with the same
    `slow(NAME)`, as tests with an expensive fixture are, stays together.
    """
    cases: dict[str, int] = defaultdict(int)
    found = set()
    for item in filter(_is_slow, items):
        test = item.nodeid.partition("[")[0]
        names = item.get_closest_marker("slow").args
        place = zlib.crc32(names[0].encode()) if names else zlib.crc32(test.encode()) + cases[test]
        cases[test] += 1
        if place % PARTS == part:
            found.add(item)
    return found


@pytest.hookimpl(tryfirst=True)  # before pytest leaves slow tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_unsampled(items)
    part = config.getoption("part")
    if part is None:
        return
    left_out = set(filter(_is_slow, items)) - _in_part(part, items)
    config.hook.pytest_deselected(items=[i for i in items if i in left_out])
    items[:] = [i for i in items if i not in left_out]


def _mark_unsampled(items: list[pytest.Item]) -> None:
    """The checksum of its name says whether a case is in the sample: one more case changes at most one other."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not _is_slow(item):
            cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        (kept,) = same[0].get_closest_marker("sampled").args
        for item in sorted(same, key=lambda item: zlib.crc32(item.nodeid.encode()))[kept:]:
            item.add_marker("slow")


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
    """The reports of one run, and the processor's seconds with its fixtures, without those of the garbage collector."""
    collecting: list[float] = []  # the processor's time at each start and end

    def note(phase: str, info: dict[str, int]) -> None:
        collecting.append(time.process_time())

    gc.callbacks.append(note)
    start = time.process_time()
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    end = time.process_time()
    gc.callbacks.remove(note)
    collected = sum(collecting[1::2]) - sum(collecting[: len(collecting) // 2 * 2 : 2])
    return reports, end - start - collected


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
