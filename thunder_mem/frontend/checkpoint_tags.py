"""`torch.utils.checkpoint`, taken over from Thunder.

Thunder repeats in the backward whatever stands inside a checkpoint: random numbers are drawn again,
writes in place are repeated or left out. Here its marks are replaced by one of our own before autograd,
so that the joint trace arrives without repetitions, and the marks say what the user allows to be
computed again. `partition/min_cut_partition.py` then cuts: the least bytes are kept from which everything else can be
rebuilt. Random numbers are drawn again from the state that they were drawn from (`runtime/rng_replay.py`). What
cannot be repeated is kept in the smallest form that serves, and what is alive anyway is not computed again.

What is recomputed never has an effect, so a BatchNorm inside a checkpoint updates its statistics once a
step, as without the checkpoint, in Thunder and in torch.compile. (Eager PyTorch runs it again in the
backward, and so updates them twice.)
"""

from __future__ import annotations

from collections.abc import Collection

import thunder.torch as ltorch
from thunder.core.proxies import ProxyTag
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace

from thunder_mem.runtime.repeatability import recompute_obstacle
from thunder_mem.trace.reading import TraceGraph

__all__ = ["CHECKPOINTED", "checkpointed_storages", "take_over_checkpoints"]

BoundSymbolTag.register_tag("CHECKPOINTED")
CHECKPOINTED = BoundSymbolTag.CHECKPOINTED
_THUNDERS = BoundSymbolTag.RECOMPUTE_IN_BACKWARD
_THUNDERS_ON_PROXY = ProxyTag.RECOMPUTE_IN_BACKWARD


def take_over_checkpoints(trace: TraceCtx) -> TraceCtx:
    """The trace with `CHECKPOINTED` where Thunder would repeat; Thunder's marks are gone.

    A tag of a bound symbol goes to all that autograd and the executors make of it. The proxies are the
    given trace's own and lose Thunder's tag there too.

    Args:
        trace: a computation trace before autograd.
    """
    if not any(_is_marked(b) or b.sym == ltorch.checkpoint for b in trace.bound_symbols):
        return trace
    new = from_trace(trace)
    internal = {p.name for b in trace.bound_symbols for p in b.flat_proxy_outs if _THUNDERS_ON_PROXY in p.tags}
    for bsym in trace.bound_symbols:
        taken_over = _taken_over(bsym, frozenset(), False)
        # Thunder leaves out what makes a checkpoint's result. It reads what exists only in there, so it is in there.
        last = not _is_marked(bsym) and any(p.name in internal for p in bsym.flat_proxy_args)
        new.bound_symbols += [_with_marked_parts(b) for b in taken_over] if last else taken_over
    new.set_provenance(TraceProvenance("Checkpoints are planned"))
    return new


def _is_marked(bsym: BoundSymbol) -> bool:
    return _THUNDERS in bsym.tags or any(_THUNDERS_ON_PROXY in p.tags for p in bsym.flat_proxy_outs)


def _taken_over(bsym: BoundSymbol, stays: Collection[str], inside: bool) -> list[BoundSymbol]:
    """The bound symbol with our mark if it has Thunder's, or stands in a checkpoint and makes more than `stays`.

    ThunderFX's checkpoint is one bound symbol around the others; its results are kept.
    """
    if bsym.sym == ltorch.checkpoint:
        results = {p.name for p in bsym.flat_proxy_outs} if not inside else stays
        return [new for part in bsym.subsymbols for new in _taken_over(part, results, True)]
    if _is_marked(bsym) or (inside and not _makes(bsym, stays)):
        return [_marked(bsym)]
    return [_with_marked_parts(bsym) if inside else bsym]


def _with_marked_parts(bsym: BoundSymbol) -> BoundSymbol:
    """The bound symbol, whose result is kept, with our mark on all that it makes on the way there."""
    stays = {p.name for p in bsym.flat_proxy_outs}
    parts = tuple(_with_marked_parts(b) if _makes(b, stays) else _marked(b) for b in bsym.subsymbols)
    return bsym.from_bsym(subsymbols=parts)


def _makes(bsym: BoundSymbol, names: Collection[str]) -> bool:
    return any(p.name in names for p in bsym.flat_proxy_outs)


def _marked(bsym: BoundSymbol) -> BoundSymbol:
    for p in bsym.flat_proxy_outs:
        p.tags.discard(_THUNDERS_ON_PROXY)
    return bsym.from_bsym(
        tags=(bsym.tags - {_THUNDERS}) | {CHECKPOINTED}, subsymbols=tuple(_marked(part) for part in bsym.subsymbols)
    )


def checkpointed_storages(source: TraceGraph) -> frozenset[int]:
    """The storages of a joint graph's forward that a checkpoint allows the backward to compute again.

    Never what a repetition would change: what is overwritten, communication, results that differ from run to run.
    """
    return frozenset(
        s
        for op, bsym in zip(source.graph.ops, source.bsyms, strict=True)
        if not op.backward
        and CHECKPOINTED in bsym.tags
        and op.allocates
        and recompute_obstacle(source, op.index) is None
        for s in op.allocates
    )
