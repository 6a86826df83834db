"""The operations that may run twice with the same result, decided in this one place."""

from __future__ import annotations

from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import has_tags

from thunder_mem.runtime.rng_replay import rng_replay_obstacle
from thunder_mem.semantics.effects import leaves
from thunder_mem.trace.reading import TraceGraph

__all__ = ["recompute_obstacle"]

# A second run may differ from the first, in the order of equal elements or in the order in which
# atomics add up (the list of `torch.use_deterministic_algorithms`). By prim, and by the name of the
# function that an executor calls.
_VARIES = {
    PrimIDs.TOPK, PrimIDs.SORT, PrimIDs.SCATTER, PrimIDs.SCATTER_ADD, PrimIDs.INDEX_ADD, PrimIDs.INDEX_COPY,
    PrimIDs.INDEX_PUT, PrimIDs.EMBEDDING_BACKWARD,
}  # fmt: skip
_VARIES_BY_NAME = {
    "topk", "sort", "argsort", "kthvalue", "median", "mode", "unique", "scatter", "scatter_add", "scatter_reduce",
    "index_add", "index_put", "index_copy", "put", "bincount", "histc", "cumsum", "embedding_backward",
}  # fmt: skip


def recompute_obstacle(source: TraceGraph, op: int) -> str | None:
    """The reason why an op must run only once, in words; None if it may run again in the backward."""
    bsym, effects = source.bsyms[op], source.effects[op]
    if effects.writes:
        return f"it overwrites {effects.writes[0]}"
    if any(not channel.startswith("rng") for channel in effects.channels):
        return "it communicates"
    if effects.channels and (reason := rng_replay_obstacle(bsym)):
        return reason
    if effects.barrier:
        return "it may do more than compute its result"
    if changed := [s for s in source.graph.ops[op].touches if s in source.overwritten]:
        return f"{source.graph.storages[changed[0]].name}, which it uses, is overwritten"
    if has_tags(bsym, {OpTags.DONT_RECOMPUTE_IN_BACKWARD}):
        return "its executor forbids it"
    if any(b.sym.id in _VARIES or b.sym.name in _VARIES_BY_NAME for b in (bsym, *leaves(bsym))):
        return "its result may differ from run to run"
    if not all(isinstance(p, TensorProxy) for p in bsym.flat_proxy_outs):
        return "its result is not a tensor"
    return None
