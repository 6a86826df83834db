"""Decompositions of operations that hide a sum over rows, with the sum as an operation of its own.

A mean over rows is not a mean of chunk means: the chunker needs the sum, and the divisor of the whole batch. Operations
whose own decomposition by Thunder has that form (`mse_loss`) are not listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.sharding.op_rules import pointwise
from thunder_mem.sharding.propagation import RULES, RuleError
from thunder_mem.torch_functions.steps import reduced
from thunder_mem.trace.rebuilding import recorded

__all__ = ["DECOMPOSITIONS", "STACKS", "addmm", "decomposed", "written_out"]

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
"""By symbol id: `fn(*args, **kwargs)`, written in `thunder.torch` ops, that means the same as the op
but keeps the sum over rows apart from what it is divided by; or None when it has nothing to say."""


def decomposed(bsym: BoundSymbol, trace: TraceCtx) -> BoundSymbol:
    """The same bound symbol with subsymbols that the chunker can split, if a decomposition is known."""
    fn = DECOMPOSITIONS.get(bsym.sym.id)
    subsymbols: Sequence[BoundSymbol] = bsym.subsymbols
    if fn is not None:
        subsymbols = written_out(bsym, trace, fn) or subsymbols
    if not subsymbols:
        return bsym
    new = [decomposed(b, trace) for b in subsymbols]
    if len(new) == len(bsym.subsymbols) and all(a is b for a, b in zip(new, bsym.subsymbols, strict=True)):
        return bsym
    return bsym.from_bsym(subsymbols=tuple(new))


def written_out(bsym: BoundSymbol, trace: TraceCtx, fn: Callable[..., Any]) -> Sequence[BoundSymbol]:
    """What `fn` records for a bound symbol's arguments, with its results; none if it does not know these arguments.

    Args:
        bsym: of one result, or of several.
        trace: in which it stands.
        fn: `fn(*args, **kwargs)`, written in `thunder.torch` ops.
    """
    result = None
    with suppress(Exception), recorded(trace) as scope:
        result = langctx(Languages.TORCH)(fn)(*bsym.args, **bsym.kwargs)
    made = [p for p in (result if isinstance(result, tuple) else (result,)) if isinstance(p, TensorProxy)]
    outs = bsym.flat_proxy_outs
    if [(p.shape, p.dtype) for p in made] != [(p.shape, p.dtype) for p in outs]:
        return ()
    if not {p.name for p in made}.isdisjoint(p.name for p in bsym.flat_proxy_args):  # it is an argument
        return ()
    swap = {variableify(new): out for new, out in zip(made, outs, strict=True)}
    parts = [b.from_bsym_swap_proxies(swap) for b in scope]
    for b in parts:
        b.source_filename, b.source_positions = bsym.source_filename, bsym.source_positions
    return parts


def _weights_of(target: TensorProxy, weight: TensorProxy) -> TensorProxy:
    """The class weight of every row; `target` holds valid classes only."""
    return ltorch.reshape(ltorch.index_select(weight, 0, ltorch.reshape(target, (-1,))), target.shape)


def _class_loss(
    log_p: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None,
    ignore_index: int,
    reduction: str,
    smoothing: float,
    dtype: Any,
) -> TensorProxy:
    """The negative log-likelihood of class indices, with the sum over rows apart from its divisor.

    Thunder's own decomposition pads and negates the whole of `log_p`. Its backward for "sum" and "none" fails in
    torch 2.11 (`nll_loss_backward` receives a float64 total weight).
    """
    dim = 1 if log_p.ndim > 1 else 0
    valid = ltorch.ne(target, ignore_index)
    index = ltorch.where(valid, target, 0)
    # `take_along_dim` would not look whether the index is inside.
    picked = ltorch.squeeze(ltorch.gather(log_p, dim, ltorch.unsqueeze(index, dim)), dim)
    each = ltorch.where(valid, ltorch.neg(picked), 0.0)
    row_weight = None
    if weight is not None:
        weight = ltorch.to(weight, log_p.dtype)
        row_weight = _weights_of(index, weight)
        each = ltorch.mul(each, row_weight)
    if smoothing:
        per_class = log_p if weight is None else ltorch.mul(log_p, _along_classes(weight, log_p, dim))
        smooth = ltorch.where(valid, ltorch.neg(ltorch.sum(per_class, dim)), 0.0)
        each = ltorch.add(ltorch.mul(each, 1.0 - smoothing), ltorch.mul(smooth, smoothing / log_p.shape[dim]))
    if reduction == "none":
        return ltorch.to(each, dtype)
    total = ltorch.sum(each)
    if reduction == "mean":
        count = ltorch.to(valid, log_p.dtype) if row_weight is None else ltorch.where(valid, row_weight, 0.0)
        total = ltorch.true_divide(total, ltorch.sum(count))
    return ltorch.to(total, dtype)


def _along_classes(weight: TensorProxy, log_p: TensorProxy, dim: int) -> TensorProxy:
    return ltorch.reshape(weight, [log_p.shape[dim] if d == dim else 1 for d in range(log_p.ndim)])


def _wide(dtype: Any) -> Any:
    """The dtype to compute a loss in: float32 for 16-bit logits, whose log-probabilities have two digits."""
    dtype = dtypes.to_dtype(dtype)
    return dtypes.float32 if dtype.bytes < 4 else dtype


def _cross_entropy(
    a, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    if dtypes.is_inexact_dtype(target.dtype) or size_average is not None or reduce is not None:
        return None
    log_p = ltorch.log_softmax(ltorch.to(a, _wide(a.dtype)), 1 if a.ndim > 1 else 0)
    return _class_loss(log_p, target, weight, ignore_index, reduction, label_smoothing, a.dtype)


def _nll_loss(a, target, weight=None, ignore_index=-100, reduction="mean"):
    ignore_index = -100 if ignore_index is None else ignore_index  # None is Thunder's for torch's default
    return _class_loss(ltorch.to(a, _wide(a.dtype)), target, weight, ignore_index, reduction, 0.0, a.dtype)


DECOMPOSITIONS[ltorch.cross_entropy.id] = _cross_entropy
DECOMPOSITIONS[ltorch.nll_loss.id] = _nll_loss


def _elementwise_loss(symbol: Any) -> Callable[..., Any]:
    """An elementwise torch loss: its `reduction="none"`, then the reduction."""

    def decomposition(a, target, *args, reduction="mean", size_average=None, reduce=None, **kwargs):
        if reduction == "none" or size_average is not None or reduce is not None or args:
            return None
        return reduced(symbol(a, target, reduction="none", **kwargs), reduction, a.shape[0] if a.ndim else 1)

    return decomposition


def _elementwise_rule(a, target, *args, reduction="mean", **kwargs):
    if reduction != "none":
        raise RuleError(f"it reduces over rows inside (reduction={reduction!r})")
    return pointwise(a, target, *args, **kwargs)


# Thunder passes these to torch whole, without a decomposition.
for _name in ("kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits", "l1_loss", "smooth_l1_loss",
              "huber_loss", "soft_margin_loss"):  # fmt: skip
    _symbol = ltorch._torch_to_thunder_function_map.get(getattr(torch.nn.functional, _name))
    if _symbol is not None and _symbol.id not in RULES:
        RULES[_symbol.id] = _elementwise_rule
        DECOMPOSITIONS[_symbol.id] = _elementwise_loss(_symbol)


def addmm(bias, a, b, *, beta=1, alpha=1):
    if not beta:  # the bias is ignored, also if it is no number
        return None
    of_rows = ltorch.matmul(a, b)
    of_rows = of_rows if alpha == 1 else ltorch.mul(of_rows, alpha)
    return ltorch.add(of_rows, bias if beta == 1 else ltorch.mul(bias, beta))


def _inner(a, b):
    return ltorch.matmul(a, ltorch.transpose(b, 0, 1)) if a.ndim > 1 and b.ndim == 2 else None


def _einsum(equation, *operands):
    """Rows times a matrix: Thunder's own lays rows out in an order that depends on the hash seed."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(operands) != 2 or "." in equation or any(len(set(x)) < len(x) for x in (*terms, result)):
        return None
    for (x, rows), (w, matrix) in (pairs := list(zip(operands, terms, strict=True)), pairs[::-1]):
        summed = set(matrix) - set(result)
        if len(matrix) != 2 or len(summed) != 1 or set(rows) & set(matrix) != summed:
            continue
        (c,) = summed
        (v,) = set(matrix) - summed
        made = rows.replace(c, "") + v
        if set(made) != set(result):
            continue
        product = ltorch.matmul(_permuted(x, rows, made[:-1] + c), _permuted(w, matrix, c + v))
        return _permuted(product, made, result)
    return None


def _permuted(a: TensorProxy, dims: str, wanted: str) -> TensorProxy:
    return a if dims == wanted else ltorch.permute(a, [dims.index(d) for d in wanted])


def _hstack(tensors):
    tensors = [ltorch.reshape(t, (1,)) if t.ndim == 0 else t for t in tensors]
    return ltorch.cat(tensors, 0 if tensors[0].ndim == 1 else 1)


def _vstack(tensors):
    return ltorch.cat([ltorch.reshape(t, (1, t.numel)) if t.ndim < 2 else t for t in tensors], 0)


def _dstack(tensors):
    flat = [ltorch.reshape(t, (1, t.numel)) if t.ndim < 2 else t for t in tensors]
    return ltorch.cat([ltorch.unsqueeze(t, 2) if t.ndim == 2 else t for t in flat], 2)


def _column_stack(tensors):
    return ltorch.cat([ltorch.reshape(t, (t.numel, 1)) if t.ndim < 2 else t for t in tensors], 1)


STACKS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.hstack: _hstack,
    torch.vstack: _vstack,
    torch.row_stack: _vstack,
    torch.dstack: _dstack,
    torch.column_stack: _column_stack,
}
"""By PyTorch's function: the same of a sequence of tensors, as a concatenation."""

# Thunder passes these to torch whole, except `einsum`.
_OTHERS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.addmm: addmm,
    torch.mm: ltorch.matmul,
    torch.inner: _inner,
    torch.einsum: _einsum,
    **STACKS,
}
for _torch_fn, _decomposition in _OTHERS.items():
    _symbol = ltorch._torch_to_thunder_function_map.get(_torch_fn)
    if _symbol is not None:
        DECOMPOSITIONS[_symbol.id] = _decomposition
