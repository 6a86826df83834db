"""The gradient of attention's result, one group of heads at a time.

    d_result (B*T, C) @ weight (C, H*D) -> d_out (B, T, H, D) -> backward of attention in groups

Only the backward in groups reads the gradient behind the output projection, group by group. So it makes each group's
part itself, from the columns of the projection's weight. The gradient of the result lives longer instead, but in a
transformer it is also that of the residual sum, which waits anyway.
"""

from __future__ import annotations

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import dce

from thunder_mem.attention.head_groups import groups_of, is_backward_in_groups, projecting
from thunder_mem.memory.graph import Op
from thunder_mem.trace.reading import TraceGraph, read_trace
from thunder_mem.trace.rebuilding import rebuilt
from thunder_mem.trace.region_readers import readers_in_regions

__all__ = ["with_projections_in_groups"]


def with_projections_in_groups(trace: TraceCtx) -> TraceCtx:
    """The joint trace whose attention projects its gradient by groups; the same object if there is none.

    Args:
        trace: a joint trace before fusion.
    """
    if not any(map(_has_groups, trace.bound_symbols)):
        return trace
    source = read_trace(trace)
    new = {}
    for op, bsym in zip(source.graph.ops, source.bsyms, strict=True):
        if _has_groups(bsym) and (by_groups := _projecting(source, op, bsym)) is not None:
            new[id(bsym)] = by_groups
    if not new:
        return trace
    return dce(rebuilt(trace, [new.get(id(b), b) for b in trace.bound_symbols], "Projections by groups of heads"))


def _has_groups(bsym: BoundSymbol) -> bool:
    return is_backward_in_groups(bsym) and groups_of(bsym) > 1


def _projecting(source: TraceGraph, attention: Op, bsym: BoundSymbol) -> BoundSymbol | None:
    """The backward that projects by groups; None if it cannot, or if the weight is larger than what this saves."""
    graph, grad_out = source.graph, bsym.args[0]
    storage = source.storage_of[grad_out.name]
    maker = graph.allocator[storage]
    if maker is None or not _is_product(source.bsyms[maker], grad_out) or not source.layout.is_plain(grad_out.name):
        return None
    grad_result, weight = source.bsyms[maker].args
    if source.layout.nbytes(weight.name) > graph.storages[storage].nbytes:
        return None
    if readers_in_regions(source, storage) != {attention.index} or storage in graph.outputs:
        return None
    operands = {source.storage_of[p.name] for p in (grad_result, weight)}
    between = (s for op in graph.ops[maker : attention.index] for s in op.writes)
    if any(s in operands or graph.allocator[s] is None for s in between):  # an argument may be memory of another one
        return None
    return projecting(bsym, grad_result, weight)


def _is_product(bsym: BoundSymbol, grad_out: TensorProxy) -> bool:
    """Whether it is a product of matrices in the dtype of the gradient."""
    if bsym.sym.name != "matmul" or bsym.kwargs or len(bsym.args) != 2:
        return False
    return all(isinstance(p, TensorProxy) and p.ndim == 2 and p.dtype == grad_out.dtype for p in bsym.args)
