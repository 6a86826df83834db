"""The steps of a plan that run each op, and the live bytes at each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import add

from thunder_mem.memory.graph import Graph
from thunder_mem.memory.plan import Plan

__all__ = ["PlanSteps", "plan_steps"]


@dataclass(frozen=True)
class PlanSteps:
    """A plan over the unfused graph that it was made for.

    Attributes:
        graph: that graph.
        of_op: per op, the steps that run it: several if regions recompute it.
        copied: each (op, step) whose result another step returns, or none.
        live_bytes: per step, the bytes alive then, with regions as units and with scratch.
        peak: the first step with the most bytes, in the half that peaks; None for a plan without steps there.
    """

    graph: Graph
    of_op: tuple[tuple[int, ...], ...]
    copied: frozenset[tuple[int, int]]
    live_bytes: tuple[int, ...] = ()
    peak: int | None = None

    @cached_property
    def _copied_at(self) -> dict[int, set[int]]:
        """For each op of `copied`, its steps there."""
        steps: dict[int, set[int]] = {}
        for op, step in self.copied:
            steps.setdefault(op, set()).add(step)
        return steps

    def first(self, storage: int) -> int | None:
        """The step that makes a storage: 0 for an input, None if every reader recomputes it."""
        made = self.graph.allocator[storage]
        return 0 if made is None else min((i for i in self.of_op[made] if (made, i) not in self.copied), default=None)

    def uses(self, storage: int, op: int) -> tuple[int, ...]:
        """The steps at which an op uses a storage, not a copy that its own region makes."""
        made = self.graph.allocator[storage]
        copies = None if made is None else self._copied_at.get(made)
        steps = self.of_op[op]
        return tuple([i for i in steps if i not in copies]) if copies else steps

    def last(self, storage: int) -> int:
        """The last step at which a storage is alive; -1 if none uses it."""
        if self.graph.storages[storage].held or storage in self.graph.outputs:
            return len(self.live_bytes) - 1
        return max([i for op in self.graph.users[storage] for i in self.uses(storage, op)], default=-1)

    def is_alive_at_peak(self, storage: int) -> bool:
        """Whether a storage is made before the peak or there, and read there or later."""
        first = self.first(storage)
        return first is not None and self.peak is not None and first <= self.peak <= self.last(storage)

    def uses_before_peak(self, storage: int, ops: Sequence[int]) -> int | None:
        """How many of these ops, in source order, use a storage before the peak, at which it is idle.

        None if the storage is not idle at the peak: made later, used at the peak, used only on one side of it, or
        recomputed by some user. Also None if the order of the steps mixes early and late uses.
        """
        steps = [self.uses(storage, op) for op in ops]
        first = self.first(storage)
        if self.peak is None or first is None or first >= self.peak or not all(steps):
            return None
        early = sum(max(at) < self.peak for at in steps)
        late = all(min(at) > self.peak for at in steps[early:])
        return early if early < len(ops) and late and all(max(at) < self.peak for at in steps[:early]) else None


def plan_steps(graph: Graph, plan: Plan) -> PlanSteps:
    """The steps of `plan`, which was made for `graph`."""
    of_op: list[tuple[int, ...]] = [()] * len(graph)
    for i, region in enumerate(plan.regions):
        for op in region.ops:
            of_op[op] += (i,)
    copied = frozenset((op, i) for i, region in enumerate(plan.regions) for op in region.copies)
    steps = PlanSteps(graph, tuple(of_op), copied, (0,) * len(plan.regions))
    change = [0] * (len(plan.regions) + 1)
    for s in graph.storages:
        first, last = steps.first(s.index), steps.last(s.index)
        inside = first == last and graph.allocator[s.index] is not None and len(plan.regions[last].ops) > 1
        if first is not None and last >= 0 and not (inside and s.index not in graph.outputs):
            change[first] += s.nbytes
            change[last + 1] -= s.nbytes
    scratch_bytes = (max(graph.ops[op].scratch_bytes for op in region.ops) for region in plan.regions)
    live_bytes = tuple(map(add, accumulate(change[:-1]), scratch_bytes))
    half = plan.candidate.backward_peak_bytes >= plan.candidate.forward_peak_bytes
    in_half = [i for i, r in enumerate(plan.regions) if r.backward == half]
    peak = max(in_half, key=lambda i: (live_bytes[i], -i), default=None)
    return replace(steps, live_bytes=live_bytes, peak=peak)
