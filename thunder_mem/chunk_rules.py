"""How a split along rows passes through each operation: one rule per op, and the registry of rules.

A *row* is one position of the batch that a loss head treats on its own: the row space of a head has
`n` rows, numbered as the head's input lays them out. A dim of a value may run through rows; a
`RowDim` says how (`extent` steps of `stride` rows), so that ``(B, T, V)`` and ``(B * T, V)`` are the
same split seen through two shapes. Rules do not name a direction: a `Relation` says which dims of
inputs and outputs must be split together, and `propagate` reads it forwards and backwards. That is
DTensor's vocabulary (Shard, Partial, Replicate), restricted to one mesh dim, with explicit broadcasts.

    >>> from thunder.core.prims import PrimIDs
    >>> PrimIDs.EXP in RULES, PrimIDs.CONVOLUTION in RULES
    (True, False)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thunder.core import dtypes, prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten

__all__ = ["RULES", "Axis", "Relation", "RowDim", "RuleError", "Sharding", "local_shape", "propagate", "register_rule"]

Axis = tuple[int, int]
"""(slot, dim): slot i >= 0 is the i-th tensor argument, slot -1 - j the j-th tensor result."""


class RuleError(ValueError):
    """An operation that a split along rows cannot pass; the message is the reason that the user reads."""


@dataclass(frozen=True, slots=True)
class RowDim:
    """A dim that walks through rows: `extent` steps, each `stride` rows further."""

    extent: int
    stride: int


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one value splits.

    Attributes:
        dims: for each dim its `RowDim`, or None where the dim is whole in every chunk.
        partial: None, or how the chunks' values combine to the whole one: "sum", "max" or "min".
    """

    dims: tuple[RowDim | None, ...]
    partial: str | None = None

    @property
    def split(self) -> bool:
        """Some dim runs through rows."""
        return any(d is not None for d in self.dims)

    @property
    def whole(self) -> bool:
        """Every chunk sees the same, complete value."""
        return not self.split and self.partial is None

    def complete(self, n: int) -> bool:
        """The row dims, outermost first, count through all `n` rows in order."""
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
    """What a rule says of one operation.

    Attributes:
        links: groups of axes that are split together or not at all.
        reduced: input axes that vanish, and how the parts combine: "sum", "max", "min".
        blocked: axes that must stay whole, with the reason. An axis that no field names is free to
            be split only if it belongs to a result made from nothing (`full`).
        linear: sets of tensor arguments in which the op is jointly linear, the others held fixed.
        reshapes: the op is a reshape of argument 0; links follow from the shapes.
        monotone: it may be applied to a partial maximum (views and casts).
        localise: gives the (args, kwargs) of the op for results of the given local shapes, with
            tensor arguments left as they are; None when no argument speaks of a shape.
    """

    links: tuple[tuple[Axis, ...], ...] = ()
    reduced: tuple[tuple[Axis, str], ...] = ()
    blocked: Mapping[Axis, str] = None  # type: ignore[assignment]
    linear: tuple[frozenset[int], ...] = ()
    reshapes: bool = False
    monotone: bool = False
    localise: Callable[[tuple, dict, Sequence[tuple[int, ...]]], tuple[tuple, dict]] | None = None

    def __post_init__(self) -> None:
        if self.blocked is None:
            object.__setattr__(self, "blocked", {})


RuleFn = Callable[..., Relation]
RULES: dict[Any, RuleFn] = {}
"""Rules by symbol id (`PrimIDs.EXP`, `"torch.nn.functional.kl_div"`). A rule takes the arguments of
the bound symbol, with proxies for tensors, and gives a `Relation`, or raises `RuleError`."""


def register_rule(symbol_or_id: Any, rule: RuleFn) -> None:
    """Teach the chunker an op: `rule(*args, **kwargs) -> Relation`, called with tensor proxies.

    A rule for a composite op stops the chunker from looking inside it.

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
    """Shardings of every slot, from those that are known (of inputs, outputs, or both).

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
    """A value that is still to be combined passes only through what commutes with the combination."""
    kinds = set(partials.values())
    if len(kinds) > 1 or any(s.split for s in known.values()):
        raise RuleError("it mixes rows with a total over all rows, which is known only after the last chunk")
    (kind,) = kinds
    if kind == "sum":
        if not any(
            group >= set(partials) and all(i in partials for i in group) for group in relation.linear
        ):
            raise RuleError("it is not linear in a sum over rows, which is known only after the last chunk")
    elif not relation.monotone:
        raise RuleError(f"it needs the {kind} over all rows, which is known only after the last chunk")
    return {
        slot: Sharding((None,) * len(shape), kind if slot < 0 or slot in partials else None)
        for slot, shape in _slots(inputs, outputs)
    }


def _propagate_reshape(inp: tuple[int, ...], out: tuple[int, ...], known: Mapping[int, Sharding]) -> dict[int, Sharding]:
    if 0 in known:
        return {0: known[0], -1: Sharding(_reshape_dims(inp, out, known[0].dims))}
    return {0: Sharding(_reshape_dims(out, inp, known[-1].dims)), -1: known[-1]}


def _reshape_dims(
    source: tuple[int, ...], target: tuple[int, ...], dims: tuple[RowDim | None, ...]
) -> tuple[RowDim | None, ...]:
    """The factor map: dims of equal product correspond, and a group of row dims is one longer row dim."""
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
        for outer, inner in zip(group, group[1:], strict=False):
            if outer.stride != inner.extent * inner.stride:
                raise RuleError("it merges rows that do not follow one another")
        stride = group[-1].stride
        for k in reversed(range(start, j)):
            if target[k] != 1 or math.prod(target[start:j]) == 1:
                result[k] = RowDim(target[k], stride)
                stride *= target[k]
    return tuple(result)


# --- rules ----------------------------------------------------------------------------------------


def rule(*ids: Any) -> Callable[[RuleFn], RuleFn]:
    """Register a rule for several symbol ids."""

    def register(fn: RuleFn) -> RuleFn:
        for i in ids:
            RULES[i] = fn
        return fn

    return register


def _pointwise_links(args: tuple, kwargs: dict) -> tuple[tuple[Axis, ...], ...]:
    """Dims correspond from the right; a dim of size 1 beside a longer one is broadcast, and stays whole."""
    operands = tensors(*args, **kwargs)
    rank = max((t.ndim for t in operands), default=0)
    links = []
    for d in range(rank):
        at = [(i, d - rank + t.ndim) for i, t in enumerate(operands) if d - rank + t.ndim >= 0]
        size = max(operands[i].shape[k] for i, k in at)
        links.append((*((i, k) for i, k in at if operands[i].shape[k] == size), (-1, d)))
    return tuple(links)


def pointwise(*args: Any, **kwargs: Any) -> Relation:
    return Relation(links=_pointwise_links(args, kwargs))


def _pointwise_linear(*args: Any, **kwargs: Any) -> Relation:
    """Linear in the tensor arguments taken together: negation, sums, differences, views that keep the shape."""
    operands = tensors(*args, **kwargs)
    numbers = [a for a in args if isinstance(a, (int, float, complex)) and not isinstance(a, bool)]
    together = frozenset(range(len(operands)))
    return Relation(
        links=_pointwise_links(args, kwargs),
        # x + 1 is affine, not linear: added to every chunk's part, the 1 would count once per chunk.
        linear=(together,) if not (len(operands) == 1 and any(numbers)) else (),
        monotone=len(operands) == 1 and not numbers,
    )


POINTWISE = (
    "ABS ACOS ACOSH ASIN ASINH ATAN ATANH BITWISE_NOT CEIL COS COSH DIGAMMA ERF ERFC ERFCINV ERFINV EXP EXP2 EXPM1 "
    "FLOOR ISFINITE LGAMMA LOG LOG10 LOG1P LOG2 NDTRI RECIPROCAL ROUND RSQRT SIGN SIGNBIT SIN SINH SQRT TAN TANH TRUNC "
    "ATAN2 BITWISE_AND BITWISE_OR BITWISE_XOR EQ FMOD GE GT LE LT MAXIMUM MINIMUM NE NEXTAFTER POW REMAINDER "
    "ZETA BITWISE_LEFT_SHIFT BITWISE_RIGHT_SHIFT LERP"
).split()
for _name in POINTWISE:
    if hasattr(PrimIDs, _name):
        RULES[getattr(PrimIDs, _name)] = pointwise

for _name in ("NEG", "ADD", "SUB", "SHALLOW_COPY", "CLONE", "STRIDE_ORDER"):
    RULES[getattr(PrimIDs, _name)] = _pointwise_linear
for _id in ("torch.detach", "torch.Tensor.contiguous", "torch.clone"):
    RULES[_id] = _pointwise_linear


_SAME_SHAPE = ("NEG", "ADD", "SUB", "MUL", "DIV", "WHERE", "SHALLOW_COPY", "CLONE", "STRIDE_ORDER", "CONVERT_ELEMENT_TYPE")


def pointwise_ids() -> frozenset[Any]:
    """Prims that act element by element on arguments of one shape."""
    return frozenset(getattr(PrimIDs, name) for name in (*POINTWISE, *_SAME_SHAPE) if hasattr(PrimIDs, name))


@rule(PrimIDs.NEG)
def _neg(a: TensorProxy) -> Relation:
    return Relation(links=_pointwise_links((a,), {}), linear=(frozenset({0}),))


@rule(PrimIDs.STRIDE_ORDER)
def _stride_order(a: TensorProxy, order: Sequence[int]) -> Relation:
    return _pointwise_linear(a)


@rule(PrimIDs.CONVERT_ELEMENT_TYPE)
def _convert(a: TensorProxy, dtype: Any) -> Relation:
    # A cast to integers rounds, and a cast to a Boolean is a comparison: neither commutes with a sum.
    exact = isinstance(dtype, dtypes.floating) or dtype is float or dtypes.is_integer_dtype(a.dtype)
    exact = exact and not dtypes.is_boolean_dtype(dtype)
    linear = (frozenset({0}),) if exact else ()
    return Relation(links=_pointwise_links((a,), {}), linear=linear, monotone=True)


@rule(PrimIDs.MUL)
def _mul(a: Any, b: Any) -> Relation:
    count = len(tensors(a, b))
    return Relation(links=_pointwise_links((a, b), {}), linear=tuple(frozenset({i}) for i in range(count)))


@rule(PrimIDs.DIV)
def _div(a: Any, b: Any) -> Relation:
    linear = (frozenset({0}),) if isinstance(a, TensorProxy) and dtypes.is_float_dtype(a.dtype) else ()
    return Relation(links=_pointwise_links((a, b), {}), linear=linear)


@rule(PrimIDs.WHERE)
def _where(pred: Any, a: Any, b: Any) -> Relation:
    slots = [i for i, t in enumerate(tensors(pred, a, b)) if t is not pred]
    constant = [x for x in (a, b) if not isinstance(x, TensorProxy)]
    linear = (frozenset(slots),) if slots and not any(constant) else ()
    return Relation(links=_pointwise_links((pred, a, b), {}), linear=linear)


@rule(PrimIDs.BROADCAST_IN_DIM)
def _broadcast(a: TensorProxy, shape: Sequence[int], dims: Sequence[int]) -> Relation:
    links = [((0, i), (-1, d)) for i, d in enumerate(dims) if a.shape[i] == shape[d]]

    def localise(args: tuple, kwargs: dict, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple, dict]:
        return (args[0], tuple(shapes[0]), args[2]), kwargs

    return Relation(links=tuple(links), linear=(frozenset({0}),), monotone=True, localise=localise)


@rule(PrimIDs.RESHAPE, PrimIDs.VIEW)
def _reshape(a: TensorProxy, shape: Sequence[int]) -> Relation:
    def localise(args: tuple, kwargs: dict, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple, dict]:
        return (args[0], tuple(shapes[0])), kwargs

    return Relation(reshapes=True, linear=(frozenset({0}),), monotone=True, localise=localise)


@rule(PrimIDs.SQUEEZE)
def _squeeze(a: TensorProxy, dims: Sequence[int]) -> Relation:
    gone = {d % a.ndim for d in dims}
    kept = [d for d in range(a.ndim) if d not in gone]
    return Relation(
        links=tuple(((0, d), (-1, i)) for i, d in enumerate(kept)),
        blocked={(0, d): "it squeezes the row dim away" for d in gone},
        linear=(frozenset({0}),),
        monotone=True,
    )


@rule(PrimIDs.TRANSPOSE)
def _transpose(a: TensorProxy, permutation: Sequence[int]) -> Relation:
    return Relation(
        links=tuple(((0, d), (-1, i)) for i, d in enumerate(permutation)), linear=(frozenset({0}),), monotone=True
    )


@rule(PrimIDs.FLIP)
def _flip(a: TensorProxy, dims: Sequence[int]) -> Relation:
    gone = {d % a.ndim for d in dims}
    return _through(a, blocked={d: "it reverses the order of the rows" for d in gone})


def _through(a: TensorProxy, blocked: Mapping[int, str], **kwargs: Any) -> Relation:
    """One argument, one result of the same rank: dims correspond, save the blocked ones."""
    stop = {axis: why for d, why in blocked.items() for axis in ((0, d), (-1, d))}
    links = tuple(((0, d), (-1, d)) for d in range(a.ndim) if d not in blocked)
    return Relation(links=links, blocked=stop, linear=(frozenset({0}),), **kwargs)


@rule(PrimIDs.SLICE)
def _slice(
    a: TensorProxy, start_indices: Sequence[int], end_indices: Sequence[int], strides: Sequence[int] | None = None
) -> Relation:
    steps = strides or [1] * a.ndim
    part = {
        d: "it takes a slice of the rows"
        for d in range(a.ndim)
        if (start_indices[d], end_indices[d], steps[d]) != (0, a.shape[d], 1)
    }

    def localise(args: tuple, kwargs: dict, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple, dict]:
        x, start, end, *rest = args
        ends = [e if d in part else shapes[0][d] for d, e in enumerate(end)]
        return (x, start, ends, *rest), kwargs

    return _through(a, part, localise=localise)


@rule(PrimIDs.PAD)
def _pad(a: TensorProxy, padding_value: Any, padding_config: Sequence[tuple[int, int, int]]) -> Relation:
    blocked = {d: "it pads the row dim" for d, cfg in enumerate(padding_config) if tuple(cfg) != (0, 0, 0)}
    return _through(a, blocked) if padding_value == 0 else _not_linear(_through(a, blocked))


def _not_linear(r: Relation) -> Relation:
    return Relation(links=r.links, reduced=r.reduced, blocked=r.blocked, localise=r.localise)


@rule(PrimIDs.CAT)
def _cat(parts: Sequence[TensorProxy], dim: int) -> Relation:
    rank = parts[0].ndim
    dim %= rank
    slots = range(len(parts))
    return Relation(
        links=tuple((*((i, d) for i in slots), (-1, d)) for d in range(rank) if d != dim),
        blocked={axis: "it joins rows of several values" for i in (*slots, -1) for axis in ((i, dim),)},
        linear=(frozenset(slots),),
    )


def _reduction(kind: str) -> RuleFn:
    def reduction(a: TensorProxy, dims: Sequence[int] | None = None, **_: Any) -> Relation:
        gone = {d % a.ndim for d in dims} if dims is not None else set(range(a.ndim))
        kept = [d for d in range(a.ndim) if d not in gone]
        return Relation(
            links=tuple(((0, d), (-1, i)) for i, d in enumerate(kept)),
            reduced=tuple(((0, d), kind) for d in sorted(gone)),
            linear=(frozenset({0}),) if kind == "sum" else (),
        )

    return reduction


RULES[PrimIDs.SUM] = _reduction("sum")
RULES[PrimIDs.AMAX] = _reduction("max")
RULES[PrimIDs.AMIN] = _reduction("min")


@rule(PrimIDs.PROD, PrimIDs.VAR, PrimIDs.VAR_MEAN, PrimIDs.STD)
def _inner_reduction(a: TensorProxy, dims: Sequence[int] | None = None, **_: Any) -> Relation:
    gone = {d % a.ndim for d in dims} if dims is not None else set(range(a.ndim))
    kept = [d for d in range(a.ndim) if d not in gone]
    slots = (-1, -2)
    return Relation(
        links=tuple(((0, d), *((s, i) for s in slots)) for i, d in enumerate(kept)),
        blocked={(0, d): "it reduces over rows in a way that chunks cannot be combined" for d in gone},
    )


@rule(PrimIDs.ARGMAX, PrimIDs.ARGMIN)
def _arg_reduction(a: TensorProxy, dim: int | None = None) -> Relation:
    gone = {dim % a.ndim} if dim is not None else set(range(a.ndim))
    kept = [d for d in range(a.ndim) if d not in gone]
    return Relation(
        links=tuple(((0, d), (-1, i)) for i, d in enumerate(kept)),
        blocked={(0, d): "it looks for an index over all rows" for d in gone},
    )


@rule(PrimIDs.TOPK)
def _topk(a: TensorProxy, k: int, dim: int, *_: Any) -> Relation:
    return _along(a, dim, outputs=2, why="it compares rows with one another")


@rule(PrimIDs.SORT)
def _sort(a: TensorProxy, dim: int, *_: Any) -> Relation:
    return _along(a, dim, outputs=2, why="it compares rows with one another")


@rule("torch.cumsum")
def _cumsum(a: TensorProxy, dim: int, **_: Any) -> Relation:
    return _along(a, dim, outputs=1, why="it sums up from row to row")


def _along(a: TensorProxy, dim: int, outputs: int, why: str) -> Relation:
    dim %= a.ndim
    slots = [-1 - j for j in range(outputs)]
    return Relation(
        links=tuple(((0, d), *((s, d) for s in slots)) for d in range(a.ndim) if d != dim),
        blocked={(s, dim): why for s in (0, *slots)},
    )


@rule(PrimIDs.TAKE_ALONG_AXIS, PrimIDs.GATHER)
def _take_along(a: TensorProxy, index: TensorProxy, dim: int) -> Relation:
    dim %= a.ndim
    links: list[tuple[Axis, ...]] = [
        ((0, d), (1, d), (-1, d)) for d in range(a.ndim) if d != dim and a.shape[d] == index.shape[d]
    ]
    links.append(((1, dim), (-1, dim)))
    blocked: dict[Axis, str] = {(0, dim): "it picks rows by an index"}
    for d in range(a.ndim):
        if d != dim and a.shape[d] != index.shape[d]:
            blocked.update({(s, d): "its index has another number of rows" for s in (0, 1, -1)})
    return Relation(links=tuple(links), blocked=blocked, linear=(frozenset({0}),))


@rule(PrimIDs.SCATTER_ADD, PrimIDs.SCATTER)
def _scatter(a: TensorProxy, index: TensorProxy, src: Any, dim: int) -> Relation:
    dim %= a.ndim
    slots = (0, 1, 2, -1) if isinstance(src, TensorProxy) else (0, 1, -1)
    blocked = {(s, dim): "it writes to rows by an index" for s in slots}
    links = []
    for d in range(a.ndim):
        if d == dim:
            continue
        same = a.shape[d] == index.shape[d] and (not isinstance(src, TensorProxy) or src.shape[d] == index.shape[d])
        if same:
            links.append(tuple((s, d) for s in slots))
        else:
            blocked.update({(s, d): "its index has another number of rows" for s in slots})
    return Relation(links=tuple(links), blocked=blocked)


@rule(PrimIDs.TAKE)
def _take(a: TensorProxy, index: TensorProxy, dim: int) -> Relation:
    dim %= a.ndim
    links: list[tuple[Axis, ...]] = [((0, d), (-1, d)) for d in range(a.ndim) if d != dim]
    links.append(((1, 0), (-1, dim)))
    return Relation(links=tuple(links), blocked={(0, dim): "it picks rows by an index"}, linear=(frozenset({0}),))


@rule(PrimIDs.EMBEDDING)
def _embedding(indices: TensorProxy, weight: TensorProxy, **_: Any) -> Relation:
    return Relation(
        links=(*(((0, d), (-1, d)) for d in range(indices.ndim)), ((1, 1), (-1, indices.ndim))),
        blocked={(1, 0): "it picks rows by an index"},
        linear=(frozenset({1}),),
    )


@rule(PrimIDs.FULL)
def _full(shape: Sequence[int], *_: Any, **__: Any) -> Relation:
    def localise(args: tuple, kwargs: dict, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple, dict]:
        return (tuple(shapes[0]), *args[1:]), kwargs

    return Relation(localise=localise)


@rule(PrimIDs.IOTA)
def _iota(length: int, *_: Any, **__: Any) -> Relation:
    return Relation(blocked={(-1, 0): "it numbers the rows"})


@rule(PrimIDs.UNIFORM, PrimIDs.UNIFORM_PHILOX, PrimIDs.RANDN, PrimIDs.RANDINT, PrimIDs.MULTINOMIAL)
def _random(*_: Any, **__: Any) -> Relation:
    raise RuleError("it draws random numbers, and chunks would draw others than the whole")


@rule(PrimIDs.LINEAR)
def _linear(a: TensorProxy, w: TensorProxy, bias: TensorProxy | None = None) -> Relation:
    out = a.ndim - 1
    links: list[tuple[Axis, ...]] = [((0, d), (-1, d)) for d in range(out)]
    links.append(((1, 0), *(((2, 0),) if bias is not None else ()), (-1, out)))
    return Relation(
        links=tuple(links),
        blocked={axis: "it sums over rows, and its terms are rows of a matrix product" for axis in ((0, out), (1, 1))},
        linear=(frozenset({0}), frozenset({1})) if bias is None else (),
    )


@rule(PrimIDs.MATMUL)
def _matmul(a: TensorProxy, b: TensorProxy) -> Relation:
    contracted = {(0, a.ndim - 1), (1, max(b.ndim - 2, 0))}
    links: list[tuple[Axis, ...]] = []
    rank = max(a.ndim, b.ndim)
    if a.ndim >= 2 and b.ndim >= 2:
        for d in range(rank - 2):
            group: list[Axis] = [(-1, d)]
            group += [(s, d - (rank - t.ndim)) for s, t in ((0, a), (1, b)) if d - (rank - t.ndim) >= 0]
            links.append(tuple(group))
        links += [((0, a.ndim - 2), (-1, rank - 2)), ((1, b.ndim - 1), (-1, rank - 1))]
    elif a.ndim >= 2:
        links = [((0, d), (-1, d)) for d in range(a.ndim - 1)]
    else:
        links = [((1, d), (-1, d if d < b.ndim - 2 else d - 1)) for d in range(b.ndim) if (1, d) not in contracted]
    return Relation(
        links=tuple(links),
        blocked={axis: "it sums over rows, and its terms are rows of a matrix product" for axis in contracted},
        linear=(frozenset({0}), frozenset({1})),
    )
