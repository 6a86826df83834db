"""The record of a compilation: its plan, the reason why there is none, and the program's digest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thunder.core.compile_data import _compile_data

from thunder_mem.decisions.program import Planned
from thunder_mem.frontend.thunderfx import highest_peak, is_fx
from thunder_mem.memory.plan import Plan
from thunder_mem.user_choices.offload import OffloadOption

__all__ = [
    "Studied",
    "current_record",
    "last_failure",
    "last_plan",
    "note_plan",
    "note_program",
    "noted_program",
    "studied",
]


@dataclass(frozen=True)
class Studied:
    """What a study keeps of a compilation.

    Attributes:
        planned: the plan that was compiled.
        within: plans the same call anew for a budget in bytes, with values that may be offloaded. It raises
            `BudgetError` as the compilation would.
    """

    planned: Planned
    within: Callable[[int, OffloadOption | None], Planned]


def last_plan(jitted) -> Plan | None:
    """The plan of the last compilation of a jitted function or module, or None; `why_no_plan` then gives the reason.

    For a program of ThunderFX, the plan of the subgraph that peaks highest; `fx.subgraphs` has all.
    """
    return getattr(_stats(jitted), "thunder_mem_plan", None)


def last_failure(jitted) -> str:
    """Why planning failed in the last compilation of a jitted function or module; "" if it did not."""
    return getattr(_stats(jitted), "thunder_mem_failure", "")


def _stats(jitted):
    import thunder

    return thunder.compile_stats(highest_peak(jitted) if is_fx(jitted) else jitted)


def current_record() -> tuple[Plan | None, str]:
    """The plan of the present compilation, and the reason if there is none."""
    stats = _compile_data.get()[1]
    return getattr(stats, "thunder_mem_plan", None), getattr(stats, "thunder_mem_failure", "")


def note_plan(plan: Plan | None, *, took_ms: int = 0, failure: str = "", study: Studied | None = None) -> None:
    """Store the plan with the compilation, for `last_plan` and `last_failure`; it replaces an earlier plan.

    `study` is for `studied`; it is large, so only a study asks for it.
    """
    if (stats := _compile_data.get()[1]) is not None:
        stats.thunder_mem_plan = plan
        stats.thunder_mem_planning_ms = took_ms
        stats.thunder_mem_failure = failure
        stats.thunder_mem_study = study


def studied(jitted) -> Studied | None:
    """What a study keeps of its last compilation; None if nothing was planned."""
    return getattr(_stats(jitted), "thunder_mem_study", None)


def note_program(program: Mapping[str, Any], options: Mapping[str, str]) -> None:
    """Store the program and its options with the compilation, for `save_plan`."""
    if (stats := _compile_data.get()[1]) is not None:
        stats.thunder_mem_program = program, options


def noted_program() -> str:
    """The digest of the program in compilation; "" if none was stored."""
    noted: Any = getattr(_compile_data.get()[1], "thunder_mem_program", None)
    return noted[0]["digest"] if noted else ""
