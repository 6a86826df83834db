"""What has no gradient in eager has none here: results under `detach` or `no_grad`, and made of such values alone.

Thunder (0.2.6) gives every result of a program with gradients a history. A hidden state that is detached and given to
the next step then fails in its second backward, keeps what the first one saved, and refuses `.numpy()`.

And the other way round: what has a gradient in eager. Some operations return their argument itself where they have
nothing to do, such as ``x.to(x.dtype)``. Thunder takes their result under `no_grad` as detached, silently.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from thunder.core import dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import ProxyTag, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.extend import OperatorExecutor

from thunder_mem.functionalization.replaceable_writes import (
    arguments_of,
    copies_in,
    has_own_gradient,
    is_detached,
    tensors_in,
)
from thunder_mem.semantics.effects import is_copy, leaves
from thunder_mem.trace.missing_tangents import ask_for_none, named_results
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["with_detached_results", "with_same_results"]

_RETURN_THEIR_ARGUMENT = frozenset(
    {"atleast_1d", "atleast_2d", "atleast_3d", "dropout", "flatten", "real", "to", "torch_type", "type_as"}
)
"""Functions that return the very tensor that they are given where it is already what they should make of it.

So does `contiguous`, but which strides an intermediate value has in eager is not known here.
"""
_TO_A_DTYPE = frozenset({"bfloat16", "double", "float", "half"})
_OF_SHAPE_ALONE = re.compile("new_.*|.*_like")

mem_detached_ex = OperatorExecutor("mem_detached", version="0.1")

without_history = mem_detached_ex.register_operator(
    "without_history", meta=lambda a: TensorProxy(like=a, requires_grad=False), fn=torch.Tensor.detach
)


def with_same_results(trace: TraceCtx) -> TraceCtx:
    """The trace in which what is its own argument under `no_grad` keeps that argument's gradient.

    Args:
        trace: before autograd; only its proxies' tags change.
    """
    for bsym in trace.bound_symbols:
        if _is_its_argument(bsym):
            for p in tensors_in([bsym.output, [leaf.output for leaf in leaves(bsym)]]):
                p.tags.discard(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    return trace


def _is_its_argument(bsym: BoundSymbol) -> bool:
    name, given = bsym.sym.name, tensors_in(bsym.args[:1])
    if name in _RETURN_THEIR_ARGUMENT:
        return all(leaf.sym.id is PrimIDs.SHALLOW_COPY for leaf in leaves(bsym))
    if name in _TO_A_DTYPE:
        return bool(given) and given[0].dtype == bsym.output.dtype
    if name == "cpu":
        return bool(given) and given[0].device == bsym.output.device
    return name in ("conj", "positive", "resolve_conj") and not dtypes.is_complex_dtype(bsym.output.dtype)


def with_detached_results(epilogue: TraceCtx, computation: TraceCtx) -> TraceCtx:
    """The epilogue that gives results without a gradient in eager no history.

    Args:
        epilogue: takes the computation's results last.
        computation: before autograd, with the program's own writes.
    """
    if not any(p.requires_grad for p in tensors_in(computation.args)):
        return epilogue
    kept = _names_with_gradient(computation) | {p.name for p in arguments_of(computation)}
    detached = {
        name
        for name, p in named_results(epilogue, computation)
        if isinstance(p, TensorProxy) and dtypes.is_inexact_dtype(p.dtype) and p.name not in kept
    }
    if not detached:
        return epilogue
    return rebuilt(
        epilogue, lambda: _detaching(epilogue.bound_symbols, detached), "Detach the results that eager detaches"
    )


def _names_with_gradient(trace: TraceCtx) -> set[str]:
    known = {p.name for p in arguments_of(trace) if isinstance(p, TensorProxy) and p.requires_grad}
    for bsym in trace.bound_symbols:
        _follow(bsym, known)
    return known


def _follow(bsym: BoundSymbol, known: set[str]) -> None:
    """Add the results of an operation that have a gradient to the names that have one."""
    outs = tensors_in(bsym.output)
    if bsym.subsymbols and not has_own_gradient(bsym):
        for part in bsym.subsymbols:
            _follow(part, known)
    elif bsym.sym.id is PrimIDs.UPDATE_ALIASES:
        pairs = zip(bsym.flat_proxy_args, bsym.flat_proxy_outs, strict=True)
        known.update(new.name for old, new in pairs if old.name in known)
        return
    elif is_copy(bsym):
        source, target = (p.name in known for p in bsym.args[:2])
        known.update(p.name for p in outs if target or (source and bsym.kwargs["grad_enabled"]))
        return
    elif any(p.name in known for p in bsym.flat_proxy_args) and not _OF_SHAPE_ALONE.fullmatch(bsym.sym.name):
        known.update(p.name for p in outs if dtypes.is_inexact_dtype(p.dtype))
    if not copies_in(bsym):  # gradients bypass a write under `no_grad`
        known.difference_update(p.name for p in outs if bsym.sym.name == "detach" or is_detached(p))


def _detaching(bsyms: Sequence[BoundSymbol], names: Collection[str]) -> Iterator[BoundSymbol]:
    """The bound symbols of an epilogue in which these results lose their history, but for what asks about it."""
    swap: dict[Any, TensorProxy] = {}
    for bsym in bsyms:
        yield bsym if bsym.sym is ask_for_none else bsym.from_bsym_swap_proxies(swap, skip_output=True)
        if bsym.sym.id is PrimIDs.UNPACK_TRIVIAL and bsym.output.name in names:
            swap[variableify(bsym.output)] = shown = TensorProxy(like=bsym.output, requires_grad=False)
            yield without_history.bind(bsym.output, output=shown)
