"""Operations that run part by part: loss heads in chunks, stretches in tiles, attention in groups of heads."""

from __future__ import annotations

from thunder_mem.chunk_loop.symbols import loop_of, runs_rows
from thunder_mem.fake_execution.replay import Event
from thunder_mem.memory.units import counted
from thunder_mem.runtime.head_groups import groups_of, runs_in_groups

__all__ = ["parts_of"]


def parts_of(event: Event) -> str:
    """The parts in words, such as "8 tiles of 2,048 rows"; "" if the operation runs whole."""
    if event.bsym is None:
        return ""
    if runs_rows(event.bsym):
        return loop_of(event.bsym).plan.sizes
    return f"{counted(groups_of(event.bsym), 'group')} of heads" if runs_in_groups(event.bsym) else ""
