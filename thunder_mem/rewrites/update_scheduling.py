"""Run updates whose states are on the host beside the backward, as far as the limit has room.

An update copies its states to the device and back, which takes longer than most of a layer's kernels. Beside other work
the device does not wait for these copies:

    link            copies of w2's states          copies of w1's states
    device    ...   start w2   matmul   matmul   end w2, start w1   matmul   ...   end w1

Updates keep their order, and one runs at a time. An update starts when the one before has ended; until then its
gradient waits. It ends before the first operation that begins after its copies. It ends earlier, and the device waits
for it, in two cases: an operation needs what the update reads or writes, or the limit has no room for it and for the
gradients that wait. The time of this waiting is exposed.

The pass uses the roofline, on the last trace, in which no other op moves any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.costs.plan_time import bound_symbol_seconds
from thunder_mem.memory.device_models import DeviceModel
from thunder_mem.memory.graph import GraphError
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.optimizer.update import Update, end_update, is_update, start_update, update_of
from thunder_mem.runtime.host_transfers import is_transfer
from thunder_mem.trace.reading import UNPACKING, TraceGraph, read_trace
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["UpdatesBeside", "schedule_updates"]


@dataclass(frozen=True)
class UpdatesBeside:
    """Places for the starts and ends of updates in a trace.

    Attributes:
        order: of the trace's operations, in which each of these updates counts as two, its start and its end.
        exposed_s: by the update, the time for which the device waits for it.
        peaks: bytes of the forward and of the backward, including the caller's tensors.
    """

    order: tuple[int, ...]
    exposed_s: Mapping[Update, float]
    peaks: tuple[int, int]

    def applied(self, trace: TraceCtx) -> TraceCtx:
        """The trace whose updates run beside other work.

        Args:
            trace: the one for which the places were found, or the same with other loops.
        """
        *body, result = trace.bound_symbols
        prefix = [b for b in body if b.sym.id in UNPACKING]

        def ordered() -> Iterator[BoundSymbol]:
            operations = (b for b in body if b.sym.id not in UNPACKING)
            parts = [part for b in operations for part in _started_and_ended(b, self.exposed_s)]
            yield from (*prefix, *(parts[i] for i in self.order), result)

        return rebuilt(trace, ordered, "Updates run beside other work")


def schedule_updates(
    trace: TraceCtx, device: DeviceModel, limit_bytes: int, earlier: TraceGraph | None = None
) -> UpdatesBeside | None:
    """Let updates whose states are on the host run beside the operations that follow.

    Args:
        trace: a joint trace in its final order, fused, without `del`s.
        device: the device with the rates.
        limit_bytes: the most bytes alive at once, unless more are alive anyway.
        earlier: a reading of an earlier trace, whose scratch of the same operations holds.

    Returns:
        None if no update has copies that can run beside anything.
    """
    if not any(map(_can_run_beside, trace.bound_symbols)):
        return None
    split = rebuilt(trace, lambda: (part for b in trace.bound_symbols for part in _started_and_ended(b, {})))
    program = _read(read_trace(split, earlier=earlier), device, limit_bytes)
    at_once = frozenset[int]()
    while True:
        walk = _Walk(program, at_once)
        try:
            timeline = price_order(program.source.graph, walk.order)
        except GraphError:  # an op depends on an update in an unexpected way
            return None
        if timeline.peak_bytes <= program.limit_bytes:
            return UpdatesBeside(tuple(walk.order), walk.exposed_s, timeline.peaks)
        # Updates without room where they wait or run are done where they were, where there is room for each.
        crowded = walk.pending_where(nbytes > program.limit_bytes for nbytes in timeline.live_bytes)
        if crowded <= at_once:
            return None
        at_once |= crowded


def _can_run_beside(bsym: BoundSymbol) -> bool:
    """Whether an update has copies to hide, and takes nothing of all gradients together."""
    if not is_update(bsym) or (moved := update_of(bsym).transfers) is None:
        return False
    update = update_of(bsym)
    return moved.link_s > 0 and not update.updates.optimizer.needs_all and runs_beside(update)


def runs_beside(update: Update) -> bool:
    """Whether the parameter's device has streams, on which work runs beside other work."""
    return update.parameter.device.type == "cuda"


def _started_and_ended(bsym: BoundSymbol, exposed_s: Mapping[Update, float]) -> list[BoundSymbol]:
    """The update as a start and an end, next to each other; other operations stay."""
    if not _can_run_beside(bsym):
        return [bsym]
    update, p, grad, *_ = bsym.args
    beside = update.beside(exposed_s.get(update, 0.0))
    flight = start_update.meta(beside, p, grad)
    return [
        bsym.from_bsym(sym=start_update, args=(beside, p, grad), output=flight),
        bsym.from_bsym(sym=end_update, args=(beside, flight, p, grad), output=None),
    ]


@dataclass(frozen=True)
class _Flight:
    """An update beside other work.

    Attributes:
        update: what runs.
        start: its first operation; the next one is its end.
        gradients: the storages that it keeps alive.
        handle: the storage of its temporaries.
        busy_s: the time of its kernels.
        lasts_s: the time from its start to its end.
        before: the other operation before which it has to end; the number of operations if there is none.
    """

    update: Update
    start: int
    gradients: frozenset[int]
    handle: int
    busy_s: float
    lasts_s: float
    before: int


@dataclass(frozen=True)
class _Program:
    """A trace with its updates as starts and ends, next to each other.

    Attributes:
        source: the trace.
        device: the device with the rates.
        live: bytes alive at each operation, in the order of the trace.
        limit_bytes: the most bytes that may be alive at once.
        flights: by their starts.
        own: all starts and ends.
        last_use: for each storage of a flight, the last other operation that needs it.
    """

    source: TraceGraph
    device: DeviceModel
    live: tuple[int, ...]
    limit_bytes: int
    flights: Mapping[int, _Flight]
    own: frozenset[int]
    last_use: Mapping[int, int]


def _read(source: TraceGraph, device: DeviceModel, limit_bytes: int) -> _Program:
    graph, timeline = source.graph, price_order(source.graph)
    starts = [i for i, b in enumerate(source.bsyms) if b.sym is start_update]
    own = frozenset((*starts, *(i + 1 for i in starts)))
    after: dict[int, int] = {}
    for op, before in enumerate(graph.predecessors):
        if op not in own:
            for i in before:
                after.setdefault(i, op)
    flights = {i: _flight(source, i, min(after.get(j, len(graph)) for j in (i, i + 1))) for i in starts}
    storages = {s for flight in flights.values() for s in (*flight.gradients, flight.handle)}
    last_use = {}
    for s in storages:
        stays = graph.storages[s].held or s in graph.outputs
        last_use[s] = len(graph) if stays else max((op for op in graph.users[s] if op not in own), default=-1)
    limit_bytes = max(limit_bytes, timeline.peak_bytes)
    return _Program(source, device, timeline.live_bytes, limit_bytes, flights, own, last_use)


def _flight(source: TraceGraph, start: int, before: int) -> _Flight:
    op, update = source.graph.ops[start], update_of(source.bsyms[start]).alone
    assert update is not None and update.transfers is not None
    (handle,) = op.allocates
    gradients = frozenset(op.reads) - {*op.writes}
    lasts_s = update.transfers.update_s
    return _Flight(update, start, gradients, handle, lasts_s - update.transfers.exposed_s, lasts_s, before)


class _Walk:
    """One walk over a program with the time of the device and of the link.

    Attributes:
        order: the operations with starts and ends in their places.
        exposed_s: the seconds that the device waits for each update.
    """

    def __init__(self, program: _Program, at_once: Collection[int]) -> None:
        """Walk.

        Args:
            at_once: the starts of updates beside which nothing may run.
        """
        self._program, self._at_once = program, at_once
        self._now = self._fetched = 0.0  # the device's time, and that by which all asked copies of values are there
        self._arrives: dict[str, float] = {}
        self._waiting: deque[_Flight] = deque()
        self._running: tuple[_Flight, float] | None = None
        self._asked: dict[int, int] = {}  # by an update's start, the place where its gradient begins to wait
        self.order: list[int] = []
        self.exposed_s: dict[Update, float] = {f.update: 0.0 for f in program.flights.values()}
        for op in range(len(program.source.bsyms)):
            if op in program.flights:
                self._ask(program.flights[op])
            elif op not in program.own:
                self._before(op)
                self._run(op)
        while self._waiting or self._running:
            self._start()
            self._finish()

    def pending_where(self, places: Iterable[bool]) -> frozenset[int]:
        """The starts of the updates that wait or run at any of the places where the order has True."""
        at = {i for i, here in enumerate(places) if here}
        ends = {op - 1: i for i, op in enumerate(self.order) if op - 1 in self._asked}
        return frozenset(s for s, first in self._asked.items() if not at.isdisjoint(range(first, ends[s] + 1)))

    def _ask(self, flight: _Flight) -> None:
        self._waiting.append(flight)
        self._asked[flight.start] = len(self.order)
        while flight.start in self._at_once and flight.start + 1 not in self.order[-1:]:
            self._start()
            self._finish()

    def _before(self, op: int) -> None:
        """Start and end updates before another operation."""
        if self._running is not None and self._running[1] <= self._now:
            self._finish()
        self._start()
        while self._in_the_way(op):
            self._finish()
            self._start()

    def _run(self, op: int) -> None:
        bsym, device = self._program.source.bsyms[op], self._program.device
        self.order.append(op)
        if is_transfer(bsym) and bsym.sym.name == "prefetch":
            copy_s = device.copy_seconds(self._program.source.layout.nbytes(bsym.output.name))
            self._arrives[bsym.output.name] = self._fetched = max(self._now, self._fetched) + copy_s
            if self._running is not None:  # they share the link
                self._running = self._running[0], self._running[1] + copy_s
        elif is_transfer(bsym) and bsym.sym.name == "prefetch_wait":
            self._now = max(self._now, self._arrives.get(bsym.args[0].name, 0.0))
        self._now += bound_symbol_seconds(bsym, device)

    def _start(self) -> None:
        """Start the next update, if none runs."""
        if self._running is None and self._waiting:
            flight = self._waiting.popleft()
            self.order.append(flight.start)
            self._running = flight, max(self._now, self._fetched) + flight.lasts_s
            self._now += flight.busy_s

    def _finish(self) -> None:
        """End the update that runs; the device waits for it."""
        assert self._running is not None
        (flight, over), self._running = self._running, None
        self.order.append(flight.start + 1)
        self.exposed_s[flight.update] += max(0.0, over - self._now)
        self._now = max(self._now, over)

    def _in_the_way(self, op: int) -> bool:
        """Whether an update has to end before an operation."""
        if self._running is None:
            return False
        pending = self._running[0], *self._waiting
        if any(flight.before <= op for flight in pending):
            return True
        held = {s for flight in pending for s in flight.gradients} | {self._running[0].handle}
        storages, last_use = self._program.source.graph.storages, self._program.last_use
        more_bytes = sum(storages[s].nbytes for s in held if last_use[s] < op)
        return self._program.live[op] + more_bytes > self._program.limit_bytes
