"""Compute a value a second time instead of holding it idle over the peak.

The projection reads a norm's result, and the gradient of the projection's weight reads it again much later. In between
the result is idle, although it could be recomputed from live values. This is register rematerialization (Chaitin 1982,
Briggs 1992), for storages. A plan shows the values that are idle at the peak. All values that are made and used alike
are treated alike, so that the peak does not just move to the next layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thunder.core.trace import TraceCtx

from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.graph import Op
from thunder_mem.memory.plan import Decision, Plan
from thunder_mem.memory.plan_steps import PlanSteps, plan_steps
from thunder_mem.memory.units import counted
from thunder_mem.rewrites.recompute import gathers_of_held, repeat_late
from thunder_mem.runtime.repeatability import recompute_obstacle
from thunder_mem.trace.reading import TraceGraph

__all__ = ["Remake", "about_remakes", "idle_at_peak", "with_rematerialized"]

# The least size, as a share of the peak: smaller values are not worth a kernel.
_LEAST_SHARE = 0.002
# The most operations to recompute a value.
_LONGEST_CHAIN = 16


@dataclass(frozen=True)
class Remake:
    """A storage that is made twice.

    Attributes:
        storage: its index.
        readers: the ops that read the recomputed one, in source order.
        chain: the storages that are recomputed for it, including itself.
    """

    storage: int
    readers: tuple[int, ...]
    chain: frozenset[int]


def idle_at_peak(
    source: TraceGraph, plan: Plan, fuse: FusionCapabilities, affordable: frozenset[int] = frozenset()
) -> tuple[Remake, ...]:
    """The values that are idle at the plan's peak and can be recomputed from values that are alive later anyway.

    Args:
        source: the trace that `plan` was made for, as read.
        fuse: the facts about its cheap ops.
        affordable: other ops that may be repeated, once each.
    """
    steps = plan_steps(source.graph, plan)
    if steps.peak is None:
        return ()
    chains = _Chains(source, fuse, gathers_of_held(source), steps, affordable)
    least_bytes = _LEAST_SHARE * steps.live_bytes[steps.peak]
    alike: dict[tuple, int] = {}  # by how a storage is made and used: how many of its uses come before it is made again
    candidates = {s.index: chains.uses(s.index) for s in source.graph.storages if s.nbytes >= least_bytes}
    for s, uses in candidates.items():
        early = steps.uses_before_peak(s, uses)
        if early is not None and chains.of(s, uses[early:]):
            alike.setdefault(chains.kind(s, uses), early)
    found = []
    for s, uses in candidates.items():
        early = alike.get(chains.kind(s, uses)) if uses else None
        if early is not None and (chain := chains.of(s, uses[early:])):
            found.append(Remake(s, tuple(uses[early:]), chain))
    return tuple(found)


def with_rematerialized(source: TraceGraph, trace: TraceCtx, remakes: Iterable[Remake]) -> TraceCtx:
    """The trace whose readers of each remake read a second storage, made just before the first reader.

    Args:
        source: the reading of `trace`.
        remakes: from `idle_at_peak`.
    """
    late: dict[int, set[int]] = {}
    inner: set[int] = set()
    for remake in remakes:
        inner |= remake.chain
        for reader in remake.readers:
            late.setdefault(reader, set()).add(remake.storage)
    return repeat_late(source, trace, late, frozenset(inner), "Make again what sits idle over the peak")


@dataclass(frozen=True)
class _Chains:
    """The ops that recompute a storage."""

    source: TraceGraph
    fuse: FusionCapabilities
    gathered: frozenset[int]
    steps: PlanSteps
    affordable: frozenset[int]

    def uses(self, storage: int) -> list[int]:
        """The ops, except views, that read a storage of the same half, in source order; none if it must stay."""
        graph, maker = self.source.graph, self.source.graph.allocator[storage]
        stays = graph.storages[storage].held or storage in graph.outputs or storage in self.source.overwritten
        if maker is None or stays or not self._may_repeat(graph.ops[maker]):
            return []
        # A view runs at any time, and is recomputed with its base.
        reads = [op for op in graph.users[storage] if op != maker]
        uses = [op for op in reads if graph.ops[op].allocates or graph.ops[op].writes]
        same_half = all(graph.ops[op].backward == graph.ops[maker].backward for op in reads)
        return uses if same_half else []

    def kind(self, storage: int, uses: Sequence[int]) -> tuple:
        graph = self.source.graph
        maker = graph.ops[graph.allocator[storage]]  # type: ignore[index]
        return (maker.name, maker.backward, graph.storages[storage].nbytes, *(graph.ops[op].name for op in uses))

    def of(self, storage: int, readers: Sequence[int]) -> frozenset[int]:
        """The storages to recompute so that `readers` have this one; empty if that needs more memory, or costs time."""
        if not readers:
            return frozenset()
        graph = self.source.graph
        when = min((step for op in readers for step in self.steps.uses(storage, op)), default=0)
        chain: set[int] = set()
        stack = [storage]
        while stack:
            s = stack.pop()
            if s in chain or (s != storage and self.steps.last(s) >= when):
                continue
            maker = graph.allocator[s]
            if maker is None or not self._may_repeat(graph.ops[maker]) or len(chain) >= _LONGEST_CHAIN:
                return frozenset()
            chain.add(s)
            stack += graph.ops[maker].reads
        return frozenset(chain)

    def _may_repeat(self, op: Op) -> bool:
        """Whether an op is cheap, or affordable, and repeatable."""
        cheap = self.fuse.cheap[op.index] or not self.gathered.isdisjoint(op.allocates) or op.index in self.affordable
        return cheap and recompute_obstacle(self.source, op.index) is None


def about_remakes(remade: int, before_bytes: int, after_bytes: int) -> Decision:
    """The decision to recompute values instead of holding them over the peak: peaks without and with it."""
    how = f"{counted(remade, 'idle value')} made again after the peak"
    return Decision("rematerialized", how, "peak", before_bytes, after_bytes)
