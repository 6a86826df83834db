"""One order of all collectives, from the structure of the program alone.

Thunder starts all gathers at once, in the order of the parameters' names, and all reductions of gradients after the
last gradient. Later planning would be bound to that order. Here a gather follows the first use of its parameter, and a
reduction stands where its gradient is complete.

Every rank must start its collectives in the same order, even if ranks compile the program for batches of different
sizes. So the order depends only on the trace's data flow, its source order and the bytes of parameters. It never
depends on sizes of activations or on time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.costs.roofline import bound_symbol_flops
from thunder_mem.semantics.collectives import awaited_futures, is_gather, is_reduction, starts
from thunder_mem.semantics.effects import COMMUNICATION
from thunder_mem.trace.reading import TraceGraph, read_trace
from thunder_mem.trace.rebuilding import in_order

__all__ = ["Walk", "free_predecessors", "made_of_shards", "ordered_collectives", "starts_of"]


def ordered_collectives(
    trace: TraceCtx,
    earlier: TraceGraph | None = None,
    also_needs: Callable[[TraceGraph], Mapping[int, Collection[int]]] | None = None,
) -> TraceCtx:
    """The trace with its collectives in the order that planning then keeps; unchanged without communication.

    Args:
        trace: plain or joint, unfused, without `del`s.
        earlier: a reading of a trace that `trace` was made from.
        also_needs: further ops, beside its predecessors, that must stand before an op.
    """
    if not any(map(starts, trace.bound_symbols)):
        return trace
    source = read_trace(trace, earlier=earlier)
    order = collective_order(source, also_needs(source) if also_needs is not None else {})
    if order == list(range(len(source.graph))):
        return trace
    return in_order(trace, source, order, "Collectives in the order of use and completion")


def collective_order(source: TraceGraph, also_needs: Mapping[int, Collection[int]]) -> list[int]:
    """An order of the ops: gathers on demand and one layer ahead, reductions at once, their waits at the end."""
    graph = source.graph
    before = [(*b, *also_needs.get(op, ())) for op, b in enumerate(free_predecessors(source))]
    gathered = made_of_shards(source)
    waits = _waits_for_reductions(source)
    urgent = _only_for_reductions(source)
    lazy = gathered | waits | (_of_no_gradient(source) if also_needs else frozenset())
    is_start = [COMMUNICATION in effects.channels for effects in source.effects]
    order: list[int] = []
    for backward in (False, True):
        half = [op.index for op in graph.ops if op.backward == backward]
        just_in_time = _walk(is_start, before, half, order, lazy, urgent)
        ahead = _look_ahead(source, just_in_time.demanded, gathered)
        order = _walk(is_start, before, half, order, lazy, urgent, ahead).order
    return order


class Walk:
    """Ops in an order that respects predecessors: each op is taken with its missing predecessors.

    Attributes:
        order: the ops taken so far.
        demanded: per requested op, the ops that had to be taken before it.
    """

    def __init__(self, before: Sequence[Collection[int]], order: Iterable[int] = ()) -> None:
        self.order = list(order)
        self.demanded: dict[int, tuple[int, ...]] = {}
        self._before = before
        self._done = set(self.order)

    def __contains__(self, op: int) -> bool:
        return op in self._done

    def take(self, op: int) -> None:
        """Append `op`, and before it all missing ops that it needs."""
        if op in self._done:
            return
        first = len(self.order)
        stack = [op]
        while stack:
            last = stack[-1]
            missing = [p for p in self._before[last] if p not in self._done]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if last not in self._done:
                self._done.add(last)
                self.order.append(last)
        self.demanded[op] = tuple(self.order[first:-1])


def _walk(
    is_start: Sequence[bool],
    before: Sequence[Collection[int]],
    half: Sequence[int],
    done: Sequence[int],
    lazy: Collection[int],
    urgent: Collection[int],
    ahead: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> Walk:
    """One half in source order, except ops taken on demand, `ahead` of an op, or as soon as they are ready."""
    walk = Walk(before, done)
    lacks = {op: _inputs(op, before, urgent) - set(done) for op in half if op in urgent and is_start[op]}
    waiting: dict[int, list[int]] = {}
    for start, missing in lacks.items():
        for op in missing:
            waiting.setdefault(op, []).append(start)
    looked_at = len(walk.order)
    for op in half:
        if op in lazy or op in urgent:
            continue
        for early in ahead.get(op, ()):
            walk.take(early)
        walk.take(op)
        while looked_at < len(walk.order):
            now = walk.order[looked_at]
            looked_at += 1
            for start in waiting.get(now, ()):
                lacks[start].discard(now)
                if not lacks[start]:
                    walk.take(start)
    for op in half:
        walk.take(op)
    return walk


def _inputs(op: int, before: Sequence[Collection[int]], urgent: Collection[int]) -> set[int]:
    """The inputs of `op` and of the urgent ops that belong to it."""
    inputs: set[int] = set()
    seen, stack = {op}, [op]
    while stack:
        for p in before[stack.pop()]:
            if p not in urgent:
                inputs.add(p)
            elif p not in seen:
                seen.add(p)
                stack.append(p)
    return inputs


def starts_of(source: TraceGraph) -> list[int]:
    """The ops that start a collective, in source order."""
    return [i for i, effects in enumerate(source.effects) if COMMUNICATION in effects.channels]


def free_predecessors(source: TraceGraph) -> list[tuple[int, ...]]:
    """The predecessors of each op, without those that only the order among collectives requires."""
    before = [set(p) for p in source.graph.predecessors]
    chain = starts_of(source)
    for a, b in pairwise(chain):
        effects = (source.effects[a], source.effects[b])
        makes = {p.name for p in source.bsyms[a].flat_proxy_outs}
        taken = any(p.name in makes for p in source.bsyms[b].flat_proxy_args)
        if not taken and not any(e.writes or e.barrier for e in effects):
            before[b].discard(a)
    return [tuple(sorted(b)) for b in before]


def made_of_shards(source: TraceGraph) -> frozenset[int]:
    """The ops that gather arguments, their waits, and cheap ops on their results alone.

    Examples are a cast of a gathered weight, and its view for a matrix product.
    """
    found: set[int] = set()
    of_arguments: set[int] = set()  # made from arguments alone: a shard that is cast before it is gathered
    for op, (bsym, effects) in enumerate(zip(source.bsyms, source.effects, strict=True)):
        producers = {source.producer_of.get(p.name) for p in bsym.flat_proxy_args if p.name in source.storage_of}
        if producers <= {None, *of_arguments}:
            if is_gather(bsym):
                found.add(op)
            elif producers and effects.pure:
                of_arguments.add(op)
        elif producers <= found and ((effects.pure and _is_cheap(bsym)) or any(True for _ in awaited_futures(bsym))):
            found.add(op)
    return frozenset(found)


def _waits_for_reductions(source: TraceGraph) -> frozenset[int]:
    makers = {p.name: op for op in starts_of(source) for p in source.bsyms[op].flat_proxy_outs}
    return frozenset(
        op
        for op, bsym in enumerate(source.bsyms)
        if any(f in makers and is_reduction(source.bsyms[makers[f]]) for f in awaited_futures(bsym))
    )


def _only_for_reductions(source: TraceGraph) -> frozenset[int]:
    """The starts of reductions, and cheap ops that only serve them, such as the division of a gradient.

    Products do not count, or the whole backward would. Waits also read a gradient while it is in flight.
    """
    graph, waits = source.graph, _waits_for_reductions(source)
    urgent: set[int] = set()
    for op in range(len(graph) - 1, -1, -1):
        bsym, effects = source.bsyms[op], source.effects[op]
        users = [u for u in graph.successors[op] if u not in waits]
        movable = op not in waits and effects.pure and _is_cheap(bsym)
        returned = not source.returned_names.isdisjoint(p.name for p in bsym.flat_proxy_outs)
        alone = users and all(u in urgent and graph.ops[u].backward == graph.ops[op].backward for u in users)
        if is_reduction(bsym) or (movable and alone and not returned):
            urgent.add(op)
    return frozenset(urgent)


def _of_no_gradient(source: TraceGraph) -> frozenset[int]:
    """The backward's ops on forward values alone: Thunder runs some at its start and uses their results late."""
    graph = source.graph
    depends: set[int] = set()
    for op, bsym, effects in zip(graph.ops, source.bsyms, source.effects, strict=True):
        makers = (source.producer_of.get(p.name) for p in bsym.flat_proxy_args)
        if op.backward and (bsym.sym == prims.get_grad or not effects.pure or not depends.isdisjoint(makers)):
            depends.add(op.index)
    return frozenset(op.index for op in graph.ops if op.backward and op.index not in depends)


def _is_cheap(bsym: BoundSymbol) -> bool:
    """Whether an op is no product: at most one operation for each element that it reads or makes."""
    proxies = (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)
    return bound_symbol_flops(bsym) <= max((p.numel for p in proxies if isinstance(p, TensorProxy)), default=0)


def _look_ahead(
    source: TraceGraph, demanded: dict[int, tuple[int, ...]], gathered: Collection[int]
) -> dict[int, list[int]]:
    """Per op that uses gathered values, the gathers to start before it: its own, and some for the ops to come.

    They have as many bytes as the op's own, and at least those of the next op: while one layer is in use, the next
    arrives. Only the order is decided here, above all that a layer is gathered before the gradients of the layer
    behind it are reduced. `overlap_scheduling.py` decides when gathers start.
    """
    groups: list[tuple[int, list[int]]] = []
    for op, needs in demanded.items():
        if group := [n for n in needs if n in gathered and is_gather(source.bsyms[n])]:
            groups.append((op, group))
    size = [sum(source.graph.storages[s].nbytes for n in g for s in source.graph.ops[n].allocates) for _, g in groups]
    ahead: dict[int, list[int]] = {}
    last = 0
    for i, (op, _) in enumerate(groups):
        last, room = max(last, i), size[i] - sum(size[i + 1 : last + 1])
        while last + 1 < len(groups) and (last == i or size[last + 1] <= room):
            last += 1
            room -= size[last]
        ahead[op] = [n for _, group in groups[i : last + 1] for n in group]
    return ahead
