"""The choices about a user's program, as `MemEfficient` sees them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import thunder
from thunder.core.trace import TraceCtx

from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.partition.budget_search import PartitionProblem
from thunder_mem.planning.executor import user_executors
from thunder_mem.planning.pipeline import choose_partition, plan_partition, programs_seen
from thunder_mem.planning.program import Planned, Program, partition_problem
from thunder_mem.planning.stages import carried_out
from thunder_mem.prediction.compiled_call import compiled_entry
from thunder_mem.trace.reading import TraceGraph
from thunder_mem.transforms.mem_efficient import MemEfficient

__all__ = ["Study", "check_program", "study_for_budgets", "study_program"]


# A stand-in budget that every plan keeps, because a study covers all budgets.
_AMPLE = 1 << 62


@dataclass(frozen=True)
class Study:
    """A joint trace before any decision.

    Attributes:
        program: the reading of the trace.
        given: Thunder's trace.
        problem: the values that may be kept or recomputed.
    """

    program: Program
    given: TraceCtx
    problem: PartitionProblem

    @property
    def source(self) -> TraceGraph:
        """The joint trace as a graph."""
        return self.program.source

    @cached_property
    def free(self) -> frozenset[int]:
        """The storages to recompute without cost, as `MemEfficient` chooses them."""
        return choose_partition(self.program)[1]

    def plan(self, rebuilt: frozenset[int], offloaded: frozenset[int] = frozenset()) -> Planned:
        """The whole plan for given storages to recompute and to offload, with its final trace."""
        planned = plan_partition(self.program, rebuilt, offloaded)
        return carried_out(self.program, planned, self.given, time.perf_counter_ns())

    @property
    def sizes_chunks(self) -> bool:
        """Whether it has a loss head whose chunks the user did not set, so that a budget makes them smaller."""
        return any(is_chunk_loop(b) and loop_of(b).plan.sized != "asked" for b in self.source.bsyms)


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
    return _studies(fn, args, kwargs, executors, None)[0]


def study_for_budgets(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], executors: Sequence[Any] | None = None
) -> tuple[Study, ...]:
    """The studies for budgets: the program as it is, and with smaller and smaller loss heads.

    Arguments and errors are those of `study_program`.
    """
    return _studies(fn, args, kwargs, executors, _AMPLE)


def _studies(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    executors: Sequence[Any] | None,
    budget: int | None,
) -> tuple[Study, ...]:
    with programs_seen() as programs:
        compiled_entry(_jitted_anew(fn, executors, budget), tuple(args), dict(kwargs), call=True)
    studies = [Study(program, given, partition_problem(program)) for program, given in programs]
    if not any(op.backward for study in studies for op in study.source.graph.ops):
        raise ValueError("the call has no backward: give arguments or parameters that ask for a gradient")
    return tuple(studies)


def _jitted_anew(fn: Callable[..., Any], executors: Sequence[Any] | None, budget: int | None) -> Callable[..., Any]:
    """`fn` jitted anew, with the same options except the budget."""
    compiled: Any = thunder.compile_data(fn)
    transforms = list(thunder.list_transforms(fn)) if compiled is not None else []
    own = next((t for t in transforms if isinstance(t, MemEfficient)), None)
    watching = copy.copy(own) if own is not None else MemEfficient()
    watching._plan = None  # the study does not follow a plan file
    watching._options = replace(watching._options, strict=True, budget=budget, named=True)
    others = [t for t in transforms if t is not own]
    if compiled is None:
        given = {} if executors is None else {"executors": list(executors)}
        return thunder.jit(fn, transforms=[watching], **given)
    inner = fn._model if isinstance(fn, thunder.ThunderModule) else compiled.fn
    listed = [e for e in user_executors(compiled.executors_list) if not isinstance(e, thunder.extend.TemporaryExecutor)]
    return thunder.jit(inner, executors=listed, transforms=[*others, watching], **compiled.compile_options)
