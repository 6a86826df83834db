"""Which values of a program would exist a tile at a time only, if every possible stretch ran in tiles."""

from __future__ import annotations

from contextlib import suppress

from thunder.core.trace import TraceCtx

from thunder_mem.loop_body.leaves import numel, read_program
from thunder_mem.loop_body.region import Refused
from thunder_mem.tiling.marks import strip_tile_marks
from thunder_mem.tiling.seeds import seeds_of
from thunder_mem.tiling.stretch import WIDE_RATIO, grow_stretch
from thunder_mem.trace.source_lines import place_of

__all__ = ["cuttable_values"]


def cuttable_values(trace: TraceCtx) -> frozenset[tuple[str, int]]:
    """The source line and the number of elements of each value inside a stretch that could run in tiles.

    Products on one line with one size stand for each other, as those of equal layers do, so few stretches are grown.

    Args:
        trace: the computation trace before autograd. It is not changed.
    """
    program = read_program(strip_tile_marks(trace)[0])
    found, grown = set[tuple[str, int]](), set[tuple[str, int, tuple[int, ...]]]()
    for seed in seeds_of(program, WIDE_RATIO):
        key = (seed.leaf.source, numel(seed.leaf.outputs[0]), seed.dims)
        if key in grown:
            continue
        grown.add(key)
        with suppress(Refused):
            region = grow_stretch(program, seed)
            if region is None or region.n < 2:
                continue
            whole = {value.proxy.name for value in region.outputs}
            for leaf in region.members:
                sizes = {numel(t) for t in leaf.outputs if t.name not in whole}
                found.update((line, n) for line in (leaf.source, place_of(leaf.bsym)) if line for n in sizes)
    return frozenset(found)
