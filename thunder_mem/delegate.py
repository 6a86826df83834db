"""Take Thunder's seat at the fusion pass.

Thunder has no hook for the joint trace, but it asks each fusion executor of its list to transform
that trace while every fusible operation is still open. A `PlanningExecutor` stands in the list for
each of the user's fusion executors, answers every question as that one would, and, at the first
fusion pass, plans with all of them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter

from thunder.core.compile_data import _compile_data, get_compile_data
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceTag
from thunder.core.transform_common import Transform
from thunder.extend import Executor, FusionExecutor

from thunder_mem.budget import BudgetError, share_in_words
from thunder_mem.choices import RecomputeError
from thunder_mem.chunk_fit import fit_loops, leanest_loops, with_fitted_loops
from thunder_mem.chunk_narrow import narrow_sums
from thunder_mem.cost import device_model_of
from thunder_mem.distributed import buckets_not_built, prepared, with_overlap
from thunder_mem.emit import emit, regions_in_order
from thunder_mem.fallback import Original, final_halves
from thunder_mem.fx import highest_peak, is_fx
from thunder_mem.joint_plan import Planned, PlanningOptions, device_of, plan_joint_trace, with_checkpoints
from thunder_mem.measure import collector_off
from thunder_mem.offload_schedule import schedule_transfers, with_transfers
from thunder_mem.peak_parts import peak_in_words
from thunder_mem.plan import Plan
from thunder_mem.planner import peaks_of
from thunder_mem.ranks import agree
from thunder_mem.reuse import reuse_and_sort, with_reuse
from thunder_mem.trace_graph import read_trace
from thunder_mem.verify import VerificationError, is_verified, verify_final, verify_rewrite

__all__ = ["PlanningExecutor", "final_trace", "last_failure", "last_plan", "latest", "seat", "unseat"]


class _Session:
    """One compilation: who shares its plan, whether planning failed, and what it then goes back to.

    Attributes:
        original: the computation before its heads became loops; None where none did.
        given: the trace that was to be planned.
        halves: forward and backward as Thunder has them, in the place of broken ones.
    """

    def __init__(self, options: PlanningOptions, original: Original | None) -> None:
        self.options = options
        self.original = original
        self.given: TraceCtx | None = None
        self.halves: tuple[TraceCtx, TraceCtx | None] | None = None
        self.executors: list[FusionExecutor] = []
        self.plan: Plan | None = None
        self.failed = False


class PlanningExecutor(FusionExecutor):
    """Stands for a fusion executor of the user's list, or for none; see the module."""

    def __init__(self, inner: FusionExecutor | None, session: _Session) -> None:
        name: Hashable = inner.name if inner else "mem_efficient"
        super().__init__(name, version=inner.version if inner else None)
        self.inner = inner
        self.session = session
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
        session = self.session
        if session.plan is None and not session.failed:
            session.given = trace
            try:
                # Planning makes many small objects that live until its end: collecting meanwhile finds nothing.
                with collector_off():
                    planned = _plan_and_emit(trace, session)
            except (BudgetError, RecomputeError):  # the user asked for what cannot be
                raise
            except Exception as error:
                if session.options.strict:
                    raise
                trace = _unplanned(session, error)
            else:
                agree(planned, get_compile_data(), session.plan)
                return planned
        return self.inner.fusion_pass(trace) if session.failed and self.inner else trace


def _unplanned(session: _Session, error: Exception) -> TraceCtx:
    """Give up planning: a warning with the cause, and the trace as Thunder has it, with the user's checkpoints."""
    session.failed = True
    cause = f"{type(error).__name__}: {error}"
    _remember(None, failure=cause)
    warnings.warn(f"MemEfficient left this program as Thunder compiles it: {cause}", stacklevel=3)
    trace = session.given if session.original is None else session.original.unfused(get_compile_data())
    assert trace is not None
    with suppress(Exception):
        kept = with_checkpoints(trace)
        verify_rewrite(trace, kept)
        trace = kept
    agree(trace, get_compile_data())
    return trace


def seat(
    executors: Sequence[Executor], options: PlanningOptions, original: Original | None = None
) -> tuple[Executor, ...]:
    """The executors with a planner in each fusion executor's seat (one before the last two, Thunder's
    own, if there is no fusion executor). Planners from an earlier compilation give way to new ones.

    Args:
        executors: the user's.
        options: how to plan.
        original: the computation as it was, where its heads are loops now.
    """
    session = _Session(options, original)
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
    """The plan of the last compilation of a jitted function or module; None without one: `why_no_plan` says why.

    Of the subgraphs of a program of ThunderFX the plan that peaks highest; `thunder_mem.fx.subgraphs` has all.
    """
    return getattr(_stats(jitted), "thunder_mem_plan", None)


def last_failure(jitted) -> str:
    """Why planning failed in the last compilation of a jitted function or module; "" if it did not."""
    return getattr(_stats(jitted), "thunder_mem_failure", "")


def _stats(jitted):
    import thunder

    return thunder.compile_stats(highest_peak(jitted) if is_fx(jitted) else jitted)


def latest() -> tuple[Plan | None, str]:
    """The plan of the compilation that is under way, and why there is none."""
    stats = _compile_data.get()[1]
    return getattr(stats, "thunder_mem_plan", None), getattr(stats, "thunder_mem_failure", "")


def final_trace(trace: TraceCtx, transform: Transform) -> TraceCtx | None:
    """A trace that is about to run; where it or its other half is broken, the same half as Thunder has it.

    Args:
        trace: a forward, or, after that, its backward.
        transform: who asks.

    Returns:
        None for a backward that Thunder does not have.

    Raises:
        VerificationError: it is broken, and `MemEfficient` is strict; see `verify_final`.
    """
    data, stats = _compile_data.get()
    session = next((e.session for e in data.executors_list if isinstance(e, PlanningExecutor)), None)
    if session is None:
        return trace
    if TraceTag.BACKWARD in trace.tags:
        return trace if session.halves is None else session.halves[1]
    try:
        backwards = stats.last_backward_traces
        saved = verify_final(trace)
        if backwards:
            verify_final(backwards[-1], saved)
    except VerificationError as error:
        if session.options.strict:
            raise
        own = unseat(data.executors_list)
        before = data.transforms[: data.transforms.index(transform)]
        session.halves = final_halves(_unplanned(session, error), own, before)
        trace = session.halves[0]
    session.given = session.original = None
    return trace


def _plan_and_emit(trace: TraceCtx, session: _Session) -> TraceCtx:
    start = time.perf_counter_ns()
    if any(type(executor).__name__ == "nvFuserExecutor" for executor in session.executors):
        from thunder.core.rematerialization import replace_uniform

        trace = replace_uniform(trace)
    given, trace = trace, prepared(trace)
    planned = _planned(trace, session, partial(_finished, given=given, session=session, start=start))
    plan = planned.plan
    assert planned.arranged is not None and planned.final is not None
    if is_verified(planned.original, plan.fingerprint, session.options.verify):
        verify_rewrite(planned.original, planned.arranged)
    elif session.options.verify is not False:  # which costs little, however long the trace
        verify_final(planned.arranged)
    plan = replace(plan, refused=(*session.options.refused, *buckets_not_built(), *plan.refused))
    session.plan = plan
    _remember(plan, took_ms=_took_ms(start))
    return planned.final


def _finished(planned: Planned, *, given: TraceCtx, session: _Session, start: int) -> Planned:
    """The plan with its final trace, and the peaks that it has there: what a budget is judged by."""
    options = session.options
    plan = replace(planned.plan, decisions=(*options.decisions, *planned.plan.decisions))
    executors = {str(e.name): e for e in session.executors}
    note = f"Memory planning (took {_took_ms(start)} milliseconds)"
    emitted = new = emit(planned.source, planned.trace, plan, executors, note)
    source = read_trace(new)
    plan = plan.with_peaks(*peaks_of(source.graph, range(len(source.graph))))
    if options.reuse and (reused := reuse_and_sort(source, new, options.sort)):
        new, plan = reused.trace, with_reuse(plan, reused)
    new, plan = with_overlap(new, plan, given)
    device = device_model_of(device_of(planned.source))
    limit_bytes = plan.budget.budget_bytes if plan.budget else plan.candidate.peak_bytes
    if scheduled := schedule_transfers(new, device, limit_bytes):
        new, plan = scheduled.trace, with_transfers(plan, scheduled)
    plan = replace(plan, regions=regions_in_order(plan.regions, emitted, new))
    final = new
    if fitted := fit_loops(new, plan.budget.budget_bytes if plan.budget else None):
        final, plan = fitted.trace, with_fitted_loops(plan, fitted)
    return replace(planned, plan=plan, arranged=new, final=final)


def _took_ms(start: int) -> int:
    return (time.perf_counter_ns() - start) // 1_000_000


def _planned(trace: TraceCtx, session: _Session, finish: Callable[[Planned], Planned]) -> Planned:
    """The plan; where no plan fits a budget, of the program with loss heads that take less.

    Smaller chunks cost time, sums of gradients in 16 bits cost digits, but neither as much as no plan.

    Raises:
        BudgetError: nothing fits and `on_infeasible` is "error".
    """
    options = session.options
    found: list[Planned] = []
    for variant in _variants(trace):
        found.append(plan_joint_trace(variant, session.executors, options, finish))
        outcome = found[-1].plan.budget
        if outcome is None or (outcome.peak_bytes <= outcome.budget_bytes and options.observe is None):
            return found[-1]
    best = min(found, key=attrgetter("peak_bytes"))
    assert outcome is not None and options.budget is not None and best.final is not None
    if best.peak_bytes <= outcome.budget_bytes:
        return best
    share = share_in_words(options.budget, device_of(best.source))
    error = BudgetError(outcome.budget_bytes, best.peak_bytes, peak_in_words(best.final, best.source), share)
    if options.on_infeasible == "error":
        raise error
    warnings.warn(str(error), stacklevel=2)
    return best


def _variants(trace: TraceCtx) -> Iterator[TraceCtx]:
    """The joint trace, and with loss heads that take less: in smaller chunks, with narrower sums, and both."""
    yield trace
    if (lean := leanest_loops(trace)) is not None:
        yield lean
    if (narrow := narrow_sums(trace)) is not None:
        yield narrow
        if (lean := leanest_loops(narrow)) is not None:
            yield lean


def _remember(plan: Plan | None, *, took_ms: int = 0, failure: str = "") -> None:
    """With the compilation, where `last_plan` and `last_failure` find it; nothing stays of an earlier one."""
    if (stats := _compile_data.get()[1]) is not None:
        stats.thunder_mem_plan = plan
        stats.thunder_mem_planning_ms = took_ms
        stats.thunder_mem_failure = failure
