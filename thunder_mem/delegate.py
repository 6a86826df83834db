"""Take Thunder's seat at the fusion pass.

Thunder has no hook for the joint trace, but it asks each fusion executor of its list to transform
that trace while every fusible operation is still open. A `PlanningExecutor` stands in the list for
each of the user's fusion executors, answers every question as that one would, and, at the first
fusion pass, plans with all of them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from thunder.core.compile_data import _compile_data
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.core.trace import TraceCtx
from thunder.extend import Executor, FusionExecutor

from thunder_mem.checkpoint import checkpointed_storages
from thunder_mem.choices import Choices
from thunder_mem.decisions import about_saving
from thunder_mem.effects import leaves
from thunder_mem.emit import emit
from thunder_mem.measure import collector_off
from thunder_mem.overwrites import protect_old_values
from thunder_mem.plan import Decision, Plan, Refusal
from thunder_mem.planner import make_plan
from thunder_mem.recompute import recompute_in_backward
from thunder_mem.regions import Fusibility
from thunder_mem.saving import storages_to_rebuild
from thunder_mem.sorting import SortFunction
from thunder_mem.trace_graph import TraceGraph, read_trace

__all__ = ["PlanningExecutor", "PlanningOptions", "fusibility", "last_plan", "seat", "unseat"]

_NOT_CHEAP = {
    PrimIDs.SUM, PrimIDs.PROD, PrimIDs.AMAX, PrimIDs.AMIN, PrimIDs.VAR, PrimIDs.VAR_MEAN, PrimIDs.STD,
    PrimIDs.ARGMAX, PrimIDs.ARGMIN, PrimIDs.SORT, PrimIDs.TOPK, PrimIDs.GATHER, PrimIDs.TAKE,
    PrimIDs.TAKE_ALONG_AXIS, PrimIDs.INDEX_ADD, PrimIDs.SCATTER_ADD, PrimIDs.SCATTER, PrimIDs.INDEX_PUT,
    PrimIDs.EMBEDDING, PrimIDs.EMBEDDING_BACKWARD, PrimIDs.DEVICE_PUT,
}  # fmt: skip
_NOT_CHEAP_TAGS: set = {OpTags.REDUCTION_OP, OpTags.MATMUL_OP, OpTags.RANDOM_OP, OpTags.DONT_RECOMPUTE_IN_BACKWARD}


@dataclass(frozen=True)
class PlanningOptions:
    """What `MemEfficient` passes on; see there."""

    sort: str | SortFunction = "auto"
    strict: bool = False
    refused: tuple[Refusal, ...] = ()  # by what ran before
    decisions: tuple[Decision, ...] = ()  # of what ran before


class _Session:
    """One compilation: who shares its plan, and whether planning failed."""

    def __init__(self, options: PlanningOptions) -> None:
        self.options = options
        self.executors: list[FusionExecutor] = []
        self.plan: Plan | None = None
        self.failed = False


class PlanningExecutor(FusionExecutor):
    """Stands for a fusion executor of the user's list, or for none; see the module."""

    def __init__(self, inner: FusionExecutor | None, session: _Session) -> None:
        name: Hashable = inner.name if inner else "mem_efficient"
        super().__init__(name, version=inner.version if inner else None)
        self.inner = inner
        self._session = session
        if inner is not None:
            session.executors.append(inner)
            self._implmap, self._lookasides, self._opmap = inner._implmap, inner._lookasides, inner._opmap

    def can_execute(self, bsym: BoundSymbol) -> bool:
        return self.inner is not None and self.inner.can_execute(bsym)

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        return self.inner is not None and self.inner.can_fuse(bsym)

    def get_execution_transform(self, bsym: BoundSymbol):
        return self.inner.get_execution_transform(bsym) if self.inner else None

    def get_grad_transform(self, sym):
        return self.inner.get_grad_transform(sym) if self.inner else None

    def fuse(self, region, fusion_counter: int) -> BoundSymbol:
        if self.inner is None:
            raise RuntimeError("there is no fusion executor to fuse with")
        return self.inner.fuse(region, fusion_counter)

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        session = self._session
        if session.plan is None and not session.failed:
            try:
                # Planning makes many small objects that live until its end: collecting meanwhile finds nothing.
                with collector_off():
                    return _plan_and_emit(trace, session)
            except Exception as error:
                if session.options.strict:
                    raise
                session.failed = True
                warnings.warn(
                    f"MemEfficient left this program as Thunder compiles it: {type(error).__name__}: {error}",
                    stacklevel=2,
                )
                with suppress(Exception):
                    trace = _with_checkpoints(trace)
        return self.inner.fusion_pass(trace) if session.failed and self.inner else trace


def seat(executors: Sequence[Executor], options: PlanningOptions) -> tuple[Executor, ...]:
    """The executors with a planner in each fusion executor's seat (one before the last two, Thunder's
    own, if there is no fusion executor). Planners from an earlier compilation give way to new ones."""
    session = _Session(options)
    seated: list[Executor] = [
        PlanningExecutor(e, session) if isinstance(e, FusionExecutor) else e for e in unseat(executors)
    ]
    if not session.executors:
        always = next((i for i, e in enumerate(seated) if e.name in ("torch", "python")), len(seated))
        seated.insert(always, PlanningExecutor(None, session))
    return tuple(seated)


def unseat(executors: Sequence[Executor]) -> tuple[Executor, ...]:
    """The executors as the user gave them."""
    plain = (e.inner if isinstance(e, PlanningExecutor) else e for e in executors)
    return tuple(e for e in plain if e is not None)


def last_plan(jitted) -> Plan | None:
    """The plan of the last compilation of a jitted function or module; None if there was none."""
    import thunder

    return getattr(thunder.compile_stats(jitted), "thunder_mem_plan", None)


def _plan_and_emit(trace: TraceCtx, session: _Session) -> TraceCtx:
    start = time.perf_counter_ns()
    if any(type(executor).__name__ == "nvFuserExecutor" for executor in session.executors):
        from thunder.core.rematerialization import replace_uniform

        trace = replace_uniform(trace)
    plan, source, trace = _best_plan(trace, session)
    plan = replace(
        plan,
        refused=(*session.options.refused, *plan.refused),
        decisions=(*session.options.decisions, *plan.decisions),
    )
    took_ms = (time.perf_counter_ns() - start) // 1_000_000
    executors = {str(e.name): e for e in session.executors}
    new = emit(source, trace, plan, executors, f"Memory planning (took {took_ms} milliseconds)")
    session.plan = plan
    if (stats := _compile_data.get()[1]) is not None:
        stats.thunder_mem_plan = plan
        stats.thunder_mem_planning_ms = took_ms
    return new


def _best_plan(trace: TraceCtx, session: _Session) -> tuple[Plan, TraceGraph, TraceCtx]:
    """Plan the program as it is and, if the backward could rebuild what it now receives, that way too."""
    names = [str(e.name) for e in session.executors]

    def plan(trace: TraceCtx, read: TraceGraph, fuse: Fusibility) -> tuple[Plan, TraceGraph, TraceCtx]:
        plan = make_plan(read.graph, fuse, names, sort=session.options.sort)
        saved = about_saving(source.graph, read.graph)
        return replace(plan, decisions=(saved, *plan.decisions)), read, trace

    trace, source = _read(trace)
    fuse = fusibility(source, session.executors)
    choices = Choices(offered=checkpointed_storages(source))
    rebuilt = [_only_offered(source, fuse, choices), storages_to_rebuild(source.graph, fuse, choices)]
    planned = []
    for storages in dict.fromkeys(rebuilt):
        new, read, takes = trace, source, fuse
        if storages:
            new = recompute_in_backward(source, trace, storages)
            read = read_trace(new, earlier=source)
            takes = fusibility(read, session.executors)
        planned.append(plan(new, read, takes))
    return min(planned, key=lambda p: (p[0].candidate.peak_bytes, -planned.index(p)))


def _read(trace: TraceCtx) -> tuple[TraceCtx, TraceGraph]:
    """The trace with all that its backward needs kept from being overwritten, and its graph."""
    source = read_trace(trace)
    safe = protect_old_values(source, trace)
    return safe, source if safe is trace else read_trace(safe, earlier=source)


def _only_offered(source: TraceGraph, fuse: Fusibility, choices: Choices) -> frozenset[int]:
    """What the user's own checkpoints make the backward compute again."""
    if not choices.offered:
        return frozenset()
    return storages_to_rebuild(source.graph, replace(fuse, cheap=(False,) * len(source.graph)), choices)


def _with_checkpoints(trace: TraceCtx) -> TraceCtx:
    """The joint trace, with the user's checkpoints carried out and nothing else planned."""
    trace, source = _read(trace)
    choices = Choices(offered=checkpointed_storages(source))
    rebuilt = _only_offered(source, fusibility(source, ()), choices)
    return recompute_in_backward(source, trace, rebuilt) if rebuilt else trace


def fusibility(source: TraceGraph, executors: Sequence[FusionExecutor]) -> Fusibility:
    """Ask each executor about each op.

    An op that touches a storage which anything overwrites later is fused by nobody: inside a region
    its view of that storage might become a copy.
    """
    graph = source.graph
    selective = 0
    for bit, executor in enumerate(executors):
        if getattr(executor, "required_ops", None):
            selective |= 1 << bit
    takes, required, cheap, operands = [], [], [], []
    for op, bsym, effects in zip(graph.ops, source.bsyms, source.effects, strict=True):
        bits = wants = 0
        if effects.pure and source.overwritten.isdisjoint(op.touches):
            for bit, executor in enumerate(executors):
                if _takes(executor, bsym):
                    bits |= 1 << bit
                    wants |= (bsym.sym.id in (getattr(executor, "required_ops", None) or ())) << bit
        takes.append(bits)
        required.append(wants)
        cheap.append(bool(bits) and effects.pure and _is_cheap(bsym))
        producers = (source.producer_of.get(p.name) for p in bsym.flat_proxy_args)
        operands.append(tuple(sorted({p for p in producers if p is not None and p != op.index})))
    return Fusibility(tuple(takes), tuple(required), selective, tuple(cheap), tuple(operands))


def _takes(executor: FusionExecutor, bsym: BoundSymbol) -> bool:
    if bsym.sym.is_fusion or not any(isinstance(p, TensorProxy) for p in bsym.flat_proxy_outs):
        return False
    # nvFuser's can_fuse leaves the question of the device to its fusion pass.
    on_device = getattr(executor, "has_cuda_input_or_output", None)
    return executor.can_fuse(bsym) and (on_device is None or on_device(bsym))


def _is_cheap(bsym: BoundSymbol) -> bool:
    """Elementwise or a view throughout, with tensors for results."""
    if not all(isinstance(p, TensorProxy) for p in bsym.flat_proxy_outs):
        return False
    return not any(b.sym.id in _NOT_CHEAP or has_tags(b, _NOT_CHEAP_TAGS) for b in (bsym, *leaves(bsym)))
