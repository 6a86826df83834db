"""Which arguments of a computation are parameters of an optimizer.

The prologue says where each argument comes from: a parameter of the module, or one that a closure refers to. Its
unpacking is run once to get the tensor. Tensors that the caller passes in are unknown at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import getitem
from typing import Any

import torch
from thunder.core.module import get_thunder_module
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

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
    values: dict[str, Any] = {}
    found = {}
    for name in wanted:
        tensor = _value(name, makers, function, values)
        if isinstance(tensor, torch.Tensor) and id(tensor) in known:
            found[name] = tensor
    return found


_GETTERS: dict[Any, Callable[[Any, Any], Any]] = {
    PrimIDs.UNPACK_ATTR: getattr,
    PrimIDs.UNPACK_GETITEM: getitem,
    PrimIDs.UNPACK_DICT_KEY: getitem,
    PrimIDs.UNPACK_PARAMETER: lambda module, name: module.get_parameter(name),
    PrimIDs.UNPACK_SUBMODULE: lambda module, name: module.get_submodule(name),
}


def _value(name: str, makers: dict[str, BoundSymbol], function: Any, values: dict[str, Any]) -> Any:
    """The value that the prologue gives to `name`; None if it depends on the call's arguments, or is not looked for."""
    if name not in values:
        values[name] = None
        bsym = makers.get(name)
        if bsym is not None and bsym.sym.id is PrimIDs.UNPACK_FUNCTION_OBJ:
            values[name] = function
        elif bsym is not None and bsym.sym.id is PrimIDs.UNPACK_THUNDER_MODULE:
            values[name] = get_thunder_module(_value(bsym.args[0].name, makers, function, values))
        elif bsym is not None and (getter := _GETTERS.get(bsym.sym.id)) is not None:
            held = _value(bsym.args[0].name, makers, function, values)
            with suppress(AttributeError, KeyError, IndexError, TypeError):
                values[name] = None if held is None else getter(held, bsym.args[1])
    return values[name]
