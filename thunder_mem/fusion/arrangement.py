"""Absorb, contract, order and merge ops; price every arrangement by the timeline and keep the best.

Heuristics propose and the exact timeline disposes. Thunder's default arrangement, neighbours fused in source order,
is always among the candidates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import le

from thunder_mem.fusion.contraction import (
    FusionCapabilities,
    Groups,
    consecutive_groups,
    contract_chains,
)
from thunder_mem.fusion.merging import merge_for_speed
from thunder_mem.fusion.producer_duplication import (
    WithDuplicates,
    cheap_chains,
    duplicate_cheap_producers,
    with_copies,
)
from thunder_mem.memory.graph import Graph
from thunder_mem.memory.live_ranges import Timeline, peaks_of, price_order
from thunder_mem.memory.plan import Arrangement, Decision, Plan, PlannedRegion
from thunder_mem.memory.shared_storages import in_order, with_shared_storages
from thunder_mem.schedule.registry import SortFunction, SortResult, sort_graph

__all__ = ["Arranged", "about_regions", "arrange", "between_halves", "order_halves"]


THUNDERS_OWN = "neighbours, source order"


@dataclass(frozen=True)
class _Arrangement:
    """Groups in running order over a graph (with or without copies); before merges they were `unmerged`, in order."""

    name: str
    base: WithDuplicates
    groups: Groups
    timeline: Timeline
    unmerged: Timeline

    @cached_property
    def peaks(self) -> tuple[int, int]:
        """The peak of each half, forward and backward; 0 for a missing half."""
        return self.timeline.peaks

    @cached_property
    def overwritten_peak_bytes(self) -> int:
        """The peak if every permitted region wrote its results over inputs of the same size that die there.

        `rewrites/buffer_reuse.py` knows which regions really can, but only on the final trace. Without this figure, a
        plan that looks lower may end higher, because a value with a later reader does not die.
        """
        timeline, storages = self.timeline, self.timeline.graph.storages
        peak_bytes = 0
        for step, live_bytes in enumerate(timeline.live_bytes):
            pairs = _overwritable(timeline, step, self.groups[step], self.base.fuse)
            peak_bytes = max(peak_bytes, live_bytes - sum(storages[made].nbytes for made in pairs))
        return peak_bytes


@dataclass(frozen=True)
class Arranged:
    """The arrangement with the lowest peak, as a plan."""

    best: _Arrangement
    plan_of: Callable[[_Arrangement], Plan]

    @cached_property
    def plan(self) -> Plan:
        return self.plan_of(self.best)

    def merged_for_reuse(self) -> Plan:
        """The plan without merges that prevent results from being written over what dies; see `_merged_for_reuse`."""
        other = _merged_for_reuse(self.best)
        return self.plan if other is self.best else self.plan_of(other)


def arrange(
    graph: Graph, fuse: FusionCapabilities, executors: Sequence[str], sort: str | SortFunction = "auto"
) -> Arranged:
    """Plan a trace's graph.

    Args:
        graph: forward and backward ops of one trace, unfused.
        fuse: the executors that can take each op.
        executors: the executors' names, by their bit in `fuse`.
        sort: see `thunder_mem.schedule.registry.sort_graph`.

    Raises:
        ValueError, TypeError, GraphError: from `sort`.
    """
    plain = WithDuplicates(graph, fuse, tuple(range(len(graph))), ())
    neighbours = graph.contract(g for g in consecutive_groups(graph, fuse) if fuse.executors(g))
    own = _arrange(THUNDERS_OWN, plain, neighbours, range(len(neighbours)))
    absorbed = duplicate_cheap_producers(graph, fuse) if any(fuse.takes) else plain
    proposed = _propose(absorbed, sort)
    best = _choose([*proposed.arrangements, own])
    if best is own and any(fuse.takes):  # another pricing takes time, and is seldom needed
        second = _propose(duplicate_cheap_producers(graph, fuse, fused_late=True), sort)
        if (other := _choose([*second.arrangements, own])) is not own:
            proposed, best = second, other
    elif any(fuse.takes) and _may_lower(joined := cheap_chains(graph, fuse, fused_late=True, joining=True), best):
        # The most that copies can replace: GELU's backward then keeps only its gradient and its argument.
        second = _propose(with_copies(graph, fuse, joined), sort)
        other = _choose([best, *second.arrangements])
        if other is not best and other.overwritten_peak_bytes <= best.overwritten_peak_bytes:
            proposed, best = second, other
    return Arranged(best, partial(_plan, fingerprint(graph), executors, proposed, own))


def _plan(program: str, executors: Sequence[str], proposed: _Proposal, own: _Arrangement, best: _Arrangement) -> Plan:
    """The plan of the best arrangement, which replaces the proposed one of its name."""
    arrangements = [best if a.name == best.name else a for a in (*proposed.arrangements, own)]
    planned = tuple(_planned_region(group, best.base, executors) for group in best.groups)
    in_source_order = own.peaks if best is own else proposed.source_peaks
    algorithm = proposed.algorithm if best.name == "planned" else "source"
    return Plan(
        regions=planned,
        chosen=best.name,
        candidates=tuple(Arrangement(a.name, *a.peaks, len(a.groups)) for a in arrangements),
        sort=algorithm,
        fingerprint=program,
        overwritten_peak_bytes=best.overwritten_peak_bytes,
        decisions=(
            about_regions(planned, own.peaks, in_source_order),
            Decision("order", f"by {algorithm}, then neighbours merged", "peak", max(in_source_order), max(best.peaks)),
        ),
    )


def _may_lower(chains: Mapping[int, tuple[int, ...]], best: _Arrangement) -> bool:
    """Whether copies replace a value that the best arrangement holds outside of regions.

    Args:
        chains: for each op that still runs, what it copies.
        best: the arrangement without these copies.
    """
    base = best.base
    replaced = [op for op, o in enumerate(base.origin) if o not in chains and op not in base.fuse.copies]
    if not replaced:
        return False
    region_of = {op: i for i, group in enumerate(best.groups) for op in group}
    users = base.graph.users
    return any(
        region_of[user] != region_of[op] for op in replaced for s in base.graph.ops[op].allocates for user in users[s]
    )


def between_halves(graph: Graph) -> int:
    """Bytes alive after the last forward op and before the first backward op, in every order."""
    nbytes = 0
    for storage, maker, users in zip(graph.storages, graph.allocator, graph.users, strict=True):
        if maker is None or not graph.ops[maker].backward:
            stays = storage.held or storage.index in graph.outputs or not users
            nbytes += storage.nbytes if stays or graph.ops[users[-1]].backward else 0
    return nbytes


@dataclass(frozen=True)
class _Proposal:
    """The result of one way to absorb: arrangements, their sort, and the source order's peaks."""

    arrangements: tuple[_Arrangement, ...]
    algorithm: str
    source_peaks: tuple[int, int]


def _propose(base: WithDuplicates, sort: str | SortFunction) -> _Proposal:
    regions = base.graph.contract(contract_chains(base.graph, base.groups, base.fuse))
    order, algorithm = order_halves(regions, sort)
    arrangements = [_arrange("planned", base, regions, order)]
    if sort != "auto":  # which alone never has a higher peak than the source order
        arrangements.append(_arrange("planned, source order", base, regions, range(len(regions))))
    return _Proposal(tuple(arrangements), algorithm, peaks_of(regions))


def fingerprint(graph: Graph) -> str:
    """A hash of all inputs of planning; it does not depend on names of proxies or the process' hash seed."""
    shape = [
        [(op.name, op.reads, op.writes, op.allocates, op.scratch_bytes, op.backward) for op in graph.ops],
        [(s.nbytes, s.device, s.held) for s in graph.storages],
        graph.predecessors,
        sorted(graph.outputs),
    ]
    return hashlib.sha256(repr(shape).encode()).hexdigest()[:16]


def order_halves(regions: Graph, sort: str | SortFunction) -> tuple[list[int], str]:
    order: list[int] = []
    algorithms: list[str] = []
    for backward in (False, True):
        half = regions.half(backward)
        if len(half):
            result: SortResult = sort_graph(half, sort)
            order += [half.ops[i].payload for i in result.order]  # type: ignore[misc]
            algorithms.append(result.algorithm)
    return order, ", ".join(dict.fromkeys(algorithms)) or "source"


def _arrange(name: str, base: WithDuplicates, regions: Graph, order: Sequence[int]) -> _Arrangement:
    """Merge for speed within the order's peaks, then price the regions exactly as they will be emitted.

    A region that no executor takes in the end runs op by op, which may need more memory: then nothing is merged.
    """
    priced, unmerged = partial(_priced, name, base), price_order(regions, order)
    limits = unmerged.peaks
    merged = priced(unmerged, merge_for_speed(unmerged, base.fuse, limits.__getitem__))
    if all(peak <= limit for peak, limit in zip(merged.peaks, limits, strict=True)):
        return merged
    apart = priced(unmerged, _members(regions, order))
    return min(merged, apart, key=lambda a: (max(a.peaks), sum(a.peaks)))


def _merged_for_reuse(best: _Arrangement) -> _Arrangement:
    """The arrangement without merges that prevent a lower peak once results are written over what dies.

    A merge may fit, and yet keep alive what one of its regions could have overwritten. `rewrites/buffer_reuse.py` sorts
    the steps once more, but cannot undo a merge. So the unmerged regions, sorted with results written over what dies,
    show how low the peak may become, and a merged region may not hold more.
    """
    if best.name != "planned":
        return best
    base, unmerged = best.base, best.unmerged
    regions = unmerged.graph
    limit_bytes = _sorted_peak_bytes(unmerged, _members(regions, unmerged.order), base.fuse)
    if limit_bytes >= best.overwritten_peak_bytes:
        return best
    groups = merge_for_speed(unmerged, base.fuse, unmerged.peaks.__getitem__, limit_bytes)
    other = _priced(best.name, base, unmerged, groups)
    if other.groups == best.groups or not all(map(le, other.peaks, best.peaks)):
        return best
    return min(best, other, key=lambda a: _sorted_peak_bytes(a.timeline, a.groups, base.fuse))


def _members(regions: Graph, order: Sequence[int]) -> list[tuple[int, ...]]:
    """The members of each region of a contracted graph, in an order of it."""
    return [regions.ops[op].payload for op in order]  # type: ignore[misc]


def _sorted_peak_bytes(timeline: Timeline, groups: Sequence[tuple[int, ...]], fuse: FusionCapabilities) -> int:
    """The peak of the best order if every permitted region writes its results over inputs that die there."""
    memory_of: dict[int, int] = {}
    for step, group in enumerate(groups):
        memory_of |= _overwritable(timeline, step, group, fuse)
    sharing = with_shared_storages(in_order(timeline.graph, timeline.order), memory_of)
    return max(peaks_of(sharing, order_halves(sharing, "auto")[0]))


def _overwritable(timeline: Timeline, step: int, group: Sequence[int], fuse: FusionCapabilities) -> dict[int, int]:
    """The results that a step may write over inputs of the same size that die there, each with its input."""
    if len(group) < 2 or not fuse.executor(group) & fuse.overwriting:
        return {}
    graph = timeline.graph
    op = graph.ops[timeline.order[step]]
    dying: dict[int, list[int]] = {}
    for s in op.reads:
        if timeline.live_range(s)[1] == step and graph.allocator[s] is not None:
            dying.setdefault(graph.storages[s].nbytes, []).append(s)
    return {made: left.pop() for made in op.allocates if (left := dying.get(graph.storages[made].nbytes))}


def _priced(name: str, base: WithDuplicates, unmerged: Timeline, groups: Iterable[tuple[int, ...]]) -> _Arrangement:
    steps = tuple(part for group in groups for part in _emittable(group, base))
    regions = base.graph.contract(steps)
    position = {op.payload: op.index for op in regions.ops}
    return _Arrangement(name, base, steps, price_order(regions, [position[step] for step in steps]), unmerged)


def _emittable(group: tuple[int, ...], base: WithDuplicates) -> Groups:
    """The steps that a group becomes: the region without views that only other steps use, then these views.

    A view costs nothing outside a region, while a region may have to return it as a copy. A group that no executor
    takes runs op by op.
    """
    core, views = set(group), []
    for op in reversed(group):
        own_names = base.fuse.copies.isdisjoint((op, *base.fuse.operands[op]))
        is_view = own_names and not base.graph.ops[op].allocates
        if is_view and len(core) > 1 and core.isdisjoint(base.fuse.consumers[op]):
            core.remove(op)
            views.append((op,))
    kept = (
        (tuple(sorted(core)),) if len(core) == 1 or base.fuse.executors(core) else tuple((op,) for op in sorted(core))
    )
    return (*kept, *reversed(views))


def _choose(arrangements: Sequence[_Arrangement]) -> _Arrangement:
    """The arrangement with the lowest peak; those below Thunder's own arrangement in both halves come first."""
    own = next((a for a in arrangements if a.name == THUNDERS_OWN), None)
    allowed = [a for a in arrangements if own is None or (a.peaks[0] <= own.peaks[0] and a.peaks[1] <= own.peaks[1])]
    return min(allowed, key=lambda a: (max(a.peaks), sum(a.peaks)))


def _planned_region(group: tuple[int, ...], base: WithDuplicates, executors: Sequence[str]) -> PlannedRegion:
    own = {base.origin[op] for op in group if op not in base.fuse.copies}
    copied = {base.origin[op] for op in group if op in base.fuse.copies} - own
    ops = tuple(sorted(own | copied))
    taken = base.fuse.executor(group) if len(ops) > 1 else 0
    name = executors[taken.bit_length() - 1] if taken else None
    return PlannedRegion(ops, tuple(sorted(copied)), name, base.graph.ops[group[0]].backward)


def about_regions(regions: Sequence[PlannedRegion], before: Sequence[int], after: Sequence[int]) -> Decision:
    """The decision about regions; peaks are (forward, backward), of fused neighbours and of these regions."""
    fused = [r for r in regions if r.executor is not None]
    copies = sum(len(r.copies) for r in regions)
    inside = sum(len(r.ops) for r in fused)
    where = "1 region" if len(fused) == 1 else f"{len(fused)} regions"
    how = f"{inside} operations in {where}, {copies} of them copies" if fused else "nothing is fused"
    return Decision("regions", how, "peak", max(before), max(after))
