"""Views that a fused region would only hand on run outside of it, where they cost nothing.

A region that returns a view of its operand keeps the operand alive under a name that Thunder's `rematerialize` does not
recompute from. So a later region receives a value computed from the view, which is as large and has its own memory,
instead of the view. Outside of regions, every region can read the view itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol

from thunder_mem.semantics.layout import is_view

__all__ = ["views_outside"]


def views_outside(
    bsyms: Sequence[BoundSymbol], fuses: Callable[[BoundSymbol], bool]
) -> tuple[list[BoundSymbol], frozenset[str]]:
    """The views that an operation outside of regions reads, and whose operand no region makes.

    Regions still return the views that only the caller gets.

    Args:
        bsyms: the operations of a trace without writes in place, so that views may move.
        fuses: whether regions take an operation.

    Returns:
        the operations, with each such view directly behind the one that makes its operand, so that it cuts no region
        in two; and the names of these views.
    """
    found = _views_read_outside(bsyms, fuses)
    made = {o.name for b in bsyms if not fuses(b) for o in b.flat_proxy_outs}
    moved: dict[str, BoundSymbol] = {}
    behind: dict[str, list[BoundSymbol]] = {}
    for view in found:
        operands = {p.name for p in view.flat_proxy_args}
        if len(operands) == 1 and operands <= made:
            behind.setdefault(operands.pop(), []).append(view)
            moved.update((o.name, view) for o in view.flat_proxy_outs)
            made.update(o.name for o in view.flat_proxy_outs)
    ordered: list[BoundSymbol] = []
    for b in bsyms:
        pending = [] if any(o.name in moved for o in b.flat_proxy_outs) else [b]
        while pending:
            ordered.append(now := pending.pop(0))
            pending += [view for o in now.flat_proxy_outs for view in behind.pop(o.name, ())]
    return ordered, frozenset(moved)


def _views_read_outside(bsyms: Sequence[BoundSymbol], fuses: Callable[[BoundSymbol], bool]) -> list[BoundSymbol]:
    """Fusible views that an unfusible operation reads, itself or through other views; in order."""
    read: set[str] = set()
    views = []
    for b in reversed(bsyms):
        if b.sym.id == PrimIDs.RETURN:
            continue
        if not fuses(b):
            read.update(p.name for p in b.flat_proxy_args)
        elif is_view(b) and any(o.name in read for o in b.flat_proxy_outs):
            read.update(p.name for p in b.flat_proxy_args)
            views.append(b)
    return views[::-1]
