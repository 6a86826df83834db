"""Compile again where an argument changes that Thunder's prologue does not check.

The prologue checks the tensors, numbers and strings that a program reads. It does not check None, dtypes, enums,
functions, or the lengths of containers, and the next call with another such value silently gets the first call's
program: `step(x, mask)` after `step(x, None)` ignores the mask (Thunder 0.2.6). Here the prologue notes such arguments
at its first run, which is the call that was traced, and fails at later runs where they differ: then Thunder compiles
anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, EllipsisType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import NumberProxy, Proxy, StringProxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.executors.pythonex import ex as pythonex

__all__ = ["with_unchecked_arguments"]

_NAME = "check_other_arguments"

# Compared by their values, all of which are hashable. Numbers, strings and slices are Thunder's to check.
_VALUES = (
    *(NoneType, EllipsisType, Enum, bytes, range, frozenset, type, ModuleType, BuiltinFunctionType),
    *(torch.dtype, torch.layout, torch.memory_format),
)


def with_unchecked_arguments(prologue: TraceCtx, compile_options: dict[str, Any]) -> TraceCtx:
    """The prologue with a check of what the others leave out; unchanged where they leave nothing out.

    Args:
        prologue: of the program.
        compile_options: Thunder's. ThunderFX's programs stay as they are, because Dynamo guards their arguments.
    """
    if "is_differentiable_outputs" in compile_options:  # which only ThunderFX gives
        return prologue
    given = {b.output.name: b.output for b in prologue.bound_symbols if b.sym.id is PrimIDs.UNPACK_TRIVIAL}
    if set(given) != {"args", "kwargs"} or not any(_has_unchecked(prologue, name) for name in given):
        return prologue
    new = from_trace(prologue)
    *body, returned = prologue.bound_symbols
    new.bound_symbols = [*body, _check(tuple(given.values())), returned]
    new.set_provenance(TraceProvenance("Check of other arguments"))
    return new


def _has_unchecked(prologue: TraceCtx, container: str) -> bool:
    """Whether an entry of ``args`` or ``kwargs`` is anything but a tensor, a number or a string that is checked."""
    of_container = [b for b in prologue.bound_symbols if b.args and _is_named(b.args[0], container)]
    length = next((b.args[1] for b in of_container if b.sym.id is PrimIDs.CHECK_LEN), 0)
    kinds = (TensorProxy, NumberProxy, StringProxy)
    read = {b.args[1] for b in of_container if b.sym.id is PrimIDs.UNPACK_GETITEM and isinstance(b.output, kinds)}
    return len(read) < length


def _is_named(value: Any, name: str) -> bool:
    return isinstance(value, Proxy) and value.name == name


def _check(arguments: tuple) -> BoundSymbol:
    symbol = Symbol(_NAME, meta=None, id=_NAME, executor=pythonex, tags=(OpTags.DONT_DCE,), is_prim=True)
    return BoundSymbol(symbol, args=arguments, kwargs={}, output=None, _call_ctx={_NAME: _same_as_first()})


def _same_as_first() -> Callable[[Any, Any], None]:
    """A function of a call's arguments that raises ValueError where they are of other kinds than the first call's."""
    first: list[Hashable] = []

    def check_other_arguments(args: Any, kwargs: Any) -> None:
        kind = _kind((args, kwargs))
        if not first:
            first.append(kind)
        elif kind != first[0]:
            raise ValueError("an argument is of another kind than when this program was compiled")

    return check_other_arguments


def _kind(value: Any, inside: tuple[int, ...] = ()) -> Hashable:
    """What of an argument decides, beside what Thunder checks, which program is traced.

    Args:
        value: the argument, or a part of one.
        inside: the ids of what it is a part of, since a recursive function is a part of its own closure.
    """
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, torch.Tensor):
        return torch.Tensor  # a parameter or a fake tensor is no other kind
    if isinstance(value, set):
        return frozenset(value)
    if id(value) in inside:
        return "itself"
    kind = partial(_kind, inside=(*inside, id(value)))
    if isinstance(value, (tuple, list)):
        return (type(value), *map(kind, value))
    if isinstance(value, dict):
        return (type(value), *((key, kind(item)) for key, item in value.items()))
    if is_dataclass(value):
        return (type(value), *(kind(getattr(value, field.name, None)) for field in fields(value)))
    if isinstance(value, FunctionType):  # one lambda, made anew for each call, is one program
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return (value.__code__, *map(_default, defaults), kind(defaults), kind(_closure(value)))
    if isinstance(value, MethodType):
        return (kind(value.__func__), kind(value.__self__))
    if isinstance(value, partial):
        return (partial, kind(value.func), kind(value.args), kind(value.keywords))
    kind_of_object: type = type(value)
    return kind_of_object


def _default(value: Any) -> Hashable:
    """A function's default where it is a number or a text, which Thunder checks as an argument only."""
    return value if isinstance(value, (int, float, complex, str)) else None


def _closure(function: FunctionType) -> tuple:
    """The values that a function holds; a cell that is not yet filled counts as None."""
    held = []
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:
            held.append(None)
    return tuple(held)
