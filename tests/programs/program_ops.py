"""Operations of random programs: elementwise, booleans and integers, casts, reductions, matrix products."""

from __future__ import annotations

from random import Random

import torch

from tests.programs import (  # noqa: F401 - each fills the table
    program_effects,
    program_functions,
    program_layers,
    program_losses,
    program_splits,
    program_views,
)
from tests.programs.program_table import (
    FAMILIES,
    OPS,
    Drawn,
    Values,
    add,
    filled,
    is_bool,
    is_float,
    is_number,
    keepdim,
    one,
    shape_of_input,
    two,
    with_dim,
)

__all__ = ["FAMILIES", "OPS"]


def _scalar(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, is_number)
    if a is None:
        return None
    # An integer tensor and a float number: Thunder promotes the result like a number from then on.
    numbers = [2, -1, 0.5, 1.5, -0.25] if values.tensors[a].is_floating_point() else [2, -1]
    return (a,), (rng.choice(numbers),)


def _inputs_without_gradient(rng: Random, values: Values) -> Drawn | None:
    """For what Thunder has no derivative of: it asks for one under no_grad too."""
    names = [n for n, t in values.tensors.items() if n.startswith("x") and is_float(t) and not t.requires_grad]
    a = names and rng.choice(names)
    b = a and rng.choice([n for n in names if values.tensors[n].dtype == values.tensors[a].dtype])
    return b and ((a, b), ())


def _untied(t: torch.Tensor) -> bool:
    """No two values are equal: of such eager hands the gradient to one, Thunder to all in equal parts."""
    return filled(t) and t.unique().numel() == t.numel()


# Elementwise. Arguments are bent into each function's domain, so that NaN never hides a difference. No product of
# inputs meets a clamp's bound, where Thunder's derivative is 0 and eager's is 1; see `defects.WRONG`.
for _name in ["sin", "cos", "tanh", "neg", "erf", "square", "abs"]:
    add("elementwise", _name, "fresh", f"torch.{_name}({{0}})", one(is_float))
for _name in ["relu", "gelu", "silu", "softplus"]:
    add("elementwise", _name, "fresh", f"F.{_name}({{0}})", one(is_float))
add("elementwise", "sigmoid", "fresh", "torch.sigmoid(torch.clamp({0}, -19.9, 19.9))", one(is_float))
add("elementwise", "exp", "fresh", "torch.exp(torch.clamp({0}, -2.9, 2.9))", one(is_float))
add("elementwise", "log", "fresh", "torch.log(torch.abs({0}) + 1.0)", one(is_float))
add("elementwise", "rsqrt", "fresh", "torch.rsqrt({0} * {0} + 1.0)", one(is_float))
add("elementwise", "pow", "fresh", "{0} ** {p[0]}", lambda r, v: (a := v.floating(r)) and ((a,), (r.choice([2, 3]),)))
add("elementwise", "clamp", "fresh", "torch.clamp({0}, -0.45, 0.95)", one(is_float))
for _name, _sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
    add("elementwise", _name, "fresh", f"{{0}} {_sign} {{1}}", two())
    add("elementwise", f"{_name}_scalar", "fresh", f"{{0}} {_sign} {{p[0]!r}}", _scalar)
add("elementwise", "div", "fresh", "{0} / (torch.abs({1}) + 1.0)", two(is_float, both=True))
add("elementwise", "rsub", "fresh", "1.0 - {0}", one(is_float))
add("elementwise", "maximum", "fresh", "torch.maximum({0}, {1})", two())
add("elementwise", "addcmul", "fresh", "torch.addcmul({0}, {0}, {1})", two(is_float))
add("elementwise", "minimum", "fresh", "torch.minimum({0}, {1})", two())
add("elementwise", "lerp", "fresh", "torch.lerp({0}, {0} + {1}, 0.25)", _inputs_without_gradient)
add("elementwise", "addcdiv", "fresh", "torch.addcdiv({0}, {1}, torch.abs({1}) + 1.0)", two(is_float, both=True))
for _name, _text in {
    "sqrt": "torch.sqrt(torch.abs({0}) + 0.5)",
    "reciprocal": "torch.reciprocal(torch.abs({0}) + 0.5)",
    "log1p": "torch.log1p(torch.abs({0}))",
    "exp2": "torch.exp2(torch.clamp({0}, -2.9, 2.9))",
    "expm1": "torch.expm1(torch.clamp({0}, -2.9, 2.9))",
    "atan": "torch.atan({0})",
    "gelu_tanh": 'F.gelu({0}, approximate="tanh")',
    "leaky_relu": "F.leaky_relu({0}, 0.125)",
    "elu": "F.elu(torch.clamp({0}, -19.9, 19.9))",
    "mish": "F.mish(torch.clamp({0}, -19.9, 19.9))",
    "hardswish": "F.hardswish({0})",
    "logsigmoid": "F.logsigmoid({0})",
    "softcap": "torch.tanh({0} / 2.0) * 2.0",
    "sign": "torch.sign({0})",
    "ones_like": "{0} + torch.ones_like({0})",
}.items():
    add("elementwise", _name, "fresh", _text, one(is_float))
add("elementwise", "swiglu", "fresh", "F.silu({0}) * {1}", two(is_float, both=True))
add("elementwise", "clone", "fresh", "{0}.clone()", one())
add("elementwise", "zeros_like", "fresh", "torch.zeros_like({0})", shape_of_input)
add("elementwise", "detach", "view", "{0}.detach()", one(is_float))

# Booleans and integers.
for _name, _sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="), ("eq", "=="), ("ne", "!=")):
    add("logic", _name, "fresh", f"{{0}} {_sign} {{1}}", two())
    add("logic", f"{_name}_scalar", "fresh", f"{{0}} {_sign} {{p[0]!r}}", _scalar)
add("logic", "not", "fresh", "torch.logical_not({0})", one(is_bool))
add("logic", "and", "fresh", "{0} & {1}", two(lambda t: not t.is_floating_point()))
add("logic", "or", "fresh", "{0} | {1}", two(is_bool, both=True))
add("logic", "any", "fresh", "torch.any({0}, {p[0]})", with_dim(is_bool))
add("logic", "all", "fresh", "torch.all({0}, {p[0]})", with_dim(is_bool))


def _where(rng: Random, values: Values) -> Drawn | None:
    mask = values.pick(rng, is_bool)
    a = mask and values.like(rng, mask)
    b = a and values.like(rng, a)
    return b and ((mask, a, b), ())


def _masked(rng: Random, values: Values) -> Drawn | None:
    a = values.floating(rng)
    shape = a and values.tensors[a].shape
    mask = a and values.pick(rng, lambda t: is_bool(t) and (t.shape == shape or t.dim() == 0))
    return mask and ((a, mask), (rng.choice([0.0, -1.0]),))


add("logic", "where", "fresh", "torch.where({0}, {1}, {2})", _where)
add("logic", "where_gt", "fresh", "torch.where({0} > 0, {0}, {1})", two(is_float))
add("logic", "masked_fill", "fresh", "{0}.masked_fill({1}, {p[0]})", _masked)


def _cast(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng)
    return a and ((a,), (rng.choice(["float32", "float32", "bfloat16", "float16", "float64"]),))


# A cast to the same dtype is a view, so both are written as views, and the float64 run asks which they were.
add("cast", "to", "view", "{0}.to(torch.{p[0]})", _cast, "_to({0}, {p[0]!r})")
add("cast", "float", "view", "{0}.float()", one(), "_to({0}, 'float32')")
add("cast", "to_int", "fresh", "{0}.to(torch.int64)", one())
add("cast", "to_bool", "fresh", "{0} > 0", one(is_number))


# Reductions and row-wise functions.
for _name in ["sum", "mean", "amax", "amin"]:
    add("reduce", _name, "fresh", f"torch.{_name}({{0}}, {{p[0]}}, keepdim={{p[1]}})", with_dim(filled, keepdim))
add("reduce", "var", "fresh", "torch.var({0}, {p[0]}, correction=0, keepdim={p[1]})", with_dim(is_float, keepdim))
add(
    "reduce",
    "var_mean",
    "fresh",
    "torch.var_mean({0}, {p[0]}, correction=0, keepdim={p[1]})",
    with_dim(filled, keepdim),
)
add("reduce", "max_of", "fresh", "torch.max({0}, {p[0]}, keepdim={p[1]})", with_dim(_untied, keepdim))
add("reduce", "topk", "fresh", "torch.topk({0}, 1, {p[0]})", with_dim(filled))
add("reduce", "prod", "fresh", "torch.prod(torch.abs({0}) + 0.5, {p[0]})", with_dim(filled))
add("reduce", "count", "fresh", "torch.sum({0}, {p[0]})", with_dim(lambda t: not is_float(t) and t.numel() > 0))
add("reduce", "sum_all", "fresh", "torch.sum({0})", one(is_float))
add("reduce", "mean_all", "fresh", "{0}.mean()", one(is_float))
add("reduce", "cumsum", "fresh", "torch.cumsum({0}, {p[0]})", with_dim())
add("reduce", "argmax", "fresh", "torch.argmax({0}, {p[0]})", with_dim(filled))
add("reduce", "softmax", "fresh", "torch.softmax({0}, {p[0]})", with_dim(filled))
add("reduce", "log_softmax", "fresh", "torch.log_softmax({0}, {p[0]})", with_dim(filled))
add("reduce", "logsumexp", "fresh", "torch.logsumexp({0}, {p[0]}, keepdim={p[1]})", with_dim(filled, keepdim))


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


add("matmul", "matmul", "fresh", "{0} @ {1}", _matmul)
add("matmul", "linear", "fresh", "F.linear({0}, {1})", _linear)
add(
    "matmul",
    "gram",
    "fresh",
    "{0} @ {0}.transpose(-2, -1)",
    one(lambda t: is_float(t) and t.dim() >= 2 and t.numel()),
)


def _outer(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, lambda t: is_float(t) and t.dim() == 1 and t.numel() > 0)
    b = a and values.pick(rng, lambda u: u.dim() == 1 and u.dtype == values.tensors[a].dtype and u.numel() > 0)
    return b and ((a, b), ())


def _vector(rng: Random, values: Values) -> Drawn | None:
    a = values.pick(rng, lambda t: is_float(t) and t.dim() > 1 and t.numel() > 0)
    t = values.tensors[a] if a else None
    b = a and values.pick(rng, lambda u: u.dim() == 1 and u.dtype == t.dtype and u.shape[0] == t.shape[-1])
    return b and ((a, b), ())


def _with_bias(rng: Random, values: Values) -> Drawn | None:
    drawn = _linear(rng, values)
    w = drawn and values.tensors[drawn[0][1]]
    bias = drawn and values.pick(rng, lambda u: u.dim() == 1 and u.dtype == w.dtype and u.shape[0] == w.shape[0])
    return bias and ((*drawn[0], bias), ())


add("matmul", "outer", "fresh", "torch.outer({0}, {1})", _outer)
add("matmul", "matvec", "fresh", "{0} @ {1}", _vector)
add("matmul", "linear_bias", "fresh", "F.linear({0}, {1}, {2})", _with_bias)
add(
    "matmul",
    "einsum",
    "fresh",
    # In eager's layout and in Thunder's, which dropout's order follows, it is contiguous only when asked for.
    'torch.einsum("...ij,...kj->...ik", {0}, {0}).contiguous()',
    one(lambda t: filled(t) and t.dim() >= 2),
)
