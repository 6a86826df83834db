"""Regions of nvFuser that Inductor takes over where nvFuser fails.

nvFuser compiles a region at a call, and one of its own assertions may fail there. On an H200 its segmenter gave up on a
region of longchat's backward that is right in Thunder's operations. The program goes on all the same, unless the region
draws random numbers: another draw than nvFuser's would not be the one that the other half repeats.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace

from thunder_mem.regions.compiled_region import CompileWarning
from thunder_mem.regions.pointwise_executor import region_function

__all__ = ["GuardedFusion", "with_guarded_fusions"]


class GuardedFusion:
    """A region of nvFuser, and of Inductor after nvFuser's first error.

    Attributes:
        definition: Thunder's function of the region, which calls nvFuser.
    """

    def __init__(
        self,
        definition: Callable[..., Sequence[Any]],
        bsyms: Sequence[BoundSymbol],
        inputs: Sequence[Proxy],
        outputs: Sequence[Proxy],
    ) -> None:
        self.definition = definition
        self._source = bsyms, inputs, outputs
        self._other: Callable[..., Sequence[Any]] | None = None

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self._other is not None:
            return self._other(*args)
        try:
            return self.definition(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            try:
                other = region_function(*self._source)
                results = other(*args)
            except Exception:
                raise error from None  # Inductor's error is not the cause
            cause = (str(error).strip().splitlines() or [""])[0][:200]
            message = f"nvFuser failed in a region ({type(error).__name__}: {cause}); Inductor runs it"
            self._other = other  # before the warning, which may be an error
            warnings.warn(message, CompileWarning, stacklevel=3)
            return results

    def __deepcopy__(self, memo: dict[int, Any]) -> GuardedFusion:
        return self

    def __getattr__(self, name: str) -> Any:
        """What `thunder.examine` asks of Thunder's function, such as `last_used`."""
        if name == "definition":  # of an object without attributes yet
            raise AttributeError(name)
        return getattr(self.definition, name)

    def __repr__(self) -> str:
        return repr(self.definition)


def with_guarded_fusions(trace: TraceCtx) -> TraceCtx:
    """The trace whose nvFuser regions go on without nvFuser if it fails; the same object if it has none."""
    guarded = [_guarded(b) for b in trace.bound_symbols]
    if all(new is old for new, old in zip(guarded, trace.bound_symbols, strict=True)):
        return trace
    new = from_trace(trace)
    new.bound_symbols = guarded
    if (provenance := trace.get_provenance()) is not None:
        new.set_provenance(provenance)
    return new


def _guarded(bsym: BoundSymbol) -> BoundSymbol:
    executor = bsym.sym.executor
    if not bsym.sym.is_fusion or executor is None or executor.name != "nvfuser":
        return bsym
    ((name, definition),) = (bsym._call_ctx or {}).items()
    if isinstance(definition, GuardedFusion):
        return bsym
    fusion = GuardedFusion(definition, bsym.subsymbols, bsym.args, bsym.output)

    def with_fusion(made: BoundSymbol) -> None:
        made._call_ctx = {name: fusion}

    # Thunder binds a fusion's function to its symbol.
    return bsym.from_bsym(sym=replace(bsym.sym, _bind_postprocess=with_fusion))
