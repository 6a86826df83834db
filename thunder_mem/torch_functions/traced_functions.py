"""Functions of PyTorch that Thunder 0.2.6 refuses, or refuses with some arguments, in others that it knows.

- `torch.cat`, `stack` and their like of a list to which more is appended later, as in a DenseNet;
- `var`, `std` and their means with ``unbiased=``;
- reductions, `cat`, `stack` and `softmax` with ``axis=`` and ``keepdims=``, NumPy's names that PyTorch takes, too;
- methods that write, such as `sigmoid_`, `clip_` and `addmm_`, which it has without the write;
- `torch.eye`, `as_tensor` of a tensor, `x.tile(2)`, and `x.clone(memory_format=...)`;
- Python's types as dtypes (``torch.zeros(3, dtype=int)``, ``mask.to(float)``), and ``non_blocking=True`` of `to`, which
  changes no value;
- `scaled_dot_product_attention(enable_gqa=True)`, which shares keys and values between heads;
- `instance_norm` of a module that tracks statistics, which Thunder silently leaves as they are;
- those of `torch_functions/refused_functions.py`.

Functions are the same for all programs, which fail or are wrong without them. Methods that write or make views are
not: see `complete_functions`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core.devices import Device
from thunder.core.interpreter import WrappedValue, _interpret_call, interpreter_needs_wrap, unwrap, wrap_const
from thunder.core.jit_ext import (
    _general_jit_lookaside_map,
    ensure_recursive_proxies,
    record_source_loc_in_symbol_header,
)
from thunder.core.proxies import TensorProxy
from thunder.torch.langctx import _method_name_to_fn_map, register_method

from thunder_mem.torch_functions.refused_functions import REFUSED, REFUSED_METHODS

__all__ = ["WITH_MORE_ARGUMENTS", "complete_functions"]


def complete_functions(is_own_program: Callable[[], bool]) -> None:
    """From now on, Thunder traces them.

    Args:
        is_own_program: whether the program that is being traced has a transform of this package. Methods that write or
            make views are for such programs: in others Thunder would miss writes through views.
    """
    _general_jit_lookaside_map.update(_WITH_DTYPE)
    _general_jit_lookaside_map.update(_OF_SEQUENCES)
    _general_jit_lookaside_map.update(_WITH_NUMPYS_NAMES)
    for name, function in _METHODS.items():
        register_method(name, function)
    _general_jit_lookaside_map.update(_TRACED)
    for name, (function, traced) in _in_own_programs(is_own_program).items():
        register_method(name, function)
        _general_jit_lookaside_map[function] = _general_jit_lookaside_map[getattr(torch.Tensor, name)] = traced


@cache
def _in_own_programs(is_own_program: Callable[[], bool]) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """By name: the method, and what traces it."""
    refused = REFUSED_METHODS | {f"{name}_": _in_place(name) for name in _METHODS_IN_PLACE}
    functions = {name: _in_own(name, function, is_own_program) for name, function in refused.items()}
    return {name: (function, _traced(function)) for name, function in functions.items()}


_METHODS_IN_PLACE = (
    "absolute", "addbmm", "addmm", "addmv", "addr", "baddbmm", "clamp_max", "clamp_min", "clip", "detach", "divide",
    "frac", "hypot", "index_fill", "index_reduce", "logit", "masked_scatter", "multiply", "nan_to_num", "negative",
    "scatter_reduce", "sgn", "sigmoid", "sinc", "subtract", "xlogy",
)  # fmt: skip


def _in_place(name: str) -> Callable[..., TensorProxy]:
    def method(a: TensorProxy, *args: Any, **kwargs: Any) -> TensorProxy:
        return ltorch.copy_(a, _method_name_to_fn_map[name](a, *args, **kwargs))

    return method


def _in_own(name: str, function: Callable[..., Any], is_own_program: Callable[[], bool]) -> Callable[..., Any]:
    thunders = _THUNDERS.get(name)

    def method(*args: Any, **kwargs: Any) -> Any:
        if is_own_program():
            return function(*args, **kwargs)
        if thunders is None:
            raise AttributeError(f"Unknown attribute {name}")
        return thunders(*args, **kwargs)

    return method


def _traced(function: Callable[..., Any]) -> Callable[..., Any]:
    return ensure_recursive_proxies(
        interpreter_needs_wrap(record_source_loc_in_symbol_header(_with_pytorchs_dtype(function)))
    )


_THUNDERS = dict(_method_name_to_fn_map)  # as they are before any is replaced


_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def _with_pytorchs_dtype(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def of_dtype(*args: Any, **kwargs: Any) -> Any:
        if "dtype" in kwargs and (kind := unwrap(given := kwargs["dtype"])) in _DTYPES:
            kwargs["dtype"] = wrap_const(_DTYPES[kind]) if isinstance(given, WrappedValue) else _DTYPES[kind]
        return function(*args, **kwargs)

    return of_dtype


_MAKERS = (
    *("arange", "empty", "ones", "rand", "randint", "randn", "tensor", "zeros"),
    *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
)
_WITH_DTYPE = {
    function: _with_pytorchs_dtype(_general_jit_lookaside_map[function])
    for function in (getattr(torch, name) for name in _MAKERS)
    if function in _general_jit_lookaside_map
}


def _to(a: TensorProxy, *args: Any, non_blocking: bool = False, copy: bool = False, **kwargs: Any) -> TensorProxy:
    of_device = bool(args) and isinstance(args[0], (str, torch.device, Device))
    wanted, flags = args[: 1 + of_device], args[1 + of_device :]  # flags: non_blocking, copy
    wanted = tuple(_DTYPES.get(x, x) if isinstance(x, type) else x for x in wanted)
    return ltorch.to(a, *wanted, copy=flags[1] if len(flags) > 1 else copy, **kwargs)


def _of_a_tuple(thunders: Callable[..., Any]) -> Callable[..., Any]:
    """Thunder remembers a list as it is at the call, and cannot trace what a program does with it afterwards."""

    @wraps(thunders)
    def of_a_tuple(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(unwrap(tensors), list):
            tensors = _interpret_call(tuple, tensors)
        return thunders(tensors, *args, **kwargs)

    return of_a_tuple


_OF_SEQUENCES = {
    function: _of_a_tuple(_general_jit_lookaside_map[function])
    for function in (torch.cat, torch.stack, torch.hstack, torch.vstack, torch.dstack, torch.column_stack)
    if function in _general_jit_lookaside_map
}


def _with_unbiased(thunders: Callable[..., Any]) -> Callable[..., Any]:
    """The variance, or what is made of it, with PyTorch's older arguments, too: ``(a, unbiased)`` and by name."""

    @wraps(thunders)
    def variance(
        a: TensorProxy, dim: Any = None, unbiased: bool | None = None, keepdim: Any = None, **kwargs: Any
    ) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        if unbiased is not None:
            kwargs["correction"] = int(unbiased)
        return thunders(a, dim, keepdim=bool(keepdim), **{k: v for k, v in kwargs.items() if v is not None})

    return variance


def _with_numpys_names(thunders: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(thunders)
    def named(*args: Any, **kwargs: Any) -> Any:
        return thunders(*args, **{_NUMPYS_NAMES.get(name, name): value for name, value in kwargs.items()})

    return named


_NUMPYS_NAMES = {"axis": "dim", "keepdims": "keepdim"}
_REDUCTIONS = ("sum", "mean", "prod", "argmax", "argmin", "amax", "amin", "max", "min", "all", "any", "softmax")


def _eye(n: int, m: int | None = None, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
    rows = ltorch.unsqueeze(ltorch.arange(n, device=device), 1)
    ones = ltorch.eq(rows, ltorch.arange(n if m is None else m, device=device))
    return ltorch.to(ones, torch.get_default_dtype() if dtype is None else dtype)


def _as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Any:
    if isinstance(data, TensorProxy):
        return ltorch.to(data, dtype=dtype, device=device) if dtype is not None or device is not None else data
    return ltorch.tensor(data, dtype=dtype, device=device)


def _tile(a: TensorProxy, *dims: Any) -> TensorProxy:
    (times,) = dims if len(dims) == 1 and not isinstance(dims[0], int) else (dims,)
    return ltorch.repeat(a, *(1,) * (a.ndim - len(times)), *times)


def _clone(a: TensorProxy, *, memory_format: Any = torch.preserve_format) -> TensorProxy:
    copied = ltorch.clone(a)
    return copied if memory_format is torch.preserve_format else ltorch.contiguous(copied, memory_format=memory_format)


def _attention(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> TensorProxy:
    if enable_gqa:
        key, value = (_for_heads(t, query.shape[-3]) for t in (key, value))
    return ltorch.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def _for_heads(t: TensorProxy, heads: int) -> TensorProxy:
    """Keys or values (..., K, S, D), each head as often in a row as there are `heads` of queries for it."""
    times, rest = divmod(heads, t.shape[-3])
    if rest:
        raise RuntimeError(f"enable_gqa=True shares {t.shape[-3]} heads of keys or values between {heads} of queries")
    if times == 1:
        return t
    *batch, of_keys, rows, size = t.shape
    shown = ltorch.expand(ltorch.unsqueeze(t, -3), (*batch, of_keys, times, rows, size))
    return ltorch.reshape(shown, (*batch, heads, rows, size))


def _instance_norm(
    a: TensorProxy,
    running_mean: TensorProxy | None = None,
    running_var: TensorProxy | None = None,
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> TensorProxy:
    if not use_input_stats or running_mean is None or running_var is None:
        return ltorch.instance_norm(a, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    out = ltorch.instance_norm(a, None, None, weight, bias, True, momentum, eps)
    fixed = ltorch.to(ltorch.detach(a), running_mean.dtype)
    variance, mean = ltorch.var_mean(fixed, tuple(range(2, a.ndim)))
    for statistics, of_instances in ((running_mean, mean), (running_var, variance)):
        ltorch.copy_(statistics, statistics * (1 - momentum) + ltorch.mean(of_instances, 0) * momentum)
    return out


_VARIANCES = {
    name: _with_numpys_names(_with_unbiased(getattr(ltorch, name)))
    for name in ("var", "std", "var_mean")
    if hasattr(ltorch, name)
}
_WITH_NUMPYS_NAMES = {
    **{
        function: _with_numpys_names(_with_pytorchs_dtype(_general_jit_lookaside_map[function]))
        for function in (getattr(torch, name) for name in _REDUCTIONS)
        if function in _general_jit_lookaside_map
    },
    **{function: _with_numpys_names(traced) for function, traced in _OF_SEQUENCES.items()},
}
_METHODS: dict[str, Callable[..., Any]] = {
    **{name: _with_numpys_names(_method_name_to_fn_map[name]) for name in _REDUCTIONS},
    **{name: _VARIANCES[name] for name in ("var", "std")},
    "to": _to,
    "tile": _tile,
    "clone": _clone,
    **{name: REFUSED[getattr(torch, name)] for name in ("quantile", "nanquantile", "cov", "corrcoef", "round")},
}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): function for name, function in _VARIANCES.items()},
    torch.Tensor.var: _VARIANCES["var"],
    torch.Tensor.std: _VARIANCES["std"],
    torch.eye: _eye,
    torch.as_tensor: _as_tensor,
    torch.Tensor.to: _to,
    torch.tile: _tile,
    torch.Tensor.tile: _tile,
    torch.clone: _clone,
    torch.Tensor.clone: _clone,
    F.instance_norm: _instance_norm,
    F.scaled_dot_product_attention: _attention,
    **REFUSED,
}
WITH_MORE_ARGUMENTS: dict[Any, Callable[..., Any]] = {ltorch.scaled_dot_product_attention.id: _attention}
"""By the id of Thunder's symbol: the function with all of PyTorch's arguments, for ThunderFX."""
# A method is looked up as such a function, too: interpreted, its lines would stand for the program's.
_TRACED = {
    original: _traced(replacement)
    for original, replacement in (_FUNCTIONS | {function: function for function in _METHODS.values()}).items()
}
