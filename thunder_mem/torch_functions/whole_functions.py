"""Functions that Thunder passes to PyTorch whole, written out in operations that it differentiates and fuses.

Thunder registers hundreds of PyTorch's functions by themselves. Such a function runs as it is. Its gradient runs it
once more, under autograd, and makes the gradients of all its arguments. No executor fuses it, and no tile or chunk runs
it. These mean the same as a few operations of `thunder.torch`. At kinks the derivatives are PyTorch's, such as that of
`clamp` at its bounds, where Thunder's own has 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.clang import maybe_convert_to_dtype
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy

from thunder_mem.torch_functions.loss_decompositions import addmm
from thunder_mem.torch_functions.multi_head_attention import masked_attention_with_dropout, multi_head_attention
from thunder_mem.torch_functions.random_functions import RANDOM
from thunder_mem.torch_functions.recurrent import RECURRENT
from thunder_mem.torch_functions.steps import are_floats, clamp, constant, norm, wide_dtype
from thunder_mem.torch_functions.whole_losses import LOSSES, LOSSES_WITHOUT_DERIVATIVE

__all__ = ["FUSED", "WRITTEN_OUT", "Written"]

Written = Callable[..., Any]


def _narrow(a: TensorProxy, dim: int, start: int, length: int) -> TensorProxy | None:
    if not (isinstance(start, int) and isinstance(length, int)):
        return None
    dim = dim % a.ndim
    start = start + a.shape[dim] if start < 0 else start
    return _part(a, dim, start, start + length)


def _part(a: TensorProxy, dim: int, start: int, end: int) -> TensorProxy:
    starts, ends = [0] * a.ndim, list(a.shape)
    starts[dim], ends[dim] = start, end
    return prims.slice_prim(a, starts, ends)


def _roll(a: TensorProxy, shifts: Any, dims: Any = None) -> TensorProxy | None:
    """A roll along one dimension; along several it would be several copies."""
    (shift,) = (shifts,) if isinstance(shifts, int) else shifts
    if dims is None or dims == ():
        flat = _roll(ltorch.reshape(a, (a.numel,)), shift, 0)
        return None if flat is None else ltorch.reshape(flat, a.shape)
    (dim,) = (dims % a.ndim,) if isinstance(dims, int) else (d % a.ndim for d in dims)
    if not a.numel or not (cut := -shift % a.shape[dim]):
        return None
    return ltorch.cat([_part(a, dim, cut, a.shape[dim]), _part(a, dim, 0, cut)], dim)


def _pixel_shuffle(a: TensorProxy, upscale_factor: int) -> TensorProxy | None:
    *outer, c, h, w = a.shape
    r = upscale_factor
    if r < 2 or not a.numel or h == w == 1:  # of single pixels it would be a view, where PyTorch copies
        return None
    parts = ltorch.reshape(a, (prod(outer), c // r**2, r, r, h, w))
    return ltorch.reshape(ltorch.permute(parts, (0, 1, 4, 2, 5, 3)), (*outer, c // r**2, h * r, w * r))


def _pixel_unshuffle(a: TensorProxy, downscale_factor: int) -> TensorProxy | None:
    *outer, c, h, w = a.shape
    r = downscale_factor
    if r < 2 or not a.numel or h == w == r:
        return None
    parts = ltorch.reshape(a, (prod(outer), c, h // r, r, w // r, r))
    return ltorch.reshape(ltorch.permute(parts, (0, 1, 3, 5, 2, 4)), (*outer, c * r**2, h // r, w // r))


def _diff(a: TensorProxy, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> TensorProxy | None:
    dim = dim % a.ndim
    if n != 1 or prepend is not None or append is not None or a.shape[dim] < 2 or dtypes.is_boolean_dtype(a.dtype):
        return None
    return ltorch.sub(_part(a, dim, 1, a.shape[dim]), _part(a, dim, 0, a.shape[dim] - 1))


def _divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> TensorProxy | None:
    return ltorch.true_divide(a, b) if rounding_mode is None else None


def _lerp(start: TensorProxy, end: TensorProxy, weight: float | TensorProxy) -> TensorProxy | None:
    if not are_floats(start, end, *([weight] if isinstance(weight, TensorProxy) else [])):
        return None
    step = ltorch.sub(end, start)
    from_start = ltorch.add(start, ltorch.mul(step, weight))
    from_end = ltorch.sub(end, ltorch.mul(step, ltorch.sub(1, weight)))
    if isinstance(weight, TensorProxy):
        return ltorch.where(ltorch.lt(ltorch.abs(weight), 0.5), from_start, from_end)
    return from_start if abs(weight) < 0.5 else from_end


def _cosine_similarity(a: TensorProxy, b: TensorProxy, dim: int = 1, eps: float = 1e-8) -> TensorProxy | None:
    if a.ndim != b.ndim or not a.ndim or a.shape[dim] != b.shape[dim] or not are_floats(a, b):
        return None
    wide = wide_dtype(a)
    directions = [ltorch.true_divide(x, _length(x, dim, eps)) for x in (ltorch.to(a, wide), ltorch.to(b, wide))]
    return ltorch.to(ltorch.sum(ltorch.mul(*directions), dim), a.dtype)


def _vector_norm(
    a: TensorProxy, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> TensorProxy | None:
    """The Euclidean norm of all elements, or along some dims."""
    if ord != 2 or dtype is not None or not are_floats(a) or dim in ((), []):
        return None
    length, is_zero = norm(ltorch.to(a, wide_dtype(a)), dim, keepdim)
    return ltorch.to(ltorch.where(is_zero, 0.0, length), a.dtype)


def _linalg_norm(
    a: TensorProxy, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> TensorProxy | None:
    """Where that is the Euclidean norm of elements: an order and two dims make the norm of a matrix."""
    of_a_vector = isinstance(dim, int) or (dim is None and a.ndim == 1) or (isinstance(dim, Sequence) and len(dim) == 1)
    return _vector_norm(a, 2 if ord is None else ord, dim, keepdim, dtype=dtype) if ord is None or of_a_vector else None


def _norm(
    a: TensorProxy, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> TensorProxy | None:
    return _vector_norm(a, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


def _length(a: TensorProxy, dim: int, eps: float) -> TensorProxy:
    """The norm, at least `eps`, with the derivative of the norm."""
    length, is_zero = norm(a, dim, keepdim=True)
    missing = constant(ltorch.where(ltorch.lt(length, eps), ltorch.sub(eps, length), 0.0))
    return ltorch.where(is_zero, eps, ltorch.add(length, missing))


def _normalize(
    a: TensorProxy, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None
) -> TensorProxy | None:
    """Of zeros Thunder's own has a gradient that is no number."""
    if p != 2 or not isinstance(dim, int) or out is not None or not are_floats(a):
        return None
    wide = maybe_convert_to_dtype(a, wide_dtype(a))
    length, is_zero = norm(wide, dim, keepdim=True)
    is_short = ltorch.logical_or(is_zero, ltorch.lt(length, eps))
    return maybe_convert_to_dtype(ltorch.true_divide(wide, ltorch.where(is_short, eps, length)), a.dtype)


def _lstm_cell(
    a: TensorProxy,
    hx: Sequence[TensorProxy],
    w_ih: TensorProxy,
    w_hh: TensorProxy,
    b_ih: TensorProxy | None = None,
    b_hh: TensorProxy | None = None,
) -> tuple[TensorProxy, TensorProxy]:
    """One step; as a whole it has no gradient of `hx`, because that is a sequence."""
    hidden, cell = hx
    gates = ltorch.add(ltorch.linear(a, w_ih, b_ih), ltorch.linear(hidden, w_hh, b_hh))
    taken, kept, new, shown = ltorch.chunk(gates, 4, -1)
    taken, kept, new, shown = ltorch.sigmoid(taken), ltorch.sigmoid(kept), ltorch.tanh(new), ltorch.sigmoid(shown)
    after = ltorch.add(ltorch.mul(kept, cell), ltorch.mul(taken, new))
    return ltorch.mul(shown, ltorch.tanh(after)), after


def _meshgrid(*tensors: Any, indexing: str | None = None) -> Any:
    """Of a sequence, in which gradients would be lost, as of its elements."""
    if len(tensors) != 1 or isinstance(tensors[0], TensorProxy):
        return None
    return ltorch._torch_to_thunder_function_map[torch.meshgrid](*tensors[0], indexing=indexing)


def _cast(dtype: torch.dtype) -> Written:
    return lambda a, *, memory_format=torch.preserve_format: (
        ltorch.to(a, dtype) if memory_format is torch.preserve_format else None
    )


_CASTS: dict[Callable[..., Any], Written] = {
    torch.Tensor.bfloat16: _cast(torch.bfloat16),
    torch.Tensor.bool: _cast(torch.bool),
    torch.Tensor.byte: _cast(torch.uint8),
    torch.Tensor.char: _cast(torch.int8),
    torch.Tensor.double: _cast(torch.float64),
    torch.Tensor.half: _cast(torch.float16),
    torch.Tensor.int: _cast(torch.int32),
    torch.Tensor.short: _cast(torch.int16),
}

_ALWAYS: dict[Callable[..., Any], Written] = {
    **_CASTS,
    torch.absolute: ltorch.abs,
    torch.diff: _diff,
    torch.divide: _divide,
    torch.dot: ltorch.matmul,
    torch.lerp: _lerp,
    torch.lstm_cell: _lstm_cell,
    torch.meshgrid: _meshgrid,
    torch.mm: ltorch.matmul,
    torch.moveaxis: ltorch.movedim,
    torch.multiply: ltorch.mul,
    torch.mv: ltorch.matmul,
    torch.narrow: _narrow,
    torch.negative: ltorch.neg,
    F.normalize: _normalize,
    F.multi_head_attention_forward: multi_head_attention,
    torch.rsub: lambda a, b, alpha=1: ltorch.sub(b, a, alpha=alpha),
    F.scaled_dot_product_attention: masked_attention_with_dropout,
    torch.subtract: ltorch.sub,
    torch.swapaxes: ltorch.transpose,
    torch.swapdims: ltorch.transpose,
    # Of their other argument they read the shape alone: it shares no memory with the result.
    torch.Tensor.expand_as: lambda a, other: ltorch.expand(a, other.shape),
    torch.Tensor.reshape_as: lambda a, other: ltorch.reshape(a, other.shape),
    torch.Tensor.view_as: lambda a, other: ltorch.view(a, other.shape),
}

_WHERE_FUSED: dict[Callable[..., Any], Written] = {
    torch.addmm: addmm,
    torch.clamp: clamp,
    torch.clamp_max: lambda a, max: clamp(a, None, max),
    torch.clamp_min: lambda a, min: clamp(a, min),
    torch.clip: clamp,
    F.cosine_similarity: _cosine_similarity,
    F.pixel_shuffle: _pixel_shuffle,
    F.pixel_unshuffle: _pixel_unshuffle,
    torch.linalg.norm: _linalg_norm,
    torch.linalg.vector_norm: _vector_norm,
    torch.norm: _norm,
    torch.roll: _roll,
}


def _by_symbol(written: dict[Callable[..., Any], Written]) -> dict[Any, Written]:
    known = ltorch._torch_to_thunder_function_map
    return {known[function].id: fn for function, fn in written.items() if function in known}


WRITTEN_OUT = _by_symbol(_ALWAYS | RANDOM | RECURRENT | LOSSES_WITHOUT_DERIVATIVE)
"""By symbol id: `fn(*args, **kwargs)`, which means the same, or None where it does not know the arguments."""

FUSED = _by_symbol(_WHERE_FUSED | LOSSES)
"""The same for functions of several steps: without fusion each step would be a tensor."""
