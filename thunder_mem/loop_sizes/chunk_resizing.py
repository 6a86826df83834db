"""The rows of a chunk, from the timeline of the whole program.

A chunk's logits live beside all other values that are alive while the loop runs. So the room for a chunk is only known
on the planned and fused joint trace. A head whose rows the user did not set is built lean (`rows_per_chunk.py`),
and the program is planned around it. Then its chunks grow in place, as far as the program's peak lies above them
anyway, and as far as more rows save time. The peak stays the same, and the matrix products get rows that cost no
memory.

Under a budget the head is built leaner than is efficient, and as lean as possible if nothing fits. Memory that the
budget leaves goes to the chunks first. The trace with the resized chunks decides about a budget. Other rows need no
other order, and on a GPU no other compiled blocks, because they are a multiple of the block's rows. On a CPU
`even_chunks.py` chooses blocks for them.

This module also writes the gradient of the head's input over that input, if nobody reads it any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.chunk_loop.plan import LoopPlan, about_chunks
from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of, makes_gradients, rebind, scratch_bytes_under
from thunder_mem.loop_sizes.built_blocks import with_blocks_built
from thunder_mem.loop_sizes.rows_per_chunk import allowed_block_rows, even_part, floor_rows, most_rows
from thunder_mem.memory.device_bytes import block_bytes
from thunder_mem.memory.live_ranges import peaks_of, price_order
from thunder_mem.memory.plan import Plan
from thunder_mem.semantics.aliases import Aliases
from thunder_mem.semantics.kernel_scratch import estimated_scratch_bytes
from thunder_mem.trace.reading import TraceGraph, proxies_in, read_trace
from thunder_mem.trace.rebuilding import rebuilt

__all__ = [
    "ResizedLoops",
    "UsesOfLoop",
    "fit_loops",
    "leanest_loops",
    "resized",
    "uses_of_loops",
    "with_fitted_loops",
    "write_over_dead_rows",
]

# Where nothing else fits a budget, chunks on a CPU start from as few rows. Products of fewer take as long again each.
_LEAST_ROWS = 4


@dataclass(frozen=True)
class ResizedLoops:
    """A trace whose loops fit the program around them.

    Attributes:
        trace: the new trace.
        source: its reading.
        loops: their plans, in the order of the trace.
        peaks: bytes of the forward and of the backward, including the caller's tensors.
    """

    trace: TraceCtx
    source: TraceGraph
    loops: tuple[LoopPlan, ...]
    peaks: tuple[int, int]


def fit_loops(
    trace: TraceCtx, budget_bytes: int | None = None, earlier: TraceGraph | None = None
) -> ResizedLoops | None:
    """Give every loop whose rows the user did not set the largest chunks that do not raise the program's peak.

    Args:
        trace: a joint or plain trace in its final order.
        budget_bytes: chunks may grow up to this peak until the matrix products are efficient.
        earlier: a reading of the trace from which `trace` was made.

    Returns:
        None when there is no loop in the trace.
    """
    if not any(map(is_chunk_loop, trace.bound_symbols)):
        return None
    trace = write_over_dead_rows(trace)
    source = read_trace(trace, earlier)
    uses, peak = uses_of_loops(source)
    swap = {}
    for use in uses:
        plan = _fitted(use, peak, max(peak, budget_bytes or 0))
        if plan is not use.loop.plan:
            swap[id(use.loop)] = use.loop.with_plan(plan)
    return resized(trace, source, swap)


@dataclass(frozen=True)
class UsesOfLoop:
    """The bound symbols of a loop, each with the other bytes that are alive there."""

    loop: ChunkLoop
    others_bytes: tuple[tuple[BoundSymbol, int], ...]

    def fits(self, plan: LoopPlan, limit_bytes: int) -> bool:
        """Whether the loop with another plan keeps the peak within the limit."""
        scratch = [block_bytes(scratch_bytes_under(plan, bsym), plan.device) for bsym, _ in self.others_bytes]
        return all(more + others <= limit_bytes for more, (_, others) in zip(scratch, self.others_bytes, strict=True))


def uses_of_loops(source: TraceGraph) -> tuple[tuple[UsesOfLoop, ...], int]:
    """The loops of a trace in its final order, with their uses, and the trace's peak in bytes."""
    live = price_order(source.graph).live_bytes
    uses: dict[int, list[tuple[BoundSymbol, int]]] = {}
    for bsym, live_bytes in zip(source.bsyms, live, strict=True):
        if is_chunk_loop(bsym):
            uses.setdefault(id(loop_of(bsym)), []).append((bsym, live_bytes - estimated_scratch_bytes(bsym)))
    return tuple(UsesOfLoop(loop_of(found[0][0]), tuple(found)) for found in uses.values()), max(live, default=0)


def resized(trace: TraceCtx, source: TraceGraph, swap: Mapping[int, ChunkLoop]) -> ResizedLoops:
    """The trace, which `source` reads, with other loops for those with some ids."""
    if swap:
        trace = _with_loops(trace, swap)
        source = read_trace(trace, earlier=source)
    plans = {id(loop_of(b)): loop_of(b).plan for b in source.bsyms if is_chunk_loop(b)}
    return ResizedLoops(trace, source, tuple(plans.values()), peaks_of(source.graph))


def leanest_loops(trace: TraceCtx) -> TraceCtx | None:
    """The trace with chunks of one step where the user set no rows, or None if that saves nothing.

    A single chunk of 16 bits becomes several chunks whose sums keep one more byte, in the same dtype.

    Args:
        trace: a joint or plain trace.
    """
    swap = {}
    for loop in {id(loop): loop for loop in map(loop_of, filter(is_chunk_loop, trace.bound_symbols))}.values():
        lean = _leanest(loop) if loop.plan.sized != "asked" else loop
        if _scratch_bytes(lean.plan) < _scratch_bytes(loop.plan):
            swap[id(loop)] = lean
    return _with_loops(trace, swap) if swap else None


def _leanest(loop: ChunkLoop) -> ChunkLoop:
    plan, opening = loop.plan, loop.plan.opening
    rows, block_rows = _leanest_rows(plan)
    if block_rows == plan.block_rows:
        return loop.with_plan(replace(plan, chunk_rows=rows))
    opening = opening and replace(opening, block_rows=min(rows, opening.block_rows))
    return with_blocks_built(loop.with_plan(replace(plan, chunk_rows=rows, block_rows=block_rows, opening=opening)))


def _leanest_rows(plan: LoopPlan) -> tuple[int, int]:
    """Rows of a chunk and of a block; of a head on a CPU as few as if the user had asked for small chunks."""
    if plan.is_stretch or not plan.device.startswith("cpu"):
        rows = min(plan.chunk_rows, plan.step_rows)
        return rows, min(rows, plan.block_rows)
    rows = min(plan.chunk_rows, max(_LEAST_ROWS, plan.step_rows // 4))
    scratch = max(plan.forward_block_bytes, plan.backward_block_bytes) // plan.block_rows
    allowed = allowed_block_rows(plan.device, plan.n, rows, plan.row_bytes, scratch, asked=True)
    return rows, min(plan.block_rows, even_part(rows, min(rows, max(1, allowed))))


def _scratch_bytes(plan: LoopPlan) -> int:
    return max(plan.forward_scratch_bytes, plan.backward_scratch_bytes)


def with_fitted_loops(plan: Plan, fitted: ResizedLoops) -> Plan:
    """The plan with the present peaks and chunks of its trace."""
    others = (d for d in plan.decisions if d.what not in ("loss head", "tiles"))
    return replace(plan, decisions=about_chunks(fitted.loops)).after(*others, peaks=fitted.peaks)


def _with_loops(trace: TraceCtx, swap: Mapping[int, ChunkLoop]) -> TraceCtx:
    bsyms = [
        rebind(b, swap[id(loop_of(b))]) if is_chunk_loop(b) and id(loop_of(b)) in swap else b
        for b in trace.bound_symbols
    ]
    return rebuilt(trace, bsyms, "Chunks as large as the program's peak allows")


def _fitted(use: UsesOfLoop, peak_bytes: int, budget_bytes: int) -> LoopPlan:
    """The plan of a loop with more rows, if there is room."""
    plan = use.loop.plan
    if plan.sized in ("asked", "tile") or plan.chunk_rows >= plan.n:
        return plan
    device = plan.gemms[0].out.device

    def most(limit_bytes: int, most_rows: int) -> int:
        """The most rows, in whole steps, that keep the peak within the limit."""

        def fits(steps: int) -> bool:
            return use.fits(replace(plan, chunk_rows=min(plan.n, steps * plan.step_rows)), limit_bytes)

        low, high = plan.chunk_rows // plan.step_rows, max(1, -(-min(most_rows, plan.n) // plan.step_rows))
        while low < high:
            middle = -(-(low + high) // 2)
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return min(plan.n, low * plan.step_rows)

    rows = max(
        plan.chunk_rows,
        most(peak_bytes, most_rows(device, plan.n)),
        most(budget_bytes, floor_rows(device, plan.gemms[0].out.dtype)),
    )
    # The same number of chunks of more equal size takes fewer bytes.
    even = -(-plan.n // -(-plan.n // rows))
    rows = min(rows, max(plan.chunk_rows, -(-even // plan.step_rows) * plan.step_rows))
    return plan if rows == plan.chunk_rows else replace(plan, chunk_rows=rows, sized="timeline")


# --- the gradient of dead rows ----------------------------------------------------------------------


def write_over_dead_rows(trace: TraceCtx) -> TraceCtx:
    """Let loops that compute gradients in the forward write the gradient of their rows over the rows
    themselves, if nothing reads the rows afterwards; the same trace if there is no such loop.

    Args:
        trace: joint, plain, or a forward with its `del`s, in its final order.
    """
    runs: dict[int, list[int]] = {}  # a loop may run more than once
    for at, bsym in enumerate(trace.bound_symbols):
        if makes_gradients(bsym):
            runs.setdefault(id(loop_of(bsym)), []).append(at)
    swap = {}
    for key, places in runs.items():
        loop = loop_of(trace.bound_symbols[places[0]])
        over = tuple(sorted(set.intersection(*(set(_dead_rows(trace, at)) for at in places))))
        if over != loop.plan.over:
            swap[key] = loop.with_plan(replace(loop.plan, over=over))
    return _with_loops(trace, swap) if swap else trace


def _dead_rows(trace: TraceCtx, at: int) -> tuple[int, ...]:
    bsyms = trace.bound_symbols
    plan = loop_of(bsyms[at]).plan
    args = [a.name for a in bsyms[at].args[1:]]
    rows = plan.rows_read_first
    if not rows:
        return ()
    made = [b for b in bsyms[:at] if not is_chunk_loop(b)]  # its results have their own memory
    aliases = Aliases(made)
    memory = [aliases(name) for name in args]
    rows = tuple(i for i in rows if memory.count(memory[i]) == 1)
    given = {p.name for p in proxies_in((trace.args, trace.kwargs))}
    given |= {p.name for b in made if b.sym.id in _GIVEN for p in b.flat_proxy_outs}
    later = {a.name for b in bsyms[at + 1 :] if b.sym.id is not PrimIDs.DEL for a in b.flat_proxy_args}
    needed = {aliases(name) for name in given | later}
    return tuple(i for i in rows if memory[i] not in needed)


_GIVEN = {PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE}
