"""Compile again where an argument changes that Thunder's prologue does not check.

The prologue checks the tensors, numbers and strings that a program reads. It does not check None, dtypes, enums,
functions, or the lengths of containers, and the next call with another such value silently gets the first call's
program: `step(x, mask)` after `step(x, None)` ignores the mask (Thunder 0.2.6). Here the prologue notes such arguments
at its first run, which is the call that was traced, and fails at later runs where they differ: then Thunder compiles
anew.
"""

from __future__ import annotations

import warnings
from collections import UserDict, deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import (
    BuiltinFunctionType,
    EllipsisType,
    FunctionType,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import torch
from thunder.core.options import CACHE_OPTIONS
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import NumberProxy, Proxy, StringProxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.executors.pythonex import ex as pythonex

from thunder_mem.frontend.fx_prologue_checks import is_of_thunderfx

__all__ = ["with_unchecked_arguments"]

_NAME = "check_other_arguments"
_LEVELS, _LONGEST = 8, 1000  # of containers; what lies deeper, or in longer ones, is compared by its type or length
_OFTEN = 8  # kinds of arguments of one function, after which a warning says why
_COMPILED_OFTEN = (
    f"this function was compiled for {_OFTEN} kinds of arguments that are no tensors, numbers or strings: None, "
    "dtypes, functions, lengths of containers, or objects made anew. Leave out of its arguments what it does not read"
)

# Compared by their values. Numbers, strings and slices are Thunder's to check, except as a function's defaults.
_VALUES = (
    *(NoneType, EllipsisType, Enum, bytes, range, type, ModuleType, MethodDescriptorType, WrapperDescriptorType),
    *(torch.dtype, torch.layout, torch.memory_format),
)
_NUMBERS = (int, float, complex, str)


def with_unchecked_arguments(prologue: TraceCtx, data: Any) -> TraceCtx:
    """The prologue with a check of what the others leave out; unchanged where they leave nothing out.

    Arguments that the program does not read count too, because nothing tells them from a None that it reads. The
    function's eighth kind of arguments comes with a warning.

    Args:
        prologue: of the program.
        data: Thunder's `CompileData`. ThunderFX's programs stay as they are, because Dynamo guards their arguments.
    """
    if is_of_thunderfx(data.compile_options):
        return prologue
    given = {b.output.name: b.output for b in prologue.bound_symbols if b.sym.id is PrimIDs.UNPACK_TRIVIAL}
    # Beside symbolic values the prologue does not check the types of numbers either.
    needed = data.cache_option is CACHE_OPTIONS.SYMBOLIC_VALUES or any(_has_unchecked(prologue, n) for n in given)
    if set(given) != {"args", "kwargs"} or not needed:
        return prologue
    if not hasattr(data, "thunder_mem_kinds"):
        data.thunder_mem_kinds = []
    new = from_trace(prologue)
    *body, returned = prologue.bound_symbols
    new.bound_symbols = [*body, _check(tuple(given.values()), data.thunder_mem_kinds), returned]
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


def _check(arguments: tuple, kinds: list[Any]) -> BoundSymbol:
    symbol = Symbol(_NAME, meta=None, id=_NAME, executor=pythonex, tags=(OpTags.DONT_DCE,), is_prim=True)
    return BoundSymbol(symbol, args=arguments, kwargs={}, output=None, _call_ctx={_NAME: _same_as_first(kinds)})


def _same_as_first(kinds: list[Any]) -> Callable[[Any, Any], None]:
    """A function of a call's arguments that raises ValueError where they are of other kinds than the first call's.

    Args:
        kinds: those of the function's programs, to which this one's is added.
    """
    first: list[Any] = []

    def check_other_arguments(args: Any, kwargs: Any) -> None:
        kind = (_kind(args), _kind(dict(sorted(kwargs.items()))))
        if not first:
            first.append(kind)
            if kind in kinds:
                return
            kinds.append(kind)
            if len(kinds) == _OFTEN:
                warnings.warn(_COMPILED_OFTEN, stacklevel=2)
        elif kind != first[0]:
            raise ValueError("an argument is of another kind than when this program was compiled")

    return check_other_arguments


def _kind(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """What of an argument decides, beside what Thunder checks, which program is traced; it holds no tensor.

    Args:
        value: the argument, or a part of one.
        inside: the ids of what it is a part of, since a recursive function is a part of its own closure.
    """
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, torch.Tensor):
        return torch.Tensor  # a parameter or a fake tensor is no other kind
    if len(inside) == _LEVELS or id(value) in inside:
        return type(value)
    kind = partial(_kind, inside=(*inside, id(value)))
    of_parts = next((of for classes, of in _PARTS if isinstance(value, classes)), None)
    if of_parts is None:
        return _of_fields(value, kind) if is_dataclass(value) else type(value)
    return of_parts(value, kind)


def _of_function(value: FunctionType, kind: Callable[[Any], Any]) -> tuple:
    """One lambda, made anew for each call, is one program."""
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    numbers = tuple(x for x in defaults if isinstance(x, _NUMBERS))
    return value.__code__, numbers, kind(defaults), kind(_closure(value))


def _closure(function: FunctionType) -> tuple:
    """The values that a function holds; a cell that is not yet filled counts as None."""
    held = []
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:
            held.append(None)
    return tuple(held)


def _of_builtin(value: BuiltinFunctionType, kind: Callable[[Any], Any]) -> Any:
    """A function of a module is itself; a method of an object must not keep the object."""
    owner = value.__self__
    return value if owner is None or isinstance(owner, ModuleType | type) else (value.__name__, kind(owner))


def _of_sequence(value: Any, kind: Callable[[Any], Any]) -> tuple:
    return (type(value), len(value), *map(kind, value if len(value) <= _LONGEST else ()))


def _of_set(value: Any, kind: Callable[[Any], Any]) -> tuple:
    return type(value), len(value), frozenset(x if isinstance(x, _NUMBERS) else kind(x) for x in value)


def _of_mapping(value: Mapping, kind: Callable[[Any], Any]) -> tuple:
    return (type(value), len(value), *((k, kind(x)) for k, x in value.items() if len(value) <= _LONGEST))


def _of_fields(value: Any, kind: Callable[[Any], Any]) -> tuple:
    return (type(value), *(kind(getattr(value, "__dict__", {}).get(field.name)) for field in fields(value)))


# By the class of a value: its kind, from those of its parts.
_PARTS: tuple[tuple[Any, Callable[[Any, Callable[[Any], Any]], Any]], ...] = (
    ((tuple, list, deque), _of_sequence),
    ((set, frozenset), _of_set),
    ((dict, UserDict, MappingProxyType), _of_mapping),
    (FunctionType, _of_function),
    (BuiltinFunctionType, _of_builtin),
    (MethodType, lambda value, kind: (kind(value.__func__), kind(value.__self__))),
    (partial, lambda value, kind: (partial, kind(value.func), kind(value.args), kind(value.keywords))),
    (SimpleNamespace, lambda value, kind: (SimpleNamespace, kind(vars(value)))),
)
