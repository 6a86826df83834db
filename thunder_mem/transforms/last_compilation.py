"""The outcome of the last compilation with `MemEfficient`: its plan as a file, or the reason why there is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import thunder

from thunder_mem.frontend.thunderfx import highest_peak, is_fx, left_to_others, only_subgraph, why_no_subgraphs
from thunder_mem.planning.plan_file import write_plan
from thunder_mem.planning.record import last_failure, last_plan
from thunder_mem.transforms.mem_efficient import MemEfficient

__all__ = ["save_plan", "why_no_plan"]


def why_no_plan(jitted: Any) -> str:
    """Say in one sentence why `last_plan` is None, and what to do; "" if there is a plan.

    Args:
        jitted: what `thunder.jit` or ThunderFX returned.

    Example:
        >>> why_no_plan(thunder.jit(lambda x: x * 2))
        'it has no MemEfficient: write thunder.jit(..., transforms=[MemEfficient()])'
    """
    if is_fx(jitted):
        if (shown := highest_peak(jitted)) is None:
            others = "; ".join(left_to_others(jitted))
            return f"Thunder compiles nothing of this program: {others}" if others else why_no_subgraphs(jitted)
        return why_no_plan(shown)
    data: Any = thunder.compile_data(jitted)
    stats: Any = thunder.compile_stats(jitted)
    if data is None or stats is None:
        return f"{type(jitted).__name__} is nothing that Thunder compiled: give what thunder.jit or thunderfx returned"
    if last_plan(jitted) is not None:
        return ""
    if failure := last_failure(jitted):
        return f"planning failed, and Thunder alone compiled it: {failure}"
    if not any(isinstance(transform, MemEfficient) for transform in data.transforms):
        return "it has no MemEfficient: write thunder.jit(..., transforms=[MemEfficient()])"
    if not stats.interpreter_cache:
        return "nothing of it was compiled yet: call it once"
    return "its last compilation made no plan, and no failure is known: MemEfficient(strict=True) raises where it ends"


def save_plan(jitted: Callable[..., Any], path: str | os.PathLike[str]) -> None:
    """Write the plan of the last compilation, for `MemEfficient(plan=path)` with the same other options.

    Args:
        jitted: what `thunder.jit` made with `MemEfficient`, after a call.
        path: the file, which is replaced as a whole.

    Raises:
        ValueError: nothing was planned yet, or planning failed.
        OSError: the path is a folder, or cannot be written.

    Example:
        >>> import pathlib, tempfile, thunder, torch
        >>> from thunder_mem import MemEfficient, save_plan
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "plan.json"
        >>> compile = lambda **options: thunder.jit(torch.sin, executors=[], transforms=[MemEfficient(**options)])
        >>> jitted = compile()
        >>> _ = jitted(torch.zeros(3))
        >>> save_plan(jitted, path)
        >>> compile(plan=path)(torch.zeros(3))
        tensor([0., 0., 0.])
        >>> compile(plan=path)(torch.zeros(4))  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        thunder_mem.planning.plan_file.PlanFileError: plan.json is for another program
    """
    stats: Any = thunder.compile_stats(only_subgraph(jitted) if is_fx(jitted) else jitted)
    plan = getattr(stats, "thunder_mem_plan", None)
    if plan is None:
        raise ValueError(f"there is no plan to save: {why_no_plan(jitted)}")
    program, options = stats.thunder_mem_program
    write_plan(path, plan, program, options)
