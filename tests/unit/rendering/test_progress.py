"""Long work shows itself after two seconds by a clock that is ours, on a console that is a buffer."""

import io
import threading

import pytest
from rich.console import Console

from thunder_mem.rendering import progress
from thunder_mem.rendering.progress import Progress, showing, stage, wanted


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def shown_by(clock, terminal=False, **options):
    console = Console(file=io.StringIO(), force_terminal=terminal, force_jupyter=False, width=80)
    return Progress(console, clock, wakes=False, **options), console.file


def test_two_seconds_of_work_show_the_innermost_stage(clock):
    shown, file = shown_by(clock)
    with shown.stage("planning"):
        clock.now_s += 1.9
        with shown.stage("what to save"):
            assert file.getvalue() == ""
        clock.now_s += 0.1
        with shown.stage("verification"):
            pass
    assert file.getvalue().splitlines() == ["thunder_mem: verification", "thunder_mem: planning"]


def test_a_stage_has_one_line_in_a_pipe(clock):
    shown, file = shown_by(clock, after_s=0.0)
    with shown.stage("planning"):
        for name in ("what to save", "verification", "verification"):
            with shown.stage(name):
                pass
    lines = ["thunder_mem: planning", "thunder_mem: what to save", "thunder_mem: verification"]
    assert file.getvalue().splitlines() == lines and not shown._printed


def test_short_work_after_a_pause_stays_silent_and_work_in_pieces_does_not(clock):
    shown, file = shown_by(clock)
    for _ in range(5):
        with shown.stage("compiling"):
            clock.now_s += 1.0
        clock.now_s += 3.0
    assert file.getvalue() == ""
    for left in (3, 2, 1):
        with shown.stage(f"compiling regions, {left} left"):
            clock.now_s += 1.0
    assert file.getvalue().splitlines() == ["thunder_mem: compiling regions, 1 left"]


def test_on_a_terminal_the_line_goes_away(clock):
    shown, file = shown_by(clock, terminal=True)
    with shown.stage("planning [red]x[/red]"):
        clock.now_s += 2.0
        with shown.stage("reuse buffers"):
            assert "\x1b[?25l" in file.getvalue()  # the cursor hides
    text = file.getvalue()
    assert "thunder_mem: reuse buffers" in text and text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")
    assert shown._live is None and not shown._open


def test_an_error_ends_its_stage(clock):
    shown, file = shown_by(clock, after_s=0.0)
    with pytest.raises(KeyError), shown.stage("one"), shown.stage("two"):
        raise KeyError
    with shown.stage("three"):
        pass
    assert file.getvalue().splitlines()[-1] == "thunder_mem: three" and not shown._open


def test_a_long_stage_shows_without_another_one(clock):
    """The timer's function, called as it would be."""
    shown, file = shown_by(clock)
    shown._wake()
    with shown.stage("tracing"):
        clock.now_s += 2.0
        shown._wake()
        assert file.getvalue() == "thunder_mem: tracing\n"


def test_the_timer_is_for_the_rest_of_the_two_seconds(clock, monkeypatch):
    made = []

    class Timer:
        def __init__(self, seconds, function):
            made.append(seconds)
            self.started = self.cancelled = False

        def start(self):
            self.started = True

        def cancel(self):
            made.append("cancelled")

    monkeypatch.setattr(threading, "Timer", Timer)
    shown = Progress(Console(file=io.StringIO()), clock)
    for _ in range(2):
        with shown.stage("one"):
            clock.now_s += 0.5
    assert made == [2.0, "cancelled", 1.5, "cancelled"]


def test_it_is_silent_in_tests_in_pipes_on_other_ranks_and_when_switched_off(monkeypatch, clock):
    monkeypatch.delenv("THUNDER_MEM_PROGRESS", raising=False)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    assert not wanted()  # a test
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert wanted()
    monkeypatch.setenv("RANK", "1")
    assert not wanted()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("THUNDER_MEM_PROGRESS", "0")
    assert not wanted()
    monkeypatch.delenv("THUNDER_MEM_PROGRESS")
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert not wanted()  # a pipe
    monkeypatch.setenv("THUNDER_MEM_PROGRESS", "1")
    assert wanted()
    monkeypatch.setattr(progress, "_default", lambda: shown)
    shown, file = shown_by(clock, after_s=0.0)
    with stage("forced"):
        assert file.getvalue() == "thunder_mem: forced\n"
    monkeypatch.setenv("THUNDER_MEM_PROGRESS", "0")
    with stage("silent"):
        pass
    assert "silent" not in file.getvalue()
    within, inner = shown_by(clock, after_s=0.0)
    with showing(within), stage("within"):
        pass
    assert inner.getvalue() == "thunder_mem: within\n"
