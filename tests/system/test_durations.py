"""That a long test must say so, and that the parts are all of the slow tests."""

import pytest

from tests.checking import durations

pytest_plugins = ["pytester"]

# A processor whose time the tests themselves turn on.
CONFTEST = """
from types import SimpleNamespace
from tests.checking import durations
from tests.checking.durations import *
durations.time = SimpleNamespace(process_time=lambda: durations.now)
durations.now = 0
"""
TESTS = """
import gc
import pytest
from tests.checking import durations

runs = []

@pytest.fixture
def work():
    durations.now += 1

def test_one(work):
    durations.now += 2

def test_first(work):
    runs.append(1)
    durations.now += 9 if len(runs) == 1 else 1

def test_collecting():
    def takes_long(phase, info):
        durations.now += 20 if phase == "start" else 0

    gc.callbacks.append(takes_long)
    gc.collect()
    gc.callbacks.remove(takes_long)

@pytest.mark.slow
@pytest.mark.parametrize("n", range(16))
def test_slow(n):
    durations.now += 20

@pytest.mark.slow("costly")
@pytest.mark.parametrize("n", range(3))
def test_together(n):
    pass

@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [*range(5), pytest.param(5, marks=pytest.mark.slow)])
def test_sampled(n):
    pass
"""


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setattr(durations, "_took", [])
    monkeypatch.setattr(durations, "time", durations.time)
    monkeypatch.setattr(durations, "_slowness", lambda: 1.0)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers =\n  slow: long\n  sampled(N): not slow\n")

    def run_once(*options):
        durations._took.clear()
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)

    return run_once


def test_a_long_test_that_is_not_marked_fails_the_run(run):
    result = run("--longest=2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["over 2 s: *test_one: make it shorter, or mark it slow"])
    over = "".join(line for line in result.outlines if line.startswith("over"))
    assert not any(name in over for name in ("test_slow", "test_first", "test_collecting"))
    result.assert_outcomes(passed=28)


def test_a_short_one_does_not(run):
    assert run("--longest=3").ret == run().ret == pytest.ExitCode.OK


def test_a_slower_processor_has_as_many_seconds_more(run, monkeypatch):
    monkeypatch.setattr(durations, "_slowness", lambda: 2.0)
    assert run("--longest=2").ret == pytest.ExitCode.OK
    assert run("--longest=1").ret == pytest.ExitCode.TESTS_FAILED


def test_the_parts_are_all_slow_tests(run):
    every = [_names(run(f"--part={part}", "-v")) for part in range(durations.PARTS)]
    slow = [{name for name in names if "test_slow" in name} for names in every]
    assert all("test_one" in "".join(names) for names in every)
    assert len(set.union(*slow)) == 16 and {len(names) for names in slow} == {2}
    together = sorted(sum("test_together" in name for name in names) for names in every)
    assert together == [0] * (durations.PARTS - 1) + [3]


def test_all_cases_but_a_sample_are_slow(run):
    short, slow = (_names(run("-v", "-m", which, "-k", "sampled")) for which in ("not slow", "slow"))
    assert (len(short), len(slow), len({*short, *slow})) == (2, 4, 6)


def _names(result):
    return [line.split()[0] for line in result.outlines if "::" in line and "PASSED" in line]
