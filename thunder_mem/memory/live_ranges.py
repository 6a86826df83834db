"""The exact live bytes at each step of an order.

`price_order` prices an order. It returns a `Timeline`, which has the live range of each storage and the storages at
the peak. `WhatIf` (in `what_if.py`) prices the move of a stretch of steps faster than a full pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from thunder_mem.memory.graph import Graph
from thunder_mem.memory.running_set import liveness, profile

__all__ = ["Timeline", "peaks_of", "price_order"]


@dataclass(frozen=True)
class Timeline:
    """The live bytes of one order of a graph.

    Attributes:
        graph: the graph that is ordered.
        order: op indices in execution order.
        live_bytes: per step, the bytes alive while it runs, including the caller's storages and the
            step's inputs, outputs and scratch.
        peak_bytes: the largest of them; for a graph without ops the bytes alive from the start.
        peak_step: the first step that reaches it; -1 for a graph without ops.
    """

    graph: Graph = field(repr=False)
    order: tuple[int, ...] = field(repr=False)
    live_bytes: tuple[int, ...] = field(repr=False)
    peak_bytes: int
    peak_step: int

    @property
    def peaks(self) -> tuple[int, int]:
        """The peaks of forward and backward; 0 for a missing half."""
        peaks, ops = [0, 0], self.graph.ops
        for op, live in zip(self.order, self.live_bytes, strict=True):
            half = ops[op].backward
            if live > peaks[half]:
                peaks[half] = live
        return peaks[0], peaks[1]

    @cached_property
    def _ranges(self) -> tuple[tuple[int, int], ...]:
        position = [0] * len(self.order)
        for step, op in enumerate(self.order):
            position[op] = step
        last = len(self.order) - 1
        ranges = []
        for s, users in enumerate(self.graph.users):
            allocator = self.graph.allocator[s]
            stays = self.graph.storages[s].held or s in self.graph.outputs or not users
            born = 0 if allocator is None else position[allocator]
            ranges.append((born, last if stays else max(position[op] for op in users)))
        return tuple(ranges)

    @cached_property
    def host_peak_bytes(self) -> int:
        """The most bytes of offloaded values in the host's memory at once; no other figure includes them."""
        offloaded = [s for s in self.graph.storages if s.host_bytes]
        changes = [0] * (len(self.order) + 1)
        for s in offloaded:
            born, dies = self._ranges[s.index]
            changes[born] += s.host_bytes
            changes[dies + 1] -= s.host_bytes
        return max(accumulate(changes), default=0)

    def live_range(self, storage: int) -> tuple[int, int]:
        """The first and the last step, both included, at which `storage` is alive.

        An input is alive from step 0; a storage that stays is alive until the last step. In a graph
        without ops the range is the empty (0, -1).
        """
        return self._ranges[storage]

    def alive_at(self, step: int) -> tuple[int, ...]:
        """The storages alive while `step` runs, largest first, then by index.

        Raises:
            IndexError: there is no such step.
        """
        if not 0 <= step < len(self.order):
            raise IndexError(f"step {step} of an order of {len(self.order)} steps")
        alive = (s for s, (born, dies) in enumerate(self._ranges) if born <= step <= dies)
        return tuple(sorted(alive, key=lambda s: (-self.graph.storages[s].nbytes, s)))


def price_order(graph: Graph, order: Sequence[int] | None = None) -> Timeline:
    """Price an order of `graph`, the source order by default, in time linear in the graph's size.

    Raises:
        GraphError: `order` is not a legal order of all ops; the message names the first offender.

    Example:
        >>> from thunder_mem.memory.graph import Op, Storage, make_graph
        >>> x, y, z = Storage(0, 8, held=True), Storage(1, 16), Storage(2, 4)
        >>> ops = [Op(0, "exp", reads=(0,), allocates=(1,)), Op(1, "sum", reads=(1,), allocates=(2,))]
        >>> timeline = price_order(make_graph(ops, [x, y, z], outputs=[2]))
        >>> timeline.live_bytes, timeline.peak_bytes, timeline.alive_at(1)
        ((24, 28), 28, (1, 0, 2))
    """
    if order is None:
        order = range(len(graph))
    else:
        order = tuple(order)
        graph.check_order(order)
    live = liveness(graph)
    steps = tuple(profile(live, order))
    if not steps:
        return Timeline(graph, (), (), live.start_bytes, -1)
    peak_bytes = max(steps)
    return Timeline(graph, tuple(order), steps, peak_bytes, steps.index(peak_bytes))


def peaks_of(graph: Graph, order: Sequence[int] | None = None) -> tuple[int, int]:
    """The peaks of forward and backward in an order, by default the source order; 0 for a missing half."""
    return price_order(graph, order).peaks
