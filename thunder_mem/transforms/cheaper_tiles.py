"""The same program with cheaper tiles, made only if a plan with all stretches in tiles takes too long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from thunder.core.trace import TraceCtx
from thunder.extend import Executor

from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.loop_sizes.tile_choice import cheaper_choices
from thunder_mem.memory.plan import Decision
from thunder_mem.planning.executor import user_executors
from thunder_mem.planning.fallback import Original
from thunder_mem.planning.options import PlanningOptions
from thunder_mem.tiling.tiles import Tiles
from thunder_mem.transforms.before_autograd import tiled

__all__ = ["CheaperTiles", "stretches_of"]


@dataclass(frozen=True)
class CheaperTiles:
    """Makes the joint traces of a program with cheaper tiles, one after the other.

    Attributes:
        whole: the computation before stretches became tiles.
        tiles, options: as for the tiles that take too long.
        executors: the user's, with the defaults.
        loops: the tiles that take too long.
    """

    whole: Original
    tiles: Tiles
    options: PlanningOptions
    executors: tuple[Executor, ...]
    loops: tuple[ChunkLoop, ...]

    def __call__(self, data: Any, excess_s: float) -> Iterator[tuple[TraceCtx, tuple[Decision, ...]]]:
        """The traces that Thunder gives to fusion executors, each with the decisions about it.

        Args:
            data: Thunder's compile data.
            excess_s: the seconds by which `loops` take too long.
        """
        for choice in cheaper_choices(self.loops, excess_s):
            planners, data.executors_list = data.executors_list, self.executors
            try:  # a tile is differentiated with the gradients of the same kernels
                found = tiled(self.whole.computation, self.tiles, self.options, user_executors(self.executors), choice)
            finally:
                data.executors_list = planners
            computation, options = found
            if stretches_of(computation):
                yield replace(self.whole, computation=computation).unfused(data), options.decisions


def stretches_of(trace: TraceCtx) -> tuple[ChunkLoop, ...]:
    """The stretches in tiles of a computation trace."""
    loops = map(loop_of, filter(is_chunk_loop, trace.bound_symbols))
    return tuple({id(loop): loop for loop in loops if loop.plan.is_stretch}.values())
