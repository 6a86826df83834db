"""Operations of random programs: views, joins, and indexing by tensors."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch

from tests.programs.program_table import Drawn, Values, add, always, dim_of, is_float, one, with_dim

__all__ = ["index_text"]


# Views. `flatten` and `reshape` copy where they must, so aliasing depends on the layout.
def _reshape(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng)
    if a is None:
        return None
    t = values.tensors[a]
    sizes = [n for n in (2, 3, 4, 6) if t.numel() and t.numel() % n == 0]
    return (a,), (rng.choice([(-1,), (t.numel(), 1), *((n, t.numel() // n) for n in sizes)]),)


def _permute(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, lambda t: t.dim() >= 2)
    if a is None:
        return None
    dims = list(range(values.tensors[a].dim()))
    rng.shuffle(dims)
    return (a,), (tuple(dims),)


def _expand(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, lambda t: t.dim() < 4)
    if a is None:
        return None
    sizes = tuple(rng.choice([2, 3]) if n == 1 and rng.random() < 0.7 else n for n in values.tensors[a].shape)
    return (a,), ((rng.choice([1, 2, 3]), *sizes),)


def index_text(rng: Random, shape: tuple[int, ...]) -> str:
    """A basic index for a tensor of this shape: slices with steps, integers, None, ellipsis."""
    parts = []
    for n in shape[: rng.randint(1, max(1, len(shape)))]:
        start = rng.randint(0, max(0, n - 1))
        choices = [":", f"{start}:", f":{max(1, n - start)}", "::2", f"{start}:{n}:2"]
        parts.append(rng.choice([*choices, str(start), "-1"] if n else choices))
    if rng.random() < 0.15:
        parts.insert(0, "None")
    if rng.random() < 0.15:
        parts = ["...", *parts]
    return ", ".join(parts)


def _index(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, lambda t: t.dim() > 0)
    return a and ((a,), (index_text(rng, tuple(values.tensors[a].shape)),))


def _pieces(*more: Callable[[Random], object]):
    """A dim to cut, not an empty one: Thunder cuts that into no pieces, torch into one."""

    def draw(rng: Random, values: Values) -> Drawn | None:
        a = values.pick(rng, lambda t: t.dim() > 0 and t.numel() > 0)
        return a and ((a,), (dim_of(values.tensors[a], rng), *(m(rng) for m in more)))

    return draw


def _two_dims(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, lambda t: t.dim() >= 2)
    return a and ((a,), (dim_of(values.tensors[a], rng), dim_of(values.tensors[a], rng)))


add("view", "reshape", "view", "{0}.reshape({p[0]})", _reshape)
add("view", "view", "view", "{0}.view({p[0]})", _reshape)
add("view", "flatten", "view", "torch.flatten({0})", one())
add("view", "transpose", "view", "{0}.transpose({p[0]}, {p[1]})", _two_dims)
add("view", "permute", "view", "{0}.permute({p[0]})", _permute)
add("view", "expand", "view", "{0}.expand({p[0]})", _expand)
add("view", "unsqueeze", "view", "{0}.unsqueeze({p[0]})", with_dim(always))
add("view", "squeeze", "view", "{0}.squeeze()", one())
add("view", "index", "view", "{0}[{p[0]}]", _index)
add("view", "index_again", "view", "{0}[{p[0]}]", _index)
add(
    "view",
    "chunk",
    "view",
    "torch.chunk({0}, {p[1]}, {p[0]})",
    _pieces(lambda r: r.choice([2, 3])),
    "",
    True,
)
add(
    "view",
    "split",
    "view",
    "torch.split({0}, {p[1]}, {p[0]})",
    _pieces(lambda r: r.choice([1, 2])),
    "",
    True,
)
add("view", "unbind", "view", "torch.unbind({0}, {p[0]})", _pieces(), "", True)
add("view", "contiguous", "view", "{0}.contiguous()", one())
add("view", "select", "view", "{0}.select({p[0]}, -1)", _pieces())
add("view", "movedim", "view", "torch.movedim({0}, {p[0]}, {p[1]})", _two_dims)
add("view", "mT", "view", "{0}.mT", one(lambda t: t.dim() >= 2))
add("view", "unflatten", "view", "{0}.unflatten({p[0]}, (-1, 1))", _pieces())
add("view", "diagonal", "view", "torch.diagonal({0})", one(lambda t: t.dim() >= 2 and t.numel() > 0))


# Joining and indexing by tensors.
def _cat(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, lambda t: t.dim() > 0)
    if a is None:
        return None
    dim = dim_of(values.tensors[a], rng)
    b = values.pick(rng, lambda t: t.shape == values.tensors[a].shape)
    return (a, b), (dim,)


def _take(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, lambda t: t.dim() > 0)
    if a is None:
        return None
    dim = dim_of(values.tensors[a], rng)
    n = values.tensors[a].shape[dim]
    index = values.pick(rng, lambda t: t.dtype == torch.int64 and t.dim() == 1 and bool(((t >= 0) & (t < n)).all()))
    return index and ((a, index), (dim,))


add("join", "cat", "fresh", "torch.cat([{0}, {1}], {p[0]})", _cat)
add("join", "stack", "fresh", "torch.stack([{0}, {1}], {p[0]})", _cat)
add("join", "index_select", "fresh", "torch.index_select({0}, {p[0]}, {1})", _take)
add("join", "take_rows", "fresh", "{0}[{1}]", _take)
add("join", "tril", "fresh", "torch.tril({0})", one(lambda t: is_float(t) and t.dim() >= 2 and t.numel() > 0))


def _rotated(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, lambda t: is_float(t) and t.dim() > 0 and t.shape[-1] > 0 and t.shape[-1] % 2 == 0)
    return a and ((a,), (values.tensors[a].shape[-1] // 2,))


def _indexed(rng: Random, values: Values) -> Drawn | None:
    """A tensor, an index of int64 of the same rank, and the dim."""
    a = values.pick(rng, lambda t: is_float(t) and t.dim() > 0 and t.numel() > 0)
    if a is None:
        return None
    t = values.tensors[a]
    dim = dim_of(t, rng)

    def fits(i: torch.Tensor) -> bool:
        whole = i.dtype == torch.int64 and i.dim() == t.dim() and i.numel() > 0
        return whole and bool(i.min() >= 0) and bool(i.max() < t.shape[dim])

    index = values.pick(rng, fits)
    return index and ((a, index), (dim,))


def _rank(rng: Random, values: Values) -> Drawn | None:
    a = values.floating(rng, 1)
    return a and ((a,), (values.tensors[a].dim() - 1,))


def _not_empty(t: torch.Tensor) -> bool:
    return is_float(t) and t.dim() > 0 and t.numel() > 0


# What moves values about.
add("join", "cat_same", "fresh", "torch.cat([{0}, {0}], {p[0]})", with_dim(is_float))
add("join", "rotate_half", "fresh", "torch.cat([-{0}[..., {p[0]}:], {0}[..., :{p[0]}]], -1)", _rotated)
add("join", "repeat", "fresh", "{0}.repeat(2, *([1] * {p[0]}))", _rank)
add(
    "join",
    "pad",
    "fresh",
    "F.pad({0}, (1, 0), value=0.5)",
    one(_not_empty),
)
add("join", "roll", "fresh", "torch.roll({0}, 1, {p[0]})", _pieces())
add("join", "triu", "fresh", "torch.triu({0}, 1)", one(lambda t: is_float(t) and t.dim() >= 2 and t.numel() > 0))
add("join", "gather", "fresh", "torch.gather({0}, {p[0]}, {1})", _indexed)
add("join", "scatter_add", "fresh", "torch.scatter_add({0}, {p[0]}, {1}, {0})", _indexed)
add(
    "join",
    "one_hot",
    "fresh",
    "F.one_hot(torch.remainder({0}, 3), 3)",
    one(lambda t: t.dtype == torch.int64 and t.numel() > 0),
)
add("join", "add_arange", "fresh", "{0} + torch.arange({0}.shape[-1])", one(lambda t: is_float(t) and t.dim() > 0))
