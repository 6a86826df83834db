"""Thunder without what it finds out again and again, for many small programs in one process."""

from __future__ import annotations

import builtins
import dataclasses
import dis
import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dis import Positions
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import optree
from thunder.core import interpreter, pytree
from thunder.core.interpreter import InterpreterFrame, unwrap, wrap_binary_subscr, wrap_const
from thunder.core.proxies import ProxyInterface
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.distributed.prims import PrimIDs as DistributedPrims
from thunder.executors import passes
from torch._inductor import cpu_vec_isa

__all__ = ["claimed_once", "interpreted_quickly", "loaded_here", "looked_up_once"]

_frames: dict[Hashable, FrameType] = {}
_MOST = 10_000
# Whose truth and length no program can define.
_PLAIN = frozenset({dict, OrderedDict, list, tuple, str, int, float, type(None)})


@contextmanager
def interpreted_quickly() -> Iterator[None]:
    """Within, Thunder's interpreter traces a module in a quarter of the time, to the same trace.

    A piece of bytecode, which is immutable, is disassembled once and not each time that it is entered. Globals and
    builtins are looked up, not found by interpreting a lookup; the same holds for the truth and the length of plain
    containers. The caller's stack is told without the sources around each of its frames.
    """
    disassemble, stack = dis.get_instructions, inspect.stack
    globals_lookup, bool_, len_ = interpreter.globals_lookup, interpreter._bool_lookaside, interpreter._len_lookaside

    @functools.lru_cache(_MOST)
    def instructions(code: CodeType, options: tuple[tuple[str, Any], ...]) -> tuple[dis.Instruction, ...]:
        return tuple(disassemble(code, **dict(options)))

    def once(x: Any, **options: Any) -> Iterator[dis.Instruction]:
        if isinstance(x, CodeType):
            return iter(instructions(x, tuple(options.items())))
        return disassemble(x, **options)

    def stack_without_sources(context: int = 1) -> list[inspect.FrameInfo]:
        frames, frame = [], sys._getframe(1)
        while frame is not None:
            line, code = frame.f_lineno, frame.f_code
            positions = Positions(line, line, 0, 999)
            frames.append(
                inspect.FrameInfo(frame, code.co_filename, line, code.co_name, None, None, positions=positions)
            )
            frame = frame.f_back
        return frames

    def looked_up(globals_dict: Any, name: Any) -> Any:
        scope, key = unwrap(globals_dict), unwrap(name)
        if globals_dict.has_item_tracking:  # a program that writes its globals
            return globals_lookup(globals_dict, name)
        if key in scope:
            # Alive as long as the scope's wrapper: a value that is met again is the same to the interpreter.
            known = globals_dict.__dict__.setdefault("looked_up", {})
            if key not in known:
                known[key] = wrap_binary_subscr(scope[key], globals_dict, name)
            return known[key]
        found = getattr(builtins, key, _frames)
        return globals_lookup(globals_dict, name) if found is _frames else wrap_const(found)

    def truth(x: Any) -> Any:
        return wrap_const(bool(unwrap(x))) if type(unwrap(x)) in _PLAIN else bool_(x)

    def length(x: Any) -> Any:
        return wrap_const(len(unwrap(x))) if type(unwrap(x)) in _PLAIN else len_(x)

    dis.get_instructions, inspect.stack, interpreter.globals_lookup = once, stack_without_sources, looked_up
    lookasides = interpreter._default_lookaside_map
    lookasides[bool], lookasides[len] = truth, length
    try:
        yield
    finally:
        dis.get_instructions, inspect.stack, interpreter.globals_lookup = disassemble, stack, globals_lookup
        lookasides[bool], lookasides[len] = bool_, len_


@contextmanager
def looked_up_once() -> Iterator[None]:
    """Within, Thunder compiles small programs in half of the time; each of these is a tenth or more of it.

    Signatures, which classes are trees, the frames that stand for interpreted ones in tracebacks, and what
    `interpreted_quickly` has.
    """
    flatten, flatten_dataclasses = pytree.tree_flatten, pytree.tree_flatten_with_dataclass
    normalize, make_frame = Symbol.normalize, InterpreterFrame.get_or_make_python_frame
    plain = {tuple, list, dict, str, int, bool, float, type(None)}
    signature, is_dataclass = functools.cache(inspect.signature), functools.cache(dataclasses.is_dataclass)

    def quick_flatten(tree: Any, namespace: str = pytree.OPTREE_NAMESPACE) -> Any:
        if type(tree) in plain or isinstance(tree, ProxyInterface):
            return optree.tree_flatten(tree, none_is_leaf=True, namespace=namespace)
        return flatten(tree, namespace)

    def quick_flatten_dataclasses(tree: Any) -> Any:
        leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=pytree.OPTREE_NAMESPACE)
        return flatten_dataclasses(tree) if any(map(is_dataclass, set(map(type, leaves)))) else (leaves, spec)

    def quick_normalize(self: Symbol, *args: Any, **kwargs: Any) -> Any:
        bound = signature(self.meta).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def quick_frame(self: InterpreterFrame) -> FrameType:
        key = (self.code, self.qualname, self.positions and self.positions.lineno)
        if key not in _frames:
            if len(_frames) > _MOST:
                _frames.clear()
            _frames[key] = make_frame(self)
        return _frames[key]

    Symbol.normalize = quick_normalize  # type: ignore[method-assign]
    InterpreterFrame.get_or_make_python_frame = quick_frame  # type: ignore[method-assign]
    try:
        with interpreted_quickly(), _replaced({flatten: quick_flatten, flatten_dataclasses: quick_flatten_dataclasses}):
            yield
    finally:
        Symbol.normalize = normalize  # type: ignore[method-assign]
        InterpreterFrame.get_or_make_python_frame = make_frame  # type: ignore[method-assign]


@contextmanager
def claimed_once() -> Iterator[None]:
    """Within, programs without collectives compile without a pass that only sorts the waits of collectives.

    The pass claims operations for executors, which `transform_for_execution` does again.
    """
    claim = passes._transform_for_operator_executor_execution

    def quick_claim(trace: Any, executors: Any) -> Any:
        to_sort = sys._getframe(1).f_code.co_name.startswith("apply_transforms")
        return trace if to_sort and not _communicates(trace.bound_symbols) else claim(trace, executors)

    with _replaced({claim: quick_claim}):
        yield


def _communicates(symbols: Iterable[BoundSymbol]) -> bool:
    """Whether one of the symbols, or of what they hold, is a collective."""
    return any(isinstance(s.sym.id, DistributedPrims) or _communicates(s.subsymbols) for s in symbols)


@contextmanager
def loaded_here() -> Iterator[None]:
    """Within, Inductor loads what it compiles to find out the vector units in this process, not in six others.

    Each of these would import PyTorch, which takes ten seconds in all.
    """

    def check_call(command: list[str], **options: Any) -> None:
        _, _, script = command
        exec(script)

    in_others = cpu_vec_isa.subprocess
    cpu_vec_isa.subprocess = SimpleNamespace(check_call=check_call, DEVNULL=in_others.DEVNULL)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        cpu_vec_isa.subprocess = in_others  # type: ignore[attr-defined]


@contextmanager
def _replaced(functions: dict[Callable, Callable]) -> Iterator[None]:
    """Within, each function is another wherever a module has it."""
    for old, new in functions.items():
        for module, name in _places(old):
            setattr(module, name, new)
    try:
        yield
    finally:
        for old in functions:
            for module, name in _places(old):
                setattr(module, name, old)


@functools.cache
def _places(value: Callable) -> list[tuple[Any, str]]:
    """The modules that have it, and by what name."""
    modules = list(sys.modules.values())
    return [(m, name) for m in modules for name, v in list(getattr(m, "__dict__", {}).items()) if v is value]
