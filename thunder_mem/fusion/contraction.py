"""Grow fusion regions: contract where that cannot raise the peak, then merge for speed where memory has slack.

A region is a tuple of op indices that one fusion executor runs as one. Regions grow only along data, from a producer
to its consumer or between readers of one storage. Independent paths stay apart, so that each can run, and free its
inputs, at the best time. The functions here propose; the planner prices their proposals with the timeline.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from thunder_mem.memory.graph import Graph
from thunder_mem.memory.live_ranges import price_order

__all__ = ["FusionCapabilities", "Groups", "consecutive_groups", "contract_chains", "merge_for_speed"]

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
        may_free = sum(storages[s].nbytes for s in self._mortal(p))
        # An unused result dies with `p` if `p` runs alone, but in one region it exists beside the results of `c`.
        handed_on = sum(storages[s].nbytes * (1 if self.users[s] - {p} else -1) for s in self.makes[p])
        if may_free > handed_on:
            later = self._some_after(c)
            may_free = sum(storages[s].nbytes for s in self._mortal(p) if self.users[s].isdisjoint(later))
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


# The largest distance in the order between two regions to be merged.
MERGE_WINDOW = 48


def merge_for_speed(
    regions: Graph, order: Sequence[int], fuse: FusionCapabilities, allowance_bytes: Callable[[bool], int]
) -> tuple[tuple[int, ...], ...]:
    """Merge neighbours that share data, as long as the live bytes stay within the allowance.

    Args:
        regions: a contracted graph; each op's payload is the tuple of its members.
        order: a legal order of it, forward before backward.
        fuse: the facts about the members.
        allowance_bytes: the bytes that may be alive at once, in the forward (False) or the backward (True).

    Returns:
        The members of each region in execution order. Each merge runs both regions at the place of one of
        them, so the order stays legal, without cycles.
    """
    merger = _Merger(regions, order, fuse)
    for here in range(len(order)):
        merger.merge_from(here, allowance_bytes)
    return merger.groups()


class _Merger:
    """Slots in running order; a merge empties one slot and refills another.

    Fused ops hold no scratch (matrix products and attention do), so a merge moves no scratch.
    """

    def __init__(self, regions: Graph, order: Sequence[int], fuse: FusionCapabilities) -> None:
        self.graph, self.fuse = regions, fuse
        self.slot_of = [0] * len(regions)
        for slot, op in enumerate(order):
            self.slot_of[op] = slot
        self.slots: list[tuple[int, ...]] = [(op,) for op in order]
        self.slots_of = [sorted(self.slot_of[op] for op in users) for users in regions.users]  # of each storage
        self.traits = [fuse.traits(regions.ops[op].payload) for op in order]  # type: ignore[arg-type]
        self.takes = list(map(fuse.may_grow, self.traits))
        self.live_bytes = list(price_order(regions, order).live_bytes)
        self.large = [s.nbytes > 8 for s in regions.storages]

    def groups(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(self._members(slot))) for slot in range(len(self.slots)) if self.slots[slot])

    def _members(self, slot: int) -> tuple[int, ...]:
        return tuple(m for op in self.slots[slot] for m in self.graph.ops[op].payload)  # type: ignore[attr-defined]

    def merge_from(self, here: int, allowance_bytes: Callable[[bool], int]) -> None:
        """Merge the region at slot `here` with later ones, nearest first, for as long as one fits."""
        if not self.slots[here] or not self.takes[here]:
            return
        backward = self.graph.ops[self.slots[here][0]].backward
        limit = allowance_bytes(backward)
        waiting, seen = self._candidates(self.slots[here], here), {here}
        while waiting:
            there = heapq.heappop(waiting)
            if there in seen or not self.slots[there]:
                continue
            seen.add(there)
            if self.graph.ops[self.slots[there][0]].backward != backward:
                break
            joining = self.slots[there]
            if not self.takes[here] & self.takes[there]:
                continue
            if not self.fuse.may_grow(self.traits[here].joined(self.traits[there])):
                continue
            for target in (here, there):
                if self._legal(here, there, target) and self._try(here, there, target, limit):
                    break
            if not self.slots[here]:
                return
            if not self.slots[there]:
                for slot in self._candidates(joining, here):
                    heapq.heappush(waiting, slot)

    def _candidates(self, ops: Sequence[int], here: int) -> list[int]:
        """Slots after `here`, within the window, that touch a storage that `ops` touch, as a heap."""
        found: set[int] = set()
        for op in ops:
            for s in self.graph.touches[op]:
                if self.large[s]:
                    slots = self.slots_of[s]
                    found.update(slots[bisect_right(slots, here) : bisect_right(slots, here + MERGE_WINDOW)])
        return sorted(found)

    def _legal(self, here: int, there: int, target: int) -> bool:
        """No region between the two slots needs the early region (if it moves) or feeds the late one."""
        if target == there:
            neighbours = (n for op in self.slots[here] for n in self.graph.successors[op])
        else:
            neighbours = (n for op in self.slots[there] for n in self.graph.predecessors[op])
        return not any(here < self.slot_of[n] < there for n in neighbours)

    def _try(self, here: int, there: int, target: int, limit: int) -> bool:
        """Merge at `target` if the live bytes from `here` to `there` stay within `limit`."""
        moved = {*self.slots[here], *self.slots[there]}
        change = [0] * (there - here + 2)
        for s in dict.fromkeys(s for op in moved for s in self.graph.touches[op]):
            self._add_change(change, s, moved, here, there, target)
        live, delta = [], 0
        for k in range(there - here + 1):
            delta += change[k]
            live.append(self.live_bytes[here + k] + delta)
        runs = [
            k for k in range(there - here + 1) if here + k == target or (0 < k < there - here and self.slots[here + k])
        ]
        if any(live[k] > limit for k in runs):
            return False
        other = here if target == there else there
        self.live_bytes[here : there + 1] = live
        for op in self.slots[other]:
            self.slot_of[op] = target
            for s in self.graph.touches[op]:
                self._move(self.slots_of[s], other, target)
        self.slots[target] = (*self.slots[here], *self.slots[there])
        self.takes[target] = self.takes[here] & self.takes[there]
        self.traits[target] = self.traits[here].joined(self.traits[there])
        self.slots[other] = ()
        return True

    @staticmethod
    def _move(slots: list[int], source: int, target: int) -> None:
        """Put `target` in the place of `source`, in an ascending list without repetitions."""
        at = bisect_left(slots, source)
        if at < len(slots) and slots[at] == source:
            del slots[at]
            at = bisect_left(slots, target)
            if at == len(slots) or slots[at] != target:
                slots.insert(at, target)

    def _add_change(self, change: list[int], s: int, moved: set[int], here: int, there: int, target: int) -> None:
        """Add the change of a storage's live range, as differences over the slots `here`..`there`."""
        graph = self.graph
        nbytes = graph.storages[s].nbytes
        used, allocator = self.slots_of[s], graph.allocator[s]
        stays = graph.storages[s].held or s in graph.outputs
        if stays and allocator is None:
            return
        if not (stays or allocator is None) and len(used) == 1 and len(self.slots[used[0]]) > 1:
            return  # an earlier merge made it disappear

        def add(born: int, dies: int, amount: int) -> None:
            first, last = max(born, here), min(dies, there)
            if first <= last:
                change[first - here] += amount
                change[last - here + 1] -= amount

        born = here - 1 if allocator is None else self.slot_of[allocator]
        add(born, there + 1 if stays else used[-1], -nbytes)
        if not stays and allocator in moved and all(slot in (here, there) for slot in used[:3]):
            return  # nobody else uses it, so it will live inside the region
        others_last = next((slot for slot in reversed(used) if slot not in (here, there)), -1)
        add(target if allocator in moved else born, there + 1 if stays else max(target, others_last), nbytes)
