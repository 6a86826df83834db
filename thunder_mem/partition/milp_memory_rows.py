"""Live bytes at a step of a trial, as a function of the storages that are kept, recomputed and offloaded.

A kept storage is alive from its last use in the forward to its first use in the backward; after that, it is alive
under every decision. A recomputed storage is alive from its recomputation on: its op runs just before the first use of
any value that depends on it, which may be earlier than its own first use. An offloaded storage is fetched just before
its first use, by the backward itself or by a repeated op. All terms are linear in the decisions (`milp.py`). Each row
is exact for its own trial: bytes that the model does not explain there are its `fixed_bytes`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.graph import Graph
from thunder_mem.memory.hills import hills
from thunder_mem.partition.evaluation import Evaluation
from thunder_mem.partition.min_cut_partition import saved_storages

__all__ = ["MemoryRow", "MilpVariables", "calibrated", "memory_rows"]


@dataclass(frozen=True)
class MilpVariables:
    """The decisions of a program: `storages` may be recomputed, `forced` must be, `movable` may be offloaded.

    Each op that makes such storages costs `repeat_s`.
    """

    graph: Graph
    fuse: FusionCapabilities
    storages: frozenset[int]
    repeat_s: Sequence[float]
    forced: frozenset[int] = frozenset()
    movable: frozenset[int] = frozenset()

    @cached_property
    def maker(self) -> dict[int, int]:
        """Per storage that may be recomputed, the op that makes it."""
        return {s: op for s in sorted(self.storages) if (op := self.graph.allocator[s]) is not None}

    @cached_property
    def ops(self) -> tuple[int, ...]:
        """The ops that may be repeated, in source order."""
        return tuple(sorted(set(self.maker.values())))

    def made(self, op: int) -> list[int]:
        """The results of an op that may be recomputed."""
        return [s for s in self.graph.ops[op].allocates if s in self.storages]

    @cached_property
    def must_save_inputs(self) -> tuple[int, ...]:
        """Storages that cannot be recomputed but must be kept if an op that reads them is repeated."""
        graph = self.graph
        read = {s for op in self.ops for s in graph.ops[op].reads} - self.storages
        return tuple(
            sorted(
                s
                for s in read
                if graph.allocator[s] is not None and not graph.storages[s].held and s not in graph.outputs
            )
        )

    @cached_property
    def decided(self) -> tuple[int, ...]:
        """All storages that the program may keep or not."""
        return tuple(dict.fromkeys((*sorted(self.storages), *self.must_save_inputs, *sorted(self.movable))))

    @cached_property
    def needed(self) -> frozenset[int]:
        """The storages that the backward itself touches."""
        return frozenset(s for op in self.graph.ops if op.backward for s in op.touches)

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Per storage, the ops that read it and may be repeated."""
        readers: dict[int, list[int]] = {}
        for op in self.ops:
            for s in self.graph.ops[op].reads:
                readers.setdefault(s, []).append(op)
        return {s: tuple(ops) for s, ops in readers.items()}

    @cached_property
    def outlives_region(self) -> frozenset[int]:
        """Storages that exist outside regions when recomputed: costly ones, and those that an unfused op needs."""
        takes, cheap = self.fuse.takes, self.fuse.cheap
        users = self.graph.users
        return frozenset(
            s for s, op in self.maker.items() if not cheap[op] or any(not takes[user] for user in users[s])
        )


@dataclass(frozen=True)
class MemoryRow:
    """The bytes alive at one step, as a linear function of all decisions.

    Attributes:
        key: the op of the original graph at that step, which names the step across trials.
        fixed_bytes: alive in any case.
        bytes_of: alive if kept.
        again: those of `bytes_of` that are also alive if they have been recomputed by then.
        fetched: those of `bytes_of` that may be offloaded, each with those of `started` that fetch it.
        started: the ops that matter here and may have been repeated by then, users first, each with its
            results that the backward itself has used by then.
    """

    key: int
    fixed_bytes: int
    bytes_of: Mapping[int, int]
    again: frozenset[int]
    started: Mapping[int, tuple[int, ...]]
    fetched: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def live_bytes(
        self,
        candidates: MilpVariables,
        rebuilt: Collection[int],
        kept: Collection[int],
        offloaded: Collection[int] = frozenset(),
    ) -> int:
        """The row's prediction for another choice."""
        repeated = self._repeated(candidates, rebuilt)

        def is_alive(s: int) -> bool:
            if s in offloaded:
                return not repeated.isdisjoint(self.fetched.get(s, ()))
            return s in kept or (s in self.again and candidates.maker[s] in repeated)

        return self.fixed_bytes + sum(nbytes for s, nbytes in self.bytes_of.items() if is_alive(s))

    def _repeated(self, candidates: MilpVariables, rebuilt: Collection[int]) -> set[int]:
        found: set[int] = set()
        for op, used in self.started.items():
            made = candidates.graph.ops[op].allocates
            if any(s in rebuilt for s in used) or any(
                s in rebuilt and not found.isdisjoint(candidates.readers.get(s, ())) for s in made
            ):
                found.add(op)
        return found


def memory_rows(candidates: MilpVariables, trial: Evaluation, count: int = 16) -> list[MemoryRow]:
    """The rows of a trial's highest local peaks and of the end of its forward."""
    timeline = trial.timeline
    steps = list(hills(timeline.live_bytes, count, share=0))
    first_backward = sum(not op.backward for op in timeline.graph.ops)
    if 0 < first_backward < len(timeline.order):
        steps.append(first_backward)
    lives = _Lives(candidates, trial)
    kept = saved_storages(candidates.graph, trial.rebuilt) - trial.offloaded
    rows = []
    for step in dict.fromkeys(steps):
        row = lives.row(step, trial.names[step], in_backward=step >= first_backward)
        unexplained = timeline.live_bytes[step] - row.live_bytes(candidates, trial.rebuilt, kept, trial.offloaded)
        rows.append(replace(row, fixed_bytes=unexplained))
    return rows


def calibrated(candidates: MilpVariables, rows: Iterable[MemoryRow], trials: Sequence[Evaluation]) -> list[MemoryRow]:
    """The rows, each lowered until it claims at most the trial's peak for every trial."""
    kept = [saved_storages(candidates.graph, t.rebuilt) - t.offloaded for t in trials]

    def excess(row: MemoryRow) -> int:
        return max(
            row.live_bytes(candidates, t.rebuilt, k, t.offloaded) - t.peak_bytes
            for t, k in zip(trials, kept, strict=True)
        )

    return [replace(row, fixed_bytes=row.fixed_bytes - max(0, excess(row))) for row in rows]


class _Lives:
    """The steps of one trial at which storages are used."""

    def __init__(self, candidates: MilpVariables, trial: Evaluation) -> None:
        self.candidates, self.trial = candidates, trial
        self.due: dict[int, int] = {}  # per op, the earliest step before which it may be repeated
        for op in reversed(candidates.ops):
            made = candidates.made(op)
            later = (self.due[r] for s in made for r in candidates.readers.get(s, ()))
            self.due[op] = min((*(trial.backward_start[s] for s in made), *later), default=len(trial.names))

    def row(self, step: int, key: int, in_backward: bool) -> MemoryRow:
        candidates, trial = self.candidates, self.trial
        bytes_of = {
            s: candidates.graph.storages[s].nbytes
            for s in candidates.decided
            if trial.forward_end[s] < step < self._end(s)
        }
        if not in_backward:
            return MemoryRow(key, 0, bytes_of, frozenset(), {})
        outlives = candidates.outlives_region
        again = frozenset(s for s in bytes_of if s in outlives and trial.backward_end[s] >= step)
        readers = {s: candidates.readers.get(s, ()) for s in bytes_of if s in candidates.movable}
        started = self._started({candidates.maker[s] for s in again}.union(*readers.values()), step)
        fetched = {s: found for s, ops in readers.items() if (found := tuple(op for op in ops if op in started))}
        return MemoryRow(key, 0, bytes_of, again, started, fetched)

    def _end(self, s: int) -> int:
        """The last step at which keeping `s` costs memory: before its first use, also by repeated ops."""
        if self.trial.backward_end[s] >= 0:
            return self.trial.backward_start[s]
        return max((self.due[op] for op in self.candidates.readers.get(s, ())), default=-1)

    def _started(self, makers: set[int], step: int) -> dict[int, tuple[int, ...]]:
        candidates = self.candidates
        found: set[int] = set()
        stack = [op for op in makers if self.due[op] <= step]
        while stack:
            op = stack.pop()
            if op not in found:
                found.add(op)
                readers = (r for s in candidates.made(op) for r in candidates.readers.get(s, ()))
                stack += [r for r in readers if self.due[r] <= step]
        start = self.trial.backward_start
        return {op: tuple(s for s in candidates.made(op) if start[s] <= step) for op in sorted(found, reverse=True)}
