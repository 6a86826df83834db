"""Activations and softmax by PyTorch's kernels, which keep one tensor: the result if possible, else the argument.

The next operation usually keeps the result for the backward anyway. So operations that can be differentiated from
their result keep the result. Most of the kernels can write the argument's gradient over the result's, which
`rewrites/buffer_reuse.py` asks of them where nothing reads the result's gradient later.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.transforms import get_grad, put_grad

from thunder_mem.kernels.in_place import register_in_place
from thunder_mem.kernels.kernel_executor import is_float, mem_kernels_ex, register

__all__: list[str] = []

_aten = torch.ops.aten
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805

# Per operation the derivative of a gradient and what is kept. Further parameters are the operation's own. `over` is
# empty, or PyTorch's `grad_input`, the memory for the result.
_BY_ARGUMENT: dict[Symbol, Callable[..., torch.Tensor]] = {
    ltorch.celu: lambda g, a, alpha, **over: _aten.elu_backward(g, alpha, 1.0, 1.0 / alpha, False, a, **over),
    ltorch.elu: lambda g, a, alpha, **over: _aten.elu_backward(g, alpha, 1.0, 1.0, False, a, **over),
    ltorch.gelu: lambda g, a, approximate, **over: _aten.gelu_backward(g, a, approximate=approximate, **over),
    ltorch.hardshrink: lambda g, a, lambd, **over: _aten.hardshrink_backward(g, a, lambd, **over),
    ltorch.hardsigmoid: lambda g, a, **over: _aten.hardsigmoid_backward(g, a, **over),
    ltorch.hardswish: lambda g, a: _aten.hardswish_backward(g, a),
    ltorch.mish: lambda g, a: _aten.mish_backward(g, a),
    ltorch.selu: lambda g, a, **over: _aten.elu_backward(g, _SELU_ALPHA, _SELU_SCALE, 1.0, False, a, **over),
    ltorch.silu: lambda g, a, **over: _aten.silu_backward(g, a, **over),
    ltorch.softplus: lambda g, a, beta, threshold, **over: _aten.softplus_backward(g, a, beta, threshold, **over),
    ltorch.softshrink: lambda g, a, lambd, **over: _aten.softshrink_backward(g, a, lambd, **over),
}
_BY_RESULT: dict[Symbol, Callable[..., torch.Tensor]] = {
    ltorch.hardtanh: lambda g, out, min_val, max_val, **over: _aten.hardtanh_backward(g, out, min_val, max_val, **over),
    ltorch.leaky_relu: lambda g, out, negative_slope, **over: _aten.leaky_relu_backward(
        g, out, negative_slope, True, **over
    ),
    ltorch.relu: lambda g, out, **over: _aten.threshold_backward(g, out, 0, **over),
    ltorch.relu6: lambda g, out, **over: _aten.hardtanh_backward(g, out, 0.0, 6.0, **over),
    ltorch.tanh: lambda g, out, **over: _aten.tanh_backward(g, out, **over),
}


def _parameters(operation: Symbol, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, without the tensor."""
    call = signature(operation.meta).bind(*args, **kwargs)
    call.apply_defaults()
    return dict(list(call.arguments.items())[1:])


def _is_supported(operation: Symbol, a: Any, *args: Any, **kwargs: Any) -> bool:
    given = _parameters(operation, a, *args, **kwargs)
    if not is_float(a) or given.pop("inplace", False) or any(isinstance(x, NumberProxy) for x in given.values()):
        return False
    # Below zero the result does not show on which side of the kink the argument was.
    return given.get("negative_slope", 0) >= 0 and given.get("alpha", 1) != 0


def _like_kept(grad: TensorProxy, kept: TensorProxy, **_: Any) -> TensorProxy:
    return TensorProxy(like=kept, requires_grad=False)


def _register_backward(name: str, derivative: Callable[..., torch.Tensor]) -> Symbol:
    backward = mem_kernels_ex.register_operator(f"mem_{name}_backward", meta=_like_kept, fn=derivative)
    if "over" in signature(derivative).parameters:

        def over_gradient(grad: torch.Tensor, kept: torch.Tensor, **given: Any) -> torch.Tensor:
            over = {"grad_input": grad} if grad.is_contiguous() and grad.dtype == kept.dtype else {}
            return derivative(grad, kept, **given, **over)

        register_in_place(backward, f"{backward.name}_over_gradient", over_gradient)
    return backward


def _register(operation: Symbol, derivative: Callable[..., torch.Tensor], *, by_result: bool) -> None:
    backward = _register_backward(operation.name, derivative)
    names = [name for name in list(signature(derivative).parameters)[2:] if name != "over"]

    def differentiate(a: TensorProxy, *args: Any, **kwargs: Any) -> TensorProxy:
        out = operation(a, *args, **kwargs)
        given = _parameters(operation, a, *args, **kwargs)
        kept = out if by_result else a
        put_grad(a, backward(get_grad(out), kept, **{name: given[name] for name in names}))
        return out

    register(operation, partial(_is_supported, operation), differentiate)


for _operation, _derivative in _BY_ARGUMENT.items():
    _register(_operation, _derivative, by_result=False)
for _operation, _derivative in _BY_RESULT.items():
    _register(_operation, _derivative, by_result=True)


# The torch executor knows no sigmoid: Thunder has three operations for it.
_sigmoid = mem_kernels_ex.register_operator("mem_sigmoid", meta=lambda a: _like_kept(a, a), fn=torch.sigmoid)
_sigmoid_backward = _register_backward("sigmoid", lambda g, out, **over: _aten.sigmoid_backward(g, out, **over))


def _differentiate_sigmoid(a: TensorProxy) -> TensorProxy:
    out = _sigmoid(a)
    put_grad(a, _sigmoid_backward(get_grad(out), out))
    return out


mem_kernels_ex.register_implementation(
    ltorch.sigmoid, _sigmoid, checker=is_float, grad_transform=_differentiate_sigmoid
)


_softmax_backward = mem_kernels_ex.register_operator(
    "mem_softmax_backward",
    meta=lambda grad, out, dim: _like_kept(grad, out),
    fn=lambda grad, out, dim: _aten._softmax_backward_data(grad, out, dim, out.dtype),
)


def _is_softmax(a: Any, dim: Any, *, dtype: Any = None) -> bool:
    kept = None if dtype is None else dtypes.to_dtype(dtype)
    return is_float(a) and type(dim) is int and (kept is None or dtypes.is_float_dtype(kept))


def _differentiate_softmax(a: TensorProxy, dim: int, *, dtype: Any = None) -> TensorProxy:
    out = ltorch._softmax(a, dim, dtype=dtype)
    gradient = _softmax_backward(get_grad(out), out, dim)
    put_grad(a, gradient if dtypes.are_same_dtypes(gradient, a) else ltorch.to(gradient, a.dtype))
    return out


register(ltorch._softmax, _is_softmax, _differentiate_softmax)
