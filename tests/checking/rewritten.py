"""Planned programs, and what breaks them on purpose works with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from tests.checking.traces import replaced
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.pipeline import plan_joint_trace
from thunder_mem.decisions.program import Planned
from thunder_mem.memory.plan import PlannedRegion
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.semantics.effects import effects_of
from thunder_mem.trace.emission import emit

__all__ = ["Rewritten", "effects_in", "positions", "rewrite", "with_bsyms"]


@dataclass(frozen=True)
class Rewritten:
    """A program, planned: its trace before, the plan, and the trace that was emitted."""

    name: str
    planned: Planned
    after: TraceCtx

    def emit(self, regions: Sequence[PlannedRegion]) -> TraceCtx:
        plan = replace(self.planned.plan, regions=tuple(regions))
        return emit(self.planned.source, self.planned.trace, plan, {"mem_pointwise": mem_pointwise_ex}, "corrupted")


def rewrite(name: str, trace: TraceCtx) -> Rewritten:
    planned = plan_joint_trace(trace, [mem_pointwise_ex], PlanningOptions(strict=True))
    after = emit(planned.source, planned.trace, planned.plan, {"mem_pointwise": mem_pointwise_ex}, "planned")
    return Rewritten(name, planned, after)


def positions(trace: TraceCtx, wanted: Callable[[BoundSymbol], bool]) -> list[int]:
    return [i for i, b in enumerate(trace.bound_symbols) if wanted(b)]


def with_bsyms(program: Rewritten, i: int, *new: BoundSymbol) -> TraceCtx:
    bsyms = list(program.after.bound_symbols)
    bsyms[i : i + 1] = new
    return replaced(program.after, bsyms)


def effects_in(bsym: BoundSymbol):
    return [effects_of(b) for b in (bsym.subsymbols if bsym.sym.is_fusion else (bsym,))]
