"""Take Thunder's seat at the fusion pass.

Thunder has no hook for the joint trace, but it asks each fusion executor of its list to transform
that trace while every fusible operation is still open. A `PlanningExecutor` stands in the list for
each of the user's fusion executors, answers every question as that one would, and, at the first
fusion pass, plans with all of them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from thunder.core.compile_data import _compile_data, get_compile_data
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceTag
from thunder.extend import Executor, FusionExecutor

from thunder_mem.budget import BudgetError
from thunder_mem.choices import RecomputeError
from thunder_mem.chunk_fit import fit_loops, leaner_loops, with_fitted_loops
from thunder_mem.chunk_narrow import narrow_sums
from thunder_mem.cost import device_model_of
from thunder_mem.distributed import buckets_not_built, prepared, with_overlap
from thunder_mem.emit import emit, regions_in_order
from thunder_mem.fx import highest_peak, is_fx
from thunder_mem.joint_plan import Planned, PlanningOptions, device_of, plan_joint_trace, with_checkpoints
from thunder_mem.measure import collector_off
from thunder_mem.offload_schedule import schedule_transfers, with_transfers
from thunder_mem.plan import Plan
from thunder_mem.plan_kernels import with_kernels
from thunder_mem.planner import peaks_of
from thunder_mem.ranks import agree
from thunder_mem.reuse import reuse_and_sort, with_reuse
from thunder_mem.scratch_table import save_tables
from thunder_mem.trace_graph import read_trace
from thunder_mem.verify import is_verified, verify_final, verify_rewrite

__all__ = ["PlanningExecutor", "check_final_trace", "last_failure", "last_plan", "latest", "seat", "unseat"]


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
                    planned = _plan_and_emit(trace, session)
            except (BudgetError, RecomputeError):  # the user asked for what cannot be
                raise
            except Exception as error:
                if session.options.strict:
                    raise
                session.failed = True
                cause = f"{type(error).__name__}: {error}"
                _remember(None, failure=cause)
                warnings.warn(f"MemEfficient left this program as Thunder compiles it: {cause}", stacklevel=2)
                with suppress(Exception):
                    trace = with_checkpoints(trace)
                agree(trace, get_compile_data())
            else:
                agree(planned, get_compile_data(), session.plan)
                return planned
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
    """The plan of the last compilation of a jitted function or module; None if there was none, or it failed.

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


def check_final_trace(trace: TraceCtx) -> None:
    """Check a trace that is about to run, a backward against the forward before it.

    Raises:
        VerificationError: see `verify_final`.
    """
    stats = _compile_data.get()[1]
    if TraceTag.BACKWARD in trace.tags:
        verify_final(trace, getattr(stats, "thunder_mem_saved", ()))
    else:
        saved = verify_final(trace)
        if stats is not None:
            stats.thunder_mem_saved = saved


def _plan_and_emit(trace: TraceCtx, session: _Session) -> TraceCtx:
    start = time.perf_counter_ns()
    if any(type(executor).__name__ == "nvFuserExecutor" for executor in session.executors):
        from thunder.core.rematerialization import replace_uniform

        trace = replace_uniform(trace)
    given, trace = trace, prepared(trace)
    planned = _planned(trace, session, partial(_finished, given=given, session=session, start=start))
    plan, new = planned.plan, planned.final
    assert new is not None
    if is_verified(planned.original, plan.fingerprint, session.options.verify):
        verify_rewrite(planned.original, new)
    options = session.options
    plan = replace(
        plan,
        refused=(*options.refused, *buckets_not_built(), *plan.refused),
        decisions=(*options.decisions, *plan.decisions),
    )
    if fitted := fit_loops(new, plan.budget.budget_bytes if plan.budget else None):
        new, plan = fitted.trace, with_fitted_loops(plan, fitted)
    plan = with_kernels(plan, new)
    save_tables()
    session.plan = plan
    _remember(plan, took_ms=_took_ms(start))
    return new


def _finished(planned: Planned, *, given: TraceCtx, session: _Session, start: int) -> Planned:
    """The plan with its final trace, but for the rows of chunk loops, and the peaks that it has there."""
    options, plan = session.options, planned.plan
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
    return replace(planned, plan=plan, final=new)


def _took_ms(start: int) -> int:
    return (time.perf_counter_ns() - start) // 1_000_000


def _planned(trace: TraceCtx, session: _Session, finish: Callable[[Planned], Planned]) -> Planned:
    """The plan; where no plan fits a budget, of the program with loss heads that take less.

    Smaller chunks cost time, sums of gradients in 16 bits cost digits, but neither as much as no plan.
    """
    options = session.options
    if options.budget is None:
        return plan_joint_trace(trace, session.executors, options, finish)
    narrow = narrow_sums(trace)
    traces = [trace, leaner_loops(trace), narrow, leaner_loops(narrow) if narrow else None]
    *others, last = [t for t in traces if t is not None]
    for other in others:
        with suppress(BudgetError):
            return plan_joint_trace(other, session.executors, replace(options, on_infeasible="error"), finish)
    return plan_joint_trace(last, session.executors, options, finish)


def _remember(plan: Plan | None, *, took_ms: int = 0, failure: str = "") -> None:
    """With the compilation, where `last_plan` and `last_failure` find it; nothing stays of an earlier one."""
    if (stats := _compile_data.get()[1]) is not None:
        stats.thunder_mem_plan = plan
        stats.thunder_mem_planning_ms = took_ms
        stats.thunder_mem_failure = failure
