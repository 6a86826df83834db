"""What each test gave on each side, in files of lines to which runs append and from which they go on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

__all__ = ["PLAIN", "SIDES", "Record", "append", "close", "falls_in", "lines", "own_sides", "place", "read"]

# What is injected: nothing; the transform; the transform, and `mem_pointwise` in every list of executors that
# fuses nothing, as Thunder's test executors give one.
SIDES = ("without", "default", "pointwise")

# Files of thousands of small programs, mostly of one operation: each test on one of the two injected sides.
_SHARED_OUT = ("test_ops.py", "test_grad.py", "test_auto_register_torchops.py")

# Where this package is not even imported; for what does not pass "without", which imports it.
PLAIN = "plain"


@dataclass(frozen=True)
class Record:
    """One test on one side.

    Attributes:
        id: of the test, "test_core.py::test_name".
        side: one of `SIDES`, or `PLAIN`.
        outcome: "passed", "failed", "skipped", "xfailed", "crashed" (the process died) or "started".
        programs: how many the injected transform saw.
        compiled: whether fused regions were compiled, not run one operation at a time.
        seconds: the test's own time.
        cause: the first line of a failure.
    """

    id: str
    side: str
    outcome: str
    programs: int = 0
    compiled: bool = False
    seconds: float = 0.0
    cause: str = ""

    @property
    def file(self) -> str:
        """The name of the test's file."""
        return self.id.partition("::")[0]


def append(folder: Path, record: Record) -> None:
    """Add a line, at once on disk: the process may die in the next test."""
    with (folder / f"{record.file}.jsonl").open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def lines(folder: Path, file: str) -> list[Record]:
    """All that was written about a test file, in order."""
    path = folder / f"{file}.jsonl"
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def read(folder: Path, file: str) -> dict[tuple[str, str], Record]:
    """The last record of each (test, side), but for what was started and never ended: the run was stopped there."""
    last = {(r.id, r.side): r for r in lines(folder, file)}
    return {key: r for key, r in last.items() if r.outcome != "started"}


def close(folder: Path, file: str, start: int = 0) -> None:
    """Write down that what was started, in the lines from `start` on, and did not end has crashed."""
    last = {(r.id, r.side): r for r in lines(folder, file)[start:]}
    for r in last.values():
        if r.outcome == "started":
            append(folder, replace(r, outcome="crashed", cause="the process died"))


def place(id: str, salt: str = "") -> float:
    """Where a test stands among all, from 0 to 1, the same in every run."""
    return int(sha256(f"{salt}{id}".encode()).hexdigest()[:8], 16) / 16**8


def falls_in(id: str, share: float, salt: str = "") -> bool:
    """Whether a test belongs to a share of all; a larger share holds the smaller."""
    return place(id, salt) < share


def own_sides(id: str) -> tuple[str, ...]:
    """The injected sides on which a test runs: both, or one of them for files of thousands."""
    if id.partition("::")[0] not in _SHARED_OUT:
        return SIDES[1:]
    return (SIDES[1 + falls_in(id, 0.5, "side")],)
