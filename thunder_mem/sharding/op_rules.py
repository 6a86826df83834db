"""The rules: for each prim, how a split along rows passes through it.

Importing this module fills the registry of `propagation.py`. A rule reads the arguments of a bound symbol and says
which dims of inputs and results go together; it does not depend on the split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from thunder.core import dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy

from thunder_mem.sharding.propagation import RULES, Axis, Relation, RuleError, RuleFn, tensors

__all__ = ["pointwise", "pointwise_ids", "rule"]


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
    """Links of ops that are jointly linear in their tensor arguments: negation, sums, differences, same-shape views."""
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
    "ABS", "ACOS", "ACOSH", "ASIN", "ASINH", "ATAN", "ATANH", "BITWISE_NOT", "CEIL", "COS", "COSH", "DIGAMMA", "ERF",
    "ERFC", "ERFCINV", "ERFINV", "EXP", "EXP2", "EXPM1", "FLOOR", "ISFINITE", "LGAMMA", "LOG", "LOG10", "LOG1P",
    "LOG2", "NDTRI", "RECIPROCAL", "ROUND", "RSQRT", "SIGN", "SIGNBIT", "SIN", "SINH", "SQRT", "TAN", "TANH", "TRUNC",
    "ATAN2", "BITWISE_AND", "BITWISE_OR", "BITWISE_XOR", "EQ", "FMOD", "GE", "GT", "LE", "LT", "MAXIMUM", "MINIMUM",
    "NE", "NEXTAFTER", "POW", "REMAINDER", "ZETA", "BITWISE_LEFT_SHIFT", "BITWISE_RIGHT_SHIFT", "LERP",
)  # fmt: skip
for _name in POINTWISE:
    if hasattr(PrimIDs, _name):
        RULES[getattr(PrimIDs, _name)] = pointwise

for _name in ("NEG", "ADD", "SUB", "SHALLOW_COPY", "CLONE", "STRIDE_ORDER"):
    RULES[getattr(PrimIDs, _name)] = _pointwise_linear
for _id in ("torch.detach", "torch.Tensor.contiguous", "torch.clone"):
    RULES[_id] = _pointwise_linear


_SAME_SHAPE = (
    "NEG", "ADD", "SUB", "MUL", "DIV", "WHERE", "SHALLOW_COPY", "CLONE", "STRIDE_ORDER", "CONVERT_ELEMENT_TYPE",
)  # fmt: skip


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
    gone, links = _dropping(a, dims)
    blocked = {(0, d): "it squeezes the row dim away" for d in gone}
    return Relation(links=links, blocked=blocked, linear=(frozenset({0}),), monotone=True)


def _dropping(
    a: TensorProxy, dims: Sequence[int] | None, outputs: int = 1
) -> tuple[list[int], tuple[tuple[Axis, ...], ...]]:
    """The dims that results lack, all for None, and the links of the others."""
    gone = sorted({d % a.ndim for d in dims}) if dims is not None else list(range(a.ndim))
    kept = [d for d in range(a.ndim) if d not in gone]
    return gone, tuple(((0, d), *((-1 - j, i) for j in range(outputs))) for i, d in enumerate(kept))


@rule(PrimIDs.TRANSPOSE)
def _transpose(a: TensorProxy, permutation: Sequence[int]) -> Relation:
    return Relation(
        links=tuple(((0, d), (-1, i)) for i, d in enumerate(permutation)), linear=(frozenset({0}),), monotone=True
    )


@rule(PrimIDs.FLIP)
def _flip(a: TensorProxy, dims: Sequence[int]) -> Relation:
    gone = {d % a.ndim for d in dims}
    return _through(a, blocked=dict.fromkeys(gone, "it reverses the order of the rows"))


def _through(a: TensorProxy, blocked: Mapping[int, str], **kwargs: Any) -> Relation:
    """One argument, one result of the same rank: dims correspond, except blocked ones."""
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
    through = _through(a, blocked)
    return through if padding_value == 0 else replace(through, linear=())


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
        gone, links = _dropping(a, dims)
        linear = (frozenset({0}),) if kind == "sum" else ()
        return Relation(links=links, reduced=tuple(((0, d), kind) for d in gone), linear=linear)

    return reduction


RULES[PrimIDs.SUM] = _reduction("sum")
RULES[PrimIDs.AMAX] = _reduction("max")
RULES[PrimIDs.AMIN] = _reduction("min")


@rule("torch.logsumexp")
def _logsumexp(a: TensorProxy, dim: int | Sequence[int], keepdim: bool = False) -> Relation:
    gone = {d % a.ndim for d in (dim if isinstance(dim, Sequence) else (dim,))} if a.ndim else set()
    kept = [d for d in range(a.ndim) if d not in gone]
    return Relation(
        links=tuple(((0, d), (-1, d if keepdim else i)) for i, d in enumerate(kept)),
        reduced=tuple(((0, d), "logsumexp") for d in sorted(gone)),
    )


@rule(PrimIDs.PROD, PrimIDs.VAR, PrimIDs.STD)
def _inner_reduction(a: TensorProxy, dims: Sequence[int] | None = None, *, outputs: int = 1, **_: Any) -> Relation:
    gone, links = _dropping(a, dims, outputs)
    why = "it reduces over rows in a way that chunks cannot be combined"
    return Relation(links=links, blocked={(0, d): why for d in gone})


@rule(PrimIDs.VAR_MEAN)
def _var_mean(a: TensorProxy, dims: Sequence[int] | None = None, **_: Any) -> Relation:
    return _inner_reduction(a, dims, outputs=2)


@rule(PrimIDs.ARGMAX, PrimIDs.ARGMIN)
def _arg_reduction(a: TensorProxy, dim: int | None = None) -> Relation:
    gone, links = _dropping(a, None if dim is None else (dim,))
    return Relation(links=links, blocked={(0, d): "it looks for an index over all rows" for d in gone})


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
        blocked=dict.fromkeys(((0, out), (1, 1)), "it sums over rows, and its terms are rows of a matrix product"),
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
        blocked=dict.fromkeys(contracted, "it sums over rows, and its terms are rows of a matrix product"),
        linear=(frozenset({0}), frozenset({1})),
    )
