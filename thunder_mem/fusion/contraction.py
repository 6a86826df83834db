"""Grow fusion regions: contract where that cannot raise the peak. `merging.py` then merges where memory has slack.

A region is a tuple of op indices that one fusion executor runs as one. Regions grow only along data, from a producer
to its consumer or between readers of one storage. Independent paths stay apart, so that each can run, and free its
inputs, at the best time. The functions here propose; the planner prices their proposals with the timeline.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from thunder_mem.memory.graph import Graph

__all__ = ["FusionCapabilities", "Groups", "consecutive_groups", "contract_chains"]

Groups = tuple[tuple[int, ...], ...]

# The most regions to visit when looking for those that must run after a region.
MAX_SEARCH = 200


class Traits(NamedTuple):
    """The facts about some ops that decide whether they may be one region; they compose for unions.

    Attributes:
        takes: bits of the executors that fuse each of the ops.
        required: bits of the executors for which one of the ops is required.
        copies: one of the ops is a copy.
    """

    takes: int
    required: int
    copies: bool

    def joined(self, other: Traits) -> Traits:
        return Traits(self.takes & other.takes, self.required | other.required, self.copies or other.copies)


@dataclass(frozen=True)
class FusionCapabilities:
    """The fusion executors' answers about each op of a graph.

    Attributes:
        takes: per op, a bit for each executor that can fuse it.
        required: per op, a bit for each executor that fuses no region without such an op.
        selective: bits of the executors that want at least one required op in a region.
        cheap: per op, whether a copy inside another region costs almost nothing: it is pure, and
            elementwise or a view; no reduction, no random numbers.
        operands: per op, the ops that produce its arguments (only data, no effect edges).
        copies: the ops that are copies for one consumer each, and so never run apart from it.
        kept: forward ops that run once at the user's request: the backward receives their results. Consumers in the
            forward have no copies either, or Thunder would move the op to the backward.
        overwriting: bits of the executors whose regions may write results over inputs that die there.
    """

    takes: tuple[int, ...]
    required: tuple[int, ...]
    selective: int
    cheap: tuple[bool, ...]
    operands: tuple[tuple[int, ...], ...]
    copies: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    overwriting: int = 0

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Per op, the ops that take its results as arguments."""
        consumers: list[list[int]] = [[] for _ in self.operands]
        for op, operands in enumerate(self.operands):
            for p in operands:
                consumers[p].append(op)
        return tuple(map(tuple, consumers))

    def repeated(self, origin: Sequence[int | None], operands: Iterable[tuple[int, ...]]) -> FusionCapabilities:
        """The answers for a graph whose ops repeat ops of this one; `copies` and `kept` still number this graph's.

        Args:
            origin: per op, the op that it repeats; None for an op that no executor takes.
            operands: per op, the ops that produce its arguments.
        """
        return replace(
            self,
            takes=tuple([0 if o is None else self.takes[o] for o in origin]),
            required=tuple([0 if o is None else self.required[o] for o in origin]),
            cheap=tuple([o is not None and self.cheap[o] for o in origin]),
            operands=tuple(operands),
        )

    def traits(self, ops: Iterable[int]) -> Traits:
        """The traits of these ops as one region."""
        takes, required, copies = ~0, 0, False
        for op in ops:
            takes &= self.takes[op]
            required |= self.required[op]
            copies = copies or op in self.copies
        return Traits(takes, required, copies)

    def executors(self, ops: Iterable[int]) -> int:
        """The executors that take these ops as one region, as bits."""
        takes, required, _ = self.traits(ops)
        return takes & (~self.selective | required)

    def executor(self, ops: Iterable[int]) -> int:
        """The first executor that takes these ops as one region, as a bit; 0 for none."""
        taken = self.executors(ops)
        return taken & -taken

    def joinable(self, ops: Iterable[int]) -> int:
        """The executors for which these ops may still grow: a required op may join later, if the ops can
        also run apart."""
        return self.may_grow(self.traits(ops))

    def may_grow(self, traits: Traits) -> int:
        """`joinable` for ops with these traits."""
        return traits.takes & (~self.selective | traits.required) if traits.copies else traits.takes


def consecutive_groups(graph: Graph, fuse: FusionCapabilities) -> Groups:
    """Neighbours in the source order that one executor takes together, as Thunder fuses by default."""
    groups: list[tuple[int, ...]] = []
    current: list[int] = []
    traits = nothing = fuse.traits(())
    for op in graph.ops:
        own = fuse.traits((op.index,))
        grown = traits.joined(own)
        joins = current and graph.ops[current[0]].backward == op.backward and fuse.may_grow(grown)
        if current and not joins:
            groups.append(tuple(current))
            current, traits = [], nothing
        if fuse.takes[op.index]:
            current.append(op.index)
            traits = traits.joined(own)
    if current:
        groups.append(tuple(current))
    return tuple(groups)


def contract_chains(graph: Graph, groups: Groups, fuse: FusionCapabilities) -> Groups:
    """Merge a region into its only consumer where that can never raise the best peak.

    The producer must free at most the bytes that it passes on; running both together then dominates. Repeats
    until nothing changes.
    """
    chains = _Chains(graph.contract(groups), fuse)
    # A merge may leave what feeds the merged region with one consumer, so those are looked at again.
    waiting = list(range(len(chains.regions)))
    heapq.heapify(waiting)
    while waiting:
        producer = heapq.heappop(waiting)
        consumer = chains.consumer_to_join(producer)
        if consumer is not None:
            chains.join(producer, consumer)
            for feeding in chains.before[consumer]:
                heapq.heappush(waiting, feeding)
            heapq.heappush(waiting, consumer)
    return tuple(tuple(sorted(members)) for members in chains.members if members and fuse.joinable(members))


class _Chains:
    """Regions that are merged one pair at a time, at the place of the later region.

    A merged region keeps the index of the later region. All ops after a producer also run after its consumer,
    so the indices stay a topological order, without cycles.
    """

    def __init__(self, regions: Graph, fuse: FusionCapabilities) -> None:
        self.regions, self.fuse = regions, fuse
        self.members: list[list[int]] = [list(op.payload) for op in regions.ops]  # type: ignore[call-overload]
        self.traits = [fuse.traits(members) for members in self.members]
        self.before = list(map(set, regions.predecessors))
        self.after = list(map(set, regions.successors))
        self.users = list(map(set, regions.users))
        self.touches = list(map(set, regions.touches))
        self.makes = [set(op.allocates) for op in regions.ops]

    def consumer_to_join(self, p: int) -> int | None:
        """The only consumer of `p`, if both may and should run as one region."""
        made = self.makes[p]
        if not made or not self.members[p] or not self.regions.outputs.isdisjoint(made):
            return None
        users = set().union(*(self.users[s] for s in made)) - {p}
        if len(users) != 1:
            return None
        (c,) = users
        if self.regions.ops[p].backward != self.regions.ops[c].backward:
            return None
        if not self.fuse.may_grow(self.traits[p]) & self.fuse.may_grow(self.traits[c]):
            return None
        if not self.after[p] - {c} <= self.after[c] or not self._dominates(p, c):
            return None
        return c if self.fuse.may_grow(self.traits[p].joined(self.traits[c])) else None

    def _dominates(self, p: int, c: int) -> bool:
        """Whether `p` passes on at least the bytes that it frees when it runs as late as possible.

        A region after `p` in every order also runs after `c`, so `p` does not free the storages of such a region.
        """
        storages = self.regions.storages
        mortal = self._mortal(p)
        may_free = sum(storages[s].nbytes for s in mortal)
        # An unused result dies with `p` if `p` runs alone, but in one region it exists beside the results of `c`.
        handed_on = sum(storages[s].nbytes * (1 if self.users[s] - {p} else -1) for s in self.makes[p])
        outlive = [s for s in mortal if max(self.users[s]) >= c]  # the regions stand in a topological order
        if may_free > handed_on and outlive:
            later = self._some_after(c)
            may_free -= sum(storages[s].nbytes for s in outlive if not self.users[s].isdisjoint(later))
        return may_free <= handed_on

    def _mortal(self, p: int) -> list[int]:
        storages, outputs = self.regions.storages, self.regions.outputs
        return [s for s in self.touches[p] - self.makes[p] if not storages[s].held and s not in outputs]

    def _some_after(self, c: int) -> set[int]:
        """`c` and regions after it in every order: only the nearest, if there are many."""
        found, frontier = {c}, [c]
        for region in frontier:
            if len(found) > MAX_SEARCH:
                break
            new = self.after[region] - found
            frontier += sorted(new)
            found |= new
        return found

    def join(self, p: int, c: int) -> None:
        for s in self.touches[p]:
            self.users[s].discard(p)
            self.users[s].add(c)
        inside = self.makes[p]  # whose only user was `c`
        self.touches[c] = (self.touches[c] | self.touches[p]) - inside
        for neighbours, mirrored in ((self.before, self.after), (self.after, self.before)):
            for n in neighbours[p]:
                mirrored[n].discard(p)
                if n != c:
                    mirrored[n].add(c)
            neighbours[c] |= neighbours[p]
            neighbours[c] -= {p, c}
        smaller, larger = sorted((self.members[p], self.members[c]), key=len)
        larger += smaller
        self.members[c] = larger
        self.traits[c] = self.traits[c].joined(self.traits[p])
        self.members[p], self.makes[p], self.before[p], self.after[p] = [], set(), set(), set()
