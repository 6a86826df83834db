"""`explain`: from the last compilation of a jitted function to a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import thunder
import torch
from thunder.core.trace import TraceCtx

from thunder_mem.attention.by_cudnn import mem_cudnn_attention_ex
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.attention.with_mask import mem_masked_attention_ex
from thunder_mem.frontend.thunderfx import highest_peak, is_fx
from thunder_mem.fusers.fusion_executors import fuses_generally
from thunder_mem.kernels.registered import mem_gradients_ex, mem_kernels_ex
from thunder_mem.memory.outside_input import quoted
from thunder_mem.partition.budget import parse_budget
from thunder_mem.planning.executor import user_executors
from thunder_mem.planning.record import last_failure, last_plan
from thunder_mem.prediction.compiled_call import compiled_entry
from thunder_mem.prediction.predict import Prediction, predict
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.report.above_eager import about_eager, eager_memory
from thunder_mem.report.advice import about_step
from thunder_mem.report.facts import NO_PLAN
from thunder_mem.report.given_options import given_options
from thunder_mem.report.notes import about_compilation, about_subgraphs
from thunder_mem.report.optimality import Optimality, optimality
from thunder_mem.report.owners import parameter_paths
from thunder_mem.report.report import CompiledBy, Report
from thunder_mem.runtime.device_memory import device_memory_bytes
from thunder_mem.tiling.cuttable import cuttable_values
from thunder_mem.transforms import ChunkLossHead, MemEfficient
from thunder_mem.transforms.last_compilation import why_no_plan

__all__ = ["explain"]

_OURS = (
    mem_attention_ex,
    mem_cudnn_attention_ex,
    mem_gradients_ex,
    mem_kernels_ex,
    mem_masked_attention_ex,
    mem_pointwise_ex,
)

FAILED = "MemEfficient could not plan this function, and this is the memory of Thunder's own program instead: "
NEVER_CALLED = "the jitted function has never been called, so there is nothing to explain: call it once"
LATE = "ThunderFX compiles when it runs: call the program once"
OLDER = "other arguments were compiled after these: MemEfficient's decisions for these are no longer known"


def explain(
    jitted: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    prediction: Prediction | None = None,
    budget: int | str | None = None,
    bounds: bool = True,
    detail: bool = False,
) -> Report:
    """Explain the memory of a jitted function without running it (apart from single operations, see `predict`).

    Printed, the report has five lines: the peak, when and at which line it is, which modules hold it, and as code the
    two ways to less with the most at stake. On a CPU it also names the peaks of eager PyTorch and of Thunder alone.

    Args:
        jitted: the result of `thunder.jit`; with `transforms=[MemEfficient()]` the report also shows the
            decisions. For ThunderFX the report covers the subgraph whose plan peaks highest, as last compiled.
            Notes name the other subgraphs, those that Thunder did not compile, and why.
        args: the arguments of a call, for which it is compiled if necessary. Without any, the last compilation
            is explained, with inputs that are dense and share no memory.
        kwargs: the call's keyword arguments.
        prediction: explain this prediction, such as one of a whole step by `predict_step`. The default is a
            new one in which the caller holds the outputs during the backward, as plans and budgets assume.
        budget: the limit for the peak: bytes, a size such as "40GiB", or "80%" of the device's memory; the
            report then states the headroom. The default is the budget of `MemEfficient(budget=...)`, but none
            for a given `prediction`, which may hold more than that budget covers.
        bounds: find a lower bound on each phase's peak, which proves an order optimal or limits its distance
            to the optimum. That takes seconds at 3,000 operations. The bound is omitted above that, and for
            phases with operations outside the trace (an eager loss).
        detail: print everything: why eager PyTorch needs less, the decisions, bounds, what is alive at the peak, and
            all advice.

    Raises:
        TypeError: `jitted` is not a function jitted by Thunder, or `budget` is neither an int nor a string.
        ValueError: it was never called and no arguments are given, or the budget is invalid or not positive.
        PredictionError: it cannot be traced, or an operation has no prediction.

    Example:
        >>> import torch, thunder
        >>> f = thunder.jit(lambda x: (x * 2).sin().sum(), executors=[])
        >>> explain(f, torch.zeros(1024)).peak_bytes
        12288
    """
    if not isinstance(detail, bool):
        raise TypeError(f"detail is True or False, not {quoted(detail)}")
    if budget is not None:
        parse_budget(budget)  # raise before the long work
    if is_fx(jitted):
        if args or kwargs:
            raise ValueError(f"{LATE}, then explain it without arguments")
        shown = highest_peak(jitted)
        if shown is None:
            raise ValueError(why_no_plan(jitted))
        report = explain(shown, prediction=prediction, budget=budget, bounds=bounds, detail=detail)
        about_all = (*report.notes, *about_subgraphs(jitted))
        return replace(report, notes=about_all, compiled_by=_compiled_by(jitted, "thunderfx"))
    stats: Any = thunder.compile_stats(jitted)
    data: Any = thunder.compile_data(jitted)
    if data is None or stats is None:
        compiles_itself = hasattr(getattr(jitted, "forward", None), "ours")  # by memory_efficient
        program = "programs(model)[-1].compiled" if compiles_itself else "what thunder.jit returned"
        raise TypeError(f"explain takes {program}, not {type(jitted).__name__}")
    called = bool(args or kwargs)
    if not called and not stats.interpreter_cache:
        raise ValueError(f"{NEVER_CALLED}, or give explain the arguments of a call")
    alone = prediction is None
    if prediction is None:
        prediction = predict(jitted, *args, kwargs=kwargs, keep_outputs=True)  # as plans and budgets count
    entry, _, _ = compiled_entry(jitted, args, dict(kwargs or {}), call=called)
    notes = []
    plan, failure = last_plan(jitted), last_failure(jitted)
    if plan is None and not failure:
        notes.append(NO_PLAN)
    elif entry.computation_traces is not stats.interpreter_cache[-1].computation_traces:
        plan = None
        notes.append(OLDER)
    elif failure:
        notes.append(f"{FAILED}{failure}")
    if last_plan(jitted) is not None:
        notes += about_compilation(jitted)
    if detail and (step := about_step(prediction.step_variants)):
        notes.append(step)
    found: list[Optimality] = []
    if bounds:
        traces = {"forward": entry.computation_traces, "backward": entry.backward_traces}
        phases = [prediction.phase(name) for name in prediction.phases if name in traces]
        found = [optimality(traces[p.timeline[0].phase][-1], p) for p in phases]
    if budget is not None:
        limit_bytes: int | None = parse_budget(budget, device_memory_bytes(torch.device(prediction.device_type)))
    else:
        limit_bytes = plan.budget.budget_bytes if alone and plan is not None and plan.budget is not None else None
    compared = alone and called and plan is not None and not detail
    eager = eager_memory(entry.computation_traces[0], prediction) if alone else None
    paths, compiled_by = parameter_paths(entry.prologue_traces[0]), _compiled_by(jitted, "thunder.jit")
    options = given_options(data, with_executors=compiled_by == "memory_efficient")
    may_cut = plan is not None and paths and "tile" not in options
    return Report(
        prediction,
        plan,
        tuple(found),
        limit_bytes,
        tuple(notes),
        above_eager=() if eager is None else about_eager(eager, prediction),
        eager_bytes=None if eager is None else eager.peak_bytes,
        thunder_bytes=_thunder_peak_bytes(jitted, args, kwargs or {}) if compared else None,
        paths=paths,
        options=options,
        cuttable=_cuttable(entry.computation_traces[0]) if may_cut else frozenset(),
        may_fuse=any(map(fuses_generally, user_executors(data.executors_list))),
        compiled_by=compiled_by,
        detail=detail,
    )


def _cuttable(trace: TraceCtx) -> frozenset[tuple[str, int]]:
    """The values that tiles could cut; none where the search does not understand the program."""
    try:
        return cuttable_values(trace)
    except Exception:  # advice is optional
        return frozenset()


def _compiled_by(compiled: Any, compiler: CompiledBy) -> CompiledBy:
    """The function that the user called: `memory_efficient`, or the compiler itself."""
    return "memory_efficient" if getattr(compiled, "is_hugging_face", False) is True else compiler


def _thunder_peak_bytes(jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The predicted peak of a call without this package, for which Thunder traces the program once more.

    None where other transforms are involved, or regions would have to be compiled, or Thunder alone fails.

    Args:
        jitted: compiled with `MemEfficient`.
        args, kwargs: of the call.
    """
    data: Any = thunder.compile_data(jitted)
    executors = [e for e in user_executors(data.executors_list) if e not in _OURS]
    others = [t for t in data.transforms if not isinstance(t, MemEfficient | ChunkLossHead)]
    if others or any(map(fuses_generally, executors)):
        return None
    with suppress(Exception):  # the comparison is optional
        alone = thunder.jit(data.fn, executors=executors)
        return predict(alone, *args, kwargs=kwargs, keep_outputs=True).peak_bytes
    return None
