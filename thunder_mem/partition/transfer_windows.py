"""How long the copies of offloaded values take, and how much of that other work hides, before any order is known.

What is made after some point of the forward must leave in the time that is left of the forward, and what the
backward uses before some point must have come by then: wherever the copies take longer than the work there,
the rest is exposed. Linear in the choice, so the integer program (`milp.py`) has it too; the copies'
exact times are `rewrites/transfer_scheduling.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from thunder_mem.memory.device_models import DeviceModel
from thunder_mem.memory.graph import Graph

__all__ = ["Moves", "Window", "moves_of"]

# So many points of each half are looked at.
_POINTS = 12


@dataclass(frozen=True)
class Window:
    """A stretch of the program in which some values are copied: their storages, and seconds of other work."""

    storages: frozenset[int]
    work_s: float


@dataclass(frozen=True)
class Moves:
    """What may be offloaded.

    Attributes:
        copy_s: per storage that may be, seconds of its copy, one way.
        leaving, coming: windows of the forward and of the backward.
        haste: per storage from 1 to 2, how little other work there is between its making and its use: of equal
            choices the least hasty is taken, for which it is easiest to find room beside other work.
    """

    copy_s: Mapping[int, float]
    leaving: tuple[Window, ...]
    coming: tuple[Window, ...]
    haste: Mapping[int, float]

    @property
    def movable(self) -> frozenset[int]:
        return frozenset(self.copy_s)

    def exposed_seconds(self, offloaded: Collection[int]) -> float:
        """Of copying these out and back, the time that no other work hides; a lower bound."""

        def most(windows: tuple[Window, ...]) -> float:
            late = (sum(self.copy_s[s] for s in w.storages & set(offloaded)) - w.work_s for w in windows)
            return max(0.0, *late)

        return most(self.leaving) + most(self.coming) if offloaded else 0.0


def moves_of(graph: Graph, storages: Collection[int], op_s: Sequence[float], device: DeviceModel) -> Moves:
    """What it takes to offload each of `storages`.

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
    # An op makes its results as it ends, and wants its operands as it begins.
    leaving = {s: left[(graph.allocator[s] or 0) + 1] for s in copy_s}
    coming = {s: begins[_first_use(graph, s)] for s in copy_s}
    between = {s: leaving[s] + coming[s] for s in copy_s}
    most = max(between.values()) or 1.0
    haste = {s: 2.0 - work_s / most for s, work_s in between.items()}
    return Moves(copy_s, _windows(leaving), _windows(coming), haste)


def _first_use(graph: Graph, s: int) -> int:
    """The first op of the backward that reads `s`, or, if none does, what is made of it by an op that is repeated."""
    direct = [op for op in graph.users[s] if graph.ops[op].backward]
    made = {m for op in graph.users[s] for m in graph.ops[op].allocates if m != s}
    return min(direct or [op for m in made for op in graph.users[m] if graph.ops[op].backward], default=len(graph))


def _windows(work_s: Mapping[int, float]) -> tuple[Window, ...]:
    """For some values, spread evenly by the work beside them, all that have no more of it."""
    ordered = sorted(work_s, key=lambda s: (work_s[s], s))
    last = len(ordered) - 1
    ends = sorted({round(i * last / _POINTS) for i in range(1, _POINTS + 1)}) if ordered else []
    return tuple(Window(frozenset(ordered[: end + 1]), work_s[ordered[end]]) for end in ends)
