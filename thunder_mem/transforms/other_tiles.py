"""The same program with other tiles, made only if the plan with those that cost no work may not be the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from thunder.core.compile_data import get_compile_data
from thunder.core.trace import TraceCtx
from thunder.extend import Executor

from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.loop_body.equal_blocks import EqualBlocks
from thunder_mem.loop_sizes.tile_choice import TileChoice, cheaper_choices, forward_seconds, whole_off_peak
from thunder_mem.memory.plan import Decision
from thunder_mem.planning.executor import user_executors
from thunder_mem.planning.fallback import Original
from thunder_mem.tiling.tiles import Tiles
from thunder_mem.transforms.before_autograd import tiled

__all__ = ["OtherTiles", "first_results", "stretches_of"]


@dataclass(frozen=True)
class _Variant:
    """The computation with some choice of tiles, and the decisions about it."""

    whole: Original
    computation: TraceCtx
    decisions: tuple[Decision, ...]

    @cached_property
    def loops(self) -> tuple[ChunkLoop, ...]:
        return stretches_of(self.computation)

    @cached_property
    def joint(self) -> TraceCtx:
        """The joint trace, which takes autograd once."""
        return replace(self.whole, computation=self.computation).unfused(get_compile_data())


@dataclass(frozen=True)
class OtherTiles:
    """Makes the joint traces of a program with other tiles, as Thunder gives them to fusion executors.

    Attributes:
        whole: the computation before stretches became tiles.
        tiles, options: as for the tiles that cost no work.
        executors: the user's, with the defaults.
        loops: the tiles that cost no work.
        results: their first results, by their names.
        equal: the blocks of `loops`, which other tiles use again.
    """

    whole: Original
    tiles: Tiles
    options: PlanningOptions
    executors: tuple[Executor, ...]
    loops: tuple[ChunkLoop, ...]
    results: Mapping[str, str]
    equal: EqualBlocks
    _made: dict[TileChoice, _Variant] = field(default_factory=dict, repr=False, compare=False)  # a study asks again

    def cheaper(
        self, share: float, room: Callable[[], Mapping[str, int]]
    ) -> Iterator[tuple[TraceCtx, tuple[Decision, ...]]]:
        """The traces with cheaper tiles, one after the other, each with the decisions about it.

        Args:
            share: of the time that `loops` take beyond whole stretches, what is to be saved.
            room: gives for each of them, by name, the bytes that the program has room for while it runs.
        """
        if not self.loops or share >= 1:
            return
        whole = whole_off_peak(self.loops, room(), share)
        off_peak = () if whole is None else (TileChoice(off_peak=frozenset(self.results[name] for name in whole)),)
        choices = dict[object, TileChoice]()
        for choice in chain(off_peak, cheaper_choices(self.loops, share)):
            choices.setdefault(self._effect(choice), choice)
        for choice in choices.values():
            variant = self._variant(choice)
            if variant.loops:
                yield variant.joint, variant.decisions

    def repeating(self, most_s: float) -> Iterator[tuple[TraceCtx, tuple[Decision, ...]]]:
        """The trace that also has tiles outside of checkpoints, with the decisions about it; none if there are none.

        Args:
            most_s: the seconds that the repetition of their forward may take.
        """
        variant = self._variant(TileChoice(repeats=True))
        more_s = forward_seconds(variant.loops) - forward_seconds(self.loops)
        if len(variant.loops) > len(self.loops) and more_s < most_s:
            yield variant.joint, variant.decisions

    def _effect(self, choice: TileChoice) -> tuple[int, frozenset[str]]:
        """The rows of a choice, and the stretches that it leaves whole; different choices may have the same."""
        plans = (loop.plan for loop in self.loops)
        return choice.more_rows, frozenset(p.name for p in plans if choice.leaves_whole(p, self.results[p.name]))

    def _variant(self, choice: TileChoice) -> _Variant:
        if choice not in self._made:
            computation, options = self._tiled(choice)
            self._made[choice] = _Variant(self.whole, computation, options.decisions)
        return self._made[choice]

    def _tiled(self, choice: TileChoice) -> tuple[TraceCtx, PlanningOptions]:
        data: Any = get_compile_data()
        planners, data.executors_list = data.executors_list, self.executors
        try:  # a tile is differentiated with the gradients of the same kernels
            executors = user_executors(self.executors)
            return tiled(self.whole.computation, self.tiles, self.options, executors, choice, self.equal)
        finally:
            data.executors_list = planners


def first_results(trace: TraceCtx) -> dict[str, str]:
    """The first result of each stretch in tiles of a computation trace, by the name of the stretch's loop."""
    loops = filter(is_chunk_loop, trace.bound_symbols)
    return {loop_of(b).plan.name: b.flat_proxy_outs[0].name for b in loops if loop_of(b).plan.is_stretch}


def stretches_of(trace: TraceCtx) -> tuple[ChunkLoop, ...]:
    """The stretches in tiles of a computation trace."""
    loops = map(loop_of, filter(is_chunk_loop, trace.bound_symbols))
    return tuple({id(loop): loop for loop in loops if loop.plan.is_stretch}.values())
