"""Cheaper tiles, for a program whose stretches all in tiles take too long: of more rows, or of fewer stretches.

Sums of gradients take less time, the fewer tiles there are. Copies of rows do not: only stretches left whole save them.
First those stay whole that run far below the peak, as the layers do whose backward runs when few checkpoints are left.
Else equal layers have equal stretches, so stretches of one kind are left whole together. Those go first that take the
most time for the bytes of their products' results.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from thunder_mem.chunk_loop.plan import LoopPlan
from thunder_mem.chunk_loop.price import rounding_seconds
from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.loop_sizes.tile_price import extra_seconds
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.semantics.kernel_scratch import estimated_scratch_bytes
from thunder_mem.trace.reading import TraceGraph

__all__ = ["ALL_STRETCHES", "TileChoice", "cheaper_choices", "forward_seconds", "room_bytes", "whole_off_peak"]

_MORE_ROWS = (4, 16)
_MOST_KINDS = 2


@dataclass(frozen=True)
class TileChoice:
    """Which stretches become tiles of how many rows.

    Attributes:
        more_rows: tiles have so many times the rows that the device's products need.
        left_whole: kinds of stretches that stay whole.
        off_peak: first results of stretches that stay whole.
        repeats: stretches outside of checkpoints become tiles too, though their backward repeats the forward.
        fewest_rows: no tile has more rows so that all are equal.
    """

    more_rows: int = 1
    left_whole: frozenset[Hashable] = frozenset()
    off_peak: frozenset[str] = frozenset()
    repeats: bool = False
    fewest_rows: bool = False

    def leaves_whole(self, plan: LoopPlan, result: str) -> bool:
        """Whether the stretch of a loop, with that first result, stays whole."""
        return result in self.off_peak or _kind(plan) in self.left_whole


ALL_STRETCHES = TileChoice()
"""The first choice: as many stretches that repeat no work, and as few rows, as the device's products allow."""


def cheaper_choices(loops: Sequence[ChunkLoop], share: float) -> Iterator[TileChoice]:
    """Choices that take less time than all stretches in tiles; those come first that leave the most in tiles.

    Args:
        loops: all stretches in tiles.
        share: of the time that they take beyond whole stretches, what is to be saved.
    """
    least_s = share * sum(sum(_seconds(loop)) for loop in loops)
    sums_s = sum(_seconds(loop)[1] for loop in loops)
    yield from (TileChoice(f) for f in _MORE_ROWS if least_s <= (1 - 1 / f) * sums_s)
    kinds: dict[Hashable, list[ChunkLoop]] = {}
    for loop in loops:
        kinds.setdefault(_kind(loop.plan), []).append(loop)
    seconds = {kind: sum(sum(_seconds(loop)) for loop in alike) for kind, alike in kinds.items()}
    wide_bytes = {kind: sum(loop.plan.n * loop.plan.wide_row_bytes for loop in alike) for kind, alike in kinds.items()}
    costliest = sorted(kinds, key=lambda kind: seconds[kind] / wide_bytes[kind], reverse=True)[:-1][:_MOST_KINDS]
    for count, saved_s in enumerate(accumulate(seconds[kind] for kind in costliest), 1):
        if saved_s >= least_s:
            yield TileChoice(left_whole=frozenset(costliest[:count]))


def room_bytes(source: TraceGraph, limit_bytes: int = 0) -> dict[str, int]:
    """For each stretch in tiles, by its plan's name, the bytes that the program has room for while it runs.

    Args:
        source: a reading of the final trace.
        limit_bytes: the bytes that may be alive, if the peak is lower.
    """
    live = price_order(source.graph).live_bytes
    limit_bytes, room = max(limit_bytes, *live), dict[str, int]()
    for bsym, live_bytes in zip(source.bsyms, live, strict=True):
        if is_chunk_loop(bsym) and loop_of(bsym).plan.is_stretch:
            name, own = loop_of(bsym).plan.name, limit_bytes - live_bytes + estimated_scratch_bytes(bsym)
            room[name] = min(own, room.get(name, own))
    return room


def whole_off_peak(loops: Sequence[ChunkLoop], room: Mapping[str, int], share: float) -> frozenset[str] | None:
    """The names of the fewest stretches, those farthest below the peak, that save enough time if they stay whole.

    Args:
        loops: all stretches in tiles.
        room: for each name, the bytes that the program has room for while the stretch runs.
        share: of the time that they take beyond whole stretches, what is to be saved.

    Returns:
        None if those that have room save less.
    """
    spare = {
        loop.plan.name: room[loop.plan.name] - loop.plan.n * loop.plan.wide_row_bytes
        for loop in loops
        if loop.plan.name in room  # of results that nobody reads, none runs
    }
    with_room = (loop for loop in loops if spare.get(loop.plan.name, -1) >= 0)
    farthest = sorted(with_room, key=lambda loop: -spare[loop.plan.name])
    saved_s = accumulate(sum(_seconds(loop)) for loop in farthest)
    least_s = share * sum(sum(_seconds(loop)) for loop in loops)
    count = next((count for count, saved in enumerate(saved_s, 1) if saved >= least_s), None)
    return None if count is None else frozenset(loop.plan.name for loop in farthest[:count])


def forward_seconds(loops: Iterable[ChunkLoop]) -> float:
    """The seconds of one forward of stretches in tiles."""
    return sum(loop.plan.forward_tile_s * loop.plan.n / loop.plan.chunk_rows for loop in loops)


def _kind(plan: LoopPlan) -> Hashable:
    """Equal for stretches of equal size that do the same."""
    specs = tuple((spec.shape, spec.dtype, spec.sharding) for spec in (*plan.inputs, *plan.outputs))
    return plan.n, plan.wide_row_bytes, plan.grads, specs


def _seconds(loop: ChunkLoop) -> tuple[float, float]:
    """Seconds that a step takes for copies of rows and the rounding of sums, and for sums, which more rows save.

    A checkpoint's repetition is a second forward.
    """
    plan = loop.plan
    device, rows, tiles = device_model_of(torch.device(plan.device)), plan.chunk_rows, plan.n / plan.chunk_rows
    forward_s, _ = extra_seconds(plan, loop.forward[rows], device)
    if not plan.grads:
        return tiles * forward_s, 0.0
    backward_s, sums_s = extra_seconds(plan, loop.backward[rows], device)
    return tiles * (2 * forward_s + backward_s) + rounding_seconds(plan, device), tiles * sums_s
