"""Find token-wise stretches in a computation trace, and run each a few rows at a time.

    computation trace -> Program (leaves) -> Stretch (what runs tile by tile) -> LoopPlan -> bound symbol

Without the user's word only such stretches become tiles that cost no work: inside a checkpoint, whose one repetition is
tiled, or without a gradient. The products' results must take more than a tile and its sums of gradients. The plan with
tiles must have a lower peak than the one without and take as good as no time, or be the fastest one that fits the
budget (`planning/tile_selection.py`). If it takes too long, tiles have more rows, or fewer stretches become tiles
(`tile_choice.py`). A stretch that the user asked for becomes tiles anyway. Outside of a checkpoint, its backward
computes it once more; a budget may buy that, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import thunder
from thunder.core import dtypes
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance

from thunder_mem.chunk_loop.plan import ChunkRecord, LoopPlan, StretchRefusal
from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.chunk_loop.symbols import check_autograd, is_chunk_loop, loop_of
from thunder_mem.frontend.checkpoint_tags import CHECKPOINTED
from thunder_mem.loop_body.borders import Borders, Mask
from thunder_mem.loop_body.equal_blocks import EqualBlocks
from thunder_mem.loop_body.leaves import Leaf, Program, read_program, size_bytes
from thunder_mem.loop_body.region import Refused, Region
from thunder_mem.loop_sizes.rows_per_chunk import AUTO_MIN_BYTES, equal_rows, floor_rows
from thunder_mem.loop_sizes.tile_choice import ALL_STRETCHES, TileChoice
from thunder_mem.memory.outside_input import quoted
from thunder_mem.semantics.view_prims import VIEWS
from thunder_mem.sharding.op_rules import pointwise_ids
from thunder_mem.tiling.build import head_label
from thunder_mem.tiling.find import check_accumulate
from thunder_mem.tiling.marks import Mark, strip_tile_marks
from thunder_mem.tiling.seeds import Seed, seeds_of
from thunder_mem.tiling.splice import splice, unchunked
from thunder_mem.tiling.stretch import WIDE_RATIO, grow_stretch
from thunder_mem.tiling.tile_build import build_tiles, tile_gain_bytes
from thunder_mem.torch_functions.missing_gradients import register_missing
from thunder_mem.trace.verification import VerificationError, verify_rewrite

__all__ = ["Tiles", "TilingError", "tile_trace"]

_ELEMENTWISE = pointwise_ids() | set(VIEWS)


class TilingError(ValueError):
    """A stretch that the user marked cannot run in tiles; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Which stretches of a program run in tiles, and how.

    Attributes:
        rows: the rows of a tile of every stretch that can run in tiles, whether or not the backward then computes it
            once more. "auto": only stretches that cost no time, or that a budget buys, with the rows that the device's
            products need; on a CPU without a budget up to half as many more, if tiles are equal then. Of a convolution
            by samples, each position of a result counts, and a tile has whole samples.
        accumulate: dtype in which gradients of 16-bit weights add up over tiles: "float32" or "input", as for
            `ChunkLossHead`. None is "float32", or "input" under a budget that has no room for float32.

    Raises:
        ValueError, TypeError: `rows` or `accumulate` is not accepted.
    """

    rows: int | str = "auto"
    accumulate: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not (isinstance(self.rows, int) or self.rows == "auto"):
            raise TypeError(f'rows is a positive int or "auto", but got {quoted(self.rows)}')
        if isinstance(self.rows, int) and self.rows < 1:
            raise ValueError(f"rows must be at least 1, but got {self.rows}")
        check_accumulate(self.accumulate)


def tile_trace(
    trace: TraceCtx,
    tiles: Tiles = Tiles(),
    *,
    executors_list: Sequence[Any] = (),
    verify: bool = True,
    choice: TileChoice = ALL_STRETCHES,
    equal: EqualBlocks | None = None,
) -> tuple[TraceCtx, ChunkRecord]:
    """Replace stretches of a computation trace (before autograd) by loops of tiles.

    Args:
        trace: the computation trace, with `CHECKPOINTED` on what may be repeated. It is not changed.
        tiles: which stretches, and how.
        executors_list: the executors of the tiles; Thunder's own if empty.
        verify: check that the new trace computes the same values, apart from the inside of loops.
        choice: of rows, and of stretches that stay whole, where the user did not ask for tiles.
        equal: the tiles built before with the same executors, for other choices; equal ones are used again.

    Returns:
        the new trace (the same object if nothing changed) and the record.

    Raises:
        TilingError: a stretch marked by `with thunder_mem.tiled():` cannot run in tiles.
    """
    register_missing()
    start = time.perf_counter_ns()
    new, marks = strip_tile_marks(trace)
    tiler = _Tiler(tiles, tuple(executors_list) or tuple(thunder.get_default_executors()), marks, choice, equal)
    whole = new
    while (found := tiler.next_loop(new)) is not None:
        new = found
    if verify and new is not whole:
        try:
            verify_rewrite(*unchunked(whole, new, tiler.replaced))
        except VerificationError as error:
            if marks:
                raise TilingError(f"a stretch marked by thunder_mem.tiled() stays whole: {error}") from error
            plan = tiler.loops[0]
            return whole, ChunkRecord(
                (), (StretchRefusal(plan.op, plan.source, "the program around it", "", str(error)),)
            )
    tiler.check_marks()
    if new is not whole:
        millis = (time.perf_counter_ns() - start) // 1_000_000
        new.set_provenance(TraceProvenance(f"Stretches in tiles (took {millis} milliseconds)"))
    return new, ChunkRecord(tuple(tiler.loops), tuple(dict.fromkeys(tiler.refusals.values())))


class _Tiler:
    """The search for stretches: what was tried, refused and replaced."""

    def __init__(
        self,
        tiles: Tiles,
        executors: tuple[Any, ...],
        marks: Sequence[Mark],
        choice: TileChoice,
        equal: EqualBlocks | None,
    ):
        self.tiles, self.executors, self.marks, self.choice = tiles, executors, marks, choice
        self.equal = EqualBlocks() if equal is None else equal
        self.marked = frozenset[str]().union(*(m.names for m in marks))
        self.tried: set[tuple[str, int, tuple[int, ...]]] = set()  # keys of seeds
        self.done: set[str] = set()
        self.loops: list[LoopPlan] = []
        self.refusals: dict[str, StretchRefusal] = {}  # by the name of the product's result
        self.replaced: dict[str, tuple[BoundSymbol, ...]] = {}  # by a loop's name, the leaves that it replaces

    def next_loop(self, trace: TraceCtx) -> TraceCtx | None:
        """The trace with one more stretch in tiles; None if there is no other."""
        program = read_program(trace)
        for seed in self._candidates(program):
            leaf = seed.leaf
            self.tried.add(seed.key)
            try:
                asked = self._is_asked(leaf.outputs[0].name)
                region = grow_stretch(program, seed, partial(_are_allowed, asked=asked, repeats=self.choice.repeats))
                loop = self._loop(seed, region) if region else None
                if region is None or loop is None:
                    continue
                check_autograd(loop)
                new, gone = splice(program.trace, region, loop)
            except Refused as e:
                self._refuse(leaf, e)
                continue
            except Exception as e:  # unknown kinds of traces must still compile
                self._refuse(leaf, Refused(leaf, f"the search for tiles does not understand it: {e!r}"))
                continue
            _keep_checkpoint(new, loop, region)
            self.loops.append(loop.plan)
            self.replaced[loop.plan.name] = gone
            self.done.update(m.outputs[0].name for m in region.members if m.is_product)
            for name in self.done:
                self.refusals.pop(name, None)
            return new
        return None

    def check_marks(self) -> None:
        """Raise if a stretch that the user marked stays whole."""
        for mark in self.marks:
            why = dict.fromkeys(str(r) for name, r in self.refusals.items() if name in mark.names)
            if self.done & mark.names and not why:
                continue
            reason = "; ".join(why) or "there is no matrix product in it whose result is wider than its input"
            at = f" at {mark.source}" if mark.source else ""
            raise TilingError(f"a stretch marked by thunder_mem.tiled(){at} stays whole: {reason}")

    def _candidates(self, program: Program) -> Iterator[Seed]:
        for seed in seeds_of(program, WIDE_RATIO):
            name = seed.leaf.outputs[0].name
            large = size_bytes(seed.leaf.outputs[0]) >= AUTO_MIN_BYTES
            if seed.key not in self.tried and name not in self.done and (self._is_asked(name) or large):
                yield seed

    def _is_asked(self, name: str) -> bool:
        return self.tiles.rows != "auto" or name in self.marked

    def _loop(self, seed: Seed, region: Region) -> ChunkLoop | None:
        """The stretch's loop, or None if it should stay whole."""
        out = seed.leaf.outputs[0]
        asked, device = self._is_asked(out.name), str(out.device.device_str())
        if region.n < 2:
            raise Refused(seed.leaf, "it has a single row")
        if isinstance(self.tiles.rows, int):
            enough, sized = self.tiles.rows, "asked"
        else:
            # Many more would spare few readings of weights, which products hide, and their rows would leave the cache.
            enough, sized = floor_rows(device, dtypes.to_torch_dtype(out.dtype)), "tile"
            enough *= self.choice.more_rows
        rows = -(-enough // seed.positions)
        if not asked and (region.n < 2 * rows or region.outputs[0].proxy.name in self.choice.off_peak):
            return None
        # A GPU's products would fill their last rows up. Fewer rows may pay where equal tiles hold too much.
        may_have_more = sized == "tile" and device == "cpu" and not self.choice.fewest_rows
        sizes = dict.fromkeys((equal_rows(region.n, rows), rows)) if may_have_more else (rows,)
        name, accumulate = f"tiles{len(self.loops)}", self.tiles.accumulate
        loops = (build_tiles(region, m, sized, accumulate, self.executors, name, self.equal) for m in sizes)
        loop = next((loop for loop in loops if asked or tile_gain_bytes(loop.plan) > 0), None)
        if loop is None or asked:
            return loop
        return None if self.choice.leaves_whole(loop.plan, region.outputs[0].proxy.name) else loop

    def _refuse(self, leaf: Leaf, e: Refused) -> None:
        name = leaf.outputs[0].name
        self.refusals[name] = StretchRefusal(head_label(leaf), leaf.source, e.leaf.label, e.leaf.source, e.reason)


def _are_allowed(borders: Borders, *, asked: bool, repeats: bool) -> Mask:
    """Whether the user asked for tiles, or their backward repeats nothing that costs time and is not repeated anyway.

    Stretches that repeat more may be allowed too, but outside of checkpoints only. An operation whose result leaves the
    stretch need not be marked: a checkpoint keeps its own result, so it does not mark the operation that makes it.
    """
    gradient = costly = marked = borders.inside[-1]
    program = borders.program
    for leaf in (program.leaves[i] for i in borders.row_of):
        leaving = {o.name: borders.lets_out(o.name) for o in leaf.outputs}
        gradient = borders.either([gradient, *(leaving[name] for name in program.needs_grad & leaving.keys())])
        if CHECKPOINTED in leaf.bsym.tags:
            marked = marked | borders.holds(leaf.index)
        elif leaf.bsym.sym.id not in _ELEMENTWISE:  # which take no time where they are fused
            costly = costly | (borders.holds(leaf.index) & ~borders.either(leaving.values()))
    return ~(gradient & costly) | asked | (~marked & repeats)


def _keep_checkpoint(trace: TraceCtx, loop: ChunkLoop, region: Region) -> None:
    """Mark the loop if the checkpoint lets the backward recompute all its results. Otherwise they are kept."""
    producer = region.program.producer
    if all(CHECKPOINTED in producer[v.proxy.name].bsym.tags for v in region.outputs):
        for bsym in trace.bound_symbols:
            if is_chunk_loop(bsym) and loop_of(bsym) is loop:
                bsym.tags.add(CHECKPOINTED)
