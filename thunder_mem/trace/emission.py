"""Build the trace that a plan describes, and find the plan's regions in it again."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from thunder.core.proxies import Proxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.utils import OrderedSet
from thunder.executors.utils import Region
from thunder.extend import FusionExecutor

from thunder_mem.memory.plan import Plan, PlannedRegion
from thunder_mem.semantics.layout import is_view
from thunder_mem.semantics.op_traits import traits_of
from thunder_mem.trace.reading import BACKWARD, UNPACKING, TraceGraph
from thunder_mem.trace.rebuilding import with_body
from thunder_mem.trace.renaming import named, renamed

__all__ = ["emit", "regions_in_order"]


@dataclass(frozen=True)
class _Step:
    """A planned region as bound symbols with their final names.

    `wants` are the names that it takes from elsewhere, `makes` those that it could return.
    """

    region: PlannedRegion
    bsyms: tuple[BoundSymbol, ...]
    wants: dict[str, Proxy]
    makes: dict[str, Proxy]


def emit(
    source: TraceGraph, trace: TraceCtx, plan: Plan, executors: Mapping[str, FusionExecutor], note: str
) -> TraceCtx:
    """The trace of `plan`, its regions fused by their executors.

    Args:
        source: the reading of `trace`.
        trace: the unfused trace (plain or joint).
        plan: made for `source`.
        executors: fusion executors by name.
        note: provenance, printed above the trace.
    """
    return with_body(trace, source, partial(_fused, source, plan, executors), note)


def _fused(source: TraceGraph, plan: Plan, executors: Mapping[str, FusionExecutor]) -> Iterator[BoundSymbol]:
    steps = [_step(source, region) for region in plan.regions]
    wanted = {name for step in steps for name in step.wants} | source.returned_names
    numbers = count()
    for step in steps:
        executor = executors.get(step.region.executor or "")
        if executor is None or all(is_view(b) for b in step.bsyms):
            yield from step.bsyms
            continue
        bsym = executor.fuse(_region(step, wanted), next(numbers))
        if step.region.backward:
            bsym.tags.add(BACKWARD)
        yield bsym


def regions_in_order(regions: Sequence[PlannedRegion], emitted: TraceCtx, final: TraceCtx) -> tuple[PlannedRegion, ...]:
    """The regions of an emitted trace in the order of a later trace with the same steps.

    In the emitted trace the operations of a region stand together, even if no executor fuses them.
    """
    runs_at = {_key(b): i for i, b in enumerate(final.bound_symbols)}
    body = iter([b for b in emitted.bound_symbols if b.sym.id not in UNPACKING])
    starts = []
    for region in regions:
        first = next(body)
        for _ in range(0 if first.sym.is_fusion else len(region.ops) - 1):
            next(body)
        starts.append(runs_at[_key(first)])
    return tuple(regions[k] for k in sorted(range(len(regions)), key=starts.__getitem__))


def _key(bsym: BoundSymbol) -> Hashable:
    bsym = traits_of(bsym).runs(bsym)  # a step may be carried out in place since
    return (bsym.sym.name, *(p.name for p in bsym.flat_proxy_outs), *(p.name for p in bsym.flat_proxy_args))


def _step(source: TraceGraph, region: PlannedRegion) -> _Step:
    copies = set(region.copies)
    again: dict[str, Proxy] = {}
    made: dict[str, Proxy] = {}
    local: set[str] = set()
    wants: dict[str, Proxy] = {}
    bsyms = []
    for op in region.ops:
        bsym = source.bsyms[op]
        if op in copies:
            taken = {p.name for p in bsym.flat_proxy_args}
            for p in bsym.flat_proxy_outs:
                if p.name not in taken:
                    again[p.name] = named(p, f"re_{p.name}")
        if again:
            bsym = renamed(bsym, again)
        if op in copies and region.backward and BACKWARD not in bsym.tags:
            bsym = bsym.from_bsym(tags=bsym.tags | {BACKWARD})
        for p in bsym.flat_proxy_args:
            if p.name not in local:
                wants[p.name] = p
        for p in bsym.flat_proxy_outs:
            if p.name not in wants:
                local.add(p.name)
                made[p.name] = p
        bsyms.append(bsym)
    return _Step(region, tuple(bsyms), wants, made)


def _region(step: _Step, wanted: set[str]) -> Region:
    """The region in the form for fusion executors. Thunder's own constructor compares bound symbols
    structurally, which is quadratic; inputs and outputs are already known here."""
    region = object.__new__(Region)
    region.bound_symbols = list(step.bsyms)
    region.inputs = OrderedSet(variableify(p) for p in step.wants.values())
    region.outputs = OrderedSet(variableify(p) for name, p in step.makes.items() if name in wanted)
    return region
