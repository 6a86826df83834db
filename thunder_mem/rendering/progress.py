"""Long work shows itself: the present stage, on a terminal or in a notebook, once two seconds have passed.

Nothing shows in a pipe, in tests, or on other ranks than the first. THUNDER_MEM_PROGRESS=0 switches it off, and
THUNDER_MEM_PROGRESS=1 on, wherever the standard error goes.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

__all__ = ["AFTER_S", "VARIABLE", "Progress", "showing", "stage", "wanted"]

VARIABLE = "THUNDER_MEM_PROGRESS"
AFTER_S = 2.0
"""Seconds of work after which it shows."""


class Progress:
    """Shows the innermost open stage: on a terminal as one line that goes away, elsewhere as one line for each.

    Args:
        console: to show it on.
        clock: seconds that only grow.
        after_s: seconds of work after which it shows; a pause that is no longer does not end the work.
        wakes: look at the clock also within a long stage, by a timer; otherwise only where a stage begins or ends.
    """

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        after_s: float = AFTER_S,
        *,
        wakes: bool = True,
    ) -> None:
        self._console, self._clock, self._after_s, self._wakes = console, clock, after_s, wakes
        self._lock = threading.RLock()
        self._numbers = count()
        self._open: dict[int, str] = {}  # stages, the innermost last
        self._began_s = self._ended_s = float("-inf")
        self._timer: threading.Timer | None = None
        self._live: Live | None = None
        self._printed: set[int] = set()  # open stages that have their line
        self._last_line = ""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The stage of the work that runs inside."""
        with self._lock:
            number = next(self._numbers)
            if not self._open:
                self._begin()
            self._open[number] = name
            self._show()
        try:
            yield
        finally:
            with self._lock:
                del self._open[number]
                self._printed.discard(number)
                if self._open:
                    self._show()
                else:
                    self._end()

    def _begin(self) -> None:
        now = self._clock()
        if now - self._ended_s > self._after_s:
            self._began_s = now
        if self._wakes:
            self._timer = threading.Timer(max(0.0, self._began_s + self._after_s - now), self._wake)
            self._timer.daemon = True
            self._timer.start()

    def _wake(self) -> None:
        with self._lock:
            if self._open:
                self._show()

    def _show(self) -> None:
        if self._clock() - self._began_s < self._after_s:
            return
        number, name = list(self._open.items())[-1]
        text = f"thunder_mem: {name}"
        # A notebook needs a widget for lines that go away.
        if self._console.is_jupyter or not self._console.is_terminal:
            if number not in self._printed and text != self._last_line:
                self._console.print(text, markup=False, highlight=False)
                self._last_line = text
            self._printed.add(number)
        elif self._live is None:
            # What the user's code prints meanwhile goes where it would go.
            plain = {"redirect_stdout": False, "redirect_stderr": False}
            self._live = Live(_line(text), console=self._console, transient=True, **plain)  # type: ignore[arg-type]
            self._live.start(refresh=True)
        else:
            self._live.update(_line(text), refresh=True)

    def _end(self) -> None:
        self._ended_s = self._clock()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._live is not None:
            self._live.stop()
            self._live = None


def _line(text: str) -> Spinner:
    return Spinner("dots", Text(text))


_chosen: Progress | None = None


def stage(name: str) -> AbstractContextManager[None]:
    """A stage of long work, such as "planning"; nothing shows unless `wanted` or within `showing`."""
    if _chosen is not None:
        return _chosen.stage(name)
    return _default().stage(name) if wanted() else nullcontext()


@contextmanager
def showing(progress: Progress) -> Iterator[Progress]:
    """Show all stages within on this one."""
    global _chosen
    before, _chosen = _chosen, progress
    try:
        yield progress
    finally:
        _chosen = before


def wanted() -> bool:
    """Whether long work shows itself in this process."""
    asked = os.environ.get(VARIABLE)
    if asked in ("0", "1"):
        return asked == "1"
    if "PYTEST_CURRENT_TEST" in os.environ or os.environ.get("RANK", "0") != "0":
        return False
    return sys.stderr.isatty() or _default_console().is_jupyter


@functools.cache
def _default_console() -> Console:
    return Console(stderr=True)


@functools.cache
def _default() -> Progress:
    return Progress(_default_console())
