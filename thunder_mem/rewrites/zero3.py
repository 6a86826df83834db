"""ZeRO-3: the backward gathers parameters again instead of receiving the gathered ones.

Thunder 0.2.6 takes `sharding_strategy=FSDPType.ZERO3` but runs `ZERO2`: every gathered parameter that the backward
needs is saved, so that all of them are alive at its start. (Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", 2020.)
"""

from __future__ import annotations

from thunder.core.compile_data import get_compile_data
from thunder.core.trace import TraceCtx, TraceProvenance

from thunder_mem.distributed.collective_order import made_of_shards
from thunder_mem.frontend.checkpoint_tags import CHECKPOINTED
from thunder_mem.rewrites.recompute import recompute_in_backward
from thunder_mem.rewrites.regathered_values import second_gathers
from thunder_mem.trace.reading import TraceGraph

__all__ = ["asks_for_zero3", "needed_by_checkpoints", "with_parameters_gathered_again"]


def asks_for_zero3() -> bool:
    """Whether the present program has `sharding_strategy=FSDPType.ZERO3`."""
    from thunder.distributed import FSDPType

    module = getattr(get_compile_data(), "fn", None)
    return getattr(module, "sharding_strategy", None) is FSDPType.ZERO3


def with_parameters_gathered_again(source: TraceGraph, trace: TraceCtx) -> TraceCtx | None:
    """The joint trace whose backward gathers the parameters that it needs; None if it needs none.

    Values computed from parameters alone, such as a cast, are also made again. Values that the caller gets are
    alive anyway.

    Args:
        source: the reading of `trace`.
        trace: a joint trace, unfused.
    """
    graph = source.graph
    again = frozenset(
        s
        for op in made_of_shards(source)
        if not graph.ops[op].backward
        for s in graph.ops[op].allocates
        if s not in graph.outputs
    )
    if not any(op.backward and not again.isdisjoint(op.reads) for op in graph.ops):
        return None
    new = recompute_in_backward(source, trace, again)
    new.set_provenance(TraceProvenance("Gather parameters again in the backward"))
    return new


def needed_by_checkpoints(source: TraceGraph) -> dict[int, tuple[int, ...]]:
    """Per op of the backward that reads a checkpointed value, the second gathers that its recomputation reads.

    They stand before the op under every plan for the checkpoint, so that all ranks communicate in one order.
    """
    second = second_gathers(source)
    if not second:
        return {}
    graph = source.graph
    read_by: dict[int, frozenset[int]] = {}  # per op inside a checkpoint, all that it and earlier ops inside read
    found: dict[int, tuple[int, ...]] = {}
    for op, bsym in zip(graph.ops, source.bsyms, strict=True):
        makers = {graph.allocator[s] for s in op.reads}
        inside = frozenset().union(*(read_by[m] for m in makers if m in read_by))
        if not op.backward and CHECKPOINTED in bsym.tags:
            own = (second[p.name][0] for p in bsym.flat_proxy_args if p.name in second)
            read_by[op.index] = inside.union(own)
        elif op.backward and inside:
            found[op.index] = tuple(sorted(inside))
    return found
