"""Thunder without what it finds out again and again, for many small programs in one process."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import optree
from thunder.core import pytree
from thunder.core.proxies import ProxyInterface
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.distributed.prims import PrimIDs as DistributedPrims
from thunder.executors import passes
from torch._inductor import cpu_vec_isa

from thunder_mem.prediction.quick_interpreter import interpreted_quickly

__all__ = ["claimed_once", "loaded_here", "looked_up_once"]


@contextmanager
def looked_up_once() -> Iterator[None]:
    """Within, Thunder compiles small programs in half of the time; each of these is a tenth or more of it.

    Signatures, which classes are trees, and what `interpreted_quickly` has.
    """
    flatten, flatten_dataclasses = pytree.tree_flatten, pytree.tree_flatten_with_dataclass
    normalize = Symbol.normalize
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

    Symbol.normalize = quick_normalize  # type: ignore[method-assign]
    try:
        with interpreted_quickly(), _replaced({flatten: quick_flatten, flatten_dataclasses: quick_flatten_dataclasses}):
            yield
    finally:
        Symbol.normalize = normalize  # type: ignore[method-assign]


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
