"""The operations that random programs are made of: one table row each.

A row says how the op prints and how its arguments are drawn from the values at hand. The drawing may
propose what torch refuses (a bad shape or dtype): whoever builds the program tries it and drops it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import torch

__all__ = ["FAMILIES", "OPS", "OVERWRITES", "OpSpec", "Values"]

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
    """

    kind: str
    text: str
    draw: Callable[[Random, Values], Drawn | None]
    reference: str = ""

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


# What overwrites a whole value, and so makes what was there dead.
OVERWRITES = ("copy_", "zero_", "setitem", "setitem_scalar")


def _add(family: str, name: str, kind: str, text: str, draw, reference: str = "", unpacked: bool = False) -> None:
    OPS[name] = OpSpec(kind, text, draw, reference)
    FAMILIES.setdefault(family, []).append(name)
    if unpacked:
        UNPACKED.add(text)


def _one(accept: Callable[[torch.Tensor], bool] = lambda t: True):
    def draw(rng: Random, values: Values) -> Drawn | None:
        a = values.pick(rng, accept)
        return a and ((a,), ())

    return draw


def _is_float(t: torch.Tensor) -> bool:
    return t.is_floating_point()


def _is_number(t: torch.Tensor) -> bool:
    return t.dtype != torch.bool


def _is_bool(t: torch.Tensor) -> bool:
    return t.dtype == torch.bool


def _two(accept: Callable[[torch.Tensor], bool] = _is_number, both: bool = False):
    def draw(rng: Random, values: Values) -> Drawn | None:
        a = values.pick(rng, accept)
        b = a and values.like(rng, a)
        if both and b and not accept(values.tensors[b]):
            return None
        return b and ((a, b) if rng.random() < 0.5 else (b, a), ())

    return draw


def _scalar(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, _is_number)
    if a is None:
        return None
    # An integer tensor and a float number: Thunder promotes the result like a number from then on.
    numbers = [2, -1, 0.5, 1.5, -0.25] if values.tensors[a].is_floating_point() else [2, -1]
    return (a,), (rng.choice(numbers),)


def _dim(t: torch.Tensor, rng: Random) -> int:
    return rng.randrange(-t.dim(), t.dim())


def _with_dim(accept: Callable[[torch.Tensor], bool] = _is_float, *more: Callable[[Random], object]):
    """One argument with a dim, and further drawn parameters."""

    def draw(rng: Random, values: Values) -> Drawn | None:
        a = values.pick(rng, lambda t: t.dim() > 0 and accept(t))
        return a and ((a,), (_dim(values.tensors[a], rng), *(m(rng) for m in more)))

    return draw


# Elementwise. Arguments are bent into each function's domain, so that NaN never hides a difference.
for _name in ["sin", "cos", "tanh", "sigmoid", "neg", "erf", "square", "abs"]:
    _add("elementwise", _name, "fresh", f"torch.{_name}({{0}})", _one(_is_float))
for _name in ["relu", "gelu", "silu", "softplus"]:
    _add("elementwise", _name, "fresh", f"F.{_name}({{0}})", _one(_is_float))
_add("elementwise", "exp", "fresh", "torch.exp(torch.clamp({0}, -3.0, 3.0))", _one(_is_float))
_add("elementwise", "log", "fresh", "torch.log(torch.abs({0}) + 1.0)", _one(_is_float))
_add("elementwise", "rsqrt", "fresh", "torch.rsqrt({0} * {0} + 1.0)", _one(_is_float))
_add("elementwise", "pow", "fresh", "{0} ** {p[0]}", lambda r, v: (a := v.floating(r)) and ((a,), (r.choice([2, 3]),)))
_add("elementwise", "clamp", "fresh", "torch.clamp({0}, -0.5, 1.0)", _one(_is_float))
for _name, _sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
    _add("elementwise", _name, "fresh", f"{{0}} {_sign} {{1}}", _two())
    _add("elementwise", f"{_name}_scalar", "fresh", f"{{0}} {_sign} {{p[0]!r}}", _scalar)
_add("elementwise", "div", "fresh", "{0} / (torch.abs({1}) + 1.0)", _two(_is_float, both=True))
_add("elementwise", "rsub", "fresh", "1.0 - {0}", _one(_is_float))
_add("elementwise", "maximum", "fresh", "torch.maximum({0}, {1})", _two())
_add("elementwise", "addcmul", "fresh", "torch.addcmul({0}, {0}, {1})", _two(_is_float))
_add("elementwise", "clone", "fresh", "{0}.clone()", _one())
_add("elementwise", "detach", "view", "{0}.detach()", _one(_is_float))

# Booleans and integers.
for _name, _sign in (("gt", ">"), ("le", "<="), ("ne", "!=")):
    _add("logic", _name, "fresh", f"{{0}} {_sign} {{1}}", _two())
    _add("logic", f"{_name}_scalar", "fresh", f"{{0}} {_sign} {{p[0]!r}}", _scalar)
_add("logic", "not", "fresh", "torch.logical_not({0})", _one(_is_bool))
_add("logic", "and", "fresh", "{0} & {1}", _two(lambda t: not t.is_floating_point()))


def _where(rng: Random, values: Values) -> Drawn | None:
    mask = values.pick(rng, _is_bool)
    a = mask and values.like(rng, mask)
    b = a and values.like(rng, a)
    return b and ((mask, a, b), ())


def _masked(rng: Random, values: Values) -> Drawn | None:
    a = values.floating(rng)
    shape = a and values.tensors[a].shape
    mask = a and values.pick(rng, lambda t: _is_bool(t) and (t.shape == shape or t.dim() == 0))
    return mask and ((a, mask), (rng.choice([0.0, -1.0]),))


_add("logic", "where", "fresh", "torch.where({0}, {1}, {2})", _where)
_add("logic", "where_gt", "fresh", "torch.where({0} > 0, {0}, {1})", _two(_is_float))
_add("logic", "masked_fill", "fresh", "{0}.masked_fill({1}, {p[0]})", _masked)


def _cast(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng)
    return a and ((a,), (rng.choice(["float32", "float32", "bfloat16", "float16", "float64"]),))


# A cast to the same dtype is a view, so both are written as views, and the float64 run asks which they were.
_add("cast", "to", "view", "{0}.to(torch.{p[0]})", _cast, "_to({0}, {p[0]!r})")
_add("cast", "float", "view", "{0}.float()", _one(), "_to({0}, 'float32')")
_add("cast", "to_int", "fresh", "{0}.to(torch.int64)", _one())
_add("cast", "to_bool", "fresh", "{0} > 0", _one(_is_number))


# Reductions and row-wise functions.
def _keepdim(rng: Random) -> bool:
    return rng.random() < 0.5


def _filled(t: torch.Tensor) -> bool:
    """A float tensor that is not empty: Thunder takes no maximum over an empty dim, not even a needless one."""
    return _is_float(t) and t.numel() > 0


for _name in ["sum", "mean", "amax"]:
    _add("reduce", _name, "fresh", f"torch.{_name}({{0}}, {{p[0]}}, keepdim={{p[1]}})", _with_dim(_filled, _keepdim))
_add("reduce", "var", "fresh", "torch.var({0}, {p[0]}, correction=0, keepdim={p[1]})", _with_dim(_is_float, _keepdim))
_add("reduce", "sum_all", "fresh", "torch.sum({0})", _one(_is_float))
_add("reduce", "mean_all", "fresh", "{0}.mean()", _one(_is_float))
_add("reduce", "cumsum", "fresh", "torch.cumsum({0}, {p[0]})", _with_dim())
_add("reduce", "argmax", "fresh", "torch.argmax({0}, {p[0]})", _with_dim(_filled))
_add("reduce", "softmax", "fresh", "torch.softmax({0}, {p[0]})", _with_dim(_filled))
_add("reduce", "log_softmax", "fresh", "torch.log_softmax({0}, {p[0]})", _with_dim(_filled))
_add("reduce", "logsumexp", "fresh", "torch.logsumexp({0}, {p[0]}, keepdim={p[1]})", _with_dim(_filled, _keepdim))
_add("reduce", "layer_norm", "fresh", "F.layer_norm({0}, {0}.shape[-1:])", _one(lambda t: _is_float(t) and t.dim() > 0))


# Matrix products.
def _matmul(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, lambda t: t.is_floating_point() and t.dim() > 1 and t.numel() > 0)
    t = values.tensors[a] if a else None
    b = a and values.pick(rng, lambda u: u.dim() >= 2 and u.dtype == t.dtype and u.shape[-2] == t.shape[-1])
    return b and ((a, b), ())


def _linear(rng: Random, values: Values) -> Drawn | None:
    # Never empty: Thunder's backward divides by the size of the empty dim.
    a = values.pick(rng, lambda t: t.is_floating_point() and t.dim() > 0 and t.numel() > 0)
    t = values.tensors[a] if a else None
    w = a and values.pick(rng, lambda u: u.dim() == 2 and u.dtype == t.dtype and u.shape[1] == t.shape[-1])
    return w and ((a, w), ())


def _attention(rng: Random, values: Values) -> Drawn | None:
    # Never empty: with no heads torch 2.11's CPU attention divides by zero and kills the process.
    a = values.pick(rng, lambda t: t.is_floating_point() and t.dim() >= 3 and t.numel() > 0)
    return a and ((a,), (rng.random() < 0.5,))


_add("matmul", "matmul", "fresh", "{0} @ {1}", _matmul)
_add("matmul", "linear", "fresh", "F.linear({0}, {1})", _linear)
_add(
    "matmul",
    "gram",
    "fresh",
    "{0} @ {0}.transpose(-2, -1)",
    _one(lambda t: _is_float(t) and t.dim() >= 2 and t.numel()),
)
_add(
    "matmul",
    "attention",
    "fresh",
    "F.scaled_dot_product_attention({0}[None], {0}[None], {0}[None], is_causal={p[0]})",
    _attention,
)


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
        return a and ((a,), (_dim(values.tensors[a], rng), *(m(rng) for m in more)))

    return draw


def _two_dims(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, lambda t: t.dim() >= 2)
    return a and ((a,), (_dim(values.tensors[a], rng), _dim(values.tensors[a], rng)))


def _always(t: torch.Tensor) -> bool:
    return True


_add("view", "reshape", "view", "{0}.reshape({p[0]})", _reshape)
_add("view", "view", "view", "{0}.view({p[0]})", _reshape)
_add("view", "flatten", "view", "torch.flatten({0})", _one())
_add("view", "transpose", "view", "{0}.transpose({p[0]}, {p[1]})", _two_dims)
_add("view", "permute", "view", "{0}.permute({p[0]})", _permute)
_add("view", "expand", "view", "{0}.expand({p[0]})", _expand)
_add("view", "unsqueeze", "view", "{0}.unsqueeze({p[0]})", _with_dim(_always))
_add("view", "squeeze", "view", "{0}.squeeze()", _one())
_add("view", "index", "view", "{0}[{p[0]}]", _index)
_add("view", "index_again", "view", "{0}[{p[0]}]", _index)
_add(
    "view",
    "chunk",
    "view",
    "torch.chunk({0}, {p[1]}, {p[0]})",
    _pieces(lambda r: r.choice([2, 3])),
    "",
    True,
)
_add(
    "view",
    "split",
    "view",
    "torch.split({0}, {p[1]}, {p[0]})",
    _pieces(lambda r: r.choice([1, 2])),
    "",
    True,
)
_add("view", "unbind", "view", "torch.unbind({0}, {p[0]})", _pieces(), "", True)
_add("view", "contiguous", "view", "{0}.contiguous()", _one())


# Joining and indexing by tensors.
def _cat(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, lambda t: t.dim() > 0)
    if a is None:
        return None
    dim = _dim(values.tensors[a], rng)
    b = values.pick(rng, lambda t: t.shape == values.tensors[a].shape)
    return (a, b), (dim,)


def _take(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, lambda t: t.dim() > 0)
    if a is None:
        return None
    dim = _dim(values.tensors[a], rng)
    n = values.tensors[a].shape[dim]
    index = values.pick(rng, lambda t: t.dtype == torch.int64 and t.dim() == 1 and bool(((t >= 0) & (t < n)).all()))
    return index and ((a, index), (dim,))


_add("join", "cat", "fresh", "torch.cat([{0}, {1}], {p[0]})", _cat)
_add("join", "stack", "fresh", "torch.stack([{0}, {1}], {p[0]})", _cat)
_add("join", "index_select", "fresh", "torch.index_select({0}, {p[0]}, {1})", _take)
_add("join", "take_rows", "fresh", "{0}[{1}]", _take)
_add("join", "tril", "fresh", "torch.tril({0})", _one(lambda t: _is_float(t) and t.dim() >= 2 and t.numel() > 0))


# In place: the target must be one that the caller may overwrite.
def _write(partner: bool, *more: Callable[[Random], object]):
    def draw(rng: Random, values: Values) -> Drawn | None:
        names = [n for n, t in values.tensors.items() if _is_float(t) and values.writable(n)]
        if not names:
            return None
        a = rng.choice(names)
        b = values.like(rng, a, into=True) if partner else a
        return b and ((a, b) if partner else (a,), tuple(m(rng) for m in more))

    return draw


def _copy(rng: Random, values: Values) -> Drawn | None:
    """Of the same shape: Thunder's copy_ does not broadcast."""
    names = [n for n in values.tensors if values.writable(n)]
    a = names and rng.choice(names)
    b = a and values.pick(rng, lambda t: t.shape == values.tensors[a].shape)
    return b and ((a, b), ())


def _write_index(partner: bool):
    def draw(rng: Random, values: Values) -> Drawn | None:
        names = [n for n, t in values.tensors.items() if t.dim() > 0 and _is_float(t) and values.writable(n)]
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
        fits = [n for n, t in values.tensors.items() if t.dim() <= part.dim() and _fits_into(t.shape, part.shape)]
        return fits and ((a, rng.choice(fits)), (index,))

    return draw


def _fits_into(shape: torch.Size, target: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, target) == target
    except RuntimeError:
        return False


for _name in ["add", "sub", "mul"]:
    _add("in-place", f"{_name}_", "in-place", f"{{0}}.{_name}_({{1}})", _write(True))
    _add(
        "in-place",
        f"{_name}_scalar_",
        "in-place",
        f"{{0}}.{_name}_({{p[0]}})",
        _write(False, lambda r: r.choice([2, 0.5])),
    )
_add("in-place", "iadd", "in-place", "{0} += {1}", _write(True))
_add("in-place", "copy_", "in-place", "{0}.copy_({1})", _copy)
for _name in ["relu_", "tanh_", "exp_", "sin_", "zero_"]:
    _add("in-place", _name, "in-place", f"{{0}}.{_name}()", _write(False))
_add("in-place", "setitem", "in-place", "{0}[{p[0]}] = {1}", _write_index(True))
_add("in-place", "setitem_scalar", "in-place", "{0}[{p[0]}] = {p[1]!r}", _write_index(False))


def _shape_of_input(rng: Random, values: Values) -> Drawn | None:
    # Only inputs: a computed value that is used for its shape alone is dead code to a compiler, and if
    # that value is random, eager draws for it and the compiler does not.
    names = [name for name, t in values.tensors.items() if name.startswith("x") and _is_float(t)]
    return names and ((rng.choice(names),), ())


_add("elementwise", "zeros_like", "fresh", "torch.zeros_like({0})", _shape_of_input)


# Random. The float64 run draws in the program's own dtype and then widens, so that it sees the same values.
_add("random", "rand_like", "random", "torch.rand_like({0})", _shape_of_input, "_draw('rand', {0}, {0!r})")
_add("random", "randn_like", "random", "torch.randn_like({0})", _shape_of_input, "_draw('randn', {0}, {0!r})")
_add(
    "random",
    "dropout",
    "random",
    "F.dropout({0}, {p[0]})",
    lambda r, v: (a := v.floating(r)) and ((a,), (r.choice([0.25, 0.5]),)),
    "_dropout({0}, {p[0]}, {0!r})",
)
