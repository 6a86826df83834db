"""Compile and predict a program: the work behind every command."""

from __future__ import annotations

import contextlib
import pathlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import thunder
import torch
from thunder.extend import Executor, get_default_executors

from thunder_mem.analysis.frontier import memory_time_frontier
from thunder_mem.analysis.frontier_points import Frontier
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.command_line.program import Program, UsageError, in_words
from thunder_mem.command_line.questions import Outcome, Question, limits_of
from thunder_mem.command_line.training import loss_of, optimizer_of, stepper_of
from thunder_mem.comparison.compare import compare
from thunder_mem.comparison.result import Comparison
from thunder_mem.frontend.thunderfx import by_thunderfx, highest_peak, is_fx
from thunder_mem.fusers.fusion_executors import fuser_of, with_fuser
from thunder_mem.memory.device_specs import DeviceSpec
from thunder_mem.memory.plan import Plan
from thunder_mem.optimizer.figures import large_state_bytes
from thunder_mem.optimizer.step_in_backward import StepInBackward
from thunder_mem.planning.record import last_plan
from thunder_mem.prediction.caching_allocator import allocate
from thunder_mem.prediction.predict import PredictionError, predict
from thunder_mem.prediction.simulate import simulate
from thunder_mem.prediction.training_step import predict_step
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.transforms import MemEfficient

__all__ = ["ask", "compare_compilers", "machine", "survey"]


@contextlib.contextmanager
def machine(device: str | None, fusion: str | None) -> Iterator[DeviceSpec | None]:
    """The machine of a command: a simulated GPU, as the default device of tensors, or this CPU."""
    if device is None:
        _executors(fusion)  # raise for missing packages before loading anything
        yield None
        return
    fuser = {None: "mem_pointwise", "none": None}.get(fusion, fusion)
    with simulate(device, fusion=fuser) as simulated, torch.device("cuda"):
        yield simulated.spec


def survey(
    program: Program,
    fusion: str | None,
    simulated: bool,
    points: int,
    offload: bool | str = False,
    options: Mapping[str, str] | None = None,
) -> Frontier:
    """The program's plans from no recomputation to the smallest peak.

    Args:
        program: jitted or not.
        fusion: the fusion executor, see `thunder-mem --help`.
        simulated: for a simulated device.
        points, offload: as for `memory_time_frontier`.
        options: of `MemEfficient`.

    Raises:
        UsageError: the options do not go together.
        PredictionError, ValueError: as `memory_time_frontier`.
    """
    _check_options(program, options or {})
    if program.is_fx:
        raise UsageError(
            "a frontier needs a program for thunder.jit, and this is a program of ThunderFX: name the model"
        )
    model: Any = program.model
    if not program.is_jitted:
        executors = None if simulated else _executors(fusion)
        alone = thunder.jit(model, executors=executors)
        model = thunder.jit(model, executors=executors, transforms=[_mem_efficient(options or {})])
        with _telling_whose_fault(lambda: predict(alone, *program.args, kwargs=program.kwargs)):
            return memory_time_frontier(model, *program.args, kwargs=program.kwargs, points=points, offload=offload)
    return memory_time_frontier(model, *program.args, kwargs=program.kwargs, points=points, offload=offload)


def compare_compilers(
    program: Program,
    question: Question,
    torch_compile: bool,
) -> Comparison:
    """The program under several compilers, run on this machine.

    Args:
        program: not jitted.
        question: its optimizer, loss, fusion executor, budget and options of `MemEfficient`.
        torch_compile: `torch.compile`, too.

    Raises:
        UsageError: the optimizer cannot be made.
        TypeError, ValueError: as `compare`.
    """
    return compare(
        program.model,
        *program.args,
        kwargs=program.kwargs,
        loss_fn=loss_of(program, question.loss),
        optimizer=optimizer_of(program, question.optimizer),
        mem_efficient=_mem_efficient(question.options, question.budget_bytes),
        executors=_executors(question.fusion),
        torch_compile=torch_compile,
    )


def _mem_efficient(options: Mapping[str, str], budget_bytes: int | None = None) -> MemEfficient:
    # The verdict says whether it suffices.
    return MemEfficient(budget=budget_bytes, on_infeasible="warn", **options)  # type: ignore[arg-type]


def _check_options(program: Program, options: Mapping[str, str]) -> None:
    if program.is_jitted and (name := next(iter(options), None)):
        raise UsageError(f"the program is jitted already: give {name}= to its own MemEfficient, not --{name}")


def _executors(fusion: str | None) -> list[Executor] | None:
    """The executors for `thunder.jit` on a real machine; None for its defaults."""
    if fusion is None:
        return None
    fuser = fuser_of(None if fusion == "none" else fusion)
    own = [mem_attention_ex] if fuser is mem_pointwise_ex else []
    return [] if fuser is None else [*own, *with_fuser(get_default_executors(), fuser)]


def ask(program: Program, question: Question) -> Outcome:
    """Compile and predict; if that does not fit, again with the limit as the budget of MemEfficient.

    Raises:
        UsageError: the options do not go together; or the program fails, and the message says whether Thunder
            alone fails too.
        PredictionError, ValueError: as `predict` and `predict_step`, for programs without MemEfficient, or for
            errors about MemEfficient itself.
    """
    if question.plain or program.is_jitted:
        return _answered(program, question)
    with _telling_whose_fault(lambda: _compiled(program, replace(question, plain=True, options={}), None)):
        return _answered(program, question)


@contextlib.contextmanager
def _telling_whose_fault(alone: Callable[[], object]) -> Iterator[None]:
    """Turn a failure into a `UsageError` that says whether Thunder `alone` also fails."""
    try:
        yield
    except Exception as error:
        if _is_refusal(error):
            raise
        try:
            alone()
        except Exception:
            verdict = "Thunder alone fails too"
        else:
            verdict = "Thunder alone compiles it (--plain), so MemEfficient is at fault"
        raise UsageError(f"{in_words(error)} ({verdict}; --debug shows where)") from error


def _is_refusal(error: Exception) -> bool:
    """Whether this package refuses the options, which says nothing about the program."""
    if isinstance(error, PredictionError):
        return False
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, UsageError) or raised_in.startswith(_PACKAGE)


_PACKAGE = str(pathlib.Path(__file__).parents[1])


def _answered(program: Program, question: Question) -> Outcome:
    if question.plain and program.is_jitted:
        raise UsageError("the program is jitted already: the arguments of that thunder.jit decide how it is compiled")
    _check_options(program, question.options)
    found = _compiled(program, question, None)
    if found.fits or question.plain or program.is_jitted or found.limit_bytes is None:
        return found
    # The plan cannot reduce memory outside the compiled function (an optimizer's state).
    outside_bytes = 0
    if not is_fx(found.jitted):
        call = predict(found.jitted, *program.args, kwargs=program.kwargs, keep_outputs=True)
        outside_bytes = found.peak_bytes - call.peak_bytes - _counted_bytes(stepper_of(program, question))
    if found.limit_bytes <= outside_bytes:
        return found
    best, budget_bytes = found, found.limit_bytes - outside_bytes
    for attempt in range(_ATTEMPTS + 1):
        # A plan and the step may peak at different places. Then the budget is lowered by the excess, and at last to
        # nothing, so that the smallest plan decides whether the step fits.
        leanest = attempt == _ATTEMPTS or budget_bytes <= 0
        bought = _compiled(program, question, 1 if leanest else budget_bytes)
        best = min(best, bought, key=lambda o: o.peak_bytes)
        if best.fits or leanest or _nothing_smaller(bought.plan):
            break
        budget_bytes -= bought.peak_bytes - found.limit_bytes
    return best


_ATTEMPTS = 2


def _counted_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """The optimizer's states that a budget counts itself."""
    if not isinstance(optimizer, StepInBackward) or not optimizer.counted or optimizer.states == "host":
        return 0
    return large_state_bytes(optimizer.wrapped)


def _nothing_smaller(plan: Plan | None) -> bool:
    return plan is None or plan.budget is None or plan.budget.method == "smallest"


def _through_fx(program: Program, question: Question, budget_bytes: int | None) -> Outcome:
    """Compile by a run, and predict the program, or the subgraph that peaks highest."""
    if question.spec is not None:
        raise UsageError("ThunderFX compiles when it runs, and nothing runs on a simulated device: leave --device out")
    if question.optimizer is not None or program.optimizer is not None:
        raise UsageError("a program of ThunderFX is predicted without its optimizer: leave the optimizer out")
    compiled = program.model
    if not program.is_fx:
        transforms = [] if question.plain else [_mem_efficient(question.options, budget_bytes)]
        compiled = by_thunderfx(compiled, executors=_executors(question.fusion), transforms=transforms)
    compiled(*program.args, **program.kwargs)
    shown = highest_peak(compiled) if question.parts else None
    try:
        prediction = predict(compiled if shown is None else shown, keep_outputs=True)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{error}; thunder-mem explain shows the subgraph that peaks highest") from error
    limits = limits_of(question.spec, question.budget_bytes, prediction.library_bytes)
    return Outcome(compiled, prediction, last_plan(compiled), None, limits, not program.is_jitted)


def _compiled(program: Program, question: Question, budget_bytes: int | None) -> Outcome:
    if question.fx or program.is_fx:
        return _through_fx(program, question, budget_bytes)
    jitted = program.model
    stepper = stepper_of(program, question)
    if not program.is_jitted:
        in_backward = stepper if isinstance(stepper, StepInBackward) else None
        plan = _mem_efficient(question.options, budget_bytes).with_optimizer(in_backward)
        executors = _executors(question.fusion) if question.spec is None else None
        jitted = thunder.jit(program.model, executors=executors, transforms=[] if question.plain else [plan])
    if stepper is None:
        prediction = predict(jitted, *program.args, kwargs=program.kwargs, keep_outputs=True)
    else:
        prediction = predict_step(
            jitted,
            stepper,
            loss_of(program, question.loss),
            *program.args,
            kwargs=program.kwargs,
            accumulate=question.accumulate,
        )
    allocation = allocate(prediction, question.spec.usable_bytes) if question.spec is not None else None
    limits = limits_of(question.spec, question.budget_bytes, prediction.library_bytes)
    return Outcome(jitted, prediction, last_plan(jitted), allocation, limits, not program.is_jitted)
