"""What there is to decide in a user's program, seen from where `MemEfficient` decides it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import thunder

from thunder_mem.choices import Choices, Chooser
from thunder_mem.chunk_loop import is_chunk_loop, loop_of
from thunder_mem.delegate import unseat
from thunder_mem.fit_budget import SavingProblem
from thunder_mem.joint_plan import Planned
from thunder_mem.predict import compiled_entry
from thunder_mem.trace_graph import TraceGraph
from thunder_mem.transforms.mem_efficient import MemEfficient

__all__ = ["Study", "check_program", "study_for_budgets", "study_program"]


# Which every plan keeps: a study of what a budget chooses from asks for no particular one.
_AMPLE = 1 << 62


@dataclass(frozen=True)
class Study:
    """A joint trace before anything is decided.

    Attributes:
        source: the trace as it was read.
        problem: what may be kept or recomputed.
        plan: the whole plan of a choice of storages to rebuild, and of some to offload, with its final trace.
        free: the choice that costs nothing, as `MemEfficient` makes it.
    """

    source: TraceGraph
    problem: SavingProblem
    plan: Callable[..., Planned]
    free: frozenset[int]

    @property
    def sizes_chunks(self) -> bool:
        """Whether it has a loss head whose chunks nobody asked for, which a budget makes smaller."""
        return any(is_chunk_loop(b) and loop_of(b).plan.sized != "asked" for b in self.source.bsyms)


def check_program(fn: object, caller: str) -> None:
    """Refuse what is no program, in the name of the function that was given it.

    Raises:
        TypeError: it cannot be called, or is a class.
    """
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"{caller} takes a function, a module or what thunder.jit made of one, not {fn!r}")


def study_program(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], executors: Sequence[Any] | None = None
) -> Study:
    """Trace and plan a call, and run nothing of it.

    Args:
        fn: a function, a module, or what `thunder.jit` made of one: then its executors and its own
            `MemEfficient` count.
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
    """The same as a budget sees it: as it is, and with loss heads that take less and less.

    Args and what is raised are those of `study_program`.
    """
    return _studies(fn, args, kwargs, executors, _AMPLE)


def _studies(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    executors: Sequence[Any] | None,
    budget: int | None,
) -> tuple[Study, ...]:
    watcher = _Watcher()
    compiled_entry(_watched(fn, watcher, executors, budget), tuple(args), dict(kwargs), call=True)
    if not watcher.studies:
        raise ValueError("the call has no backward: give arguments or parameters that ask for a gradient")
    return tuple(watcher.studies)


class _Watcher:
    """Stands where a configuration of recomputation would, and sees the joint trace and the problem it poses."""

    def __init__(self) -> None:
        self.inner: Chooser | None = None
        self.source: TraceGraph | None = None
        self.studies: list[Study] = []

    def choose(self, source: TraceGraph, rebuilt: frozenset[int]) -> Choices:
        self.source = source
        return self.inner.choose(source, rebuilt) if self.inner is not None else Choices()

    def observe(self, problem: SavingProblem, plan: Callable[..., Planned], free: frozenset[int]) -> None:
        if self.source is not None:
            self.studies.append(Study(self.source, problem, plan, free))


def _watched(
    fn: Callable[..., Any], watcher: _Watcher, executors: Sequence[Any] | None, budget: int | None
) -> Callable[..., Any]:
    """`fn` jitted anew, planned as before, under the eyes of `watcher`."""
    compiled: Any = thunder.compile_data(fn)
    transforms = list(thunder.list_transforms(fn)) if compiled is not None else []
    own = next((t for t in transforms if isinstance(t, MemEfficient)), None)
    watching = copy.copy(own) if own is not None else MemEfficient()
    watching._plan = None  # what is studied is no longer the plan of a file
    watcher.inner = watching._options.recompute
    options = replace(watching._options, recompute=watcher, observe=watcher.observe, strict=True, budget=budget)
    watching._options = options
    others = [t for t in transforms if t is not own]
    if compiled is None:
        given = {} if executors is None else {"executors": list(executors)}
        return thunder.jit(fn, transforms=[watching], **given)
    inner = fn._model if isinstance(fn, thunder.ThunderModule) else compiled.fn
    listed = [e for e in unseat(compiled.executors_list) if not isinstance(e, thunder.extend.TemporaryExecutor)]
    return thunder.jit(inner, executors=listed, transforms=[*others, watching], **compiled.compile_options)
