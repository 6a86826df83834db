"""What runs above the products of a loss head, in its loop: most often the final norm.

The norm's result is as large as its operand, and only the head reads it. For the gradients of the head's weight the
result exists whole, and for the norm's own gradient the operand does. If the loop computes the norm chunk by chunk,
only the operand exists whole, and its gradient is written over it. The norm runs as often as before: once in the
forward, and once more for its gradient, as fused regions rebuild it anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy

from thunder_mem.loop_body.borders import Borders, Mask, borders_between
from thunder_mem.loop_body.leaves import Leaf, Program, effects, size_bytes
from thunder_mem.loop_body.region import Region
from thunder_mem.semantics.view_prims import VIEWS
from thunder_mem.sharding.op_rules import pointwise_ids
from thunder_mem.tiling.stretch import PASSING, Closure, above, cut_composites, read_otherwise, region_of

__all__ = ["grow_opening"]

_MIN_BYTES = 1 << 20
"""Fewer bytes of rows are not worth the calls for their blocks."""

_CHEAP = frozenset({*pointwise_ids(), *VIEWS, PrimIDs.SUM, PrimIDs.AMAX, PrimIDs.AMIN, PrimIDs.VAR, PrimIDs.VAR_MEAN})

_LINEAR = frozenset({*PASSING, PrimIDs.SUM})


def grow_opening(region: Region) -> Region | None:
    """The operations above the products of a head that lower the bytes that exist whole while it runs.

    Returns:
        a region without amplifiers whose only result is the rows of the products; None if there is none.
    """
    rows = _rows(region)
    if rows is None:
        return None
    program = region.program
    closure = Closure(program, region.n)
    closure.members.update((a.leaf.index, dict(region.shardings[a.leaf.index])) for a in region.amplifiers)
    closure.values[rows.name] = region.shardings[region.first.index][0]
    core = frozenset(closure.members)
    sets = [core, *above(closure, core, _is_cheap)]
    unread = _unread(program)
    borders = borders_between(program, [s | _readers_in_vain(closure, s, unread) for s in sets], [core])
    obstacles = [mask for mask, _ in (*read_otherwise(closure, borders), *cut_composites(closure, borders))]
    leaks = (borders.lets_out(o.name) for i in borders.row_of if i not in core for o in program.leaves[i].outputs)
    fit = borders.only(~borders.either([*obstacles, *leaks, borders.comes_back()]))
    if not len(fit):
        return None
    best = np.lexsort((fit.reach[0], _whole_bytes(closure, fit, core)))[0]
    inside = fit.members(int(best)) - core
    opening = region_of(closure, inside)
    return opening if inside and not _shared(region, opening) else None


def _rows(region: Region) -> TensorProxy | None:
    """The common rows of all products, if only they read them and their gradient is wanted."""
    program = region.program
    keys = {(a.leaf.inputs[0].name, region.shardings[a.leaf.index][0]) for a in region.amplifiers}
    rows = region.amplifiers[0].leaf.inputs[0]
    others = {t.name for a in region.amplifiers for t in a.leaf.inputs[1:]}
    readers = {leaf.index for leaf in program.consumers[rows.name]} - {a.leaf.index for a in region.amplifiers}
    if len(keys) > 1 or any(a.rows for a in region.amplifiers) or rows.name in others or readers:
        return None
    wanted = rows.name in program.needs_grad and rows.name not in program.returned
    return rows if wanted and size_bytes(rows) >= _MIN_BYTES else None


def _is_cheap(leaf: Leaf) -> bool:
    return leaf.bsym.sym.id in _CHEAP


def _unread(program: Program) -> list[Leaf]:
    """The leaves, in order, from which nothing is returned: a composite's results that the program does not use."""
    needed, found = set(program.returned), []
    for leaf in reversed(program.leaves):
        if effects(leaf) or any(o.name in needed for o in leaf.outputs):
            needed.update(t.name for t in leaf.inputs)
        else:
            found.append(leaf)
    return found[::-1]


def _readers_in_vain(closure: Closure, inside: frozenset[int], unread: Sequence[Leaf]) -> frozenset[int]:
    """Leaves that only read what leaves of a set make, for nobody: they go with the set."""
    made = {o.name for i in inside for o in closure.program.leaves[i].outputs}
    found = set()
    for leaf in unread:
        known = {s: closure.values[t.name] for s, t in enumerate(leaf.inputs) if t.name in made & closure.values.keys()}
        if known and (leaf.index in closure.members or closure.takes_narrow(leaf, known)):
            found.add(leaf.index)
            made.update(o.name for o in leaf.outputs)
    return frozenset(found)


def _whole_bytes(closure: Closure, borders: Borders, core: frozenset[int]) -> NDArray[np.int64]:
    """Bytes of one row of what exists whole while the head runs.

    These are the values that cross the border, and those that operations left outside keep for their gradients.
    """
    program = closure.program
    leaves = [program.leaves[i] for i in borders.row_of]
    kept: dict[str, list[Mask]] = {}
    for leaf in leaves:
        if leaf.index not in core:
            for t in _kept_operands(leaf, program.needs_grad):
                kept.setdefault(t.name, []).append(~borders.holds(leaf.index))
    read = {t.name: t for leaf in leaves for t in leaf.inputs if closure.splits(t)}
    total = np.zeros(len(borders), dtype=np.int64)
    for name, t in read.items():
        crosses = borders.reads(name) & ~borders.makes(name)
        total += closure.row_bytes(t) * borders.either([crosses, *kept.get(name, ())])
    return total


def _kept_operands(leaf: Leaf, needs_grad: frozenset[str]) -> Sequence[TensorProxy]:
    """The operands on which an operation's gradient depends."""
    flows = [t.name in needs_grad for t in leaf.inputs]
    if leaf.bsym.sym.id in _LINEAR or not any(flows):
        return ()
    if leaf.bsym.sym.id is PrimIDs.MUL:
        return [t for k, t in enumerate(leaf.inputs) if any(flows[:k] + flows[k + 1 :])]
    return leaf.inputs


def _shared(region: Region, opening: Region) -> bool:
    """Whether the head itself also reads rows that the opening reads, so that their gradient would be two sums."""
    own = {t.name for leaf in region.leaves for t in leaf.inputs}
    return any(value.sharding.split and value.proxy.name in own for value in opening.inputs)
