"""The fusion executors that take each op of a trace, and the ops that are cheap to repeat inside a region."""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.extend import FusionExecutor

from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.regions.pointwise_executor import MemPointwiseExecutor
from thunder_mem.semantics.effects import leaves
from thunder_mem.semantics.fusible_prims import POINTWISE, SHAPES
from thunder_mem.trace.reading import TraceGraph

__all__ = ["fusibility"]

_CHEAP = POINTWISE | SHAPES | {
    PrimIDs.BITCAST, PrimIDs.DIGAMMA, PrimIDs.ERFCINV, PrimIDs.FLIP, PrimIDs.IMAG, PrimIDs.LERP, PrimIDs.NDTRI,
    PrimIDs.REAL, PrimIDs.STRIDE_ORDER, PrimIDs.UNIFORM_PHILOX, PrimIDs.ZETA,
}  # fmt: skip
_NOT_CHEAP_TAGS: set = {OpTags.REDUCTION_OP, OpTags.MATMUL_OP, OpTags.RANDOM_OP, OpTags.DONT_RECOMPUTE_IN_BACKWARD}


def fusibility(
    source: TraceGraph,
    executors: Sequence[FusionExecutor],
    earlier: tuple[TraceGraph, FusionCapabilities] | None = None,
) -> FusionCapabilities:
    """Ask each executor about each op.

    No executor fuses an op that touches a storage which is overwritten later: inside a region its view of that
    storage might become a copy.

    Args:
        source: the trace.
        executors: the fusion executors.
        earlier: their answers for the trace from which `source` was made; nothing is asked twice.
    """
    graph = source.graph
    known = {} if earlier is None else _answers(*earlier)
    selective = overwriting = 0
    for bit, executor in enumerate(executors):
        overwriting |= isinstance(executor, MemPointwiseExecutor) << bit
        if getattr(executor, "required_ops", None):
            selective |= 1 << bit
    takes, required, cheap, operands = [], [], [], []
    for op, bsym in zip(graph.ops, source.bsyms, strict=True):
        bits, wants, is_cheap = 0, 0, False
        if _may_be_fused(source, op.index):
            if (answer := known.get(id(bsym))) is None:
                for bit, executor in enumerate(executors):
                    if _takes(executor, bsym):
                        bits |= 1 << bit
                        wants |= (bsym.sym.id in (getattr(executor, "required_ops", None) or ())) << bit
            else:
                bits, wants, is_cheap = answer
        takes.append(bits)
        required.append(wants)
        # Returned values are alive anyway, and must keep their own names.
        returned = any(p.name in source.returned_names for p in bsym.flat_proxy_outs)
        cheap.append(bool(bits) and not returned and (is_cheap or _is_cheap(bsym)))
        producers = (source.producer_of.get(p.name) for p in bsym.flat_proxy_args)
        operands.append(tuple(sorted({p for p in producers if p is not None and p != op.index})))
    return FusionCapabilities(
        tuple(takes), tuple(required), selective, tuple(cheap), tuple(operands), overwriting=overwriting
    )


def _may_be_fused(source: TraceGraph, op: int) -> bool:
    return source.effects[op].pure and source.overwritten.isdisjoint(source.graph.touches[op])


def _answers(source: TraceGraph, fuse: FusionCapabilities) -> dict[int, tuple[int, int, bool]]:
    """By the identity of a bound symbol: who takes and who requires it, and whether it is known to be cheap."""
    answers = zip(map(id, source.bsyms), zip(fuse.takes, fuse.required, fuse.cheap, strict=True), strict=True)
    return {bsym: answer for op, (bsym, answer) in enumerate(answers) if _may_be_fused(source, op)}


def _takes(executor: FusionExecutor, bsym: BoundSymbol) -> bool:
    if bsym.sym.is_fusion or not any(isinstance(p, TensorProxy) for p in bsym.flat_proxy_outs):
        return False
    if bsym.sym.executor not in (None, executor):  # claimed: nvFuser would run its parts instead
        return False
    # nvFuser's can_fuse leaves the question of the device to its fusion pass.
    on_device = getattr(executor, "has_cuda_input_or_output", None)
    return executor.can_fuse(bsym) and (on_device is None or on_device(bsym))


def _is_cheap(bsym: BoundSymbol) -> bool:
    """Elementwise or a view throughout, with tensors for results."""
    if not all(isinstance(p, TensorProxy) for p in bsym.flat_proxy_outs) or has_tags(bsym, _NOT_CHEAP_TAGS):
        return False
    return all(leaf.sym.id in _CHEAP or _hands_on(leaf) for leaf in leaves(bsym))


def _hands_on(bsym: BoundSymbol) -> bool:
    """Whether it returns its arguments, as a cast to the same dtype does."""
    return {p.name for p in bsym.flat_proxy_outs} <= {p.name for p in bsym.flat_proxy_args}
