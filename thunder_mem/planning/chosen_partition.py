"""The joint trace of a partition: its backward recomputes, writes gradients over operands, and updates early."""

from __future__ import annotations

from collections.abc import Collection

from thunder.core.trace import TraceCtx

from thunder_mem.rewrites.early_updates import early_updates
from thunder_mem.rewrites.gradients_over_operands import write_over_operands
from thunder_mem.rewrites.recompute import recompute_in_backward
from thunder_mem.trace.reading import TraceGraph, read_trace

__all__ = ["with_partition"]


def with_partition(source: TraceGraph, trace: TraceCtx, rebuilt: Collection[int]) -> tuple[TraceCtx, TraceGraph]:
    """The trace whose backward recomputes some storages, read anew.

    Args:
        source: the reading of `trace`.
        trace: a joint trace before fusion.
        rebuilt: the storages to recompute.
    """
    new, read = trace, source
    if rebuilt:
        new = recompute_in_backward(source, trace, frozenset(rebuilt))
        read = read_trace(new, earlier=source)
    for rewrite in (write_over_operands, early_updates):
        if (other := rewrite(read, new)) is not new:
            new, read = other, read_trace(other, earlier=read)
    return new, read
