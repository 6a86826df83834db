"""Recompute amplifying ops inside each of their consumers, instead of materialising their results.

An upcast or a broadcast makes more bytes than it reads. Materialised, it costs memory and bandwidth; inside a fused
consumer it costs neither. Across the boundary of forward and backward the same choice decides what is saved: a value
that its consumers recompute from live values is not saved. This is the largest single gain on real training traces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from thunder_mem.fusion.contraction import FusionCapabilities, Groups
from thunder_mem.memory.graph import Graph, Op, make_graph

__all__ = ["WithDuplicates", "cheap_chains", "duplicate_cheap_producers", "with_copies"]

# A recomputed chain reads at most this many storages, so that it costs little more than reading the value.
MAX_CHAIN_SOURCES = 6
# And it computes at most this many values: a reduction at every link of a long chain would otherwise
# rebuild all links before it, quadratic work. Attention's and GELU's chains have up to 16.
MAX_CHAIN_VALUES = 32
# Views cost nothing at run time, but copying them takes planning time: so a chain has at most so many views.
MAX_CHAIN_VIEWS = 16


@dataclass(frozen=True)
class WithDuplicates:
    """A graph with one copy of each cheap chain per consumer.

    Attributes:
        graph: like the original, with copies, each just before its consumer.
        fuse: the same facts about the new ops, and which of them are copies.
        origin: per new op, the op of the original graph that it repeats.
        groups: each fusible op with the copies that feed it.
    """

    graph: Graph
    fuse: FusionCapabilities
    origin: tuple[int, ...]
    groups: Groups


def duplicate_cheap_producers(graph: Graph, fuse: FusionCapabilities, *, fused_late: bool = False) -> WithDuplicates:
    """Give every fusible op its own copies of the cheap chains that feed it; see `cheap_chains`."""
    return with_copies(graph, fuse, cheap_chains(graph, fuse, fused_late=fused_late))


def cheap_chains(
    graph: Graph, fuse: FusionCapabilities, *, fused_late: bool = False, joining: bool = False
) -> dict[int, tuple[int, ...]]:
    """For each op that still runs, the cheap chain that feeds it and that it copies, if materialising the chain's
    results would hold more bytes than recomputing them keeps alive.

    The bytes of a chain's value are compared with those of the storages that the chain reads. A storage
    that is alive until the last consumer anyway (held by the caller, or used later) costs nothing. A value
    that an unfusible op or the caller needs is also computed once for them.

    The source order tells how long a storage is alive anyway. With `fused_late` a cheap op with one consumer
    counts as run with that consumer, as if all were fused, so the op's operands live longer. With `joining`,
    operands of the copies count as alive until the copies run, and other values may be recomputed from them.
    """
    absorbed = _choose(graph, fuse, _where_fused(graph, fuse) if fused_late else range(len(graph)), joining)
    chains: dict[int, tuple[int, ...]] = {}
    wanted = [op for op in range(len(graph)) if not absorbed[op] or not fuse.consumers[op]]
    while wanted:
        op = wanted.pop()
        if op not in chains:
            # A view returns the storage itself, so the op that makes the storage must stay.
            chains[op] = _chain(op, fuse, absorbed) if graph.ops[op].allocates else ()
            inside = {op, *chains[op]}
            wanted += [p for member in inside for p in fuse.operands[member] if p not in inside]
    return chains


def _where_fused(graph: Graph, fuse: FusionCapabilities) -> Sequence[int]:
    """For each op the last op of the chain of only consumers into which it is likely to be fused."""
    where = list(range(len(graph)))
    for i in range(len(graph) - 1, -1, -1):
        consumers = fuse.consumers[i]
        if len(consumers) == 1 and fuse.cheap[i] and graph.outputs.isdisjoint(graph.ops[i].allocates):
            (c,) = consumers
            if fuse.takes[i] & fuse.takes[c] and graph.ops[i].backward == graph.ops[c].backward:
                where[i] = where[c]
    return where


class _Offered(NamedTuple):
    """An op that may be recomputed: what it reads, what it makes, and the bytes of that."""

    op: int
    reads: tuple[int, ...]
    makes: frozenset[int]
    nbytes: int


def _choose(graph: Graph, fuse: FusionCapabilities, where: Sequence[int], joining: bool) -> list[bool]:
    """The ops to recompute in their consumers: the most optimistic choice, repriced until stable."""
    absorbed = list(fuse.cheap)
    offered = [
        _Offered(op.index, op.reads, frozenset(op.allocates), sum([graph.storages[s].nbytes for s in op.allocates]))
        for op in graph.ops
        if fuse.cheap[op.index] and graph.outputs.isdisjoint(op.allocates)
    ]
    for joins in (False, True)[: 1 + joining]:
        for _ in range(4):
            chosen = _reprice(graph, fuse, where, offered, absorbed, joins)
            if chosen == absorbed:
                break
            absorbed = chosen
    return absorbed


def _reprice(
    graph: Graph,
    fuse: FusionCapabilities,
    where: Sequence[int],
    offered: Sequence[_Offered],
    absorbed: Sequence[bool],
    joining: bool,
) -> list[bool]:
    """The ops of `offered` to recompute, if the values of `absorbed` ops live as long as their copies need them."""
    allocator, storages = graph.allocator, graph.storages
    end, needed = _ends(fuse, where, absorbed)
    last_use = [-1] * len(storages)
    for user, touched in enumerate(graph.touches):
        if joining or not absorbed[user]:
            use = needed[user]
            for s in touched:
                if last_use[s] < use:
                    last_use[s] = use
    # What is alive to the end costs nothing, whoever reads it.
    for storage in storages:
        if storage.held:
            last_use[storage.index] = len(graph)
    for s in graph.outputs:
        last_use[s] = len(graph)

    chosen = list(absorbed) if joining else [False] * len(graph)
    sources: dict[int, list[int]] = {}
    values: dict[int, frozenset[int]] = {}
    views: dict[int, int] = {}
    for i, reads, makes, made in offered:
        rebuilt = [p for p in fuse.operands[i] if chosen[p]]
        read = [s for s in reads if (maker := allocator[s]) is None or not chosen[maker]]
        inside = makes
        if rebuilt:
            for p in rebuilt:
                read += sources[p]
            read = list(dict.fromkeys(read))
            inside = makes.union(*[values[p] for p in rebuilt])
        sources[i], values[i] = read, inside
        if made:
            if chosen[i] or len(read) > MAX_CHAIN_SOURCES or len(inside) > MAX_CHAIN_VALUES:
                continue
            kept_alive = 0
            for s in read:
                if last_use[s] < end[i]:
                    kept_alive += storages[s].nbytes
            chosen[i] = made > kept_alive
        else:
            views[i] = 1 + max([views.get(p, 0) for p in rebuilt], default=0)
            chosen[i] = views[i] <= MAX_CHAIN_VIEWS
    return chosen


def _ends(fuse: FusionCapabilities, where: Sequence[int], absorbed: Sequence[bool]) -> tuple[list[int], list[int]]:
    """For each op the last op that needs its value, or a copy of it; and the last op that needs its operands."""
    end, needed = list(range(len(where))), list(where)
    for i in range(len(where) - 1, -1, -1):
        consumers = fuse.consumers[i]
        if len(consumers) == 1:
            end[i] = needed[consumers[0]]
        elif consumers:
            end[i] = max([needed[c] for c in consumers])
        if absorbed[i]:
            needed[i] = end[i]
    return end, needed


def _chain(root: int, fuse: FusionCapabilities, absorbed: Sequence[bool]) -> tuple[int, ...]:
    """The absorbed ops from which `root` is computed, in source order; none if no executor fuses it."""
    members: set[int] = set()
    stack, takes = [root], fuse.executors((root,))
    while stack:
        for p in fuse.operands[stack.pop()]:
            if absorbed[p] and p not in members and p not in fuse.kept and takes & fuse.takes[p]:
                members.add(p)
                takes &= fuse.takes[p]
                stack.append(p)
    return tuple(sorted(members))


def with_copies(graph: Graph, fuse: FusionCapabilities, chains: Mapping[int, tuple[int, ...]]) -> WithDuplicates:
    """Build the graph of the ops that are keys of `chains`, each with a copy of its chain before it."""
    standing = [
        s.index for s, maker in zip(graph.storages, graph.allocator, strict=True) if maker is None or maker in chains
    ]
    storages = [graph.storages[s].at(i) for i, s in enumerate(standing)]
    ops: list[Op] = []
    origin: list[int] = []
    copies: set[int] = set()
    operands: list[tuple[int, ...]] = []
    edges: list[tuple[int, int]] = []
    groups: list[tuple[int, ...]] = []
    # For each original op and storage, the one that stands for it here: within a chain, the chain's own copy.
    op_here, storage_here = [-1] * len(graph), [-1] * len(graph.storages)
    for i, s in enumerate(standing):
        storage_here[s] = i

    def append(old: Op, backward: bool) -> int:
        index, at = len(ops), old.index
        reads = tuple([storage_here[s] for s in old.reads])
        writes = tuple([storage_here[s] for s in old.writes])
        allocates = tuple([storage_here[s] for s in old.allocates])
        ops.append(Op(index, old.name, reads, writes, allocates, old.scratch_bytes, backward, at))
        origin.append(at)
        operands.append(tuple([op_here[p] for p in fuse.operands[at]]))
        for p in graph.predecessors[at]:
            if op_here[p] >= 0:  # a removed predecessor was pure: it ordered only its own result
                edges.append((op_here[p], index))
        return index

    for op in graph.ops:
        if op.index not in chains:
            continue
        chain = chains[op.index]
        inner = [s for member in chain for s in graph.ops[member].allocates]
        outside = [op_here[member] for member in chain], [storage_here[s] for s in inner]
        for member in chain:
            for s in graph.ops[member].allocates:
                storage_here[s] = len(storages)
                storages.append(graph.storages[s].at(len(storages)))
            op_here[member] = append(graph.ops[member], op.backward)
        copied, new = [op_here[member] for member in chain], append(op, op.backward)
        for member, index in zip(chain, outside[0], strict=True):
            op_here[member] = index
        for s, index in zip(inner, outside[1], strict=True):
            storage_here[s] = index
        copies.update(copied)
        op_here[op.index] = new
        if fuse.takes[op.index]:
            groups.append((*copied, new))

    new_fuse = replace(fuse.repeated(origin, operands), copies=frozenset(copies), kept=frozenset())
    new_graph = make_graph(ops, storages, edges, [storage_here[s] for s in graph.outputs])
    return WithDuplicates(new_graph, new_fuse, tuple(origin), tuple(groups))
