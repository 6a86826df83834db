"""Parameters that a module uses under several names, such as an embedding that is also the output layer's weight.

Thunder's traces have an argument for each name. Their proxies get a tag that identifies their memory. Autograd and all
rewritings copy the tag, so that a plan counts that memory once, as the device does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.trace import TraceCtx

__all__ = ["memory_name", "tag_shared_parameters"]

_GETTERS = {PrimIDs.UNPACK_PARAMETER: "get_parameter", PrimIDs.UNPACK_BUFFER: "get_buffer"}


@dataclass(frozen=True)
class _SharedMemory:
    """A proxy's tag for the module's tensor, by the first of its names."""

    name: str


def tag_shared_parameters(arguments: Iterable[Any], prologue: TraceCtx, module: Any) -> None:
    """Tag those of a computation's arguments that are one tensor of the module.

    Args:
        arguments: of the computation; their tags change in place.
        prologue: it has the name of each argument in the module.
        module: the compiled object; nothing happens if it is no module.
    """
    if not isinstance(module, torch.nn.Module):
        return
    unpacked = [b for b in prologue.bound_symbols if b.sym.id in _GETTERS and isinstance(b.output, TensorProxy)]
    names: dict[int, list[str]] = {}
    for bsym in unpacked:
        try:
            tensor = getattr(module, _GETTERS[bsym.sym.id])(bsym.args[1])
        except AttributeError:  # of another module, which the program uses beside its own
            continue
        names.setdefault(id(tensor), []).append(bsym.output.name)
    shared = {name: _SharedMemory(alike[0]) for alike in names.values() if len(alike) > 1 for name in alike}
    for p in arguments:
        if isinstance(p, TensorProxy) and p.name in shared:
            p.tags.add(shared[p.name])


def memory_name(p: Proxy) -> str:
    """A name for the memory of an argument, the same for all arguments that are one tensor."""
    return next((tag.name for tag in p.tags if isinstance(tag, _SharedMemory)), p.name)
