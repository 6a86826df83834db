"""The memory model's only data structure: operations over storages.

A `Graph` says which storages each operation reads, overwrites and allocates, and which operations
must stay in order. Nothing here knows Thunder: `trace/reading.py` reads a trace into this form, and
`live_ranges.py` prices an order of it. `Graph.contract` turns ops into fusion regions of the same form,
so that one algorithm serves both levels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush

__all__ = ["Graph", "GraphError", "Op", "Storage", "earliest_first", "make_graph"]


class GraphError(ValueError):
    """A graph, an order or a grouping that breaks the rules; the message names the first offender."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of memory, which any number of tensors may view.

    Attributes:
        index: position in `Graph.storages`.
        nbytes: size in bytes.
        name: the proxy that first named it; for people, not for algorithms.
        device: its device, as torch prints it.
        held: the caller keeps it for the whole run (a parameter, an input), so nothing frees it.
        host_bytes: its size in the host's memory, if it lives there; `nbytes` is then 0.
    """

    index: int
    nbytes: int
    name: str = ""
    device: str = "cpu"
    held: bool = False
    host_bytes: int = 0

    def at(self, index: int) -> Storage:
        """The same storage at another position."""
        if index == self.index:
            return self
        return Storage(index, self.nbytes, self.name, self.device, self.held, self.host_bytes)


@dataclass(frozen=True, slots=True)
class Op:
    """One schedulable operation: a bound symbol, or a fusion region after `Graph.contract`.

    Attributes:
        index: position in `Graph.ops`, which is the source order.
        name: for people, not for algorithms.
        reads: storages that it reads, through any view.
        writes: existing storages that it overwrites in place.
        allocates: storages that it creates.
        scratch_bytes: bytes held only while it runs, beyond inputs and outputs.
        backward: it belongs to the backward half of a joint trace.
        payload: its origin (after `contract`: the indices of its members); algorithms do not read it.
    """

    index: int
    name: str = ""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    allocates: tuple[int, ...] = ()
    scratch_bytes: int = 0
    backward: bool = False
    payload: object = field(default=None, compare=False)

    @property
    def touches(self) -> tuple[int, ...]:
        """Every storage that must be alive while the op runs, each once."""
        return tuple(dict.fromkeys((*self.reads, *self.writes, *self.allocates)))

    def renumbered(self, index: int, storages: Mapping[int, int], payload: object) -> Op:
        """The same op at another index, with its storages renumbered."""
        return Op(
            index,
            self.name,
            tuple([storages[s] for s in self.reads]),
            tuple([storages[s] for s in self.writes]),
            tuple([storages[s] for s in self.allocates]),
            self.scratch_bytes,
            self.backward,
            payload,
        )


@dataclass(frozen=True)
class Graph:
    """An immutable graph of ops, in source order, over storages.

    A storage that no op allocates is an input, alive from the start. A storage dies after the last
    op that touches it, unless it is `held` or in `outputs`; an input that nothing touches stays.
    While an op runs, its inputs, its outputs and its scratch are alive together.

    Attributes:
        ops: in source order, which is one legal order.
        storages: indexed by `Storage.index`.
        predecessors: for each op the ops that must run before it, sorted, without repeats.
        outputs: storages alive after the last op (returned to the caller, or saved for the backward).
    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    predecessors: tuple[tuple[int, ...], ...]
    outputs: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.ops)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each op the ops that must run after it, sorted."""
        after: list[list[int]] = [[] for _ in self.ops]
        for op, before in enumerate(self.predecessors):
            for p in before:
                after[p].append(op)
        return tuple(map(tuple, after))

    @cached_property
    def touches(self) -> tuple[tuple[int, ...], ...]:
        """For each op the storages that it touches; see `Op.touches`."""
        return tuple([op.touches for op in self.ops])

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each storage the ops that touch it, the allocating one included, in source order."""
        users: list[list[int]] = [[] for _ in self.storages]
        for op, touched in enumerate(self.touches):
            for s in touched:
                users[s].append(op)
        return tuple(map(tuple, users))

    @cached_property
    def allocator(self) -> tuple[int | None, ...]:
        """For each storage the op that allocates it; None for an input."""
        allocator: list[int | None] = [None] * len(self.storages)
        for op in self.ops:
            for s in op.allocates:
                allocator[s] = op.index
        return tuple(allocator)

    def ancestors(self, op: int) -> set[int]:
        """The ops that run before an op in every order."""
        found, waiting = set[int](), [op]
        while waiting:
            new = set(self.predecessors[waiting.pop()]) - found
            found |= new
            waiting += new
        return found

    def check_order(self, order: Sequence[int]) -> None:
        """Raise `GraphError`, naming the first broken edge, unless `order` is a legal order of all ops."""
        position = [-1] * len(self.ops)
        for step, op in enumerate(order):
            if isinstance(op, bool) or not hasattr(op, "__index__"):
                raise GraphError(f"an order is a sequence of op indices, but step {step} holds {op!r}")
            if not 0 <= op < len(self.ops):
                raise GraphError(f"step {step} of the order holds {op}, but the ops are 0..{len(self.ops) - 1}")
            if position[op] >= 0:
                raise GraphError(f"the order runs op {self._label(op)} twice, at steps {position[op]} and {step}")
            position[op] = step
        if len(order) != len(self.ops):
            missing = next(op for op, step in enumerate(position) if step < 0)
            counts = f"{len(order)} steps for {len(self.ops)} ops"
            raise GraphError(f"the order has {counts}: {self._label(missing)} is missing")
        for op in order:
            for before in self.predecessors[op]:
                if position[before] > position[op]:
                    raise GraphError(f"the order breaks the edge {self._label(before)} -> {self._label(op)}")

    def contract(self, groups: Iterable[Sequence[int]]) -> Graph:
        """The graph whose ops are `groups`; an op in no group stays alone.

        A storage that a group of several allocates and no op outside touches disappears into the region.
        The payload of a new op is the tuple of its members. The new order is the topological order that
        follows the source most closely, forward before backward.

        Raises:
            GraphError: a group is empty or names no op, an op stands in two groups, a group mixes
                forward and backward, or the groups depend on each other in a cycle.

        Example:
            >>> x, y, z = Storage(0, 8, held=True), Storage(1, 16), Storage(2, 4)
            >>> ops = [Op(0, "exp", reads=(0,), allocates=(1,)), Op(1, "sum", reads=(1,), allocates=(2,))]
            >>> [s.nbytes for s in make_graph(ops, [x, y, z], outputs=[2]).contract([(0, 1)]).storages]
            [8, 4]
        """
        members = [tuple(sorted(group)) for group in groups]
        home = [-1] * len(self.ops)
        for g, group in enumerate(members):
            if not group or group[0] < 0 or group[-1] >= len(self.ops):
                raise GraphError(f"a region is made of ops 0..{len(self.ops) - 1}, not of {group}")
            for op in group:
                if home[op] >= 0:
                    raise GraphError(f"{self._label(op)} stands in two regions")
                if self.ops[op].backward != self.ops[group[0]].backward:
                    raise GraphError(f"a region mixes forward and backward: {', '.join(map(self._label, group))}")
                home[op] = g
        for op, g in enumerate(home):
            if g < 0:
                home[op] = len(members)
                members.append((op,))

        before: list[set[int]] = [set() for _ in members]
        for op, predecessors in enumerate(self.predecessors):
            earlier = before[home[op]]
            for p in predecessors:
                earlier.add(home[p])
        for g, earlier in enumerate(before):
            earlier.discard(g)

        order = self._order_groups(members, before)
        position = [0] * len(members)
        for i, g in enumerate(order):
            position[g] = i
        kept = []
        for s, (maker, users) in enumerate(zip(self.allocator, self.users, strict=True)):
            # A region omits a result that nobody reads; an op that runs alone still allocates it.
            if maker is None or s in self.outputs or len(members[g := home[maker]]) == 1:
                kept.append(s)
                continue
            for user in users:
                if home[user] != g:
                    kept.append(s)
                    break
        renumber = {s: i for i, s in enumerate(kept)}
        return Graph(
            ops=tuple([self._merge(i, members[g], renumber) for i, g in enumerate(order)]),
            storages=tuple([self.storages[s].at(i) for i, s in enumerate(kept)]),
            predecessors=tuple([tuple(sorted([position[p] for p in before[g]])) for g in order]),
            outputs=frozenset([renumber[s] for s in self.outputs]),
        )

    def half(self, backward: bool) -> Graph:
        """The forward or the backward ops alone, each with its index here as payload.

        Storages that the other half leaves are inputs, and storages that it needs later are outputs.
        Storages that the caller or a later half holds throughout stay in the live bytes.
        """
        members = [op.index for op in self.ops if op.backward == backward]
        position = {op: i for i, op in enumerate(members)}
        kept, outputs = [], set()
        for s, users in enumerate(self.users):
            allocator = self.allocator[s]
            used = any(op in position for op in users)
            if self.storages[s].held or s in self.outputs:
                stays, here = True, allocator is None or backward or allocator in position
            elif backward:
                stays, here = not users, used or not users
            else:
                stays, here = any(op not in position for op in users), allocator is None or allocator in position
            if here:
                kept.append(s)
            if here and stays:
                outputs.add(s)
        renumber = {s: i for i, s in enumerate(kept)}
        return Graph(
            ops=tuple(self.ops[op].renumbered(i, renumber, payload=op) for i, op in enumerate(members)),
            storages=tuple(self.storages[s].at(i) for i, s in enumerate(kept)),
            predecessors=tuple(tuple(position[p] for p in self.predecessors[op] if p in position) for op in members),
            outputs=frozenset(renumber[s] for s in outputs),
        )

    def _order_groups(self, groups: Sequence[tuple[int, ...]], before: Sequence[set[int]]) -> list[int]:
        """The topological order of the groups, forward first, that follows the source order of their last members."""
        order = earliest_first(before, [group[-1] + len(self.ops) * self.ops[group[0]].backward for group in groups])
        if len(order) < len(groups):
            stuck = min(groups[g] for g in set(range(len(groups))).difference(order))
            raise GraphError(f"the regions depend on each other in a cycle through {self._label(stuck[0])}")
        return order

    def _merge(self, index: int, group: tuple[int, ...], renumber: dict[int, int]) -> Op:
        first = self.ops[group[0]]
        if len(group) == 1:
            return first.renumbered(index, renumber, group)
        own = {s for op in group for s in self.ops[op].allocates}

        def collect(storages: Iterable[int]) -> tuple[int, ...]:
            return tuple(dict.fromkeys([renumber[s] for s in storages if s not in own]))

        return Op(
            index=index,
            name=f"region{index}",
            reads=collect(s for op in group for s in self.ops[op].reads),
            writes=collect(s for op in group for s in self.ops[op].writes),
            allocates=tuple(renumber[s] for op in group for s in self.ops[op].allocates if s in renumber),
            scratch_bytes=max(self.ops[op].scratch_bytes for op in group),
            backward=first.backward,
            payload=group,
        )

    def _label(self, op: int) -> str:
        return f"{self.ops[op].name or 'op'}#{op}"


def earliest_first(before: Sequence[Collection[int]], rank: Sequence[int]) -> list[int]:
    """The topological order that takes the least rank that is ready. It lacks all that a cycle keeps from ready.

    Args:
        before: for each element, those that must precede it.
        rank: for each element.
    """
    after: list[list[int]] = [[] for _ in before]
    for c, earlier in enumerate(before):
        for p in earlier:
            after[p].append(c)
    waits = [len(earlier) for earlier in before]
    ready = [(rank[c], c) for c, count in enumerate(waits) if not count]
    heapify(ready)
    order = []
    while ready:
        c = heappop(ready)[1]
        order.append(c)
        for then in after[c]:
            waits[then] -= 1
            if not waits[then]:
                heappush(ready, (rank[then], then))
    return order


def make_graph(
    ops: Iterable[Op], storages: Iterable[Storage], edges: Iterable[tuple[int, int]] = (), outputs: Iterable[int] = ()
) -> Graph:
    """Build a `Graph`: the given edges plus every read-after-write, write-after-read and
    write-after-write edge that the source order implies for each storage.

    Raises:
        GraphError: an index that does not match its position, an edge against the source order, or
            a storage that is touched before it is allocated.

    Example:
        >>> a, b = Storage(0, 8, held=True), Storage(1, 8)
        >>> make_graph([Op(0, "sin", reads=(0,), allocates=(1,)), Op(1, "add_", writes=(0,))], [a, b]).predecessors
        ((), (0,))
    """
    ops, storages = tuple(ops), tuple(storages)
    before: list[set[int]] = [set() for _ in ops]
    for source, target in edges:
        if not 0 <= source < target < len(ops):
            raise GraphError(f"the edge {source} -> {target} does not follow the source order of {len(ops)} ops")
        before[target].add(source)
    for i, storage in enumerate(storages):
        if storage.index != i:
            raise GraphError(f"storage {storage.name!r} says index {storage.index} but stands at {i}")

    allocated = {s for op in ops for s in op.allocates}
    written = {s for op in ops for s in op.writes}
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for i, op in enumerate(ops):
        if op.index != i:
            raise GraphError(f"op {op.name!r} says index {op.index} but stands at {i}")
        for s in op.allocates:
            if s in writer:
                raise GraphError(f"storage {s} is allocated twice, by ops {writer[s]} and {i}")
            writer[s] = i
        for s in (*op.reads, *op.writes):
            made = writer.get(s)
            if made is None:
                if s in allocated:
                    raise GraphError(f"op {op.name!r} (#{i}) touches storage {s} before it is allocated")
            elif made != i:
                before[i].add(made)
            if s in op.writes:
                before[i].update(readers.pop(s, ()))
                writer[s] = i
            elif s in written:
                readers.setdefault(s, []).append(i)
        before[i].discard(i)
    return Graph(ops, storages, tuple(tuple(sorted(b)) for b in before), frozenset(outputs))
