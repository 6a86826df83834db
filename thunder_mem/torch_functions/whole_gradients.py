"""Gradients of functions that Thunder passes to PyTorch whole: those that are read, beside no result.

Thunder's own run such a function once more, under autograd, and make the gradients of all its floating arguments, while
the function's result is alive. Here the result is gone before the gradients are made, as far as PyTorch's derivative
does not need it, and only gradients that something reads are made. Arguments whose values the derivative does not need,
as those of a Fourier transform, are not kept for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx
from thunder.core.transforms import backward_impls
from thunder.extend import OperatorExecutor
from thunder.torch import _is_differentiable, _vjp_impl, backward_adaptor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from thunder_mem.runtime.allocation_watch import AllocationWatch
from thunder_mem.semantics.op_traits import PLAIN, MemoryTraits, declare
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["VALID_VALUES", "give_gradient", "like_arguments", "mem_whole_ex", "with_lean_gradients"]

mem_whole_ex = OperatorExecutor("mem_whole", version="0.1")
"""Owns the symbols. It need not stand in the user's list: a symbol with an owner is claimed already."""


VALID_VALUES: dict[str, Callable[[BoundSymbol, dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {}
"""By a part of the names of operations, see `MemoryTraits.valid_values`."""


@cache
def _traits(name: str) -> MemoryTraits:
    valid_values = next((make for part, make in VALID_VALUES.items() if part in name), PLAIN.valid_values)
    return MemoryTraits(scratch_bytes=_scratch_bytes, valid_values=valid_values)


def _scratch_bytes(bsym: BoundSymbol) -> int:
    """What PyTorch's operators allocate in it beyond its results; 0 if it does not run on fake tensors."""
    leaves, spec = tree_flatten((bsym.args, bsym.kwargs))
    return _asked_once(_followed, (bsym._call_ctx or {})[bsym.sym.name], leaves, spec)


def _asked_once(
    ask: Callable[[Callable[..., Any], Sequence[Any], Any], int], function: Callable[..., Any], leaves: Any, spec: Any
) -> int:
    """`ask(function, leaves, spec)`, whose answer is the same for calls that differ in their tensors' values alone."""
    kinds = tuple((tuple(x.shape), x.dtype, x.device) if isinstance(x, TensorProxy) else repr(x) for x in leaves)
    key = (ask, function, str(spec), kinds)
    if key not in _ANSWERS:
        _ANSWERS[key] = ask(function, leaves, spec)
    return _ANSWERS[key]


_ANSWERS: dict[Hashable, int] = {}


def _followed(function: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> int:
    try:
        with FakeTensorMode():
            args, kwargs = tree_unflatten([ltorch._get_fake_arg(x) for x in leaves], spec)
            with AllocationWatch() as watch:
                results = function(*args, **kwargs)
            del args, kwargs
            return watch.peak_bytes - (watch.live_bytes() if results is not None else 0)
    except Exception:  # values decide, or an argument that Thunder's own meta functions do not know either
        return 0


declare(mem_whole_ex, _traits)


def give_gradient(
    symbol: Symbol, function: Callable[..., Any], name: str, meta: Callable[..., Any] | None = None
) -> None:
    """The gradient that Thunder makes of any function becomes that of a symbol.

    Args:
        symbol: calls the function.
        function: of tensors that are arguments themselves.
        name: of the operation that makes the gradients; Thunder's own are named by the function alone.
        meta: of that operation; by default Thunder's, which differentiates the function on fake tensors.
    """
    meta = backward_adaptor(function) if meta is None else meta
    gradient = mem_whole_ex.register_operator(name, meta=meta, fn=partial(_vjp_impl, function))
    backward_impls[symbol.id] = gradient


def like_arguments(saved: Any, *tangents: Any) -> Any:
    """The gradients of a function's arguments, as a meta function."""
    flat, spec = tree_flatten(saved[0])
    return tree_unflatten([TensorProxy(like=x) if _is_differentiable(x) else None for x in flat], spec)


def with_lean_gradients(trace: TraceCtx) -> TraceCtx:
    """The joint trace with such gradients; the same object without any."""
    bsyms = trace.bound_symbols
    if not any(_function(b) is not None for b in bsyms):
        return trace
    read = {p.name for b in bsyms for p in b.flat_proxy_args}
    bound = [b if (function := _function(b)) is None else _lean(b, function, read) for b in bsyms]
    return rebuilt(trace, bound, "Gradients of whole functions are made as they are read")


def _function(bsym: BoundSymbol) -> Callable[..., Any] | None:
    """The function of PyTorch whose gradients Thunder's bound symbol makes; None for others."""
    called = (bsym._call_ctx or {}).get(bsym.sym.name)
    return called.args[0] if isinstance(called, partial) and called.func is _vjp_impl else None


def _lean(bsym: BoundSymbol, function: Callable[..., Any], read: set[str]) -> BoundSymbol:
    made = bsym.flat_proxy_outs
    kept = tuple(p.name in read for p in made)
    if not any(kept):
        return bsym
    name = f"lean_{bsym.sym.name}"
    symbol = Symbol(name, meta=None, id=name, executor=mem_whole_ex, tags=bsym.sym.tags)
    outputs = tuple(p for p, is_read in zip(made, kept, strict=True) if is_read)
    saved, *tangents = bsym.args
    arguments, like = _without_values(function, saved, tangents)
    return bsym.from_bsym(
        sym=symbol,
        args=(arguments, *tangents, kept, like),
        output=outputs,
        subsymbols=(),
        _call_ctx={name: _gradients(function)},
    )


def _without_values(function: Callable[..., Any], saved: Any, tangents: Sequence[Any]) -> tuple[Any, _Like]:
    """The function's arguments without those of which its derivative needs only shapes, and these shapes."""
    flat, spec = tree_flatten(saved)
    of_tangents = {x.device for x in tangents if isinstance(x, TensorProxy)}
    differentiated = {i: x for i, x in enumerate(flat) if _is_differentiable(x)}
    on_one_device = len(of_tangents) == 1 and of_tangents == {x.device for x in differentiated.values()}
    shapes_are_known = all(type(n) is int for x in differentiated.values() for n in x.shape)
    if not (on_one_device and shapes_are_known) or _asked_once(_keeps_a_tensor, function, flat, spec):
        return saved, ()
    like = tuple((i, tuple(x.shape), _dtype_name(x)) for i, x in differentiated.items())
    return tree_unflatten([None if i in differentiated else x for i, x in enumerate(flat)], spec), like


def _dtype_name(x: TensorProxy) -> str:
    return str(to_torch_dtype(x.dtype)).removeprefix("torch.")


_Like = tuple[tuple[int, tuple[int, ...], str], ...]
"""Of arguments that are not there: which one of all leaves, its shape and the name of its dtype."""


class _ValueIsNeeded(Exception):
    """The derivative keeps a tensor."""


def _keeps_a_tensor(function: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> bool:
    """Whether the derivative keeps any: an argument, a result, or something in between."""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        raise _ValueIsNeeded

    try:
        with FakeTensorMode(), torch.enable_grad(), saved_tensors_hooks(keep, keep):
            fake = [ltorch._get_fake_arg(x) for x in leaves]
            fake = [f.requires_grad_() if _is_differentiable(x) else f for x, f in zip(leaves, fake, strict=True)]
            args, kwargs = tree_unflatten(fake, spec)
            edges = _edges(function(*args, **kwargs))
    except Exception:  # it is needed, or values decide already about results
        return True
    return not any(edges)


@cache
def _gradients(function: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """`gradients(saved, *tangents, kept, like)`; `saved` are the function's arguments, by position and by name."""

    def gradients(saved: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        *tangents, kept, like = given
        flat, spec = tree_flatten(tuple(saved))
        device = next((g.device for g in tangents if g is not None), None)
        for i, shape, dtype in like:
            flat[i] = torch.zeros((), dtype=getattr(torch, dtype), device=device).expand(shape)
        variables, wanted = [], iter(kept)
        for i, x in enumerate(flat):
            if _is_differentiable(x):
                flat[i] = x.detach().requires_grad_(next(wanted, False))
                if flat[i].requires_grad:
                    variables.append(flat[i])
        args, kwargs = tree_unflatten(flat, spec)
        with torch.enable_grad():
            edges = _edges(function(*args, **kwargs))
        pairs = [(edge, g) for edge, g in zip(edges, tangents, strict=False) if edge is not None and g is not None]
        if not pairs:
            return tuple(map(torch.zeros_like, variables))
        outputs, weights = zip(*pairs, strict=True)
        grads = torch.autograd.grad(outputs, variables, weights, allow_unused=True)
        return tuple(torch.zeros_like(x) if g is None else _alone(g) for x, g in zip(variables, grads, strict=True))

    return gradients


def _alone(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient in memory of its own size: that of a real FFT is every other number of a complex tensor."""
    return gradient.clone() if gradient.untyped_storage().nbytes() > gradient.nbytes else gradient


def _edges(result: Any) -> list[Any]:
    """Where gradients of a function's results enter; without the results, which may die."""
    results = result if isinstance(result, tuple | list) else (result,)
    return [get_gradient_edge(x) if isinstance(x, torch.Tensor) and x.requires_grad else None for x in results]
