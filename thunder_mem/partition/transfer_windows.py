"""The exposed time of copies of offloaded values, estimated before any order is known.

A value made after some point of the forward must leave in the rest of the forward. A value that the backward uses
before some point must arrive by then. Where copies take longer than the other work in such a window, the rest is
exposed. This is linear in the choice, so the integer program (`milp.py`) includes it. The exact times of copies are in
`rewrites/transfer_scheduling.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from thunder_mem.memory.device_models import DeviceModel
from thunder_mem.memory.graph import Graph

__all__ = ["Moves", "Window", "moves_of"]

# The number of points of each half to look at.
_POINTS = 12


@dataclass(frozen=True)
class Window:
    """A stretch of the program in which some values are copied: their storages, and the seconds of other work."""

    storages: frozenset[int]
    work_s: float


@dataclass(frozen=True)
class Moves:
    """The storages that may be offloaded.

    Attributes:
        copy_s: per such storage, seconds of its copy, one way.
        leaving, coming: windows of the forward and of the backward.
        haste: per storage from 1 to 2; larger with less other work between its making and its use. Among equal
            choices the least hasty wins, because its copies find room beside other work most easily.
    """

    copy_s: Mapping[int, float]
    leaving: tuple[Window, ...]
    coming: tuple[Window, ...]
    haste: Mapping[int, float]

    @property
    def movable(self) -> frozenset[int]:
        return frozenset(self.copy_s)

    def exposed_seconds(self, offloaded: Collection[int]) -> float:
        """The time of copying these out and back that no other work hides; a lower bound."""

        def most(windows: tuple[Window, ...]) -> float:
            late = (sum(self.copy_s[s] for s in w.storages & set(offloaded)) - w.work_s for w in windows)
            return max(0.0, *late)

        return most(self.leaving) + most(self.coming) if offloaded else 0.0


def moves_of(graph: Graph, storages: Collection[int], op_s: Sequence[float], device: DeviceModel) -> Moves:
    """The cost of offloading each of `storages`.

    Args:
        graph: forward and backward of one trace.
        storages: those that may be offloaded.
        op_s: seconds of each op.
        device: whose link counts.
    """
    if not storages:
        return Moves({}, (), (), {})
    copy_s = {s: device.copy_seconds(graph.storages[s].nbytes) for s in sorted(storages)}
    left = [0.0] * (len(graph) + 1)  # seconds of the forward from an op on
    for op in reversed(graph.ops):
        left[op.index] = left[op.index + 1] + (0.0 if op.backward else op_s[op.index])
    begins = [0.0] * (len(graph) + 1)  # seconds of the backward before an op
    for op in graph.ops:
        begins[op.index + 1] = begins[op.index] + (op_s[op.index] if op.backward else 0.0)
    # An op makes its results as it ends, and needs its operands as it begins.
    leaving = {s: left[(graph.allocator[s] or 0) + 1] for s in copy_s}
    coming = {s: begins[_first_use(graph, s)] for s in copy_s}
    between = {s: leaving[s] + coming[s] for s in copy_s}
    most = max(between.values()) or 1.0
    haste = {s: 2.0 - work_s / most for s, work_s in between.items()}
    return Moves(copy_s, _windows(leaving), _windows(coming), haste)


def _first_use(graph: Graph, s: int) -> int:
    """The first op of the backward that reads `s`, or else a value that a repeated op makes from `s`."""
    direct = [op for op in graph.users[s] if graph.ops[op].backward]
    made = {m for op in graph.users[s] for m in graph.ops[op].allocates if m != s}
    return min(direct or [op for m in made for op in graph.users[m] if graph.ops[op].backward], default=len(graph))


def _windows(work_s: Mapping[int, float]) -> tuple[Window, ...]:
    """One window for each of some values, spread evenly by the work beside them: all values with no more work."""
    ordered = sorted(work_s, key=lambda s: (work_s[s], s))
    last = len(ordered) - 1
    ends = sorted({round(i * last / _POINTS) for i in range(1, _POINTS + 1)}) if ordered else []
    return tuple(Window(frozenset(ordered[: end + 1]), work_s[ordered[end]]) for end in ends)
