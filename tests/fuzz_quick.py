"""Running many random programs in little time: the same planner on the same traces, without what is slow around it.

Most of a program's time is Thunder's own: half is its interpreter, a tenth each the functions that hold fused
regions, and looking the same things up again and again. `quickly` leaves that out. What the package decides, and
what runs in which order, stays; `tests/test_fuzz.py` compares.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import optree
import thunder
from thunder.core import pytree
from thunder.core.proxies import Proxy, ProxyInterface, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.executors import passes

from tests.fuzz_trace import called

__all__ = ["quickly"]


@contextmanager
def quickly() -> Iterator[None]:
    """Within, programs compile in about a third of the time; for small programs on one process alone."""
    with ExitStack() as stack:
        for context in (_directly_traced, _stepwise_regions, _looked_up_once):
            stack.enter_context(context())
        yield


@contextmanager
def _directly_traced() -> Iterator[None]:
    general_jit = thunder.thunder_general_jit

    def direct(fn: Callable, *args: Any, **options: Any) -> Any:
        with called(fn) as program:
            return general_jit(program, *args, **options)

    thunder.thunder_general_jit = direct
    try:
        yield
    finally:
        thunder.thunder_general_jit = general_jit


# ---- regions, one operation after the other, of functions that many regions share ----

_functions: dict[Hashable, Callable] = {}
_MOST = 10_000


@contextmanager
def _stepwise_regions() -> Iterator[None]:
    from thunder_mem import compiled_region

    whole = compiled_region._python_function

    def step(leaf: BoundSymbol) -> tuple[Callable, list[str], list[str]]:
        flat, spec = pytree.tree_flatten((leaf.args, leaf.kwargs))
        proxies = {p.name: p for p in flat if isinstance(p, Proxy)}
        names, outputs = list(proxies), [o.name for o in leaf.flat_outs]
        key = (
            leaf.sym.id,
            str(spec),
            *((names.index(x.name), _kind(x)) if isinstance(x, Proxy) else (type(x), repr(x)) for x in flat),
            *(o in proxies for o in outputs),
        )
        if key not in _functions:
            if len(_functions) > _MOST:
                _functions.clear()
            _functions[key] = whole([leaf], list(proxies.values()), leaf.flat_outs)
        return _functions[key], names, outputs

    def stepwise(leaves: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy]) -> Callable:
        steps = [step(leaf) for leaf in leaves]

        def region(*args: Any) -> tuple:
            values = {x.name: a for x, a in zip(inputs, args, strict=True)}
            for function, read, made in steps:
                values.update(zip(made, function(*(values[name] for name in read)), strict=True))
            return tuple(values[x.name] for x in outputs)

        return region

    compiled_region._python_function = stepwise
    try:
        yield
    finally:
        compiled_region._python_function = whole


def _kind(x: Proxy) -> Hashable:
    if isinstance(x, TensorProxy):
        return tuple(x.shape), x.dtype, str(x.device), x.requires_grad
    return type(x), repr(getattr(x, "value", None))


# ---- what Thunder finds out again and again ----


@contextmanager
def _looked_up_once() -> Iterator[None]:
    """Signatures, which classes are trees, and the caller's source; and a pass whose result is not used."""
    flatten, flatten_dataclasses = pytree.tree_flatten, pytree.tree_flatten_with_dataclass
    normalize, stack = Symbol.normalize, inspect.stack
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

    def quick_stack(context: int = 1) -> list[inspect.FrameInfo]:
        frames, frame = [], sys._getframe(1)
        while frame is not None:
            frames.append(inspect.FrameInfo(frame, frame.f_code.co_filename, frame.f_lineno, "", None, None))
            frame = frame.f_back
        return frames

    def quick_claim(trace: Any, executors: Any) -> Any:
        # For waits of collectives alone, which are not there: `transform_for_execution` does it again.
        return trace if sys._getframe(1).f_code.co_name.startswith("apply_transforms") else claim(trace, executors)

    quick = {flatten: quick_flatten, flatten_dataclasses: quick_flatten_dataclasses, claim: quick_claim}
    for old, new in quick.items():
        for module, name in _places(old):
            setattr(module, name, new)
    Symbol.normalize, inspect.stack = quick_normalize, quick_stack  # type: ignore[method-assign]
    try:
        yield
    finally:
        for old in quick:
            for module, name in _places(old):
                setattr(module, name, old)
        Symbol.normalize, inspect.stack = normalize, stack  # type: ignore[method-assign]


@functools.cache
def _places(value: Callable) -> list[tuple[Any, str]]:
    """The modules that have it, and by what name."""
    modules = list(sys.modules.values())
    return [(m, name) for m in modules for name, v in list(getattr(m, "__dict__", {}).items()) if v is value]
