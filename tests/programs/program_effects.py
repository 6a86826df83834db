"""Operations of random programs with an effect: writes in place, and random draws."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch

from tests.programs.program_table import Drawn, Values, add, fits_into, is_float, shape_of_input
from tests.programs.program_views import index_text

__all__ = ["OVERWRITES"]

# What overwrites a whole value, and so makes what was there dead.
OVERWRITES = ("copy_", "zero_", "setitem", "setitem_scalar")


# In place: the target must be one that the caller may overwrite.
def _write(partner: bool, *more: Callable[[Random], object]):
    def draw(rng: Random, values: Values) -> Drawn | None:
        names = [n for n, t in values.tensors.items() if is_float(t) and values.writable(n)]
        if not names:
            return None
        a = rng.choice(names)
        b = values.like(rng, a, into=True) if partner else a
        return b and ((a, b) if partner else (a,), tuple(m(rng) for m in more))

    return draw


def _masked(rng: Random, values: Values) -> Drawn | None:
    names = [n for n, t in values.tensors.items() if is_float(t) and values.writable(n)]
    a = names and rng.choice(names)
    mask = a and values.pick(rng, lambda t: t.dtype == torch.bool and fits_into(t.shape, values.tensors[a].shape))
    return mask and ((a, mask), ())


def _copy(rng: Random, values: Values) -> Drawn | None:
    """Of the same shape: Thunder's copy_ does not broadcast."""
    names = [n for n in values.tensors if values.writable(n)]
    a = names and rng.choice(names)
    b = a and values.pick(rng, lambda t: t.shape == values.tensors[a].shape)
    return b and ((a, b), ())


def _write_index(partner: bool):
    def draw(rng: Random, values: Values) -> Drawn | None:
        names = [n for n, t in values.tensors.items() if t.dim() > 0 and is_float(t) and values.writable(n)]
        if not names:
            return None
        a = rng.choice(names)
        index = index_text(rng, tuple(values.tensors[a].shape))
        if not partner:
            return (a,), (index, rng.choice([0.0, 1, -0.5]))
        try:
            part = eval(f"t[{index}]", {"t": values.tensors[a]})
        except (IndexError, RuntimeError):
            return None
        fits = [n for n, t in values.tensors.items() if t.dim() <= part.dim() and fits_into(t.shape, part.shape)]
        return fits and ((a, rng.choice(fits)), (index,))

    return draw


for _name in ["add", "sub", "mul"]:
    add("in-place", f"{_name}_", "in-place", f"{{0}}.{_name}_({{1}})", _write(True))
    add(
        "in-place",
        f"{_name}_scalar_",
        "in-place",
        f"{{0}}.{_name}_({{p[0]}})",
        _write(False, lambda r: r.choice([2, 0.5])),
    )
add("in-place", "iadd", "in-place", "{0} += {1}", _write(True))
add("in-place", "copy_", "in-place", "{0}.copy_({1})", _copy)
for _name in ["relu_", "tanh_", "exp_", "sin_", "zero_"]:
    add("in-place", _name, "in-place", f"{{0}}.{_name}()", _write(False))
add("in-place", "div_scalar_", "in-place", "{0}.div_({p[0]})", _write(False, lambda r: r.choice([2, 0.5])))
add("in-place", "clamp_", "in-place", "{0}.clamp_(-0.95, 0.95)", _write(False))
add("in-place", "neg_", "in-place", "{0}.neg_()", _write(False))
add("in-place", "isub", "in-place", "{0} -= {1}", _write(True))
add("in-place", "imul", "in-place", "{0} *= {1}", _write(True))
add("in-place", "masked_fill_", "in-place", "{0}.masked_fill_({1}, 0.5)", _masked)
add("in-place", "setitem", "in-place", "{0}[{p[0]}] = {1}", _write_index(True))
add("in-place", "setitem_scalar", "in-place", "{0}[{p[0]}] = {p[1]!r}", _write_index(False))


# Random. The float64 run draws in the program's own dtype and then widens, so that it sees the same values.
add("random", "rand_like", "random", "torch.rand_like({0})", shape_of_input, "_draw('rand', {0}, {0!r})")
add("random", "randn_like", "random", "torch.randn_like({0})", shape_of_input, "_draw('randn', {0}, {0!r})")
add(
    "random",
    "dropout",
    "random",
    "F.dropout({0}, {p[0]})",
    lambda r, v: (a := v.floating(r)) and ((a,), (r.choice([0.25, 0.5]),)),
    "_dropout({0}, {p[0]}, {0!r})",
)
