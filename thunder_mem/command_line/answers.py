"""From the command line's options to an exit code."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import pathlib
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import rich.console
import torch

from thunder_mem.analysis.frontier_page import frontier_page
from thunder_mem.command_line.output import (
    frontier_json,
    frontier_tables,
    plan_json,
    plan_tables,
    predict_json,
    predict_tables,
    verdict,
    verdict_json,
)
from thunder_mem.command_line.pages import plan_page, predict_page
from thunder_mem.command_line.predictions import ask, compare_compilers, machine, survey
from thunder_mem.command_line.program import Program, UsageError, in_words, load_target, make_program
from thunder_mem.command_line.questions import Outcome, Question, limits_of
from thunder_mem.comparison.result import OURS
from thunder_mem.frontend.thunderfx import is_fx
from thunder_mem.memory.device_specs import DeviceSpec, device_spec
from thunder_mem.prediction.library_memory import cublas_workspace_bytes
from thunder_mem.prediction.predict import PredictionError
from thunder_mem.rendering.document import Document, Section
from thunder_mem.rendering.html import fragment, page
from thunder_mem.rendering.progress import Progress, showing, stage, wanted
from thunder_mem.rendering.text import to_rich, to_text
from thunder_mem.report import explain
from thunder_mem.report.brief import brief
from thunder_mem.report.sections import headline, sections

__all__ = ["answer"]

FITS, DOES_NOT_FIT, USAGE = 0, 1, 2


class _Answering(Protocol):
    """Compiles and predicts the command's program, as a stage of that name."""

    def __call__(self, name: str, *, plain: bool) -> Outcome: ...


def answer(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    path = list(sys.path)
    try:
        with warnings.catch_warnings():
            if not options.debug:
                warnings.simplefilter("ignore")
                warnings.filterwarnings("always", message="MemEfficient")
                warnings.showwarning = _note
                os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # which says on every CPU that there is no GPU
                logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # and so does this
            return _run(options)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        hint = "" if options.debug or isinstance(error, UsageError) else " (--debug shows where)"
        print(f"thunder-mem: {in_words(error)}{hint}", file=sys.stderr)
        return USAGE
    finally:
        sys.path[:] = path  # the script's folder was put there


@dataclass(frozen=True)
class _Answer:
    """The result of a command: the basis of the exit code, and the output for programs and for people.

    Attributes:
        fits: within every limit.
        data: the object of `--json`.
        lines, tables: the printed text.
        page: the page of `--html`.
        save: the function of `--save`.
    """

    fits: bool
    data: dict[str, Any]
    lines: tuple[str, ...]
    tables: tuple[Section, ...]
    page: Callable[[], str]
    save: Callable[[pathlib.Path], None] = lambda path: None


def _note(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning of MemEfficient's, in one line."""
    print(f"thunder-mem: {message}", file=sys.stderr)


def _run(options: argparse.Namespace) -> int:
    # Output of the user's code, also during tracing, must not mix with this command's output.
    with contextlib.redirect_stdout(sys.stderr), torch.set_grad_enabled(not options.inference):
        answer = _work(options)
    if options.html is not None:
        pathlib.Path(options.html).write_text(answer.page(), encoding="utf-8")
    for name in getattr(options, "save", ()):
        answer.save(pathlib.Path(name))
    _show(options, answer)
    return FITS if answer.fits else DOES_NOT_FIT


def _work(options: argparse.Namespace) -> _Answer:
    asked = _asked(options)
    if asked and getattr(options, "plain", False):
        raise UsageError(f"--{next(iter(asked))} is for MemEfficient, which --plain leaves out: give one of them")
    commands = {"predict": _predict, "explain": _explain, "plan": _plan, "frontier": _frontier, "compare": _compare}
    # A command takes seconds anyway, so it shows from the start what it does.
    shown = showing(Progress(rich.console.Console(stderr=True), after_s=0.0)) if wanted() else contextlib.nullcontext()
    with shown, machine(options.device, options.fusion) as spec:
        with stage(f"running {options.target}"):
            found = load_target(options.target)
            program = make_program(options.target, found, options.input, grad=options.grad)

        def answer(name: str, *, plain: bool) -> Outcome:
            with stage(name):
                return ask(program, _question(options, spec, plain=plain))

        return commands[options.command](options, program, answer)


def _question(options: argparse.Namespace, spec: DeviceSpec | None, *, plain: bool = False) -> Question:
    return Question(
        fusion=options.fusion,
        plain=plain,
        optimizer=options.optimizer,
        step_in_backward=options.step_in_backward,
        states=options.states,
        loss=options.loss,
        accumulate=options.accumulate,
        inference=options.inference,
        spec=spec,
        budget_bytes=options.budget,
        options=_asked(options),
        fx=options.fx,
        parts=options.command == "explain",
    )


def _asked(options: argparse.Namespace) -> dict[str, str]:
    """The options of MemEfficient that were given."""
    given = {name: getattr(options, name) for name in ("recompute", "costs")}
    return {name: value for name, value in given.items() if value is not None}


def _predict(options: argparse.Namespace, program: Program, answer: _Answering) -> _Answer:
    found = answer("compiling and predicting", plain=options.plain)
    lines, tables = predict_tables(found)
    return _Answer(found.fits, predict_json(found), lines, tables, lambda: predict_page(found, lines, tables))


def _explain(options: argparse.Namespace, program: Program, answer: _Answering) -> _Answer:
    found = answer("compiling and predicting", plain=options.plain)
    with stage("explaining" if options.no_bounds else "looking for lower bounds"):
        called = is_fx(found.jitted)  # and has its arguments
        # Without a prediction, `explain` also looks for the peaks of eager PyTorch and of Thunder alone.
        is_call = not (called or options.device or set(found.prediction.phases) - {"forward", "backward"})
        report = explain(
            found.jitted,
            *(() if called else program.args),
            kwargs=None if called else program.kwargs,
            prediction=None if is_call else found.prediction,
            budget=options.budget or found.own_budget_bytes,
            bounds=not options.no_bounds,
            detail=options.detail,
        )
    # The report itself covers the budget.
    report = replace(report, notes=(*verdict(found.beside_the_budget()), *report.notes))
    data = {**report.to_json(), **verdict_json(found)}
    lines, tables = (headline(report), sections(report)) if report.detail else (brief(report), ())
    return _Answer(found.fits, data, lines, tables, report.to_page, report.save)


def _plan(options: argparse.Namespace, program: Program, answer: _Answering) -> _Answer:
    if program.is_jitted:
        raise UsageError(f"{options.target} is jitted already, so there is no before and after: name the model itself")
    alone: Outcome | PredictionError
    try:
        alone = answer("compiling by Thunder alone", plain=True)
    except PredictionError as error:  # Thunder alone refuses it, or nothing predicts it then
        alone = error
    planned = answer("compiling with MemEfficient", plain=False)
    lines, tables = plan_tables(alone, planned)
    page = functools.partial(plan_page, alone, planned, lines, tables)
    return _Answer(planned.fits, plan_json(alone, planned), lines, tables, page)


def _frontier(options: argparse.Namespace, program: Program, answer: _Answering) -> _Answer:
    spec = device_spec(options.device) if options.device else None
    # Of any step with products that Thunder compiled: see `prediction/library_memory.py`.
    library_bytes = cublas_workspace_bytes(spec.capability) if spec is not None else 0
    limits = limits_of(spec, options.budget, library_bytes)
    with stage("planning from no recomputation to the smallest peak"):
        frontier = survey(
            program, options.fusion, bool(options.device), options.points, options.offload, _asked(options)
        )
    fits = all(frontier.within(nbytes) is not None for _, nbytes in limits)
    lines, tables = frontier_tables(frontier, limits)
    page = functools.partial(frontier_page, frontier, lines[1:])
    return _Answer(fits, frontier_json(frontier, limits), lines, tables, page, frontier.save)


def _compare(options: argparse.Namespace, program: Program, answer: _Answering) -> _Answer:
    with stage("running under each compiler"):
        found = compare_compilers(program, _question(options, None), options.torch_compile)
    ours_bytes = found[OURS].peak_bytes
    fits = options.budget is None or (ours_bytes is not None and ours_bytes <= options.budget)
    lines, tables = (found.headline, found.verdict, *found.notes), (found.table,)
    body = functools.partial(fragment, lines, [], tables)
    return _Answer(fits, {"fits": fits, **found.to_json()}, lines, tables, lambda: page(lines[0], f"{body()}\n"))


def _show(options: argparse.Namespace, answer: _Answer) -> None:
    if options.json:
        print(json.dumps({"command": options.command, "target": options.target, **answer.data}, indent=1))
        return
    console, document = rich.console.Console(), Document(answer.lines, answer.tables)
    if console.is_terminal:
        console.print(to_rich(document))
    else:
        print(to_text(document))
