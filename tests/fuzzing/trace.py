"""Tracing random programs without Thunder's interpreter, which takes half of all the time and is not under test.

The interpreter only finds out which operations a program calls, on which proxies. A random program calls them
itself when `torch` in it is Thunder's: so `called` has the interpreter see a single call, and calls the program
inside of it. What is traced is the same; `tests/system/test_fuzz.py` compares it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from thunder.core import jit_ext
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    ProvenanceRecord,
    PseudoInst,
    interpreter_needs_wrap,
    unwrap,
    wrap,
    wrap_const,
)
from thunder.core.proxies import Proxy, ProxyTag
from thunder.core.pytree import tree_iter
from thunder.core.trace import get_tracectx
from thunder.torch import _torch_to_thunder_function_map as SYMBOLS

from tests.programs.program_functions import FUNCTIONS

__all__ = ["called"]


class _Module:
    """A module of PyTorch whose functions are Thunder's symbols."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        value = SYMBOLS[value] if callable(value) else value
        if name in ("cat", "stack"):
            value = _of_a_tuple(value)
        setattr(self, name, value)
        return value


def _of_a_tuple(symbol: Callable) -> Callable:
    """As `torch_functions/traced_functions.py` has it."""
    return lambda tensors, *args, **kwargs: symbol(tuple(tensors), *args, **kwargs)


class _Torch(_Module):
    @staticmethod
    @contextmanager
    def no_grad() -> Iterator[None]:
        before = get_compile_data().is_grad_enabled
        SYMBOLS[torch._C._set_grad_enabled](False)
        yield
        SYMBOLS[torch._C._set_grad_enabled](before)

    @staticmethod
    @contextmanager
    def autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
        SYMBOLS[torch.amp.autocast_mode._enter_autocast](device, dtype, True)
        yield
        SYMBOLS[torch.amp.autocast_mode._exit_autocast]()


def _checkpoint(function: Callable, *args: Any, use_reentrant: bool) -> Any:
    """As Thunder's own lookaside for `torch.utils.checkpoint.checkpoint` has it."""
    trace = get_tracectx()
    trace.push_scope([])
    result = function(*args)
    made = trace.pop_scope()
    trace.bound_symbols.extend(made)
    outside = {p.name for p in tree_iter((args, result)) if isinstance(p, Proxy)}
    for bsym in made:
        for out in bsym.flat_proxy_outs:
            if out.name not in outside:
                out.tags.add(ProxyTag.RECOMPUTE_IN_BACKWARD)
    return result


class _Function:
    """A `torch.autograd.Function`, whose forward and backward Thunder's own lookaside for `apply` traces."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self._function = function

    def apply(self, *args: Any) -> Any:
        made_here = ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[])
        wrapped = [wrap(x, provenance=made_here) for x in args]
        result = _APPLY(wrap_const(self._function), *wrapped)
        if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            raise RuntimeError(f"Thunder's interpreter cannot trace {self._function.__name__}")
        return unwrap(result)


_APPLY = jit_ext._general_jit_lookaside_map[torch.autograd.function.Function.apply.__func__]
_SCOPE = {
    "torch": _Torch(torch),
    "F": _Module(torch.nn.functional),
    "checkpoint": _checkpoint,
    **{name: _Function(function) for name, function in FUNCTIONS.items()},
}


@contextmanager
def called(fn: Callable) -> Iterator[Callable]:
    """A function for Thunder's interpreter that calls the program `fn`, of `programs.function`, as one."""
    names = ", ".join(fn.__code__.co_varnames[: fn.__code__.co_argcount])
    direct = types.FunctionType(fn.__code__, {**fn.__globals__, **_SCOPE}, fn.__name__)
    run = interpreter_needs_wrap(direct)

    def lookaside(*args: Any) -> Any:
        jit_ext.recursively_proxy(*args)
        return run(*args)

    scope: dict[str, Any] = {"direct": direct}
    exec(f"def program({names}):\n    return direct({names})", scope)
    jit_ext._general_jit_lookaside_map[direct] = lookaside
    try:
        yield scope["program"]
    finally:
        del jit_ext._general_jit_lookaside_map[direct]
