"""`explain`: from the last compilation of a jitted function to a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder

from thunder_mem.delegate import last_plan
from thunder_mem.predict import predict
from thunder_mem.report.bound import Optimality, optimality
from thunder_mem.report.report import Report

__all__ = ["explain"]

NO_PLAN = "MemEfficient made no plan for this function: this is the memory of what Thunder alone compiled"


def explain(jitted: Callable[..., Any], *, budget_bytes: int | None = None, bounds: bool = True) -> Report:
    """Explain the memory of the last compilation of a jitted function, without running it.

    Args:
        jitted: what `thunder.jit` returned, after at least one call; with `transforms=[MemEfficient()]`
            the report also shows what was decided.
        budget_bytes: what the peak is to fit into; the report then states the headroom.
        bounds: look for a lower bound on each phase's peak, which proves an order optimal or says how
            far from it it may be. Takes seconds at 3,000 operations; above that it is left out.

    Raises:
        TypeError: `jitted` is not a function jitted by Thunder, or `budget_bytes` is not an int.
        ValueError: it was never called, or the budget is not positive.
        PredictionError: an operation has no prediction.

    Example:
        >>> import torch, thunder
        >>> f = thunder.jit(lambda x: (x * 2).sin().sum(), executors=[])
        >>> _ = f(torch.zeros(1024))
        >>> explain(f).peak_bytes
        12288
    """
    if budget_bytes is not None:
        if not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool):
            raise TypeError(f"budget_bytes is a number of bytes, an int, not {budget_bytes!r}")
        if budget_bytes <= 0:
            raise ValueError(f"budget_bytes is a number of bytes above 0, not {budget_bytes}")
    stats: Any = thunder.compile_stats(jitted)
    if thunder.compile_data(jitted) is None or stats is None:
        raise TypeError(f"explain takes what thunder.jit returned, not {type(jitted).__name__}")
    if not stats.interpreter_cache:
        raise ValueError("the jitted function has never been called, so there is nothing to explain: call it once")
    prediction, plan = predict(jitted), last_plan(jitted)
    found: list[Optimality] = []
    if bounds:
        entry = stats.interpreter_cache[-1]
        traces = {"forward": entry.computation_traces, "backward": entry.backward_traces}
        found = [optimality(traces[name][-1], prediction.phase(name)) for name in prediction.phases if name in traces]
    return Report(prediction, plan, tuple(found), budget_bytes, () if plan else (NO_PLAN,))
