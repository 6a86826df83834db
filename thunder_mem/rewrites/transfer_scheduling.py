"""Schedule the copies of offloaded values beside other work, as far as the budget has room.

A copy to the host starts when the value exists. It ends at the latest where its memory is needed for another value. A
copy back starts early enough to end before the value is used, unless the memory that it fills is still in use. Copies
of one direction run one after the other, in the order of the requests; the other direction runs beside them. The time
of copies that no other work covers is exposed: the device waits.

The pass uses the roofline, on the last trace, in which no other op moves any more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from thunder.core import prims
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.costs.plan_time import bound_symbol_seconds
from thunder_mem.memory.device_models import DeviceModel
from thunder_mem.memory.graph import GraphError
from thunder_mem.memory.live_ranges import peaks_of, price_order
from thunder_mem.memory.plan import Decision, Plan
from thunder_mem.runtime.host_transfers import is_transfer, offloaded_names
from thunder_mem.trace.reading import TraceGraph, read_trace
from thunder_mem.trace.rebuilding import in_order

__all__ = ["Scheduled", "schedule_transfers", "with_transfers"]


@dataclass(frozen=True)
class Scheduled:
    """A trace whose copies run beside other work, and its figures.

    Attributes:
        trace: the new trace.
        names: of the offloaded values, in the order in which they leave.
        host_bytes: the most bytes that they take at once in the host's memory.
        link_s: the time of all copies, both ways.
        exposed_s: the time by which they prolong the step.
        peaks: bytes of the forward and of the backward, including the caller's tensors.
    """

    trace: TraceCtx
    names: tuple[str, ...]
    host_bytes: int
    link_s: float
    exposed_s: float
    peaks: tuple[int, int]


def schedule_transfers(trace: TraceCtx, device: DeviceModel, limit_bytes: int) -> Scheduled | None:
    """Let copies to the host and back run beside the work between.

    Args:
        trace: a joint trace in its final order, fused, without `del`s.
        device: the device with the rates.
        limit_bytes: the most bytes alive at once, unless more are alive anyway.

    Returns:
        None if nothing is offloaded.
    """
    if not any(map(is_transfer, trace.bound_symbols)):
        return None
    source = read_trace(trace)
    found = _Schedule(source, device, limit_bytes)
    order = found.order()
    graph = source.graph
    try:
        graph.check_order(order)
    except GraphError:  # an op depends on a copy in an unexpected way
        order = list(range(len(graph)))
    if max(peaks_of(graph, order)) > max(limit_bytes, *peaks_of(graph)):
        order = list(range(len(graph)))
    timeline = price_order(graph, order)
    new = in_order(trace, source, order, "Copies to the host and back run beside other work")
    names = offloaded_names(new.bound_symbols)
    link_s, exposed_s = _times(source, order, found.seconds, found.copy_s)
    return Scheduled(new, names, timeline.host_peak_bytes, link_s, exposed_s, peaks_of(graph, order))


def with_transfers(plan: Plan, scheduled: Scheduled) -> Plan:
    """The plan with the figures of its copies.

    Args:
        plan: of the trace whose copies were scheduled.
        scheduled: the result.
    """
    count = len(scheduled.names)
    how = (
        f"{count:,} {'value' if count == 1 else 'values'} to the host and back: {scheduled.link_s * 1e3:.3g} ms on the "
        f"link, {scheduled.exposed_s * 1e3:.3g} ms of them not hidden behind other work"
    )
    decision = Decision("offload", how, "host", 0, scheduled.host_bytes)
    plan = plan.after(decision, peaks=scheduled.peaks)
    return replace(
        plan,
        budget=plan.budget
        and replace(
            plan.budget,
            offloaded=scheduled.names,
            host_bytes=scheduled.host_bytes,
            link_ms=scheduled.link_s * 1e3,
            exposed_ms=scheduled.exposed_s * 1e3,
        ),
    )


@dataclass(frozen=True)
class _Copy:
    """A copy: its two ops, its bytes on the device, and the range of other ops between which it may run.

    `first` and `last` are slots: slot j is just before the j-th of the other ops of its half.
    """

    start: int
    wait: int
    nbytes: int
    first: int
    last: int


class _Schedule:
    def __init__(self, source: TraceGraph, device: DeviceModel, limit_bytes: int) -> None:
        self.source = source
        self.seconds = [bound_symbol_seconds(b, device) for b in source.bsyms]
        self.others: tuple[list[int], list[int]] = [], []  # per half, the ops that are no copies
        for op, b in zip(source.graph.ops, source.bsyms, strict=True):
            if not is_transfer(b):
                self.others[op.backward].append(op.index)
        self.copy_s = {i: device.copy_seconds(self._copied_bytes(i)) for i, b in enumerate(source.bsyms) if _starts(b)}
        self.live, peak = self._live_without_slack()
        self.limit_bytes = max(limit_bytes, peak)

    def order(self) -> list[int]:
        """The ops with the copies in their best places."""
        return [*self._interleaved(False, self._leaving()), *self._interleaved(True, self._coming())]

    def _copied_bytes(self, op: int) -> int:
        bsym = self.source.bsyms[op]
        return self.source.layout.nbytes((bsym.args[0] if bsym.sym.name == "offload" else bsym.output).name)

    def _copies(self, backward: bool) -> list[_Copy]:
        """All copies of one half, in the order of the requests, with their tightest slots."""
        source, graph = self.source, self.source.graph
        slot = {op: j for j, op in enumerate(self.others[backward])}
        copies = ((i, b) for i, b in enumerate(source.bsyms) if is_transfer(b))
        waits = {b.args[0].name: i for i, b in copies if not _starts(b)}
        found = []
        for start in self.copy_s:
            if graph.ops[start].backward != backward:
                continue
            out = source.bsyms[start].output.name
            moved = source.storage_of[out if backward else source.bsyms[start].args[0].name]
            used = [slot[op] for op in graph.users[moved] if op in slot]
            if backward:
                first, last = 0, min(used, default=len(slot))
            else:
                maker = graph.allocator[moved]
                first = slot[maker] + 1 if maker in slot else 0
                last = max(used, default=first - 1) + 1
            found.append(_Copy(start, waits[out], graph.storages[moved].nbytes, first, last))
        return sorted(found, key=lambda c: (c.last, c.start) if backward else (c.first, c.start))

    def _live_without_slack(self) -> tuple[list[list[int]], int]:
        """Bytes alive at each other op of each half if copies take no longer than necessary, and their peak."""
        leaving = {c: (c.first, c.last) for c in self._copies(False)}
        coming = {c: (c.last, c.last) for c in self._copies(True)}
        order = [*self._interleaved(False, leaving), *self._interleaved(True, coming)]
        try:
            timeline = price_order(self.source.graph, order)
        except GraphError:
            order = list(range(len(self.source.graph)))
            timeline = price_order(self.source.graph)
        live = dict(zip(order, timeline.live_bytes, strict=True))
        return [[live[op] for op in half] for half in self.others], timeline.peak_bytes

    def _interleaved(self, backward: bool, at: dict[_Copy, tuple[int, int]]) -> list[int]:
        """The ops of a half with the two ops of each copy in their slots, starts in the order of the copies."""
        due: dict[int, list[int]] = {}
        waits: dict[int, list[int]] = {}
        for c, (start, wait) in at.items():
            due.setdefault(start, []).append(c.start)
            waits.setdefault(wait, []).append(c.wait)
        ops = []
        for j in range(len(self.others[backward]) + 1):
            ops += [*due.get(j, ()), *waits.get(j, ())]
            ops += self.others[backward][j : j + 1]
        return ops

    def _leaving(self) -> dict[_Copy, tuple[int, int]]:
        """Copies to the host: from the value's making to the copy's end, if its memory may wait.

        No op overwrites the value meanwhile: the copy's end reads it, after all other ops that do.
        """
        begins = _starting_times(self.seconds, self.others[0])
        live, delay = self.live[0], [0.0] * len(begins)
        free_s = 0.0
        at = {}
        for c in self._copies(False):
            start_s = max(begins[c.first] + delay[c.first], free_s)
            free_s = start_s + self.copy_s[c.start]
            wait = c.last
            while wait < len(begins) - 1 and begins[wait] + delay[wait] < free_s:
                if live[wait] + c.nbytes > self.limit_bytes:
                    break
                live[wait] += c.nbytes
                wait += 1
            stall_s = free_s - begins[wait] - delay[wait]
            if stall_s > 0:
                for j in range(wait, len(delay)):
                    delay[j] += stall_s
            at[c] = (c.first, wait)
        return at

    def _coming(self) -> dict[_Copy, tuple[int, int]]:
        """Copies back: early enough to end before the value is used, if there is memory by then."""
        begins = _starting_times(self.seconds, self.others[1])
        live = self.live[1]
        first = sum(self.source.bsyms[op].sym == prims.get_grad for op in self.others[1])
        next_s = float("inf")
        at = {}
        for c in reversed(self._copies(True)):
            start_s = min(begins[c.last], next_s) - self.copy_s[c.start]
            wanted = max(first, min(c.last, bisect_right(begins, start_s) - 1))
            start = c.last
            while start > wanted and live[start - 1] + c.nbytes <= self.limit_bytes:
                start -= 1
                live[start] += c.nbytes
            next_s = max(start_s, begins[start])
            at[c] = (start, c.last)
        return dict(reversed(at.items()))


def _starts(bsym: BoundSymbol) -> bool:
    return is_transfer(bsym) and bsym.sym.name in ("offload", "prefetch")


def _starting_times(seconds: Sequence[float], ops: Sequence[int]) -> list[float]:
    """The start time of each op if nothing waits, and the end of the last."""
    begins = [0.0]
    for op in ops:
        begins.append(begins[-1] + seconds[op])
    return begins


def _times(
    source: TraceGraph, order: Sequence[int], seconds: Sequence[float], copy_s: dict[int, float]
) -> tuple[float, float]:
    """The time of all copies, and the time that the device waits for them."""
    now = waited = 0.0
    free: dict[str, float] = {}  # when a direction of the link is free again
    ends: dict[str, float] = {}
    for op in order:
        bsym = source.bsyms[op]
        if op in copy_s:
            way = bsym.sym.name
            ends[bsym.output.name] = free[way] = max(now, free.get(way, 0.0)) + copy_s[op]
        elif is_transfer(bsym):
            late = max(0.0, ends[bsym.args[0].name] - now)
            now, waited = now + late, waited + late
        else:
            now += seconds[op]
    return sum(copy_s.values()), waited
