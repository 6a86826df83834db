"""The table of the operations that random programs are made of, and how their arguments are drawn.

A row says how the op prints and how its arguments are drawn from the values at hand. The drawing may
propose what torch refuses (a bad shape or dtype): whoever builds the program tries it and drops it.
The rows stand in `program_ops.py`, and in `program_views.py` and others beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import torch

__all__ = ["FAMILIES", "OPS", "Drawn", "OpSpec", "Values", "add"]

Drawn = tuple[tuple[str, ...], tuple[object, ...]]


@dataclass(frozen=True)
class Values:
    """The values a new step may use, by name, and which of them it may overwrite."""

    tensors: Mapping[str, torch.Tensor]
    writable: Callable[[str], bool]

    def pick(self, rng: Random, accept: Callable[[torch.Tensor], bool] = lambda t: True) -> str | None:
        """A name whose tensor is accepted, newer ones more often; None when there is none."""
        names = [name for name, t in self.tensors.items() if accept(t)]
        if not names:
            return None
        return names[max(rng.randrange(len(names)), rng.randrange(len(names)))]

    def floating(self, rng: Random, dims: int = 0) -> str | None:
        return self.pick(rng, lambda t: t.is_floating_point() and t.dim() >= dims)

    def like(self, rng: Random, name: str, into: bool = False) -> str | None:
        """A partner that broadcasts with `name`, or `into` its shape."""
        shape = self.tensors[name].shape

        def fits(t: torch.Tensor) -> bool:
            try:
                joint = torch.broadcast_shapes(shape, t.shape)
            except RuntimeError:
                return False
            return not into or joint == shape

        return self.pick(rng, fits)


@dataclass(frozen=True)
class OpSpec:
    """One kind of statement.

    Attributes:
        kind: "fresh" (new values), "view", "in-place" or "random".
        text: the expression (a statement if in place); `{0}` are arguments, `{p[0]}` parameters.
        draw: proposes arguments and parameters, or None.
        reference: how the float64 run writes it, where that differs.
        family: the group it is drawn with.
        writes: which of its arguments a fresh op also overwrites (running statistics).
    """

    kind: str
    text: str
    draw: Callable[[Random, Values], Drawn | None]
    reference: str = ""
    family: str = ""
    writes: tuple[int, ...] = ()

    @property
    def written(self) -> tuple[int, ...]:
        """The arguments whose memory it overwrites."""
        return (0,) if self.kind == "in-place" else self.writes

    def statement(self, targets: tuple[str, ...], args: tuple[str, ...], params: tuple, reference: bool) -> str:
        expression = (self.reference if reference and self.reference else self.text).format(*args, p=params)
        left = ", ".join(targets)
        if self.kind == "in-place":
            return f"{left} = {expression}" if targets else expression
        if reference and self.kind != "view":
            return f"{left} = _r({expression}, {targets!r})"
        return f"{left}, = {expression}" if self.text in UNPACKED and len(targets) == 1 else f"{left} = {expression}"


OPS: dict[str, OpSpec] = {}
FAMILIES: dict[str, list[str]] = {}
UNPACKED: set[str] = set()


def add(
    family: str,
    name: str,
    kind: str,
    text: str,
    draw: Callable[[Random, Values], Drawn | None],
    reference: str = "",
    unpacked: bool = False,
    writes: tuple[int, ...] = (),
) -> None:
    """Enter a row; `unpacked` ones return a tuple even of one value."""
    OPS[name] = OpSpec(kind, text, draw, reference, family, writes)
    FAMILIES.setdefault(family, []).append(name)
    if unpacked:
        UNPACKED.add(text)


def is_float(t: torch.Tensor) -> bool:
    return t.is_floating_point()


def shown_twice(t: torch.Tensor) -> bool:
    """Some elements of it stand in one place of memory: it is expanded."""
    return any(n > 1 and not step for n, step in zip(t.shape, t.stride(), strict=True))


def filled(t: torch.Tensor) -> bool:
    """A float tensor that is not empty: Thunder takes no maximum over an empty dim, not even a needless one."""
    return is_float(t) and t.numel() > 0


def always(t: torch.Tensor) -> bool:
    return True


def one(accept: Callable[[torch.Tensor], bool] = always):
    def draw(rng: Random, values: Values) -> Drawn | None:
        a = values.pick(rng, accept)
        return a and ((a,), ())

    return draw


def is_number(t: torch.Tensor) -> bool:
    return t.dtype != torch.bool


def is_bool(t: torch.Tensor) -> bool:
    return t.dtype == torch.bool


def two(accept: Callable[[torch.Tensor], bool] = is_number, both: bool = False):
    def draw(rng: Random, values: Values) -> Drawn | None:
        a = values.pick(rng, accept)
        b = a and values.like(rng, a)
        if both and b and not accept(values.tensors[b]):
            return None
        return b and ((a, b) if rng.random() < 0.5 else (b, a), ())

    return draw


def dim_of(t: torch.Tensor, rng: Random) -> int:
    return rng.randrange(-t.dim(), t.dim())


def with_dim(accept: Callable[[torch.Tensor], bool] = is_float, *more: Callable[[Random], object]):
    """One argument with a dim, and further drawn parameters."""

    def draw(rng: Random, values: Values) -> Drawn | None:
        a = values.pick(rng, lambda t: t.dim() > 0 and accept(t))
        return a and ((a,), (dim_of(values.tensors[a], rng), *(m(rng) for m in more)))

    return draw


def keepdim(rng: Random) -> bool:
    return rng.random() < 0.5


def shape_of_input(rng: Random, values: Values) -> Drawn | None:
    # Only inputs: a computed value that is used for its shape alone is dead code to a compiler, and if
    # that value is random, eager draws for it and the compiler does not.
    names = [name for name, t in values.tensors.items() if name.startswith("x") and is_float(t)]
    return names and ((rng.choice(names),), ())


def fits_into(shape: torch.Size, target: torch.Size) -> bool:
    """Whether a tensor of `shape` broadcasts into one of `target`."""
    try:
        return torch.broadcast_shapes(shape, target) == target
    except RuntimeError:
        return False
