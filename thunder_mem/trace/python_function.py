"""Bound symbols as Python code that can be called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.passes import transform_for_execution
from thunder.executors.pythonex import ex as python_ex
from thunder.executors.torchex import ex as torch_ex

__all__ = ["python_function"]


def python_function(
    bsyms: Sequence[BoundSymbol], inputs: Sequence[Proxy], result: Any, name: str
) -> Callable[..., Any]:
    """The bound symbols as a function of `inputs` that returns `result`, run by their executors, or else by torch."""
    trace: Any = TraceCtx(None)
    trace.args, trace.kwargs = list(inputs), {}
    trace.names = {p.name for p in (*inputs, *(o for bsym in bsyms for o in bsym.flat_proxy_outs))}
    with tracectx(trace):
        for p in inputs:
            prims.unpack_trivial(p, name=p.name)
    trace.bound_symbols += [*bsyms, prims.python_return.bind(result, output=None)]
    trace._siginfo = SigInfo(name)
    trace._siginfo.args = [(p.name, None) for p in inputs]
    return transform_for_execution(trace, executors_list=(torch_ex, python_ex)).python_callable(
        include_decorators=False
    )
