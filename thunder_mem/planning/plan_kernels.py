"""The kernels of a plan on a GPU: their number, and the bytes that a region keeps between its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from thunder_mem.memory.kernel_figures import KernelFigures
from thunder_mem.memory.live_ranges import peaks_of
from thunder_mem.memory.plan import Decision, Plan
from thunder_mem.memory.units import counted, size
from thunder_mem.semantics.kernel_scratch import region_scratch_bytes
from thunder_mem.semantics.op_traits import traits_of
from thunder_mem.trace.reading import TraceGraph

__all__ = ["with_kernels"]


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
