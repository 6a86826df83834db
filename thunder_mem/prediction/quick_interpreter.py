"""Thunder's interpreter of Python without what it finds out again and again.

Most of the time in which Thunder compiles a model goes into interpreting `torch.nn.Module.__call__` and its like. A
prediction runs nothing, so that this time is most of a prediction's, too.
"""

from __future__ import annotations

import builtins
import dis
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from threading import Lock
from types import CodeType, FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from thunder.core import interpreter
from thunder.core.interpreter import InterpreterFrame, unwrap, wrap_binary_subscr, wrap_const

__all__ = ["interpreted_quickly"]

# Whose truth and length no program can define. Thunder guards what is in a container whose length it has found.
_PLAIN, _CONTAINERS = frozenset({str, int, float, type(None)}), frozenset({dict, OrderedDict, list, tuple})
_ABSENT = object()


@contextmanager
def interpreted_quickly() -> Iterator[None]:
    """Within, Thunder traces a module in about three fifths of the time, to the same trace with the same guards.

    A piece of bytecode, which is immutable, is disassembled once and not each time that it is entered. Globals and
    builtins are looked up, not found by interpreting a lookup; the same holds for the truth and the length of plain
    values and of empty containers. The frame that stands for an interpreted line in tracebacks is made once, and the
    caller's stack is told without the sources around each of its frames.
    """
    _QUICK.enter()
    try:
        yield
    finally:
        _QUICK.leave()


class _Quick:
    """What replaces functions of the interpreter, once for all threads and nested contexts that are within."""

    def __init__(self) -> None:
        self._lock, self._within, self._replaced = Lock(), 0, ExitStack()

    def enter(self) -> None:
        with self._lock:
            if self._within == 0:
                for replaced in _replacements():
                    self._replaced.enter_context(replaced)
            self._within += 1

    def leave(self) -> None:
        with self._lock:
            self._within -= 1
            if self._within == 0:
                self._replaced.close()


_QUICK = _Quick()


def _replacements() -> Iterator[AbstractContextManager[Any]]:
    lookasides = interpreter._default_lookaside_map
    yield _items(lookasides, {function: _on_plain(function, lookasides[function]) for function in (bool, len)})
    yield patch.object(InterpreterFrame, "get_or_make_python_frame", _frames_made_once())
    yield patch.object(interpreter, "dis", SimpleNamespace(**{**vars(dis), "get_instructions": cache(_instructions)}))
    quick_inspect = SimpleNamespace(**{**vars(inspect), "stack": partial(inspect.stack, context=0)})
    yield patch.object(interpreter, "inspect", quick_inspect)
    yield patch.object(interpreter, "globals_lookup", _looked_up(interpreter.globals_lookup))


@contextmanager
def _items(of: dict[Any, Any], new: dict[Any, Any]) -> Iterator[None]:
    """`patch.dict` would also forget what is added within."""
    old = {key: of[key] for key in new}
    of.update(new)
    try:
        yield
    finally:
        of.update(old)


def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


def _on_plain(function: Callable[[Any], Any], interpreted: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def found(x: Any) -> Any:
        value = unwrap(x)
        is_plain = type(value) in _PLAIN or (type(value) in _CONTAINERS and not value)
        return wrap_const(function(value)) if is_plain else interpreted(x)

    return found


def _looked_up(interpreted: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def lookup(globals_dict: Any, name: Any) -> Any:
        scope, key = unwrap(globals_dict), unwrap(name)
        if globals_dict.has_item_tracking:  # a program that writes its globals
            return interpreted(globals_dict, name)
        if key in scope:
            # Alive as long as the scope's wrapper: a value that is met again is the same to the interpreter.
            known = globals_dict.__dict__.setdefault("looked_up", {})
            if key not in known:
                known[key] = wrap_binary_subscr(scope[key], globals_dict, name)
            return known[key]
        found = getattr(builtins, key, _ABSENT)
        return interpreted(globals_dict, name) if found is _ABSENT else wrap_const(found)

    return lookup


def _frames_made_once() -> Callable[[InterpreterFrame], FrameType]:
    make, known = InterpreterFrame.get_or_make_python_frame, {}

    def made(self: InterpreterFrame) -> FrameType:
        key = (self.code, self.qualname, self.positions and self.positions.lineno)
        if key not in known:
            known[key] = make(self)
        return known[key]

    return made
