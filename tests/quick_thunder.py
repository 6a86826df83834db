"""Thunder without what it finds out again and again, for many small programs in one process."""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dis import Positions
from types import CodeType, FrameType
from typing import Any

import optree
from thunder.core import pytree
from thunder.core.interpreter import InterpreterFrame
from thunder.core.proxies import ProxyInterface
from thunder.core.symbol import Symbol
from thunder.executors import passes

__all__ = ["interpreted_quickly", "looked_up_once"]

_frames: dict[Hashable, FrameType] = {}
_MOST = 10_000


@contextmanager
def interpreted_quickly() -> Iterator[None]:
    """Within, Thunder's interpreter traces a module in half of the time, to the same trace.

    A piece of bytecode, which is immutable, is disassembled once and not each time that it is entered; and where the
    caller stands is told without the source around each frame of the stack.
    """
    disassemble, stack = dis.get_instructions, inspect.stack

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

    dis.get_instructions, inspect.stack = once, stack_without_sources
    try:
        yield
    finally:
        dis.get_instructions, inspect.stack = disassemble, stack


@contextmanager
def looked_up_once() -> Iterator[None]:
    """Within, Thunder compiles small programs in half of the time; each of these is a tenth or more of it.

    Signatures, which classes are trees, the frames that stand for interpreted ones in tracebacks, a pass whose result
    is not used, and what `interpreted_quickly` has.
    """
    flatten, flatten_dataclasses = pytree.tree_flatten, pytree.tree_flatten_with_dataclass
    normalize, make_frame = Symbol.normalize, InterpreterFrame.get_or_make_python_frame
    claim = passes._transform_for_operator_executor_execution
    plain = {tuple, list, dict, str, int, bool, float, type(None)}
    signature, is_dataclass = functools.cache(inspect.signature), functools.cache(dataclasses.is_dataclass)

    def quick_flatten(tree: Any, namespace: str = pytree.OPTREE_NAMESPACE) -> Any:
        if type(tree) in plain or isinstance(tree, ProxyInterface):
            return optree.tree_flatten(tree, none_is_leaf=True, namespace=namespace)
        return flatten(tree, namespace)

    def quick_flatten_dataclasses(tree: Any) -> Any:
        leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=pytree.OPTREE_NAMESPACE)
        return flatten_dataclasses(tree) if any(is_dataclass(type(x)) for x in leaves) else (leaves, spec)

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

    def quick_claim(trace: Any, executors: Any) -> Any:
        # For waits of collectives alone, which are not there: `transform_for_execution` does it again.
        return trace if sys._getframe(1).f_code.co_name.startswith("apply_transforms") else claim(trace, executors)

    quick = {flatten: quick_flatten, flatten_dataclasses: quick_flatten_dataclasses, claim: quick_claim}
    for old, new in quick.items():
        for module, name in _places(old):
            setattr(module, name, new)
    Symbol.normalize = quick_normalize  # type: ignore[method-assign]
    InterpreterFrame.get_or_make_python_frame = quick_frame  # type: ignore[method-assign]
    try:
        with interpreted_quickly():
            yield
    finally:
        for old in quick:
            for module, name in _places(old):
                setattr(module, name, old)
        Symbol.normalize = normalize  # type: ignore[method-assign]
        InterpreterFrame.get_or_make_python_frame = make_frame  # type: ignore[method-assign]


@functools.cache
def _places(value: Callable) -> list[tuple[Any, str]]:
    """The modules that have it, and by what name."""
    modules = list(sys.modules.values())
    return [(m, name) for m in modules for name, v in list(getattr(m, "__dict__", {}).items()) if v is value]
