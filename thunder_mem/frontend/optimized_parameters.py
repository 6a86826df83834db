"""Which arguments of a computation are parameters of an optimizer.

The prologue says where each argument comes from: a parameter of the module, or one that a closure refers to. Its
unpacking is run once to get the tensor. Tensors that the caller passes in are unknown at that time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

__all__ = ["optimized_parameters"]


def optimized_parameters(
    arguments: Iterable[Any], prologue: TraceCtx, function: Any, parameters: Iterable[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The parameters among a computation's arguments, by the argument's name.

    Args:
        arguments: of the computation.
        prologue: of the same program.
        function: the compiled function or module.
        parameters: those to look for.
    """
    known = {id(p): p for p in parameters}
    wanted = [p.name for p in arguments if isinstance(p, TensorProxy) and p.requires_grad]
    makers: dict[str, BoundSymbol] = {}
    for bsym in prologue.bound_symbols:
        for p in bsym.flat_proxy_outs:
            makers.setdefault(p.name, bsym)
    values: dict[str, Any] = {"__function_obj": function, "torch": torch}
    found = {}
    with tracectx(prologue):
        values.update(prologue.python_ctx())
        for name in wanted:
            tensor = _value(name, makers, values)
            if isinstance(tensor, torch.Tensor) and id(tensor) in known:
                found[name] = tensor
    return found


def _value(name: str, makers: dict[str, BoundSymbol], values: dict[str, Any]) -> Any:
    """The value that the prologue gives to `name`; None if it depends on the call's arguments."""
    if name in values:
        return values[name]
    values[name] = None
    bsym = makers.get(name)
    if bsym is None or bsym.sym.id in (PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE):
        return None
    if any(_value(p.name, makers, values) is None for p in _operands(bsym, name)):
        return None
    try:
        exec("\n".join(bsym.python(indent=0, print_depth=1)).strip(), values)
    except Exception:  # what Thunder unpacks in another way is not looked for
        values[name] = None
    return values[name]


def _operands(bsym: BoundSymbol, name: str) -> list[Proxy]:
    return [p for p in bsym.flat_proxy_args if p.name != name]
