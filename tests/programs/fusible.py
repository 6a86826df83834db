"""Random answers to "who can fuse what" for generated graphs, and what a plan means, straight from the definition.

The oracles here know nothing of contraction or absorption: they run a plan step by step, with the values
as expressions and the storages as sets.
"""

from __future__ import annotations

import random

from hypothesis import strategies as st

from tests.checking.graphs import graphs
from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.graph import Graph, Op, make_graph
from thunder_mem.memory.plan import Plan, PlannedRegion

__all__ = ["EXECUTORS", "check_plan", "fusible", "fusible_graphs", "half_peaks", "plan_live_bytes", "values"]

EXECUTORS = ("first", "second")


def fusible(graph: Graph, seed: int, often: float = 0.8) -> tuple[Graph, FusionCapabilities]:
    """The graph, with an edge to each reader of a view from the view, and which executors take which of its ops.

    As for real traces: nobody fuses what overwrites, what touches a storage that is overwritten, or what
    has scratch; what is cheap is fusible; an argument comes from the op that made it or from a view of it;
    a view has one base and is there for someone.
    """
    rng = random.Random(seed)
    overwritten = {s for op in graph.ops for s in op.writes}
    views: dict[int, list[int]] = {}
    operands, edges = [], []
    for op in graph.ops:
        chosen = set()
        for s in op.reads:
            known = views.get(s, [])
            if known and rng.random() < 0.5:
                chosen.add(rng.choice(known))
            elif graph.allocator[s] is not None:
                chosen.add(graph.allocator[s])
        operands.append(tuple(sorted(chosen)))
        edges += [(p, op.index) for p in chosen]
        if _nameless(op) and len(op.reads) == 1:
            views.setdefault(op.reads[0], []).append(op.index)
    used = {p for chosen in operands for p in chosen}

    takes, required, cheap = [], [], []
    second = rng.random() < 0.5
    for op in graph.ops:
        free = not op.scratch_bytes and overwritten.isdisjoint(op.touches) and op.touches
        if _nameless(op) and (len(op.reads) != 1 or not (op.index in used or op.reads[0] in graph.outputs)):
            free = False
        bits = 0
        if free and rng.random() < often:
            bits = rng.choice((1, 3, 3, 2)) if second else 1
        takes.append(bits)
        required.append(bits if rng.random() < 0.2 else 0)
        cheap.append(bool(bits) and rng.random() < 0.6)
    selective = 2 if second and rng.random() < 0.5 else 0
    graph = make_graph(
        graph.ops,
        graph.storages,
        [*edges, *((p, op) for op, before in enumerate(graph.predecessors) for p in before)],
        graph.outputs,
    )
    return graph, FusionCapabilities(tuple(takes), tuple(required), selective, tuple(cheap), tuple(operands))


def _nameless(op: Op) -> bool:
    return not op.allocates and not op.writes


def fusible_graphs(max_ops: int = 14, often: float = 0.8) -> st.SearchStrategy[tuple[Graph, FusionCapabilities]]:
    """Every family of `tests.checking.graphs`, with random answers of up to two executors."""
    return st.builds(lambda graph, seed: fusible(graph, seed, often), graphs(max_ops), st.integers(0, 10**6))


def values(graph: Graph, fuse: FusionCapabilities, origin: tuple[int, ...] | None = None) -> list[tuple]:
    """Per op, the expression that it computes: which source op, of which arguments and inputs."""
    found: list[tuple] = []
    for op in graph.ops:
        inputs = tuple(sorted(graph.storages[s].name for s in op.reads if graph.allocator[s] is None))
        source = origin[op.index] if origin else op.index
        found.append((source, inputs, tuple(found[p] for p in fuse.operands[op.index])))
    return found


def check_plan(graph: Graph, fuse: FusionCapabilities, plan: Plan) -> None:
    """Assert that a plan computes what the graph does, in a legal order, with regions that executors take."""
    step: dict[int, int] = {}
    for k, region in enumerate(plan.regions):
        copies = set(region.copies)
        assert region.ops and list(region.ops) == sorted(set(region.ops)) and copies < set(region.ops)
        for op in set(region.ops) - copies:
            assert op not in step, f"op {op} runs twice"
            step[op] = k
    backward = [region.backward for region in plan.regions]
    assert backward == sorted(backward)
    for k, region in enumerate(plan.regions):
        members = set(region.ops)
        for op in region.ops:
            if op in region.copies:
                assert fuse.cheap[op] and region.backward >= graph.ops[op].backward
            else:
                assert graph.ops[op].backward == region.backward
            for p in fuse.operands[op]:
                assert p in members or step.get(p, k) < k, f"op {op} of step {k} lacks its argument {p}"
            for p in graph.predecessors[op]:
                if p not in members:
                    assert step[p] < k if p in step else fuse.cheap[p], f"edge {p} -> {op}"
        _check_executor(fuse, region)
    for op in graph.ops:
        if op.index not in step:
            assert fuse.cheap[op.index] and graph.outputs.isdisjoint(op.allocates)


def _check_executor(fuse: FusionCapabilities, region: PlannedRegion) -> None:
    if len(region.ops) == 1:
        assert region.executor is None
        return
    assert region.executor is not None
    bit = 1 << EXECUTORS.index(region.executor)
    assert all(fuse.takes[op] & bit for op in region.ops)
    if fuse.selective & bit:
        assert any(fuse.required[op] & bit for op in region.ops)


def plan_live_bytes(graph: Graph, plan: Plan, *, copies_first: bool = True) -> list[int]:
    """Live bytes at each step of a plan.

    A region's inputs and all that it hands out are alive together; what it makes for itself, copies
    first of all, is not counted, but an op that runs alone makes all it makes.

    Args:
        copies_first: members of a region with a copy of an op that also runs by itself read the copy. A plan does not
            say which of the two they read: a region may have grown from one member that reads the copy, and another
            that reads the value.
    """
    alone = {op for region in plan.regions for op in region.ops if op not in region.copies}
    last = len(plan.regions) - 1
    uses: list[list[int]] = [[] for _ in graph.storages]
    born = [0 if maker is None else -1 for maker in graph.allocator]
    for k, region in enumerate(plan.regions):
        for op in region.ops:
            if op not in region.copies:
                for s in graph.ops[op].allocates:
                    born[s] = k
                    uses[s].append(k)
            for s in (*graph.ops[op].reads, *graph.ops[op].writes):
                maker = graph.allocator[s]
                if maker not in region.copies or (maker in alone and not copies_first):
                    uses[s].append(k)
    live = [max(graph.ops[op].scratch_bytes for op in region.ops) for region in plan.regions]
    for s, storage in enumerate(graph.storages):
        if born[s] < 0:
            continue
        stays = storage.held or s in graph.outputs or not uses[s]
        inside = graph.allocator[s] is not None and not stays and set(uses[s]) == {born[s]}
        if inside and len(plan.regions[born[s]].ops) > 1:
            continue
        for k in range(born[s], (last if stays else max(uses[s])) + 1):
            live[k] += storage.nbytes
    return live


def half_peaks(plan: Plan, live: list[int]) -> tuple[int, int]:
    """The peaks of the forward's and of the backward's steps; 0 for a half without any."""
    peaks = [0, 0]
    for region, now in zip(plan.regions, live, strict=True):
        peaks[region.backward] = max(peaks[region.backward], now)
    return peaks[0], peaks[1]
