"""Why a program needs no less memory with `MemEfficient`."""

from __future__ import annotations

from typing import Any

from thunder_mem.comparison.result import EAGER, TORCH_COMPILE
from thunder_mem.comparison.step import Step
from thunder_mem.memory.outside_input import shortened
from thunder_mem.memory.units import size
from thunder_mem.prediction.compiled_call import compiled_entry
from thunder_mem.prediction.predict import Prediction, predict
from thunder_mem.prediction.training_step import predict_step
from thunder_mem.report.above_eager import eager_memory, why_above
from thunder_mem.report.facts import CATEGORIES
from thunder_mem.report.notes import NOT_FUSED, about_compilation
from thunder_mem.report.report import Report
from thunder_mem.transforms.last_compilation import why_no_plan

__all__ = ["LONGEST_REASON", "why_not_lower"]

LONGEST_REASON = 240
"""The most characters that an error may take in a line."""


def why_not_lower(jitted: Any, step: Step, *, trains: bool, best: str) -> str:
    """The reason in a few words: there is no plan, eager PyTorch saves less, or what holds the peak.

    Args:
        jitted: the program with `MemEfficient`, which has run.
        step: that it ran.
        trains: with a backward.
        best: the name of the compiler that needs least.
    """
    if failure := why_no_plan(jitted):
        return failure
    try:
        if best == TORCH_COMPILE and NOT_FUSED in about_compilation(jitted):
            return "no executor here fuses operations: leave executors= out"
        if best == EAGER and (why := _against_eager(jitted, step)):
            return why
        return _at_the_peak(_predicted(jitted, step, trains))
    except (TypeError, ValueError, RuntimeError) as error:
        cause = shortened(" ".join(str(error).split()), LONGEST_REASON)
        return f"unknown, as its memory cannot be predicted ({cause})"


def _against_eager(jitted: Any, step: Step) -> str:
    entry, _, _ = compiled_entry(jitted, step.args, step.kwargs, call=True)
    call = predict(jitted, *step.args, kwargs=step.kwargs, keep_outputs=True)
    eager = eager_memory(entry.computation_traces[0], call)
    return "" if eager is None else why_above(eager, call)


def _predicted(jitted: Any, step: Step, trains: bool) -> Prediction:
    if not trains:
        return predict(jitted, *step.args, kwargs=step.kwargs)
    return predict_step(jitted, step.optimizer, step.loss, *step.args, kwargs=step.kwargs)  # type: ignore[arg-type]


def _at_the_peak(prediction: Prediction) -> str:
    peak = Report(prediction).peak
    if peak is None:
        return "nothing runs"
    if peak.phase == "optimizer":
        return "the peak is in the optimizer's step, which no compiler of the model changes"
    nbytes, category = max(zip(peak.by_category, CATEGORIES, strict=True))
    return f"its peak is in the {peak.phase}, and {size(nbytes)} of it are {category}"
