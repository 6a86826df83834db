"""Replace Thunder's fusion pass.

Thunder has no hook for the joint trace. But it asks each fusion executor of its list to transform that trace while
every fusible operation is still open. A `PlanningExecutor` replaces each of the user's fusion executors in the list,
and answers every question as that executor would. At the first fusion pass it plans with all of them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from thunder.core.compile_data import _compile_data, compile_data_and_stats, get_compile_data
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceTag
from thunder.core.transform_common import Transform
from thunder.extend import Executor, FusionExecutor

from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.program import Planned, with_checkpoints
from thunder_mem.distributed.agreement import agree
from thunder_mem.memory.plan import Plan
from thunder_mem.partition.budget import BudgetError
from thunder_mem.partition.constraints import RecomputeError
from thunder_mem.planning.fallback import Original, final_halves
from thunder_mem.planning.record import Studied, note_plan, noted_program
from thunder_mem.planning.state_placement import place_states, with_states_placed
from thunder_mem.planning.tile_selection import TileVariants, lower_plan
from thunder_mem.regions.region_kernels import region_function_of
from thunder_mem.rendering.progress import stage
from thunder_mem.runtime.collector import collector_off
from thunder_mem.trace.verification import VerificationError, verify_final, verify_rewrite
from thunder_mem.user_choices.offload import OffloadOption

__all__ = [
    "PlanningExecutor",
    "final_trace",
    "install_planner",
    "user_executors",
]


class _Session:
    """One compilation: the executors that share its plan, whether planning failed, and the fallback.

    Attributes:
        original: the computation before any loop; None if there is none.
        whole: the computation before stretches became tiles; None if there are none, or if the user asked for them.
        others: makes the program with other tiles; None if there is no choice.
        given: the trace to plan.
        halves: Thunder's own forward and backward, which replace broken ones.
    """

    def __init__(
        self, options: PlanningOptions, original: Original | None, whole: Original | None, others: TileVariants | None
    ) -> None:
        self.options = options
        self.original = original
        self.whole = whole
        self.others = others
        self.given: TraceCtx | None = None
        self.halves: tuple[TraceCtx, TraceCtx | None] | None = None
        self.executors: list[FusionExecutor] = []
        self.plan: Plan | None = None
        self.failed = False


class PlanningExecutor(FusionExecutor):
    """Replaces a fusion executor of the user's list, or none; see the module."""

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
                    planned = _planned(trace, session)
            except (BudgetError, RecomputeError):  # the user's request is impossible
                raise
            except Exception as error:
                if session.options.strict:
                    raise
                trace = _unplanned(session, error)
            else:
                agree(planned, get_compile_data(), session.plan, noted_program())
                return planned
        return self.inner.fusion_pass(trace) if session.failed and self.inner else trace


def _planned(trace: TraceCtx, session: _Session) -> TraceCtx:
    start = time.perf_counter_ns()
    with stage("planning"):
        whole = None if session.whole is None else partial(session.whole.unfused, get_compile_data())

        def plan(options: PlanningOptions) -> Planned:
            return lower_plan(trace, whole, session.executors, options, session.others)

        planned = with_states_placed(plan, session.options)
    if not session.options.studied:
        place_states(planned)
    session.plan = planned.plan
    study = Studied(planned, _within(trace, session)) if session.options.studied else None
    note_plan(planned.plan, took_ms=(time.perf_counter_ns() - start) // 1_000_000, study=study)
    assert planned.final is not None
    for function in filter(None, map(region_function_of, planned.final.bound_symbols)):
        function.expect()
    return planned.final


def _within(trace: TraceCtx, session: _Session) -> Callable[[int, OffloadOption | None], Planned]:
    """Plans a trace once more, for a budget; see `Studied`."""
    compilation = _compile_data.get()
    executors, given, others = tuple(session.executors), session.options, session.others
    whole = None if session.whole is None else cache(partial(session.whole.unfused, get_compile_data()))

    def within(budget_bytes: int, offload: OffloadOption | None) -> Planned:
        options = replace(given, budget=budget_bytes, on_infeasible="error", offload=offload)
        with compile_data_and_stats(*compilation), collector_off(), stage("planning"):
            return lower_plan(trace, whole, executors, options, others)

    return within


def _unplanned(session: _Session, error: Exception) -> TraceCtx:
    """Give up planning: a warning with the cause, and the trace as Thunder has it, with the user's checkpoints."""
    session.failed = True
    cause = f"{type(error).__name__}: {error}"
    note_plan(None, failure=cause)
    warnings.warn(f"MemEfficient left this program as Thunder compiles it: {cause}", stacklevel=3)
    trace = session.given if session.original is None else session.original.unfused(get_compile_data())
    assert trace is not None
    with suppress(Exception):
        kept = with_checkpoints(trace)
        verify_rewrite(trace, kept)
        trace = kept
    agree(trace, get_compile_data(), program=noted_program())
    return trace


def install_planner(
    executors: Sequence[Executor],
    options: PlanningOptions,
    original: Original | None = None,
    whole: Original | None = None,
    others: TileVariants | None = None,
) -> tuple[Executor, ...]:
    """The executors with a planner in place of each fusion executor. Without a fusion executor, one planner
    stands before the last two, Thunder's own. New planners replace those of an earlier compilation.

    Args:
        executors: the user's.
        options: of the plan.
        original: the computation before any loop.
        whole: the computation before stretches became tiles, if the plan may choose.
        others: makes it with other tiles, if the plan may choose.
    """
    session = _Session(options, original, whole, others)
    seated: list[Executor] = [
        PlanningExecutor(e, session) if isinstance(e, FusionExecutor) else e for e in user_executors(executors)
    ]
    if not session.executors:
        always = next((i for i, e in enumerate(seated) if e.name in ("torch", "python")), len(seated))
        seated.insert(always, PlanningExecutor(None, session))
    return tuple(seated)


def user_executors(executors: Sequence[Executor]) -> tuple[Executor, ...]:
    """The executors as the user gave them."""
    plain = (e.inner if isinstance(e, PlanningExecutor) else e for e in executors)
    return tuple(e for e in plain if e is not None)


def final_trace(trace: TraceCtx, transform: Transform) -> TraceCtx | None:
    """A trace that is about to run; Thunder's own half if this or the other half is broken.

    Args:
        trace: a forward, or, after that, its backward.
        transform: the calling transform.

    Returns:
        None for a backward that Thunder does not have.

    Raises:
        VerificationError: the trace is broken, and `MemEfficient` is strict; see `verify_final`.
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
        own = user_executors(data.executors_list)
        before = data.transforms[: data.transforms.index(transform)]
        session.halves = final_halves(_unplanned(session, error), own, before)
        trace = session.halves[0]
    session.given = session.original = session.whole = session.others = None
    return trace
