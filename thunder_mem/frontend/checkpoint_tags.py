"""`torch.utils.checkpoint`, taken over from Thunder.

Thunder repeats a whole checkpoint in the backward: random numbers are drawn again, and writes in place are repeated or
omitted. Here a mark of our own replaces Thunder's before autograd. So the joint trace has no repetitions, and the marks
show what the user allows to recompute. `partition/min_cut_partition.py` then keeps the fewest bytes from which all
other values can be recomputed. Random numbers are drawn again from the saved generator state (`runtime/rng_replay.py`).
Values that cannot be repeated are kept in their smallest form, and live values are not recomputed.

Recomputed operations never have effects. So a BatchNorm inside a checkpoint updates its statistics once a step, as
without the checkpoint, in Thunder and in torch.compile. (Eager PyTorch runs it again in the backward, and so updates
them twice.)

While Thunder traces, `traced_checkpoint` takes a call with all of PyTorch's arguments. Thunder 0.2.6 refuses
`use_reentrant=True` and keywords of the function, and puts a checkpoint inside of another one before it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import thunder.torch as ltorch
from thunder.core.interpreter import INTERPRETER_SIGNALS, _interpret_call, unwrap
from thunder.core.jit_ext import _general_jit_lookaside_map, get_jit_ctx
from thunder.core.proxies import Proxy, ProxyTag
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx
from torch.utils.checkpoint import checkpoint, noop_context_fn

from thunder_mem.frontend.own_programs import is_own_program
from thunder_mem.runtime.repeatability import recompute_obstacle
from thunder_mem.trace.reading import TraceGraph
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["CHECKPOINTED", "checkpointed_storages", "take_over_checkpoints", "traced_checkpoint"]

BoundSymbolTag.register_tag("CHECKPOINTED")
CHECKPOINTED = BoundSymbolTag.CHECKPOINTED
_THUNDERS = BoundSymbolTag.RECOMPUTE_IN_BACKWARD
_THUNDERS_ON_PROXY = ProxyTag.RECOMPUTE_IN_BACKWARD
_TRACED_BY_THUNDER: Callable[..., Any] = _general_jit_lookaside_map[checkpoint]
_OPTIONS = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")


@wraps(_TRACED_BY_THUNDER)
def traced_checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Trace a call of `torch.utils.checkpoint.checkpoint`; all values that it makes inside get Thunder's tag.

    A reentrant checkpoint is traced as any other, so that parameters inside have gradients even where no argument has.
    """
    if not is_own_program():
        return _TRACED_BY_THUNDER(function, *args, **kwargs)
    options = {name: unwrap(kwargs.pop(name)) for name in _OPTIONS if name in kwargs}
    if options.get("context_fn") not in (None, noop_context_fn):
        warnings.warn(
            "the context_fn= of a checkpoint is ignored, because MemEfficient itself chooses what to recompute",
            stacklevel=2,
        )
    trace = get_jit_ctx().computation_trace
    trace.push_scope([])
    result = _interpret_call(function, *args, **kwargs)
    made = trace.pop_scope()
    trace.peek_scope().extend(made)
    if result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        leaves, _ = tree_flatten([unwrap(x) for x in (*args, *kwargs.values(), result)])
        outside = {p.name for p in leaves if isinstance(p, Proxy)}
        for p in (p for b in made for p in b.flat_proxy_outs if p.name not in outside):
            p.tags.add(_THUNDERS_ON_PROXY)
    return result


def take_over_checkpoints(trace: TraceCtx) -> TraceCtx:
    """The trace with `CHECKPOINTED` where Thunder would repeat, without Thunder's marks.

    Autograd and the executors copy a bound symbol's tag to all bound symbols that they make from it. The given
    trace's own proxies also lose Thunder's tag.

    Args:
        trace: a computation trace before autograd.
    """
    if not any(_is_marked(b) or b.sym == ltorch.checkpoint for b in trace.bound_symbols):
        return trace
    bsyms: list[BoundSymbol] = []
    internal = {p.name for b in trace.bound_symbols for p in b.flat_proxy_outs if _THUNDERS_ON_PROXY in p.tags}
    for bsym in trace.bound_symbols:
        taken_over = _taken_over(bsym, frozenset(), False)
        # Thunder does not mark the op that makes a checkpoint's result. Its operands show that it is inside.
        last = not _is_marked(bsym) and any(p.name in internal for p in bsym.flat_proxy_args)
        bsyms += [_with_marked_parts(b) for b in taken_over] if last else taken_over
    return rebuilt(trace, bsyms, "Checkpoints are planned")


def _is_marked(bsym: BoundSymbol) -> bool:
    return _THUNDERS in bsym.tags or any(_THUNDERS_ON_PROXY in p.tags for p in bsym.flat_proxy_outs)


def _taken_over(bsym: BoundSymbol, stays: Collection[str], inside: bool) -> list[BoundSymbol]:
    """The bound symbol with our mark if it has Thunder's, or is in a checkpoint and makes more than `stays`.

    ThunderFX's checkpoint is one bound symbol around the others; its results are kept.
    """
    if bsym.sym == ltorch.checkpoint:
        results = {p.name for p in bsym.flat_proxy_outs} if not inside else stays
        return [new for part in bsym.subsymbols for new in _taken_over(part, results, True)]
    if _is_marked(bsym) or (inside and not _makes(bsym, stays)):
        return [_marked(bsym)]
    return [_with_marked_parts(bsym) if inside else bsym]


def _with_marked_parts(bsym: BoundSymbol) -> BoundSymbol:
    """The bound symbol, whose result is kept, with our mark on all intermediate values."""
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
    """The storages of a joint graph's forward that a checkpoint allows the backward to recompute.

    Values that a repetition would change are excluded: overwritten values, communication, non-deterministic results.
    So are storages all of which a checkpoint's result shows, as a norm's result shows its last sum.
    """
    forward = [(op, b) for op, b in zip(source.graph.ops, source.bsyms, strict=True) if not op.backward]
    marked = (op for op, b in forward if CHECKPOINTED in b.tags and recompute_obstacle(source, op.index) is None)
    offered = frozenset(s for op in marked for s in op.allocates)
    others = (p.name for _, b in forward if CHECKPOINTED not in b.tags for p in b.flat_proxy_outs)
    results = (name for name in others if source.storage_of.get(name) in offered)
    return offered - {source.storage_of[name] for name in results if source.layout.is_dense(name)}
