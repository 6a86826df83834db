"""The grad mode in which a transform records operations.

Thunder marks what is recorded while gradients are disabled as detached, and tracing leaves the mode as the program
does. A program that ends with gradients disabled, as parts of ThunderFX's do before a block under `torch.no_grad`,
would lose the gradients of all that a transform writes out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from thunder.core.compile_data import get_compile_data
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.functionalization.replaceable_writes import is_detached

__all__ = ["with_gradients_recorded"]


def with_gradients_recorded(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of a transform that records operations with gradients, if they are enabled anywhere in the program.

    What stands for a detached value is marked as that was. In a program all of which runs under `torch.no_grad`, such
    as an evaluation, nothing is recorded for gradients.
    """

    @wraps(hook)
    def recording(self: Any, prologue: TraceCtx, computation: TraceCtx, *args: Any, **kwargs: Any) -> Any:
        data: Any = get_compile_data()
        if data is None:
            return hook(self, prologue, computation, *args, **kwargs)
        left, data.is_grad_enabled = data.is_grad_enabled, any(map(_is_with_gradients, computation.bound_symbols))
        try:
            return hook(self, prologue, computation, *args, **kwargs)
        finally:
            data.is_grad_enabled = left

    return recording


def _is_with_gradients(bsym: BoundSymbol) -> bool:
    """Whether an operation was recorded while gradients were enabled."""
    given = {p.name for p in bsym.flat_proxy_args}
    made = (p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy) and p.name not in given)
    return bool(given) and not all(map(is_detached, made))
