"""Results inside checkpoints that the backward receives after all, because the peak has room for them.

A checkpoint trades time for memory. But the peak of a step is seldom where all checkpoints are alive: mostly it is at
the backward's end, beside the gradients of all layers. So a layer whose backward runs early may keep a few results
without a higher peak, and the backward need not repeat what makes them. On the exact timeline of the final trace, the
results that save the most time a byte are kept first.

Only programs with their loss inside are changed. Otherwise another program runs between the halves, such as a loss or
the next part of a model, and what the backward receives adds to its peak. With `MemEfficient(keep=False)`
no program is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.chunk_loop.symbols import is_chunk_loop
from thunder_mem.costs.plan_time import final_seconds
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.decisions.loss_outside import has_loss_inside
from thunder_mem.decisions.program import Planned, device_of
from thunder_mem.memory.live_ranges import peaks_of, price_order
from thunder_mem.memory.plan import Decision, PlannedRegion
from thunder_mem.memory.units import counted
from thunder_mem.semantics.op_traits import traits_of
from thunder_mem.trace.reading import TraceGraph, read_trace
from thunder_mem.trace.rebuilding import rebuilt
from thunder_mem.trace.renaming import renamed
from thunder_mem.trace.value_numbers import Numbers, VerificationError, outcome_of

__all__ = ["KEPT", "with_kept_results"]

KEPT = "kept"
"""Names the decision about results inside checkpoints that the backward receives."""

# The share of the program's modelled time that keeping a result must save.
_LEAST_SAVED = 1e-3


def with_kept_results(planned: Planned) -> Planned:
    """The plan whose backward receives results of checkpoints instead of repeating them, where its peak has room.

    The limit is the budget, or the plan's own peak without one. A plan stays as it is if the user chose what to
    recompute.

    Args:
        planned: a plan that was carried out.
    """
    assert planned.arranged is not None and planned.final is not None
    budget, before = planned.plan.budget, planned.final_source
    options = planned.program.options
    asked = options.keep and options.recompute is None
    if not asked or not planned.fits or not _offered(planned) or not has_loss_inside(before):
        return planned
    limit_bytes = planned.peak_bytes if budget is None else budget.budget_bytes
    try:
        spared = _Search(planned).spared(limit_bytes)
    except VerificationError:  # which values are equal is unknown; `checked` raises if it verifies this plan
        return planned
    if not spared.received:
        return planned
    final = spared.applied(planned.final)
    read = read_trace(final, earlier=before)
    peaks = peaks_of(read.graph)
    if max(peaks) > limit_bytes:
        return planned
    regions = tuple(left for r in planned.plan.regions if (left := spared.left_of(r, planned.source)).ops)
    candidates = tuple(
        replace(c, regions=len(regions)) if c.name == planned.plan.chosen else c for c in planned.plan.candidates
    )
    plan = replace(planned.plan, regions=regions, candidates=candidates).after(peaks=peaks)
    found = replace(planned, plan=plan, arranged=spared.applied(planned.arranged), final=final, fused=read)
    what = f"{counted(len(spared.received), 'value')} of checkpoints received where the peak has room"
    how = f"{what}, which saves {1e3 * (planned.final_seconds - found.final_seconds):.3g} ms"
    return replace(found, plan=plan.after(Decision(KEPT, how, "peak", planned.peak_bytes, max(peaks))))


def _offered(planned: Planned) -> frozenset[int]:
    """The program's storages that its checkpoints let the backward recompute."""
    return planned.program.constraints.may_recompute - planned.program.gathered


@dataclass(frozen=True)
class _Repetition:
    """An operation of the backward that repeats one of the forward.

    Attributes:
        op: its index.
        results: for each repeated name, the forward's result.
        storages: of the forward's results.
    """

    op: int
    results: Mapping[str, Proxy]
    storages: frozenset[int]


@dataclass(frozen=True)
class _Spared:
    """Operations of the backward that need not run.

    Attributes:
        received: for each repeated name, the value of the forward that the backward receives.
        gone: the names that the backward no longer makes.
    """

    received: Mapping[str, Proxy]
    gone: frozenset[str]

    def applied(self, trace: TraceCtx) -> TraceCtx:
        """The trace without these operations."""
        bsyms = [renamed(b, self.received, outputs=False) for b in trace.bound_symbols if not self._omits(b)]
        return rebuilt(trace, bsyms, "Values of checkpoints that the backward receives, as the peak has room")

    def left_of(self, region: PlannedRegion, source: TraceGraph) -> PlannedRegion:
        """What still runs of a step of the plan, a region of `source`: nothing, or all that is fused."""
        own = [op for op in region.ops if op not in region.copies]
        left = tuple(op for op in own if self.gone.isdisjoint(p.name for p in source.bsyms[op].flat_proxy_outs))
        return region if len(left) == len(own) else replace(region, ops=left if region.executor is None else ())

    def _omits(self, bsym: BoundSymbol) -> bool:
        return any(p.name in self.gone for p in bsym.flat_proxy_outs)


class _Search:
    """The choice of repetitions that a plan can spare.

    Attributes:
        source: the final trace.
        first_of: the first name of each value that was computed before, by its name.
        dies: the last step of each storage.
        received: the storages that the backward receives, of repetitions spared so far.
        live_bytes: at each step, with these.
        seconds: the modelled time of each operation.
        gone: the operations of the backward that need not run.
        readers: the number of each name's readers, without these.
    """

    def __init__(self, planned: Planned) -> None:
        self.program, self.offered = planned.program.source, _offered(planned)
        self.source, graph = planned.final_source, planned.final_source.graph
        device = device_model_of(device_of(planned.source)).without_launches
        values = outcome_of(planned.trace, Numbers()).values
        first = {value: name for name, value in reversed(values.items())}
        self.first_of = {name: first[value] for name, value in values.items() if first[value] != name}
        timeline = price_order(graph)
        self.live_bytes = np.array(timeline.live_bytes)
        self.dies = [timeline.live_range(s.index)[1] for s in graph.storages]
        self.seconds = [final_seconds(b, self.source, device) for b in self.source.bsyms]
        self.gone = frozenset[int]()
        self.received = frozenset[int]()
        self.readers = Counter(name for b in self.source.bsyms for name in _taken(b))
        self.readers.update(self.source.returned_names)

    def spared(self, limit_bytes: int) -> _Spared:
        """The repetitions to spare within a limit: first those that save the most time a byte."""
        least_s = _LEAST_SAVED * sum(self.seconds)
        found = [(r, 1 + sum(map(self._nbytes, r.storages))) for r in self._repetitions()]
        worth = [(self._seconds(self._needless(r)) / nbytes, r) for r, nbytes in found]
        received = dict[str, Proxy]()
        for _, repetition in sorted(worth, key=lambda w: (-w[0], w[1].op)):
            needless = self._needless(repetition)
            if self._seconds(needless) < least_s or not self._keep(repetition, limit_bytes):
                continue
            self.gone |= needless
            self.readers.subtract(name for op in needless for name in _taken(self.source.bsyms[op]))
            received |= repetition.results
        names = {p.name for op in self.gone for p in self.source.bsyms[op].flat_proxy_outs}
        return _Spared(received, frozenset(names))

    def _repetitions(self) -> Iterator[_Repetition]:
        """The operations of the backward whose results the forward makes and may keep."""
        source = self.source
        ops = source.graph.ops
        written = {s for op in ops for s in op.writes}
        # A stretch may write a gradient over its rows. It asks first whether autograd holds them.
        lost = {s for op in ops for s in op.writes if not is_chunk_loop(source.bsyms[op.index])}
        in_backward = {s for op in ops if op.backward for s in op.reads} | source.graph.outputs
        for op, bsym in zip(ops, source.bsyms, strict=True):
            if not op.allocates or not self._may_go(op.index):
                continue
            read = [p.name for p in bsym.flat_proxy_outs if self.readers[p.name]]
            results = {name: first for name in read if (first := self._first(name)) is not None}
            if not results or len(results) < len(read) or not source.returned_names.isdisjoint(read):
                continue
            storages = {source.storage_of[p.name] for p in results.values()}
            own = {source.storage_of[name] for name in read}
            # Nobody else may read what a stretch overwrites.
            if not storages & written and not own & lost and not (own & written and storages & in_backward):
                yield _Repetition(op.index, results, frozenset(storages))

    def _first(self, name: str) -> Proxy | None:
        """The forward's result of which a value is the repetition, if a checkpoint let the backward repeat it."""
        source, first = self.source, self.first_of.get(name, "")
        maker = source.producer_of.get(first)
        if maker is None or source.graph.ops[maker].backward or not _lie_alike(source, first, name):
            return None
        if self.program.storage_of.get(first) not in self.offered:
            return None
        return next(p for p in source.bsyms[maker].flat_proxy_outs if p.name == first)

    def _seconds(self, ops: Collection[int]) -> float:
        return sum(self.seconds[op] for op in ops)

    def _needless(self, repetition: _Repetition) -> frozenset[int]:
        """The operations of the backward that nobody needs without a repetition, itself included."""
        source, needless, unread = self.source, {repetition.op} - self.gone, Counter[str]()
        waiting = list(needless)
        while waiting:
            for name in _taken(source.bsyms[waiting.pop()]):
                unread[name] += 1
                maker = source.producer_of.get(name)
                if maker is None or maker in needless or maker in self.gone or not self._may_go(maker):
                    continue
                if all(self.readers[p.name] == unread[p.name] for p in source.bsyms[maker].flat_proxy_outs):
                    needless.add(maker)
                    waiting.append(maker)
        return frozenset(needless)

    def _may_go(self, op: int) -> bool:
        """Whether nothing is lost without an operation of the backward but its results."""
        source = self.source
        return source.graph.ops[op].backward and source.effects[op].pure and not traits_of(source.bsyms[op]).transfers

    def _keep(self, repetition: _Repetition, limit_bytes: int) -> bool:
        """Whether the results can stay alive until the backward reads them; if so, they do.

        A second repetition of one operation stays, because a stretch may overwrite what the backward receives once.
        """
        if repetition.storages & self.received:
            return False
        live_bytes = self.live_bytes.copy()
        for s in repetition.storages:
            live_bytes[self.dies[s] + 1 : repetition.op] += self._nbytes(s)
        if live_bytes.max() > limit_bytes:
            return False
        self.live_bytes = live_bytes
        self.received |= repetition.storages
        return True

    def _nbytes(self, storage: int) -> int:
        return self.source.graph.storages[storage].nbytes


def _taken(bsym: BoundSymbol) -> set[str]:
    return {p.name for p in bsym.flat_proxy_args}


def _lie_alike(source: TraceGraph, one: str, other: str) -> bool:
    """Whether two values have one layout, in memory that is alike."""
    layout = source.layout
    if one not in layout or other not in layout:
        return False
    a, b = layout[one], layout[other]
    return (a.shape, a.stride(), a.dtype, a.storage_offset()) == (b.shape, b.stride(), b.dtype, b.storage_offset())
