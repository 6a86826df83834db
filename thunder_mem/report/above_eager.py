"""Whether eager PyTorch would need less memory for the same program, and why.

The trace before autograd names the functions that the program calls. They run again on fake tensors, under PyTorch's
own autograd, without computation. Each value is dropped after its last reader, as `loss.backward()` drops its
gradients. The program's own code does not run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from inspect import signature
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import devices, dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_mem.fake_execution.fake_twins import Twins, Watch
from thunder_mem.fake_execution.replay import Ledger
from thunder_mem.memory.units import size
from thunder_mem.prediction.predict import Prediction

__all__ = ["Eager", "about_eager", "eager_memory", "follow_eager", "why_above"]

_SCENERY = {PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE, PrimIDs.COMMENT, PrimIDs.DEL, PrimIDs.UPDATE_ALIASES}
_FUNCTIONS: dict[str, list[Callable[..., Any]]] = {}
for _function, _symbol in ltorch._torch_to_thunder_function_map.items():
    if isinstance(_symbol, Symbol):
        _FUNCTIONS.setdefault(str(_symbol.id), []).append(_function)


def _set_item(a: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    a[key] = value
    return a


# Operations that Thunder traces for methods of tensors which are no functions of `thunder.torch`.
_PRIMITIVES: dict[Any, Callable[..., Any]] = {
    PrimIDs.TRANSPOSE: torch.permute,
    PrimIDs.CONVERT_ELEMENT_TYPE: lambda a, dtype: a.to(dtype),
    ltorch.setitem_.id: _set_item,
}
_NOTABLE = 0.1  # the least share of a gap that explains it
_BY_VALUES = {"max", "torch_max", "min", "torch_min", "amax", "amin", "median"}  # `evenly_distribute_backward`


@dataclass(frozen=True)
class Eager:
    """The memory of eager PyTorch for a program's forward and backward on a CPU.

    Attributes:
        peak_bytes: the most bytes alive at once, including the caller's tensors but not scratch.
        saved_bytes: the bytes that the forward leaves for the backward, beside the caller's tensors.
    """

    peak_bytes: int
    saved_bytes: int


def eager_memory(trace: TraceCtx, prediction: Prediction) -> Eager | None:
    """The memory of eager PyTorch for the call of a prediction; None where it is not known.

    Args:
        trace: the call's computation before autograd.
        prediction: of the compiled call.
    """
    if prediction.device_type != "cpu" or set(prediction.phases) - {"forward", "backward"}:
        return None
    try:
        return follow_eager(trace, backward="backward" in prediction.phases)
    except Exception:  # the comparison is optional, and its functions may be any
        return None


def about_eager(eager: Eager, prediction: Prediction) -> tuple[str, ...]:
    """A sentence that a compiled program needs more than eager PyTorch, with the reason; nothing if it does not."""
    if not (why := why_above(eager, prediction)):
        return ()
    eagers = f"{size(eager.peak_bytes)} ({eager.peak_bytes:,} bytes)"
    more_bytes = prediction.peak_bytes - eager.peak_bytes
    return (f"above eager PyTorch, which needs {eagers}, by {more_bytes:,} bytes: {why}",)


def why_above(eager: Eager, prediction: Prediction) -> str:
    """The reason why a compiled program needs more than eager PyTorch; "" if it does not."""
    event = prediction.peak_event
    if prediction.peak_bytes <= eager.peak_bytes or event is None:
        return ""
    saved_bytes, more_bytes = _saved_bytes(prediction), prediction.peak_bytes - eager.peak_bytes
    if saved_bytes - eager.saved_bytes >= _NOTABLE * more_bytes:
        here, there = size(saved_bytes), size(eager.saved_bytes)
        if here == there:
            here, there = f"{saved_bytes:,} bytes", f"{eager.saved_bytes:,}"
        return f"the backward receives {here} here and {there} in eager"
    little = "no more" if saved_bytes <= eager.saved_bytes else "little more"
    return f"{little} is saved for the backward, but {event.name} #{event.index} works with more at once"


def _saved_bytes(prediction: Prediction) -> int:
    """The bytes alive when the backward begins, beside the caller's tensors."""
    start = next((e.index for e in prediction.timeline if e.phase == "backward"), None)
    if start is None:
        return 0
    made = (s for s in prediction.storages if s.kind not in ("argument", "tangent", "parameter"))
    return sum(s.nbytes for s in made if s.born < start <= s.last)


def follow_eager(trace: TraceCtx, *, backward: bool) -> Eager:
    """Run a computation trace's functions on fake tensors, under autograd.

    Args:
        trace: a computation before autograd.
        backward: whether to differentiate its outputs, which nobody holds by then.

    Raises:
        NotImplementedError: the trace has code other than PyTorch functions, symbolic sizes, or a checkpoint,
            under which eager saves less.
    """
    mode, ledger = FakeTensorMode(), Ledger("cpu")
    watch = Watch(ledger, probe=False, twins=Twins(mode, ledger))
    watch.phase = "forward"
    with mode, torch.set_grad_enabled(backward):
        made = {p.name: _argument(p) for p in trace.args if isinstance(p, Proxy)}
        arguments = list(made.values())  # the caller's
        for name, t in made.items():
            ledger.add(name, t, "argument", held=True)
        held_bytes = ledger.live_bytes
        with watch:
            outputs = _run_forward(trace, made)
            edges = [torch.autograd.graph.get_gradient_edge(t) for t in outputs if t.grad_fn is not None]
            like = [(t.shape, t.dtype) for t in outputs if t.grad_fn is not None]
            del outputs
            ledger.sweep()
            saved_bytes = ledger.live_bytes - held_bytes
            if backward:
                watch.phase = "backward"
                torch.autograd.backward(edges, [torch.empty(shape, dtype=dtype) for shape, dtype in like])
    del arguments
    return Eager(max((e.live_bytes for e in ledger.events), default=held_bytes), saved_bytes)


def _argument(p: Proxy) -> torch.Tensor:
    if type(p) is not TensorProxy or not all(isinstance(n, int) for n in p.shape):
        raise NotImplementedError(f"{p.name} is no tensor of known sizes")
    return torch.empty(p.shape, dtype=dtypes.to_torch_dtype(p.dtype), requires_grad=p.requires_grad)


def _run_forward(trace: TraceCtx, made: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The outputs; `made` is emptied."""
    last = {p.name: i for i, b in enumerate(trace.bound_symbols) for p in b.flat_proxy_args}
    for i, bsym in enumerate(trace.bound_symbols):
        if bsym.sym.id is PrimIDs.RETURN:
            break
        if bsym.sym.id in _SCENERY:
            continue
        if ProxyTag.RECOMPUTE_IN_BACKWARD in {tag for p in bsym.flat_proxy_outs for tag in p.tags}:
            raise NotImplementedError("a checkpoint")
        _run(bsym, made)
        for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs):
            if last.get(p.name, -1) <= i:
                made.pop(p.name, None)
    returned = [made[p.name] for p in trace.bound_symbols[-1].flat_proxy_args if p.name in made]
    made.clear()
    return returned


def _run(bsym: BoundSymbol, made: dict[str, torch.Tensor]) -> None:
    proxies = tree_flatten(bsym.output)[0]
    if not any(isinstance(p, TensorProxy) for p in proxies):
        return
    if any(isinstance(p, TensorProxy) for p in bsym.flat_proxy_args):
        detached = any(ProxyTag.DETACHED_AUTOGRAD_GRAPH in p.tags for p in bsym.flat_proxy_outs)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detached):
            values = tree_flatten(_call(bsym, *tree_map(lambda x: _value(x, made), (bsym.args, dict(bsym.kwargs)))))[0]
    else:  # made of nothing: Thunder's arguments are not PyTorch's
        values = [_argument(p).requires_grad_(False) for p in proxies]
    for proxy, value in zip(proxies, values, strict=True):
        if isinstance(proxy, TensorProxy):
            if tuple(value.shape) != tuple(proxy.shape):
                raise NotImplementedError(f"{bsym.sym.name} is another function in PyTorch")
            made[proxy.name] = value


def _call(bsym: BoundSymbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the PyTorch function of that name that takes these arguments, or those that are not Thunder's defaults."""
    if bsym.sym.name in _BY_VALUES and not bsym.flat_proxy_outs[0].shape:
        raise NotImplementedError(f"the gradient of {bsym.sym.name} over everything decides by values")
    if bsym.sym.id in _PRIMITIVES:
        return _PRIMITIVES[bsym.sym.id](*args, **kwargs)
    name = str(bsym.sym.id)
    # Methods come last: `Tensor.where` takes its arguments in another order, and would run with the wrong ones.
    functions: list[Any] = sorted(_FUNCTIONS.get(name, []), key=_is_method)
    if name.startswith("torch."):
        with suppress(AttributeError):
            found: Any = reduce(getattr, name.split(".")[1:], torch)
            functions.append(found)
    functions += [method] if (method := getattr(torch.Tensor, bsym.sym.name, None)) is not None else []
    # PyTorch takes no None in some places, and others only by their names.
    up_to_none = args.index(None) if None in args else len(args)
    for given, named in ((args, kwargs), *(_by_name(bsym.sym, args, kwargs, first) for first in (up_to_none, 1))):
        for function in functions:
            with suppress(TypeError):
                return function(*given, **named)
    raise NotImplementedError(f"{bsym.sym.name} is no function of PyTorch")


def _by_name(symbol: Symbol, args: tuple, kwargs: dict[str, Any], first: int) -> tuple[tuple, dict[str, Any]]:
    """The first arguments, and the others by their names, without Thunder's defaults: PyTorch's may be others."""
    parameters = signature(symbol.meta).parameters if symbol.meta is not None else {}
    named = {**dict(zip(list(parameters)[first:], args[first:], strict=False)), **kwargs}
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    return args[:first], {k: x for k, x in named.items() if x is not None and not _is_same(x, defaults.get(k))}


def _is_same(x: Any, default: Any) -> bool:
    return x is default or (type(x) is type(default) and not isinstance(x, torch.Tensor) and x == default)


def _is_method(function: Callable[..., Any]) -> bool:
    return getattr(torch.Tensor, getattr(function, "__name__", ""), None) is function


def _value(x: Any, made: dict[str, torch.Tensor]) -> Any:
    if isinstance(x, TensorProxy):
        return made[x.name]
    if isinstance(x, Proxy):
        raise NotImplementedError(f"{x.name} is no tensor")
    if isinstance(x, dtypes.dtype):
        return dtypes.to_torch_dtype(x)
    return devices.to_torch_device(x) if isinstance(x, devices.Device) else x
