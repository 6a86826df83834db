"""The tensors of the call that is being compiled, for the few programs whose meaning depends on their memory.

A trace knows neither strides nor addresses, and Thunder runs one program for all. In eager PyTorch `x.t().contiguous()`
is a copy for some strides of `x`, and `x.t()` itself for others. So passes may look at the call's tensors, and a check
in the prologue lets Thunder compile anew where a fact about them is another one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from thunder.common import transform_for_execution
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx
from thunder.executors.pythonex import ex as pythonex

from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["tensors_of_call", "with_checked_fact"]

_CALLER = "get_computation_and_inputs"  # Thunder's function that has the call's arguments while it compiles


def tensors_of_call(prologue: TraceCtx) -> dict[str, torch.Tensor]:
    """The strided tensors that the prologue passes on, by their names there; empty if they cannot be found.

    Args:
        prologue: of the program that Thunder is compiling.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_name != _CALLER or frame.f_globals.get("__name__") != "thunder"):
        frame = frame.f_back
    if frame is None:
        return {}
    call = frame.f_locals
    try:
        run = transform_for_execution(prologue, executors_list=(pythonex,), use_del_last_used=False)[-1]
        values = run.python_callable(include_decorators=False)(*call["args"], **call["kwargs"])[0]
    except Exception:  # a prologue of another transform that cannot run yet
        return {}
    pairs = zip(_passed_on(prologue), values, strict=True)
    return {p.name: value for p, value in pairs if isinstance(p, TensorProxy) and _is_strided(value)}


def _passed_on(prologue: TraceCtx) -> tuple[Any, ...]:
    return prologue.bound_symbols[-1].args[0][0]


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def with_checked_fact(
    prologue: TraceCtx, names: Sequence[str], fact: Callable[[Sequence[torch.Tensor]], Any], expected: Any
) -> TraceCtx:
    """The prologue that fails where a fact about tensors is another one than in the call that is compiled.

    Args:
        prologue: of the program.
        names: of the tensors, which the prologue passes on; without any the prologue stays as it is.
        fact: a function of the tensors, quick because it runs at each call. Its name is the check's in the trace.
        expected: its result for the call that is compiled.
    """
    if not names:
        return prologue

    def check(*tensors: torch.Tensor) -> None:
        if fact(tensors) != expected:
            raise ValueError("arguments lie in memory in another way than when this program was compiled")

    *body, returned = prologue.bound_symbols
    known = {p.name: p for p in _passed_on(prologue) if isinstance(p, TensorProxy)}
    name = f"check_{fact.__name__}"
    symbol = Symbol(name, meta=None, id=name, executor=pythonex, tags=(OpTags.DONT_DCE,), is_prim=True)
    bound = BoundSymbol(symbol, args=tuple(known[n] for n in names), kwargs={}, output=None, _call_ctx={name: check})
    return rebuilt(prologue, [*body, bound, returned], f"Check of {fact.__name__}")
