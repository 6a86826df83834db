"""The same program with other tiles, made only if the plan with those that cost no work may not be the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from thunder.core.compile_data import get_compile_data
from thunder.core.trace import TraceCtx
from thunder.extend import Executor

from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.loop_sizes.tile_choice import TileChoice, cheaper_choices, forward_seconds
from thunder_mem.memory.plan import Decision
from thunder_mem.planning.executor import user_executors
from thunder_mem.planning.fallback import Original
from thunder_mem.planning.options import PlanningOptions
from thunder_mem.tiling.tiles import Tiles
from thunder_mem.transforms.before_autograd import tiled

__all__ = ["OtherTiles", "stretches_of"]


@dataclass(frozen=True)
class OtherTiles:
    """Makes the joint traces of a program with other tiles, as Thunder gives them to fusion executors.

    Attributes:
        whole: the computation before stretches became tiles.
        tiles, options: as for the tiles that cost no work.
        executors: the user's, with the defaults.
        loops: the tiles that cost no work.
    """

    whole: Original
    tiles: Tiles
    options: PlanningOptions
    executors: tuple[Executor, ...]
    loops: tuple[ChunkLoop, ...]

    def cheaper(self, excess_s: float) -> Iterator[tuple[TraceCtx, tuple[Decision, ...]]]:
        """The traces with cheaper tiles, one after the other, each with the decisions about it.

        Args:
            excess_s: the seconds by which `loops` take too long.
        """
        for choice in cheaper_choices(self.loops, excess_s):
            computation, options = self._tiled(choice)
            if stretches_of(computation):
                yield self._joint(computation), options.decisions

    def repeating(self, most_s: float) -> Iterator[tuple[TraceCtx, tuple[Decision, ...]]]:
        """The trace that also has tiles outside of checkpoints, with the decisions about it; none if there are none.

        Args:
            most_s: the seconds that the repetition of their forward may take.
        """
        computation, options = self._tiled(TileChoice(repeats=True))
        loops = stretches_of(computation)
        if len(loops) > len(self.loops) and forward_seconds(loops) - forward_seconds(self.loops) < most_s:
            yield self._joint(computation), options.decisions

    def _tiled(self, choice: TileChoice) -> tuple[TraceCtx, PlanningOptions]:
        data: Any = get_compile_data()
        planners, data.executors_list = data.executors_list, self.executors
        try:  # a tile is differentiated with the gradients of the same kernels
            return tiled(self.whole.computation, self.tiles, self.options, user_executors(self.executors), choice)
        finally:
            data.executors_list = planners

    def _joint(self, computation: TraceCtx) -> TraceCtx:
        return replace(self.whole, computation=computation).unfused(get_compile_data())


def stretches_of(trace: TraceCtx) -> tuple[ChunkLoop, ...]:
    """The stretches in tiles of a computation trace."""
    loops = map(loop_of, filter(is_chunk_loop, trace.bound_symbols))
    return tuple({id(loop): loop for loop in loops if loop.plan.is_stretch}.values())
