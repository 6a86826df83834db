"""Spare the zeros that autograd makes as gradients of outputs that a loss does not use.

Autograd calls a backward with a gradient for each output. For an unused output, and for an integer, it makes zeros
first. Thunder's backward holds all of them from its start: a language model that returns its logits beside its loss
holds one more gradient of all logits.

Here the backward accepts None, and makes zeros where it first reads such a gradient. The epilogue, which runs when
autograd knows the outputs, asks autograd for None.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from thunder.core import dtypes, prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors.torch_autograd import ThunderFunction, ThunderOutputFunction
from thunder.extend import OperatorExecutor

from thunder_mem.trace.rebuilding import rebuilt

__all__ = [
    "ask_for_none",
    "asks_for_none",
    "makes_missing_tangents",
    "named_results",
    "takes_none",
    "with_missing_tangents",
    "without_zeros_for",
]

mem_tangents_ex = OperatorExecutor("mem_tangents", version="0.1")
"""Owns the two symbols: one of the epilogue, one of the backward."""


def takes_none(outputs: Collection[Any]) -> bool:
    """Whether the backward of a program with these outputs accepts None for a gradient.

    That of a single output is never missing. Zeros of a symbolic size would need that size in the backward.

    Args:
        outputs: the distinct results of the forward, or the gradients of each that the backward takes.
    """
    sizes = (n for p in outputs if isinstance(p, TensorProxy) for n in p._shape)
    return len(outputs) > 1 and all(isinstance(n, int) for n in sizes)


def without_zeros_for(outputs: Iterable[Any]) -> None:
    """Ask autograd to pass None for missing gradients of a compiled call's outputs, whatever its backward does."""
    for node in {n for t in outputs if (n := _node_of(t)) is not None}:
        node.set_materialize_grads(False)


def _node_of(output: Any) -> Any:
    """The node of autograd for the compiled call that made this output; None if there is none."""
    node = output.grad_fn if isinstance(output, torch.Tensor) else None
    kind = getattr(type(node), "_forward_cls", None)
    return node if kind in (ThunderFunction, ThunderOutputFunction) else None


def _backward_of(node: Any) -> Any:
    """The compiled backward behind a node: Thunder splits a call into two nodes, or does not."""
    return (node if hasattr(node, "compiled_backward") else node.next_functions[0][0]).compiled_backward


def _ask_for_none(*outputs: Any) -> None:
    for output in outputs:
        # An output may be an argument, and so come from another compiled call, whose backward needs its zeros.
        node = _node_of(output)
        if node is not None and given_or_zeros.name in inspect.unwrap(_backward_of(node)).__globals__:
            node.set_materialize_grads(False)


def _given_or_zeros(
    tangent: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: str
) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device) if tangent is None else tangent


ask_for_none = mem_tangents_ex.register_operator("ask_for_none", meta=lambda *outputs: None, fn=_ask_for_none)
given_or_zeros = mem_tangents_ex.register_operator(
    "given_or_zeros", meta=lambda tangent, shape, dtype, device: TensorProxy(like=tangent), fn=_given_or_zeros
)


def named_results(epilogue: TraceCtx, computation: TraceCtx) -> list[tuple[str, Any]]:
    """The computation's results, each with its name in the epilogue, which takes them last; before autograd."""
    result = computation.bound_symbols[-1]
    returned = result.args[0] if result.args else None
    if not isinstance(returned, dict):
        return []
    outputs = returned["output"] if isinstance(returned["output"], Sequence) else (returned["output"],)
    names = [name for name, _ in epilogue.siginfo().args][-len(outputs) :] if outputs else []
    return list(zip(names, outputs, strict=True))


def asks_for_none(epilogue: TraceCtx, computation: TraceCtx) -> TraceCtx:
    """The epilogue that asks autograd for None in place of zeros, if the backward may accept it.

    Args:
        epilogue: takes the computation's outputs last.
        computation: before autograd.
    """
    names = {name for name, _ in named_results(epilogue, computation)}
    if not names or any(b.sym is ask_for_none for b in epilogue.bound_symbols):
        return epilogue
    taken = [p for p in epilogue.bound_symbols for p in p.flat_proxy_outs if isinstance(p, TensorProxy)]
    taken = [p for p in taken if p.name in names]
    asked = any(isinstance(p, TensorProxy) and p.requires_grad for p in computation.args)
    if not asked or not takes_none(taken):
        return epilogue
    *body, last = epilogue.bound_symbols
    asking = [*body, ask_for_none.bind(*taken, output=None), last]
    return rebuilt(epilogue, asking, "Ask autograd for None in place of zeros")


def makes_missing_tangents(backward: TraceCtx) -> bool:
    """Whether `with_missing_tangents` made this backward."""
    return any(b.sym is given_or_zeros for b in backward.bound_symbols)


def with_missing_tangents(backward: TraceCtx) -> TraceCtx:
    """The backward that accepts None for the gradient of an output; unchanged if none can be missing.

    Args:
        backward: a final trace, with its `del`s.
    """
    _, tangents = backward.args
    if not takes_none(tangents) or makes_missing_tangents(backward):
        return backward
    unread = {p.name: p for p in tangents if isinstance(p, TensorProxy)}
    making = partial(_making_missing, backward.bound_symbols, unread)
    return rebuilt(backward, making, "Make missing gradients of outputs")


def _making_missing(bsyms: Sequence[BoundSymbol], unread: dict[str, TensorProxy]) -> Iterator[BoundSymbol]:
    """The bound symbols of a backward, with each gradient made before its first reader if it is missing."""
    swap: dict[Any, Proxy] = {}
    for bsym in bsyms:
        unpacks = bsym.sym.id in (PrimIDs.UNPACK_SEQUENCE, PrimIDs.UNPACK_TRIVIAL)
        reads = not unpacks and bsym.sym.id != PrimIDs.DEL
        for name in dict.fromkeys(p.name for p in bsym.flat_proxy_args) if reads else ():
            if (p := unread.pop(name, None)) is None:
                continue
            made = TensorProxy(like=p)
            kind = dtypes.to_torch_dtype(p.dtype), p.device.device_str()
            yield given_or_zeros.bind(p, tuple(p._shape), *kind, output=made)
            yield prims.python_del.bind(p, output=None)
            swap[variableify(p)] = made
        yield bsym if unpacks else bsym.from_bsym_swap_proxies(swap, skip_output=True)
