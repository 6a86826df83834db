"""Functions that Thunder 0.2.6 refuses, by others, or passed to PyTorch whole.

- draws in place, as in a stochastic depth: ``x.new_empty(shape).bernoulli_(p)``; `uniform_`, `normal_`, `exponential_`,
  `fill_` and `fill_diagonal_`. The numbers are those that eager PyTorch draws for a contiguous tensor;
- `torch.normal` and `randperm`;
- `linspace`, `logspace`, `tril_indices`, `triu_indices`, and `full` with ``size=``;
- `F.pad` by reflection, replication and around the edge, and all modes of `F.interpolate`;
- pools with ``ceil_mode=``, ``return_indices=``, ``count_include_pad=False`` and ``divisor_override=``;
- `F.normalize` with ``out=``, and what weights of a given length are made by (`nn.utils.parametrizations`);
- `nan_to_num` with its arguments by name, and gradients of a tensor's method `unfold` into windows side by side,
  for which Thunder takes that of `F.unfold`;
- `F.binary_cross_entropy_with_logits` with weights of another dtype;
- `backward` and `torch.autograd.grad`, whose errors say what to do;
- `quantile`, `nanquantile`, `cov`, `corrcoef`, `combinations` and `F.ctc_loss`, for whose results' shapes PyTorch's
  fake tensors need values;
- windows for `torch.stft`, and `round` with ``decimals=``;
- `F.gaussian_nll_loss`. Of a negative variance, for which PyTorch raises an error, it is no number.
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb, log, pi
from typing import Any, NoReturn

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.clang import maybe_convert_to_dtype
from thunder.core import dtypes
from thunder.core.devices import to_device, to_torch_device
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_mem.kernels.random_draws import filled, permutation
from thunder_mem.torch_functions.plain_arguments import run_whole
from thunder_mem.torch_functions.steps import are_floats, constant, reduced, wide_dtype
from thunder_mem.torch_functions.whole_gradients import VALID_VALUES
from thunder_mem.torch_functions.whole_losses import binary_cross_entropy_with_logits

__all__ = ["REFUSED", "REFUSED_METHODS"]


def _named(name: str, defaults: dict[str, Any], args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The options of a function that were given, by name."""
    given = dict(zip(defaults, args, strict=False)) | named
    if len(args) > len(defaults) or not given.keys() <= defaults.keys():
        raise TypeError(f"{name} takes {', '.join(defaults)}, not {args} and {named}")
    return given


def _filled(method: str, **defaults: float) -> Callable[..., TensorProxy]:
    """A method that fills a tensor with random numbers, by its arguments and their defaults."""

    def fill(a: TensorProxy, *args: Any, generator: None = None, **named: Any) -> TensorProxy:
        if generator is not None:
            raise NotImplementedError(f"{method} with a generator cannot be compiled; seed PyTorch's own instead")
        given = _named(method, defaults, args, named)
        numbers = tuple((defaults | given).values())
        return ltorch.copy_(a, constant(filled(method, tuple(a.shape), a.device, a.dtype, numbers)))

    fill.__name__ = method
    return fill


def _fill(a: TensorProxy, value: Any) -> TensorProxy:
    if isinstance(value, TensorProxy) and value.ndim:
        raise RuntimeError(f"fill_ takes a number, or a tensor of no dims, and not of {value.ndim}")
    return ltorch.copy_(
        a, ltorch.expand(value, a.shape) if isinstance(value, TensorProxy) else ltorch.full_like(a, value)
    )


def _fill_diagonal(a: TensorProxy, fill_value: float, wrap: bool = False) -> TensorProxy:
    if a.ndim < 2 or (a.ndim > 2 and len(set(a.shape)) > 1):
        raise RuntimeError(f"fill_diagonal_ takes a matrix, or a tensor of equal dims, not one of {tuple(a.shape)}")
    if wrap and a.shape[0] > a.shape[1]:
        raise NotImplementedError("fill_diagonal_ with wrap=True of a tall matrix cannot be compiled")
    places = [_along(d, a) for d in range(a.ndim)]
    is_diagonal = ltorch.eq(places[0], places[1])
    for place in places[2:]:
        is_diagonal = ltorch.logical_and(is_diagonal, ltorch.eq(places[0], place))
    return ltorch.copy_(a, ltorch.where(is_diagonal, fill_value, a))


def _along(dim: int, a: TensorProxy) -> TensorProxy:
    """The numbers of its places along a dim, of size 1 along the others."""
    places = ltorch.arange(a.shape[dim], device=a.device)
    return ltorch.reshape(places, [n if d == dim else 1 for d, n in enumerate(a.shape)])


def _differentiated(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name} cannot run inside a compiled function: return the loss, and call it on the result, outside"
        )

    return refuse


def _normal(
    mean: Any, std: Any = 1.0, size: Any = None, *, dtype: Any = None, device: Any = None, **kwargs: Any
) -> TensorProxy:
    """In the steps of `ATen/native/Distributions.cpp`."""
    _check_plain("torch.normal", kwargs)
    tensors = [t for t in (mean, std) if isinstance(t, TensorProxy)]
    if not tensors:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        device = torch.get_default_device() if device is None else device
        return filled("normal_", tuple(size), device, dtype, (mean, std))
    shape = torch.broadcast_shapes(*(tuple(t.shape) for t in tensors))
    scale = 1.0 if isinstance(std, TensorProxy) else std
    drawn = filled("normal_", shape, tensors[0].device, tensors[0].dtype, (0.0, scale))
    drawn = ltorch.mul(drawn, std) if isinstance(std, TensorProxy) else drawn
    return constant(ltorch.add(drawn, mean))


def _randperm(n: int, *, dtype: Any = torch.int64, device: Any = None, **kwargs: Any) -> TensorProxy:
    _check_plain("torch.randperm", kwargs)
    return permutation(n, torch.get_default_device() if device is None else device, dtype or torch.int64)


_OPTIONS: tuple[str, ...] = ("out", "requires_grad", "layout", "pin_memory")


def _check_plain(name: str, options: dict[str, Any]) -> None:
    """Refuse options such as `generator=` and `out=`, unless they have PyTorch's defaults."""
    given = [key for key, value in options.items() if not any(value is x for x in (None, False, torch.strided))]
    if given:
        raise NotImplementedError(f"{name} with {', '.join(f'{key}=' for key in given)} cannot be compiled")


def _made(function: Callable[..., Any]) -> Callable[..., TensorProxy]:
    """A function of numbers alone, on the device that is PyTorch's default while it is traced."""

    def made(*args: Any, device: Any = None, dtype: Any = None, **kwargs: Any) -> TensorProxy:
        plain = {key: kwargs.pop(key, None) for key in _OPTIONS}
        _check_plain(f"torch.{function.__name__}", plain)
        device = torch.get_default_device() if device is None else to_torch_device(to_device(device))
        if dtype is not None:
            kwargs["dtype"] = dtypes.to_torch_dtype(dtype)
        return run_whole(function, *args, device=device, **kwargs)

    return made


def _full(size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> TensorProxy:
    _check_plain("torch.full", kwargs)
    return ltorch.full(size, fill_value, dtype=dtype, device=device)


def _pad(input: TensorProxy, pad: Any, mode: str | None = "constant", value: Any = None) -> TensorProxy:
    if mode in ("constant", None):
        return ltorch.pad(input, tuple(pad), "constant", value)
    return run_whole(F.pad, input, tuple(pad), mode, value)


def _pool(function: Callable[..., Any], known: int, **defaults: Any) -> Callable[..., Any]:
    """A pool of PyTorch: by Thunder with `known` of its options, in order, and defaults of the others; else whole."""
    thunders = ltorch._torch_to_thunder_function_map[function]

    def pool(
        input: TensorProxy, kernel_size: Any, stride: Any = None, padding: Any = 0, *args: Any, **named: Any
    ) -> Any:
        given = _named(function.__name__, defaults, args, named)
        options = defaults | given
        if all(options[name] == defaults[name] for name in [*defaults][known:]):
            return thunders(input, kernel_size, stride, padding, *[*options.values()][:known])
        return run_whole(function, input, kernel_size, kernel_size if stride is None else stride, padding, **given)

    return pool


_MAX_POOLS = {
    pool: _pool(pool, 1, dilation=1, ceil_mode=False, return_indices=False)
    for pool in (F.max_pool1d, F.max_pool2d, F.max_pool3d)
}
_AVERAGE_POOLS = {
    pool: _pool(pool, 0, ceil_mode=False, count_include_pad=True, divisor_override=None)
    for pool in (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
}


def _interpolate(
    input: TensorProxy,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: Any = None,
    recompute_scale_factor: Any = None,
    antialias: bool = False,
) -> TensorProxy:
    """By Thunder where it has PyTorch's result: without aligned corners, to a size or by a whole factor."""
    known = mode in ("nearest", "nearest-exact") or (mode == "bilinear" and not align_corners)
    by_a_whole = scale_factor is None or (isinstance(scale_factor, int | float) and float(scale_factor).is_integer())
    if not known or not by_a_whole or recompute_scale_factor or antialias:
        return run_whole(
            F.interpolate, input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        )
    factor = float(scale_factor) if isinstance(scale_factor, int) else scale_factor
    return ltorch.interpolate(input, size, factor, mode, None)


def _binary_cross_entropy_with_logits(input: TensorProxy, target: TensorProxy, *args: Any, **kwargs: Any) -> Any:
    weights = [w for w in (*args, *kwargs.values()) if isinstance(w, TensorProxy)]
    if weights and not are_floats(input, target, *weights):
        written = binary_cross_entropy_with_logits(input, target, *args, **kwargs)
        if written is not None:
            return written
    return ltorch._torch_to_thunder_function_map[F.binary_cross_entropy_with_logits](input, target, *args, **kwargs)


def _normalize(
    input: TensorProxy, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: TensorProxy | None = None
) -> TensorProxy:
    normalized = ltorch.normalize(input, p, dim, eps)
    return normalized if out is None else ltorch.copy_(out, normalized)


def _weight_norm(v: TensorProxy, g: TensorProxy, dim: int = 0) -> TensorProxy:
    """`v` with the lengths `g` along a dim, which is that of all elements for -1."""
    wide = maybe_convert_to_dtype(v, wide_dtype(v))
    dims = [d for d in range(v.ndim) if dim == -1 or d != dim % v.ndim]
    squares = ltorch.mul(wide, wide)
    lengths = ltorch.sqrt(ltorch.sum(squares, dims, keepdim=dim != -1) if dims else squares)
    return maybe_convert_to_dtype(ltorch.mul(wide, ltorch.true_divide(g, lengths)), v.dtype)


def _unfold(a: TensorProxy, dimension: int, size: int, step: int) -> TensorProxy:
    """Windows side by side, as views. Others have no gradient in Thunder."""
    if not a.ndim or step != size or not 1 <= size <= a.shape[dimension]:
        return ltorch.unfold(a, dimension, size, step)
    dim = dimension % a.ndim
    count = a.shape[dim] // size
    whole = tuple(slice(0, count * size) if d == dim else slice(None) for d in range(a.ndim))
    return ltorch.movedim(ltorch.unflatten(a[whole], dim, (count, size)), dim + 1, -1)


def _nan_to_num(
    input: TensorProxy, nan: Any = 0.0, posinf: Any = None, neginf: Any = None, *, out: None = None
) -> TensorProxy:
    _check_plain("torch.nan_to_num", {"out": out})
    return ltorch.nan_to_num(input, nan, posinf, neginf)


def _gaussian_nll(
    input: TensorProxy, target: TensorProxy, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> TensorProxy:
    if not isinstance(var, TensorProxy):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        var = ltorch.full_like(input, var)
    if var.shape != input.shape and tuple(var.shape) == tuple(input.shape[:-1]):
        var = ltorch.unsqueeze(var, -1)
    var = ltorch.where(ltorch.lt(var, 0), torch.nan, var)
    # PyTorch bounds the variance's value, and not its gradient.
    missing = constant(ltorch.where(ltorch.lt(var, eps), ltorch.sub(eps, var), 0.0))
    var = ltorch.add(var, missing)
    error = ltorch.sub(input, target)
    loss = ltorch.mul(ltorch.add(ltorch.log(var), ltorch.true_divide(ltorch.mul(error, error), var)), 0.5)
    if full:
        loss = ltorch.add(loss, log(2 * pi) / 2)
    return reduced(loss, reduction)


def _quantile(function: Callable[..., Any]) -> Callable[..., TensorProxy]:
    def shape(input: TensorProxy, q: Any, dim: int | None, keepdim: bool, **_: Any) -> tuple[int, ...]:
        kept = [1 if dim is None or d == dim % input.ndim else n for d, n in enumerate(input.shape)]
        if not keepdim:
            kept = [] if dim is None else [n for d, n in enumerate(kept) if d != dim % input.ndim]
        return (*(q.shape if isinstance(q, TensorProxy) else ()), *kept)

    def quantile(
        input: TensorProxy,
        q: Any,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        out: None = None,
    ) -> TensorProxy:
        _check_plain(f"torch.{function.__name__}", {"out": out})
        return run_whole(function, input, q, dim, keepdim, interpolation=interpolation, result_shape=shape)

    return quantile


def _covariance(function: Callable[..., Any]) -> Callable[..., TensorProxy]:
    def shape(input: TensorProxy, **_: Any) -> tuple[int, ...]:
        return (input.shape[0],) * 2 if input.ndim == 2 else ()

    def covariance(input: TensorProxy, **options: Any) -> TensorProxy:
        return run_whole(function, input, result_shape=shape, **options)

    return covariance


def _combinations(input: TensorProxy, r: int = 2, with_replacement: bool = False) -> TensorProxy:
    return run_whole(torch.combinations, input, r, with_replacement, result_shape=_combinations_shape)


def _combinations_shape(input: TensorProxy, r: int, with_replacement: bool) -> tuple[int, ...]:
    n = input.shape[0]
    return comb(n + r - 1 if with_replacement else n, r), r


def _ctc_loss(
    log_probs: TensorProxy,
    targets: TensorProxy,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> TensorProxy:
    given = (log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    return run_whole(F.ctc_loss, *given, result_shape=_ctc_shape)


def _ctc_shape(
    log_probs: TensorProxy, targets: Any, input_lengths: Any, target_lengths: Any, blank: int, reduction: str, *_: Any
) -> tuple[int, ...]:
    return tuple(log_probs.shape[1:2]) if reduction == "none" and log_probs.ndim == 3 else ()


def _longest_sequences(bsym: BoundSymbol, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Zeros as arguments of `ctc_loss` or its gradient, but for tensors of lengths: those of the longest sequences."""
    probs, targets, *lengths = bsym.flat_proxy_args
    steps, words = probs.shape[0], targets.shape[-1]
    if targets.ndim == 1 and probs.ndim == 3:  # one after the other
        words //= probs.shape[1]
    of = [p for p in lengths if isinstance(p, TensorProxy) and dtypes.is_integer_dtype(p.dtype)]
    longest = dict(zip((p.name for p in of), (steps, words), strict=False))
    return {name: torch.full_like(x, longest[name]) if name in longest else x for name, x in values.items()}


VALID_VALUES["ctc_loss"] = _longest_sequences


def _round(a: TensorProxy, *, decimals: int = 0, out: None = None) -> TensorProxy:
    _check_plain("torch.round", {"out": out})
    return run_whole(torch.round, a, decimals=decimals) if decimals else ltorch.round(a)


_WINDOWS = (torch.hann_window, torch.hamming_window, torch.bartlett_window, torch.blackman_window, torch.kaiser_window)

REFUSED_METHODS: dict[str, Callable[..., Any]] = {
    "backward": _differentiated("backward()"),
    "bernoulli_": _filled("bernoulli_", p=0.5),
    "exponential_": _filled("exponential_", lambd=1.0),
    "normal_": _filled("normal_", mean=0.0, std=1.0),
    "uniform_": _filled("uniform_", **{"from": 0.0, "to": 1.0}),
    "fill_": _fill,
    "fill_diagonal_": _fill_diagonal,
    "nan_to_num": _nan_to_num,
    "unfold": _unfold,
}
"""By the name of a tensor's method: `fn(a, *args, **kwargs)` while it is traced."""

REFUSED: dict[Callable[..., Any], Callable[..., Any]] = {
    **{function: _made(function) for function in (torch.linspace, torch.logspace)},
    **{function: _made(function) for function in (torch.tril_indices, torch.triu_indices, *_WINDOWS)},
    **{function: _quantile(function) for function in (torch.quantile, torch.nanquantile)},
    **{function: _covariance(function) for function in (torch.cov, torch.corrcoef)},
    **_MAX_POOLS,
    **{getattr(torch, function.__name__): pool for function, pool in _MAX_POOLS.items()},
    **_AVERAGE_POOLS,
    torch._weight_norm: _weight_norm,
    torch.autograd.backward: _differentiated("torch.autograd.backward"),
    torch.autograd.grad: _differentiated("torch.autograd.grad"),
    torch.combinations: _combinations,
    torch.round: _round,
    torch.nan_to_num: _nan_to_num,
    torch.full: _full,
    torch.normal: _normal,
    torch.randperm: _randperm,
    F.binary_cross_entropy_with_logits: _binary_cross_entropy_with_logits,
    F.ctc_loss: _ctc_loss,
    F.gaussian_nll_loss: _gaussian_nll,
    F.interpolate: _interpolate,
    F.normalize: _normalize,
    F.pad: _pad,
}
"""The same by PyTorch's function."""
