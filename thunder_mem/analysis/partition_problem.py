"""The choices about a user's program, as `MemEfficient` sees them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import thunder

from thunder_mem.decisions.partition_choice import plan_partition
from thunder_mem.decisions.program import Planned, Program, partition_problem
from thunder_mem.decisions.stages import carried_out
from thunder_mem.partition.budget_search import PartitionProblem
from thunder_mem.planning.executor import user_executors
from thunder_mem.planning.record import Studied, studied
from thunder_mem.prediction.compiled_call import compiled_entry
from thunder_mem.trace.reading import TraceGraph
from thunder_mem.transforms.mem_efficient import MemEfficient

__all__ = ["Study", "check_program", "study_call", "study_program"]


@dataclass(frozen=True)
class Study:
    """A joint trace before any decision.

    Attributes:
        program: the reading of the trace.
        problem: the values that may be kept or recomputed, on the device that was there then.
    """

    program: Program
    problem: PartitionProblem

    @classmethod
    def of(cls, program: Program) -> Study:
        """The study of a program, within `simulate` if it was traced there."""
        return cls(program, partition_problem(program))

    @property
    def source(self) -> TraceGraph:
        """The joint trace as a graph."""
        return self.program.source

    def plan(self, rebuilt: frozenset[int], offloaded: frozenset[int] = frozenset()) -> Planned:
        """The whole plan for given storages to recompute and to offload, with its final trace."""
        return carried_out(plan_partition(self.program, rebuilt, offloaded), time.perf_counter_ns())


def check_program(fn: object, caller: str) -> None:
    """Refuse an argument that is no program, in the name of the called function.

    Raises:
        TypeError: it cannot be called, or is a class.
    """
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"{caller} takes a function, a module or what thunder.jit made of one, not {type(fn).__name__}")


def study_program(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], executors: Sequence[Any] | None = None
) -> Study:
    """Trace and plan a call without running it.

    Args:
        fn: a function, a module, or a result of `thunder.jit`, whose executors and `MemEfficient` then count.
        args, kwargs: of a call (real, or under `simulate` fake) that asks for a gradient.
        executors: as for `thunder.jit`, where `fn` is not jitted yet.

    Raises:
        ValueError: the call asks for no gradient.
        PredictionError: the program cannot be traced.
    """
    return Study.of(study_call(fn, args, kwargs, executors).planned.program)


def study_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    executors: Sequence[Any] | None = None,
    budget: int | None = None,
) -> Studied:
    """The plan that `MemEfficient` chooses for a call, and how it plans the same call for budgets.

    Arguments and errors are those of `study_program`; a loss head is built smaller if there is a budget, in bytes.
    """
    jitted = _jitted_anew(fn, executors, budget)
    compiled_entry(jitted, tuple(args), dict(kwargs), call=True)
    found = studied(jitted)
    if found is None or not any(op.backward for op in found.planned.source.graph.ops):
        raise ValueError("the call has no backward: give arguments or parameters that ask for a gradient")
    return found


def _jitted_anew(fn: Callable[..., Any], executors: Sequence[Any] | None, budget: int | None) -> Callable[..., Any]:
    """`fn` jitted anew, with the same options except the budget."""
    compiled: Any = thunder.compile_data(fn)
    transforms = list(thunder.list_transforms(fn)) if compiled is not None else []
    own = next((t for t in transforms if isinstance(t, MemEfficient)), None)
    watching = copy.copy(own) if own is not None else MemEfficient()
    watching._plan = None  # the study does not follow a plan file
    watching._options = replace(watching._options, strict=True, budget=budget, studied=True)
    others = [t for t in transforms if t is not own]
    if compiled is None:
        return thunder.jit(fn, executors=executors, transforms=[watching])
    inner = fn._model if isinstance(fn, thunder.ThunderModule) else compiled.fn
    listed = [e for e in user_executors(compiled.executors_list) if not isinstance(e, thunder.extend.TemporaryExecutor)]
    return thunder.jit(inner, executors=listed, transforms=[*others, watching], **compiled.compile_options)
