"""From a plan to the trace that runs: the plan is emitted, and stages follow; each stage is a pure function.

Every stage returns its trace, and the plan with that trace's peaks and the stage's decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from thunder.core.trace import TraceCtx

from thunder_mem.costs.roofline import device_model_of
from thunder_mem.decisions.collective_stages import with_overlap
from thunder_mem.decisions.program import Planned, Program, device_of
from thunder_mem.decisions.rows_at_peak import with_fewer_rows_at_peak, with_rows_between_blocks
from thunder_mem.fusers.nvfuser_fallback import with_guarded_fusions
from thunder_mem.loop_sizes.chunk_resizing import fit_loops, with_fitted_loops
from thunder_mem.loop_sizes.even_chunks import with_even_chunks
from thunder_mem.memory.live_ranges import peaks_of
from thunder_mem.memory.plan import Decision, Plan
from thunder_mem.memory.units import counted, size
from thunder_mem.rendering.progress import stage
from thunder_mem.rewrites.buffer_reuse import reuse_and_sort, with_reuse
from thunder_mem.rewrites.transfer_scheduling import schedule_transfers, with_transfers
from thunder_mem.rewrites.update_scheduling import schedule_updates
from thunder_mem.semantics.kernel_figures import KernelFigures
from thunder_mem.semantics.kernel_scratch import region_scratch_bytes
from thunder_mem.semantics.op_traits import traits_of
from thunder_mem.trace.emission import emit, regions_in_order
from thunder_mem.trace.reading import TraceGraph, read_trace

__all__ = ["STAGES", "Emitted", "carried_out", "with_even_loops", "with_kernels", "with_updates_beside"]


@dataclass(frozen=True)
class Emitted:
    """A trace with fused regions in its order, between two stages.

    Attributes:
        program: the planned program.
        trace: the trace so far.
        plan: with the peaks of `trace`.
        source: the reading of the first trace, on which the first stage works.
    """

    program: Program
    trace: TraceCtx
    plan: Plan
    source: TraceGraph

    @property
    def budget_bytes(self) -> int | None:
        """The limit, if there is one."""
        return self.plan.budget.budget_bytes if self.plan.budget else None


def reuse_buffers(emitted: Emitted) -> Emitted:
    """Write results of fused regions over values that die there, and sort the steps once more."""
    options = emitted.program.options
    if not options.reuse:
        return emitted
    reused = reuse_and_sort(emitted.source, emitted.trace, options.sort)
    if reused is None:
        return emitted
    return replace(emitted, trace=reused.trace, plan=with_reuse(emitted.plan, reused))


def overlap_collectives(emitted: Emitted) -> Emitted:
    """Move communication behind computation."""
    trace, plan = with_overlap(emitted.trace, emitted.plan, emitted.program.given)
    return replace(emitted, trace=trace, plan=plan)


def schedule_copies(emitted: Emitted) -> Emitted:
    """Let copies to the host and back run beside other work, as far as the limit has room."""
    limit_bytes = emitted.budget_bytes or emitted.plan.candidate.peak_bytes
    device = device_model_of(device_of(emitted.program.source))
    scheduled = schedule_transfers(emitted.trace, device, limit_bytes)
    if not scheduled:
        return emitted
    return replace(emitted, trace=scheduled.trace, plan=with_transfers(emitted.plan, scheduled))


STAGES: tuple[Callable[[Emitted], Emitted], ...] = (reuse_buffers, overlap_collectives, schedule_copies)
"""What happens to an emitted trace, in order; chunk loops are fitted last, which verification need not see."""


def carried_out(planned: Planned, start: int, narrower_sums: bool = False) -> Planned:
    """The plan with its final trace and that trace's peaks, which decide about a budget.

    Args:
        planned: the plan.
        start: the start of planning, by `time.perf_counter_ns`.
        narrower_sums: whether a budget may narrow the sums of loops at the peak.
    """
    program = planned.program
    plan = replace(planned.plan, decisions=(*program.options.decisions, *planned.plan.decisions))
    executors = {str(e.name): e for e in program.executors}
    note = f"Memory planning (took {(time.perf_counter_ns() - start) // 1_000_000} milliseconds)"
    first = with_guarded_fusions(emit(planned.source, planned.trace, plan, executors, note))
    source = read_trace(first)
    emitted = Emitted(program, first, plan.after(peaks=peaks_of(source.graph)), source)
    for step in STAGES:
        with stage(f"planning: {step.__name__.replace('_', ' ')}"):
            emitted = step(emitted)
    final, plan, fused = emitted.trace, emitted.plan, emitted.source
    plan = replace(plan, regions=regions_in_order(plan.regions, first, final))
    if fitted := fit_loops(final, emitted.budget_bytes, emitted.source):
        final, plan, fused = fitted.trace, with_fitted_loops(plan, fitted), fitted.source
    planned = replace(planned, plan=plan, arranged=emitted.trace, final=final, fused=fused)
    if planned.fits:
        return with_rows_between_blocks(planned)
    return with_fewer_rows_at_peak(planned, enough_bytes=emitted.budget_bytes or 0, narrower_sums=narrower_sums)


def with_even_loops(planned: Planned) -> Planned:
    """The plan whose loss heads on a CPU run in equal chunks and few blocks.

    Args:
        planned: a plan that was carried out.
    """
    assert planned.final is not None
    if (even := with_even_chunks(planned.final, planned.final_source)) is None:
        return planned
    return replace(planned, plan=with_fitted_loops(planned.plan, even), final=even.trace, fused=even.source)


def with_updates_beside(planned: Planned) -> Planned:
    """The plan whose updates with states on the host run beside other work, as far as its limit has room.

    Args:
        planned: a plan that was carried out.
    """
    assert planned.arranged is not None and planned.final is not None
    limit_bytes = planned.plan.budget.budget_bytes if planned.plan.budget and planned.fits else planned.peak_bytes
    device = device_model_of(device_of(planned.source))
    if (found := schedule_updates(planned.final, device, limit_bytes, planned.fused)) is None:
        return planned
    arranged, final = found.applied(planned.arranged), found.applied(planned.final)
    return replace(planned, plan=planned.plan.after(peaks=found.peaks), arranged=arranged, final=final)


def with_kernels(plan: Plan, source: TraceGraph) -> Plan:
    """Add a decision about the regions' kernels, which the plan's peaks already count; no change if none is known.

    Args:
        plan: that was carried out.
        source: the reading of its final trace.
    """
    known = [f for b in source.bsyms if isinstance(f := traits_of(b).kernels(b, source.layout), KernelFigures)]
    if not known:
        return plan
    bare = []
    for op, bsym in zip(source.graph.ops, source.bsyms, strict=True):
        kept_bytes = region_scratch_bytes(bsym, source.layout)
        bare.append(replace(op, scratch_bytes=op.scratch_bytes - kept_bytes) if kept_bytes else op)
    before, after = peaks_of(replace(source.graph, ops=tuple(bare))), peaks_of(source.graph)
    launches, most = sum(f.launches for f in known), max(f.scratch_bytes for f in known)
    return plan.after(about_kernels(len(known), launches, most, before, after))


def about_kernels(
    regions: int, launches: int, most_bytes: int, before: Sequence[int], after: Sequence[int]
) -> Decision:
    """The decision about kernels: peaks (forward, backward) without and with the bytes kept between kernels."""
    kept = f"keep at most {size(most_bytes)} between them" if most_bytes else "keep nothing between them"
    how = f"{counted(launches, 'kernel')} of {counted(regions, 'region')}, which {kept}"
    return Decision("kernels", how, "peak", max(before), max(after))
