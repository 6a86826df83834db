"""Running many random programs in little time: the same planner on the same traces, without what is slow around it.

Most of a program's time is Thunder's own: half is its interpreter, a tenth each the functions that hold fused
regions, and looking the same things up again and again. `quickly` leaves that out. What the package decides, and
what runs in which order, stays; `tests/system/test_fuzz.py` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import thunder
from thunder.core import pytree
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from tests.fuzzing.quick_thunder import claimed_once, looked_up_once
from tests.fuzzing.stepping import Holds
from tests.fuzzing.trace import called

__all__ = ["directly_traced", "quickly"]


@contextmanager
def quickly(directly: bool = True) -> Iterator[None]:
    """Within, programs compile in about a third of the time; for small programs on one process alone.

    Without `directly` through Thunder's interpreter, as the graphs of ThunderFX must be.
    """
    with ExitStack() as stack:
        for context in (directly_traced if directly else nullcontext, _stepwise_regions, looked_up_once, claimed_once):
            stack.enter_context(context())
        yield


@contextmanager
def directly_traced() -> Iterator[None]:
    """Within, operations are called on Thunder's proxies, without its interpreter."""
    general_jit = thunder.thunder_general_jit

    def direct(fn: Callable, *args: Any, **options: Any) -> Any:
        if isinstance(fn, Holds):
            with called(fn.fn) as program, fn.calling(program):
                return general_jit(fn, *args, **options)
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
    from thunder_mem.regions import compiled_region

    whole = compiled_region.python_function

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
            _functions[key] = whole([leaf], list(proxies.values()), tuple(leaf.flat_outs), "region")
        return _functions[key], names, outputs

    def stepwise(leaves: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy], _: str) -> Callable:
        steps = [step(leaf) for leaf in leaves]

        def region(*args: Any) -> tuple:
            values = {x.name: a for x, a in zip(inputs, args, strict=True)}
            for function, read, made in steps:
                values.update(zip(made, function(*(values[name] for name in read)), strict=True))
            return tuple(values[x.name] for x in outputs)

        return region

    compiled_region.python_function = stepwise
    try:
        yield
    finally:
        compiled_region.python_function = whole


def _kind(x: Proxy) -> Hashable:
    if isinstance(x, TensorProxy):
        return tuple(x.shape), x.dtype, str(x.device), x.requires_grad
    return type(x), repr(getattr(x, "value", None))
