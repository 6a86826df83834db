"""How a split along rows passes through each operation: one rule per op, and the registry of rules.

A *row* is one position of the batch that a loss head treats separately. The row space of a head has `n` rows, in the
order of the head's input. A dim of a value may run through rows; a `RowDim` says how (`extent` steps of `stride` rows).
So ``(B, T, V)`` and ``(B * T, V)`` are the same split seen through two shapes. Rules have no direction: a `Relation`
says which dims of inputs and outputs must be split together, and `propagate` reads it forwards and backwards. The
vocabulary is DTensor's (Shard, Partial, Replicate), restricted to one mesh dim, with explicit broadcasts.

    >>> from thunder.core.prims import PrimIDs
    >>> import thunder_mem.sharding.op_rules
    >>> PrimIDs.EXP in RULES, PrimIDs.INDEX_PUT in RULES
    (True, False)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten

__all__ = ["RULES", "Axis", "Relation", "RowDim", "RuleError", "Sharding", "local_shape", "propagate", "register_rule"]

Axis = tuple[int, int]
"""(slot, dim): slot i >= 0 is the i-th tensor argument, slot -1 - j the j-th tensor result."""


class RuleError(ValueError):
    """A split along rows cannot pass an operation; the message is the reason that the user reads."""


@dataclass(frozen=True, slots=True)
class RowDim:
    """A dim that walks through rows: `extent` steps, each `stride` rows further.

    A dim of size 1 has no `RowDim`, so that exactly one dim has stride 1.
    """

    extent: int
    stride: int


@dataclass(frozen=True)
class Sharding:
    """How one value splits.

    Attributes:
        dims: for each dim its `RowDim`, or None if the dim is whole in every chunk.
        partial: None, or the way to combine the chunks' values: "sum", "max", "min" or "logsumexp".
    """

    dims: tuple[RowDim | None, ...]
    partial: str | None = None

    @cached_property
    def split(self) -> bool:
        """Whether some dim runs through rows."""
        return any(d is not None for d in self.dims)

    @property
    def whole(self) -> bool:
        """Whether every chunk sees the same, complete value."""
        return not self.split and self.partial is None

    def complete(self, n: int) -> bool:
        """Whether the row dims, outermost first, count through all `n` rows in order."""
        reach = n
        for d in self.dims:
            if d is not None:
                if d.extent * d.stride != reach:
                    return False
                reach = d.stride
        return reach == 1


def local_shape(shape: Sequence[int], sharding: Sharding, rows: int) -> tuple[int, ...]:
    """The shape of a value's part for `rows` rows: all of them lie in the innermost row dim.

    >>> local_shape((4, 8, 100), Sharding((RowDim(4, 8), RowDim(8, 1), None)), 5)
    (1, 5, 100)
    """
    return tuple(
        size if d is None else (rows if d.stride == 1 else 1) for size, d in zip(shape, sharding.dims, strict=True)
    )


@dataclass(frozen=True)
class Relation:
    """A rule's answer for one operation.

    Attributes:
        links: groups of axes that are split together or not at all.
        reduced: input axes that vanish, and how the parts combine: "sum", "max", "min", "logsumexp".
        blocked: axes that must stay whole, with the reason. An axis that no field names is free to
            be split only if it belongs to a result made from nothing (`full`).
        linear: sets of tensor arguments in which the op is jointly linear, the others held fixed.
        reshapes: the op is a reshape of argument 0; links follow from the shapes.
        monotone: the op may be applied to a partial maximum (views and casts).
        localise: gives the (args, kwargs) of the op for results of the given local shapes, with unchanged
            tensor arguments; None if no argument depends on a shape.
    """

    links: tuple[tuple[Axis, ...], ...] = ()
    reduced: tuple[tuple[Axis, str], ...] = ()
    blocked: Mapping[Axis, str] = None  # type: ignore[assignment]
    linear: tuple[frozenset[int], ...] = ()
    reshapes: bool = False
    monotone: bool = False
    localise: Callable[[tuple, dict, Sequence[tuple[int, ...]]], tuple[tuple, dict]] | None = None

    @property
    def axes(self) -> set[Axis]:
        """All axes that it names."""
        return {*(a for group in self.links for a in group), *(a for a, _ in self.reduced), *self.blocked}

    def __post_init__(self) -> None:
        if self.blocked is None:
            object.__setattr__(self, "blocked", {})


RuleFn = Callable[..., Relation]
RULES: dict[Any, RuleFn] = {}
"""Rules by symbol id (`PrimIDs.EXP`, `"torch.nn.functional.kl_div"`). A rule takes the arguments of
the bound symbol, with proxies for tensors, and gives a `Relation`, or raises `RuleError`."""


def register_rule(symbol_or_id: Any, rule: RuleFn) -> None:
    """Register a rule for an op: `rule(*args, **kwargs) -> Relation`, called with tensor proxies.

    A composite op with a rule is not decomposed by the chunker.

    Raises:
        TypeError: `rule` is not callable.
    """
    if not callable(rule):
        raise TypeError(f"a rule is a function (*args, **kwargs) -> Relation, but got {type(rule).__name__}")
    RULES[getattr(symbol_or_id, "id", symbol_or_id)] = rule


def tensors(*args: Any, **kwargs: Any) -> list[TensorProxy]:
    """The tensor arguments in the order of their slots."""
    return [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, TensorProxy)]


# --- propagation ----------------------------------------------------------------------------------


def propagate(
    relation: Relation,
    inputs: Sequence[tuple[int, ...]],
    outputs: Sequence[tuple[int, ...]],
    known: Mapping[int, Sharding],
    n: int,
) -> dict[int, Sharding]:
    """Shardings of every slot, from known shardings of inputs, outputs, or both.

    Args:
        relation: the rule's answer.
        inputs, outputs: shapes by slot.
        known: shardings by slot; at least one.
        n: rows in the row space.

    Raises:
        RuleError: the split cannot pass.
    """
    if partials := {slot: s.partial for slot, s in known.items() if slot >= 0 and s.partial is not None}:
        return _propagate_partial(relation, inputs, outputs, known, partials)
    if relation.reshapes:
        return _propagate_reshape(inputs[0], outputs[0], known)

    axes: dict[Axis, RowDim] = {}
    for slot, sharding in known.items():
        for dim, row in enumerate(sharding.dims):
            if row is not None:
                axes[slot, dim] = row
    decided = {(slot, dim) for slot, sharding in known.items() for dim in range(len(sharding.dims))}
    for group in relation.links:
        rows = {axes[a] for a in group if a in axes}
        if not rows:
            continue
        if len(rows) > 1 or any(a in decided and a not in axes for a in group):
            raise RuleError("its arguments are not aligned row by row, so one chunk's result needs rows of another")
        (row,) = rows
        for a in group:
            axes[a] = row
    for axis in sorted(axes):
        if axis in relation.blocked:
            raise RuleError(relation.blocked[axis])
    kinds = {kind for axis, kind in relation.reduced if axis in axes}
    partial = None
    if kinds:
        left = [axis for axis in axes if axis[0] < 0]
        if left:
            raise RuleError("it reduces over some of the row dims only")
        gone: dict[int, int] = {}
        for axis, _ in relation.reduced:
            if axis in axes:
                gone[axis[0]] = gone.get(axis[0], 1) * axes[axis].extent
        if any(rows != n for rows in gone.values()):
            raise RuleError("it reduces over some of the row dims only")
        (partial,) = kinds

    result = {}
    for slot, shape in _slots(inputs, outputs):
        dims = tuple(axes.get((slot, d)) for d in range(len(shape)))
        result[slot] = Sharding(dims, partial if slot < 0 else None)
    return result


def _slots(inputs: Sequence, outputs: Sequence):
    yield from enumerate(inputs)
    for j, shape in enumerate(outputs):
        yield -1 - j, shape


def _propagate_partial(relation, inputs, outputs, known, partials) -> dict[int, Sharding]:
    """Check that a value which is still to be combined passes only ops that commute with the combination."""
    kinds = set(partials.values())
    if len(kinds) > 1 or any(s.split for s in known.values()):
        raise RuleError("it mixes rows with a total over all rows, which is known only after the last chunk")
    (kind,) = kinds
    if kind == "sum":
        if not any(group >= set(partials) and all(i in partials for i in group) for group in relation.linear):
            raise RuleError("it is not linear in a sum over rows, which is known only after the last chunk")
    elif kind == "logsumexp" or not relation.monotone:
        raise RuleError(f"it needs the {kind} over all rows, which is known only after the last chunk")
    return {
        slot: Sharding((None,) * len(shape), kind if slot < 0 or slot in partials else None)
        for slot, shape in _slots(inputs, outputs)
    }


def _propagate_reshape(
    inp: tuple[int, ...], out: tuple[int, ...], known: Mapping[int, Sharding]
) -> dict[int, Sharding]:
    if 0 in known:
        return {0: known[0], -1: Sharding(_reshape_dims(inp, out, known[0].dims))}
    return {0: Sharding(_reshape_dims(out, inp, known[-1].dims)), -1: known[-1]}


def _reshape_dims(
    source: tuple[int, ...], target: tuple[int, ...], dims: tuple[RowDim | None, ...]
) -> tuple[RowDim | None, ...]:
    """The factor map of a reshape: dims of equal product correspond, and a group of row dims is one longer row dim."""
    result: list[RowDim | None] = [None] * len(target)
    i = j = 0
    while i < len(source) or j < len(target):
        first, start = i, j
        left = right = 1
        while True:
            if i == first or left < right:
                if i == len(source):
                    break
                left *= source[i]
                i += 1
            elif right < left:
                right *= target[j]
                j += 1
            else:
                break
        while i < len(source) and source[i] == 1 and left == right and dims[i] is None:
            i += 1
        if i == first:  # only ones are left in the target
            j = len(target)
            continue
        group = [d for k, d in enumerate(dims[first:i], first) if d is not None]
        if not group:
            continue
        if any(d is None and source[k] != 1 for k, d in enumerate(dims[first:i], first)):
            raise RuleError("it merges rows with another dim into one dim")
        for outer, inner in pairwise(group):
            if outer.stride != inner.extent * inner.stride:
                raise RuleError("it merges rows that do not follow one another")
        stride = group[-1].stride
        for k in reversed(range(start, j)):
            if target[k] != 1 or math.prod(target[start:j]) == 1:
                result[k] = RowDim(target[k], stride)
                stride *= target[k]
    return tuple(result)
