"""Merge fused regions for speed where memory has slack."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence

from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.live_ranges import Timeline

__all__ = ["merge_for_speed"]

# The largest distance in the order between two regions to be merged.
MERGE_WINDOW = 48


def merge_for_speed(
    timeline: Timeline,
    fuse: FusionCapabilities,
    allowance_bytes: Callable[[bool], int],
    overwriting_bytes: int | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Merge neighbours that share data, as long as the live bytes stay within the allowance.

    Args:
        timeline: an order, forward before backward, of a contracted graph; each op's payload is the tuple of its
            members.
        fuse: the facts about the members.
        allowance_bytes: the bytes that may be alive at once, in the forward (False) or the backward (True).
        overwriting_bytes: the bytes that may be alive in a merged region, if it writes its results over inputs of the
            same size that die there; None for no limit.

    Returns:
        The members of each region in execution order. Each merge runs both regions at the place of one of
        them, so the order stays legal, without cycles.
    """
    merger = _Merger(timeline, fuse, overwriting_bytes)
    for here in range(len(timeline.order)):
        merger.merge_from(here, allowance_bytes)
    return merger.groups()


class _Merger:
    """Slots in running order; a merge empties one slot and refills another.

    Fused ops hold no scratch (matrix products and attention do), so a merge moves no scratch.
    """

    def __init__(self, timeline: Timeline, fuse: FusionCapabilities, overwriting_bytes: int | None) -> None:
        regions, order = timeline.graph, timeline.order
        self.graph, self.fuse, self.overwriting_bytes = regions, fuse, overwriting_bytes
        self.slot_of = [0] * len(regions)
        for slot, op in enumerate(order):
            self.slot_of[op] = slot
        self.slots: list[tuple[int, ...]] = [(op,) for op in order]
        self.slots_of = [sorted(self.slot_of[op] for op in users) for users in regions.users]  # of each storage
        self.traits = [fuse.traits(regions.ops[op].payload) for op in order]  # type: ignore[arg-type]
        self.takes = list(map(fuse.may_grow, self.traits))
        self.live_bytes = list(timeline.live_bytes)
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
        if self._prevents_reuse(here, there, target, live[target - here]):
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

    def _prevents_reuse(self, here: int, there: int, target: int, live_bytes: int) -> bool:
        """Whether the merged region holds too much, even with its results over what dies there."""
        limit = self.overwriting_bytes
        return limit is not None and live_bytes > limit and live_bytes - self._overwritten(here, there, target) > limit

    def _overwritten(self, here: int, there: int, target: int) -> int:
        """The bytes of results that the merged region may write over inputs of the same size that die in it."""
        if not self.takes[here] & self.takes[there] & self.fuse.overwriting:
            return 0
        graph, moved = self.graph, {*self.slots[here], *self.slots[there]}
        made, dying = Counter[int](), Counter[int]()
        for s in {s for op in moved for s in graph.touches[op]}:
            allocator, nbytes = graph.allocator[s], graph.storages[s].nbytes
            stays = graph.storages[s].held or s in graph.outputs
            others = [slot for slot in self.slots_of[s] if slot not in (here, there)]
            if allocator in moved:
                made[nbytes] += stays or bool(others)
            elif allocator is not None and not stays:
                dying[nbytes] += not others or others[-1] < target
        return sum(min(n, dying[nbytes]) * nbytes for nbytes, n in made.items())

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
