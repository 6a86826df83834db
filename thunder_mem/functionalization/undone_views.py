"""The base of a view, found from what the view shows: `x.view(-1)` and `x.t()` show all of it, `x[1:]` a part."""

from __future__ import annotations

from math import prod

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_mem.semantics.effects import leaves

__all__ = ["base_of", "can_be_undone", "shows_whole"]

_SAME_ORDER = {PrimIDs.BROADCAST_IN_DIM, PrimIDs.SQUEEZE, PrimIDs.RESHAPE, PrimIDs.SHALLOW_COPY}


def _steps(view: BoundSymbol) -> list[BoundSymbol]:
    """The views of views that lead from the argument to the only result; none for several results, as of `split`."""
    steps = [leaf for leaf in leaves(view) if leaf.flat_proxy_outs]
    made = [view.flat_proxy_args[0].name, *(leaf.flat_proxy_outs[0].name for leaf in steps)]
    is_chain = all(leaf.flat_proxy_args[0].name == name for leaf, name in zip(steps, made, strict=False))
    return steps if is_chain and [p.name for p in view.flat_proxy_outs] == made[-1:] else []


def can_be_undone(view: BoundSymbol) -> bool:
    """Whether a view of its only argument shows no element of it twice, and `base_of` can find the base."""
    steps = _steps(view)
    return bool(steps) and all(leaf.sym.id is PrimIDs.SLICE or _is_whole(leaf) for leaf in steps)


def shows_whole(view: BoundSymbol) -> bool:
    """Whether a view of its only argument shows each element of it once."""
    steps = _steps(view)
    return bool(steps) and all(map(_is_whole, steps))


def _is_whole(leaf: BoundSymbol) -> bool:
    if leaf.sym.id is PrimIDs.TRANSPOSE:
        return True
    known = leaf.sym.id is PrimIDs.SLICE or leaf.sym.id in _SAME_ORDER
    return known and isinstance(leaf.output, TensorProxy) and prod(leaf.args[0].shape) == prod(leaf.output.shape)


def base_of(view: BoundSymbol, shown: TensorProxy, before: TensorProxy | None) -> TensorProxy:
    """The base of a view, by operations in the current trace.

    Args:
        view: the view; `can_be_undone` is true of it.
        shown: what it shows now.
        before: what the base was, for elements that the view does not show; None if `shows_whole` is true of it.
    """
    steps = _steps(view)
    operands = [before]
    for leaf in steps[:-1]:
        operands.append(None if operands[-1] is None else leaf.sym(operands[-1], *leaf.args[1:], **leaf.kwargs))
    for leaf, operand in zip(reversed(steps), reversed(operands), strict=True):
        base = leaf.args[0]
        if leaf.sym.id is PrimIDs.TRANSPOSE:
            order = leaf.args[1]
            shown = prims.transpose(shown, tuple(sorted(range(len(order)), key=order.__getitem__)))
        elif leaf.sym.id is PrimIDs.SLICE and operand is not None:
            start, end, *strides = leaf.args[1:]
            steps_of = strides[0] if strides and strides[0] is not None else [1] * len(start)
            key = tuple(slice(int(a), int(b), int(c)) for a, b, c in zip(start, end, steps_of, strict=True))
            shown = prims.copy_with_setitem(operand, key, shown)
        elif tuple(base.shape) != tuple(shown.shape):
            shown = prims.reshape(shown, tuple(base.shape))
    return shown
