"""Two executors that differentiate operations by PyTorch's own kernels.

`mem_kernels` is for composite operations that a fusion executor takes apart. Without fusion, Thunder's decompositions
materialise every step of a norm or an activation, and keep many of them for the backward. Eager PyTorch runs one kernel
each way and keeps its argument or its result, with a few statistics. This executor does the same for the operations in
`norm_kernels.py`, `activation_kernels.py`, `loss_kernels.py` and `scatter_kernels.py`.

`mem_gradients` is for operations that no fusion executor of this package takes: those in `convolution_kernel.py` and
`elementwise_losses.py`.

Calls that a kernel does not take (mixed dtypes, other devices, writes in place) are left to Thunder.

The derivatives are those of PyTorch's `tools/autograd/derivatives.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

from thunder.core import dtypes
from thunder.core.devices import DeviceType
from thunder.core.proxies import NumberProxy, TensorProxy, pyval
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx
from thunder.core.transforms import put_grad
from thunder.executors.torchex import ex as torch_ex
from thunder.extend import OperatorExecutor, register_executor

from thunder_mem.trace.rebuilding import rebuilt

__all__ = [
    "Mask",
    "asked",
    "has_dtype_of",
    "is_float",
    "is_kernel",
    "is_number",
    "mem_gradients_ex",
    "mem_kernels_ex",
    "put_asked",
    "register",
    "register_several",
    "without_unread_gradients",
]

mem_kernels_ex = OperatorExecutor("mem_kernels", version="0.1")
register_executor(mem_kernels_ex)

mem_gradients_ex = OperatorExecutor("mem_gradients", version="0.1")
register_executor(mem_gradients_ex)

_FLOATS = (dtypes.float64, dtypes.float32, dtypes.bfloat16, dtypes.float16)
_DEVICES = (DeviceType.CPU, DeviceType.CUDA)

Mask = tuple[bool, ...]
"""Which of its gradients a kernel makes, in the order of PyTorch's `output_mask`."""

_forwards: set[str] = set()
_several: set[Any] = set()


def is_float(a: Any) -> bool:
    """Whether it is a floating tensor that the kernels take, neither empty nor of symbolic sizes."""
    return (
        type(a) is TensorProxy  # a subclass is a tensor of another kind
        and a.device.devicetype in _DEVICES
        and dtypes.to_strong_dtype(a.dtype) in _FLOATS
        # `shape` would record an operation where sizes are symbolic.
        and all(isinstance(n, int) and n > 0 for n in a._shape)
    )


def has_dtype_of(a: TensorProxy, *others: Any) -> bool:
    """Whether all other given tensors have the dtype and the device of `a`."""
    return all(
        p is None
        or (is_float(p) and dtypes.to_strong_dtype(p.dtype) is dtypes.to_strong_dtype(a.dtype) and p.device == a.device)
        for p in others
    )


def is_number(x: Any) -> bool:
    return isinstance(pyval(x) if isinstance(x, NumberProxy) else x, Number)


def is_kernel(bsym: BoundSymbol) -> bool:
    """Whether one of the two executors runs the operation, by its own kernel or by the torch executor's."""
    sym = bsym.sym
    ours = sym.executor in (mem_kernels_ex, mem_gradients_ex)
    return ours or (sym.executor is not None and sym.name.strip("_") in _forwards)


def register(
    operation: Symbol,
    checker: Callable[..., bool],
    gradient: Callable[..., Any],
    executor: OperatorExecutor = mem_kernels_ex,
) -> None:
    """Let `gradient` differentiate an operation of `thunder.torch` whose forward the torch executor runs."""
    forward = torch_ex.implmap[operation.id]
    _forwards.add(operation.name.strip("_"))
    executor.register_implementation(
        operation,
        forward.symbol,
        checker=checker,
        execution_transform=forward.execution_transform,
        grad_transform=gradient,
    )


def register_several(
    name: str, meta: Callable[..., Any], fn: Callable[..., Any], executor: OperatorExecutor = mem_kernels_ex
) -> Symbol:
    """A kernel of several gradients, whose last argument selects those that it makes.

    `meta` and `fn` only receive the mask as an argument: both return all gradients.
    """

    def of_mask(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: asked(function(*args), args[-1])

    symbol = executor.register_operator(name, meta=of_mask(meta), fn=of_mask(fn))
    _several.add(symbol.id)
    return symbol


def asked(gradients: Sequence[Any], mask: Mask) -> tuple[Any, ...]:
    """The gradients whose bit is set."""
    return tuple(g for g, wanted in zip(gradients, mask, strict=True) if wanted)


def put_asked(arguments: Sequence[Any], mask: Mask, gradients: Sequence[Any]) -> None:
    """Give a kernel's gradients to the arguments whose bit is set."""
    for argument, gradient in zip(asked(arguments, mask), gradients, strict=True):
        put_grad(argument, gradient)


def without_unread_gradients(trace: TraceCtx) -> TraceCtx:
    """The joint trace in which kernels of several gradients make only those that are read."""
    read = {p.name for b in trace.bound_symbols for p in b.flat_proxy_args}
    bound = [_narrowed(b, read) if b.sym.id in _several else b for b in trace.bound_symbols]
    if all(new is old for new, old in zip(bound, trace.bound_symbols, strict=True)):
        return trace
    return rebuilt(trace, bound, "Gradients that nothing reads are not computed")


def _narrowed(bsym: BoundSymbol, read: set[str]) -> BoundSymbol:
    made = bsym.flat_proxy_outs
    if all(p.name in read for p in made):
        return bsym
    *args, mask = bsym.args
    outputs = iter(made)
    kept = tuple(wanted and next(outputs).name in read for wanted in mask)
    return bsym.from_bsym(args=(*args, kept), output=tuple(p for p in made if p.name in read))
