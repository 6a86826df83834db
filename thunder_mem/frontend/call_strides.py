"""The strides of a call's arguments, for the few programs whose meaning depends on them.

A trace knows no strides, and Thunder runs one program for arguments of all strides. In eager PyTorch
`x.t().contiguous()` is a copy for some strides of `x`, and `x.t()` itself for others. So the strides of the call that
is being compiled are read here, and a check in the prologue lets Thunder compile anew for other ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
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

__all__ = ["strides_of_call", "with_checked_strides"]

_NAME = "check_strides"
_CALLER = "get_computation_and_inputs"  # Thunder's function that has the call's arguments while it compiles


def strides_of_call(prologue: TraceCtx) -> dict[str, tuple[int, ...]]:
    """The strides of each tensor that the prologue passes on, by its name there; empty if they cannot be found.

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
    return {p.name: value.stride() for p, value in pairs if _is_plain(p, value)}


def _passed_on(prologue: TraceCtx) -> tuple[Any, ...]:
    return prologue.bound_symbols[-1].args[0][0]


def _is_plain(p: Any, value: Any) -> bool:
    return isinstance(p, TensorProxy) and isinstance(value, torch.Tensor) and value.layout is torch.strided


def with_checked_strides(prologue: TraceCtx, strides: Mapping[str, tuple[int, ...]]) -> TraceCtx:
    """The prologue that fails where tensors have other strides than these, by their names in it."""
    if not strides:
        return prologue
    *body, returned = prologue.bound_symbols
    tensors = tuple(p for p in _passed_on(prologue) if isinstance(p, TensorProxy) and p.name in strides)
    check = _same_strides([strides[p.name] for p in tensors])
    symbol = Symbol(_NAME, meta=None, id=_NAME, executor=pythonex, tags=(OpTags.DONT_DCE,), is_prim=True)
    bound = BoundSymbol(symbol, args=tensors, kwargs={}, output=None, _call_ctx={_NAME: check})
    return rebuilt(prologue, [*body, bound, returned], "Check of strides")


def _same_strides(expected: list[tuple[int, ...]]) -> Callable[..., None]:
    def check_strides(*tensors: torch.Tensor) -> None:
        if [t.stride() for t in tensors] != expected:
            raise ValueError("an argument has other strides than when this program was compiled")

    return check_strides
