"""Find loss heads in a computation trace and replace each by a chunk loop.

    computation trace -> Program (leaves) -> Region (what can run chunk by chunk) -> LoopPlan -> bound symbol

Everything that stands in the way of a head becomes a `Refusal`, and the trace stays as it was there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import thunder
import torch
from thunder.core import dtypes
from thunder.core.compile_data import get_compile_data
from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx

from thunder_mem.chunk_body import Body, build_body
from thunder_mem.chunk_exec import ChunkLoop, accumulator_dtype, block_sizes
from thunder_mem.chunk_gemm import needs_scratch, scratch_bytes_of
from thunder_mem.chunk_hoist import hoist_slice
from thunder_mem.chunk_loop import bind_loop
from thunder_mem.chunk_mark import Mark, strip_marks
from thunder_mem.chunk_plan import ACCUMULATE, ChunkRecord, Gemm, Head, LoopPlan, Refusal, Spec
from thunder_mem.chunk_program import Leaf, Program, effects, read_program, walk
from thunder_mem.chunk_region import Refused, Region, Value, candidates, grow, trim
from thunder_mem.chunk_rules import RuleError
from thunder_mem.thunder_grads import register_missing

__all__ = ["ChunkRecord", "ChunkingError", "Head", "LoopPlan", "Refusal", "chunk_trace", "default_rows"]

FLOOR_ROWS = {"cuda": 2048, "cpu": 256}
"""Fewer rows than this starve the matrix products (measured: H200; a two-core CPU)."""

AUTO_RATIO = 4.0
"""In automatic mode a product counts as an amplifier when its result is this much larger than its rows."""

AUTO_MIN_BYTES = 1 << 20
"""In automatic mode smaller results are left alone."""


class ChunkingError(ValueError):
    """A head that the user marked cannot run chunk by chunk; the message says why."""


def default_rows(head: Head) -> int:
    """Rows per chunk when nobody says anything: one chunk's logits add a sixteenth to what the head
    needs anyway, but no fewer rows than keep the matrix products efficient.
    """
    floor = FLOOR_ROWS.get(head.device.split(":")[0], 1024)
    return max(floor, head.fixed_bytes // (16 * max(1, head.row_bytes)))


def chunk_trace(
    trace: TraceCtx,
    *,
    chunks: int | None = None,
    rows: int | str | None = None,
    accumulate: str = "float32",
    executors_list: Sequence[Any] = (),
    choose_rows: Callable[[Head], int | None] | None = None,
) -> tuple[TraceCtx, ChunkRecord]:
    """Replace the loss heads of a computation trace (before autograd) by chunk loops.

    Args:
        trace: the computation trace; it is not changed.
        chunks: how many chunks every head runs in, or None.
        rows: how many rows a chunk has; "auto" or None (with no `chunks`): `choose_rows`, or else
            `default_rows`, decides, and only large heads are looked at.
        accumulate: dtype in which the gradients of whole 16-bit inputs add up: "float32" or "input".
        executors_list: who executes the blocks; Thunder's own when empty.
        choose_rows: the planner's hook: rows per chunk for a head, None to leave the head alone.

    Returns:
        the new trace (the same object when nothing was chunked) and the record.

    Raises:
        ValueError, TypeError: an argument outside of what is accepted.
        ChunkingError: a head marked by `with thunder_mem.chunked():` cannot be chunked.
    """
    check_options(chunks, rows, accumulate)
    explicit = chunks is not None or isinstance(rows, int)
    start = time.perf_counter_ns()
    executors = tuple(executors_list) or tuple(thunder.get_default_executors())

    def decide(head: Head) -> int | None:
        if chunks is not None:
            return max(1, -(-head.n // chunks))
        if isinstance(rows, int):
            return rows
        return (choose_rows or default_rows)(head)

    loops: list[LoopPlan] = []
    refusals: dict[tuple[str, str], Refusal] = {}
    tried: set[str] = set()
    new, marks = strip_marks(trace)
    marked = frozenset().union(*(m.names for m in marks)) if marks else frozenset()
    done: set[str] = set()
    while True:
        program = read_program(new)
        found = _next_head(program, explicit, marked, tried, refusals)
        if found is None:
            break
        region, found_in = found
        try:
            loop = _plan_loop(region, decide, accumulate, executors, f"chunk_loop{len(loops)}")
            if loop is None:
                continue
            new = _splice(found_in, region, loop)
        except Refused as e:
            first = region.amplifiers[0].leaf
            refusals[first.label, first.source] = _refusal(first, e)
            continue
        loops.append(loop.plan)
        done.update(region.values, (leaf.outputs[0].name for leaf in (a.leaf for a in region.amplifiers)))
    _check_marks(marks, done, tuple(refusals.values()))
    record = ChunkRecord(tuple(loops), tuple(refusals.values()))
    if new is not trace:
        millis = (time.perf_counter_ns() - start) // 1_000_000
        new.set_provenance(TraceProvenance(f"Chunk loss heads (took {millis} milliseconds)"))
    return new, record


def check_options(chunks: Any, rows: Any, accumulate: Any) -> None:
    """Raise when the options of `chunk_trace` are not what it accepts."""
    for name, value in (("chunks", chunks), ("rows", rows)):
        if value is None or (name == "rows" and value == "auto"):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            extra = ', "auto"' if name == "rows" else ""
            raise TypeError(f"{name} is a positive int{extra} or None, but got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, but got {value}")
    if chunks is not None and rows not in (None, "auto"):
        raise ValueError(f"chunks={chunks} and rows={rows} both fix the chunk size; give one of them")
    if accumulate not in ACCUMULATE:
        raise ValueError(f"accumulate is one of {', '.join(map(repr, ACCUMULATE))}, but got {accumulate!r}")


def _refusal(leaf: Leaf, e: Refused) -> Refusal:
    return Refusal(_head_label(leaf), leaf.source, e.leaf.label, e.leaf.source, e.reason)


def _head_label(leaf: Leaf) -> str:
    """The product with its weight: inside a module the line is `torch.nn.Linear`'s own, the weight says whose."""
    weights = [t.name for t in leaf.inputs if t.name.startswith("t_")]
    return f"{leaf.label} with {', '.join(weights)}" if weights else leaf.label


def _check_marks(marks: Sequence[Mark], done: set[str], refusals: Sequence[Refusal]) -> None:
    for mark in marks:
        if done & mark.names:
            continue
        why = "; ".join(map(str, refusals)) or "there is no matrix product in it that is larger than its input"
        raise ChunkingError(f"the head marked by thunder_mem.chunked() at {mark.source} is not chunked: {why}")


def _next_head(
    program: Program, explicit: bool, marked: frozenset[str], tried: set[str], refusals: dict[tuple[str, str], Refusal]
) -> tuple[Region, TraceCtx] | None:
    """The largest amplifier not yet tried that has a region, and the trace it was found in, where a
    slice may have moved; refusals are noted on the way.
    """
    for leaf, rows in candidates(program, 1.0, 1):
        out = leaf.outputs[0]
        large = out.numel > AUTO_RATIO * leaf.inputs[rows].numel and out.numel * out.dtype.bytes >= AUTO_MIN_BYTES
        if not (explicit or large or out.name in marked):
            continue
        key = f"{out.name}/{rows}"
        if key in tried:
            continue
        tried.add(key)
        name = leaf.label, leaf.source
        try:
            region, trace = _grow_hoisting(program, leaf, rows)
        except Refused as e:
            # An MLP amplifies too and does not end in a loss: that is no news unless it is loss-sized.
            if out.numel > AUTO_RATIO * leaf.inputs[rows].numel or out.name in marked:
                refusals.setdefault(name, _refusal(leaf, e))
            continue
        except Exception as e:  # a trace unlike any we know must still compile
            refusals[name] = _refusal(leaf, Refused(leaf, f"the chunker does not understand it: {e!r}"))
            continue
        if region.n < 2:
            refusals.setdefault(name, _refusal(leaf, Refused(leaf, "it has a single row")))
            continue
        tried.update(f"{a.out.proxy.name}/{r}" for a in region.amplifiers for r in (0, 1))
        refusals.pop(name, None)
        return region, trace
    return None


def _grow_hoisting(program: Program, leaf: Leaf, rows: int) -> tuple[Region, TraceCtx]:
    """Grow a region; a slice of rows in its way moves above the product."""
    original = None
    for _ in range(8):  # a chain of slices, each of which moves by itself
        try:
            return trim(grow(program, leaf, rows)), program.trace
        except Refused as e:
            original = original or e
            moved = hoist_slice(program, e.leaf)
            if moved is None:
                raise original from None
            trace, name = moved
            program = read_program(trace)
            leaf = program.producer[name]
    raise original if original is not None else AssertionError("unreachable")


# --- the plan ---------------------------------------------------------------------------------------


def _spec(value: Value) -> Spec:
    p = value.proxy
    return Spec(p.name, tuple(p.shape), dtypes.to_torch_dtype(p.dtype), str(p.device.device_str()), value.sharding)


def _plan_loop(
    region: Region, decide: Callable[[Head], int | None], accumulate: str, executors: Sequence[Any], name: str
) -> ChunkLoop | None:
    program = region.program
    first = region.amplifiers[0].leaf
    inputs = region.inputs
    index = {v.key: i for i, v in enumerate(inputs)}
    specs = tuple(map(_spec, inputs))
    outputs = tuple(map(_spec, region.outputs))
    gemms = tuple(_gemm(region, a, index) for a in region.amplifiers)
    sides = _sides(region, index)
    cd = get_compile_data()
    no_grad = cd is not None and not cd.is_grad_enabled
    differentiable = (
        () if no_grad else tuple(i for i, v in enumerate(region.outputs) if v.proxy.name in program.needs_grad)
    )
    grads = tuple(i for i, v in enumerate(inputs) if v.proxy.name in program.needs_grad) if differentiable else ()
    mode, why = _mode(outputs, differentiable, gemms)
    head = Head(
        op=_head_label(first),
        source=first.source,
        n=region.n,
        row_bytes=sum(g.width * g.out.dtype.itemsize for g in gemms),
        fixed_bytes=sum(_grad_bytes(specs[i], accumulate) for i in grads),
        device=gemms[0].out.device,
    )
    rows = decide(head)
    if rows is None:
        return None
    rows = min(rows, region.n)
    wanted = [g.x in grads or g.w in grads for g in gemms] + [i in grads for i in sides]
    side_values = [inputs[i] for i in sides]

    built: dict[tuple[int, bool, bool], Body] = {}

    def bodies(sizes: Sequence[int], want: Sequence[bool], outs: bool) -> dict[int, Body]:
        try:
            for size in sizes:
                if (size, any(want), outs) not in built:
                    built[size, any(want), outs] = build_body(region, side_values, want, size, executors, outs)
            return {size: built[size, any(want), outs] for size in sizes}
        except RuleError as e:
            raise Refused(first, str(e)) from None
        except Exception as e:  # Thunder cannot differentiate or execute an op; it will say so itself
            raise Refused(first, f"Thunder cannot build one chunk of it: {str(e) or type(e).__name__}") from e

    nothing = [False] * len(wanted)
    with_outputs = mode == "grads-in-forward"
    probe_rows = min(rows, 8)
    probe = bodies([probe_rows], wanted if grads else nothing, with_outputs or not grads)[probe_rows]
    block_rows = _block_rows(rows, head.row_bytes, -(-probe.peak_bytes // probe_rows))
    sizes = block_sizes(region.n, rows, block_rows)
    forward = {} if with_outputs else bodies(sizes, nothing, True)
    backward = bodies(sizes, wanted, with_outputs) if grads else {}
    logits = rows * head.row_bytes
    tiles = _tile_bytes(gemms, [specs[i] for i in grads], accumulate, logits)
    plan = LoopPlan(
        name=name,
        source=first.source,
        op=_head_label(first),
        n=region.n,
        chunk_rows=rows,
        block_rows=block_rows,
        mode=mode,
        why=why,
        accumulate=accumulate,
        inputs=specs,
        outputs=outputs,
        gemms=gemms,
        sides=sides,
        grads=grads,
        differentiable=differentiable,
        forward_scratch_bytes=logits + max(tiles, *(b.peak_bytes for b in (forward or backward).values())),
        backward_scratch_bytes=logits + max(tiles, *(b.peak_bytes for b in backward.values())) if backward else 0,
    )
    return ChunkLoop(plan, forward, backward)


def _tile_bytes(gemms: Sequence[Gemm], grads: Sequence[Spec], accumulate: str, logits_bytes: int) -> int:
    """Scratch of the matrix products, where they go tile by tile."""
    pairs = [(g.out.dtype, g.out.dtype) for g in gemms]
    pairs += [(accumulator_dtype(s, accumulate), s.dtype) for s in grads if not s.sharding.split]
    tiled = any(needs_scratch(gemms[0].out.device, out, dtype) for out, dtype in pairs)
    return scratch_bytes_of(logits_bytes) if tiled else 0


def _mode(outputs: Sequence[Spec], differentiable: Sequence[int], gemms: Sequence[Gemm]) -> tuple[str, str]:
    if not differentiable:
        return "forward", "no gradient is asked for"
    if len(differentiable) > 1:
        names = ", ".join(outputs[i].name for i in differentiable)
        return "recompute-in-backward", f"several results carry gradients ({names})"
    (spec,) = (outputs[i] for i in differentiable)
    if spec.sharding.partial != "sum" or math.prod(spec.shape) != 1:
        return "recompute-in-backward", f"the tangent of {spec.name} is a vector, known only in the backward"
    if any(g.out.dtype == torch.float16 for g in gemms):
        return "recompute-in-backward", "float16 gradients need the loss scale, known only in the backward"
    return "grads-in-forward", f"{spec.name} is one scalar, so its tangent is a factor applied at the end"


def _grad_bytes(spec: Spec, accumulate: str) -> int:
    dtype = spec.dtype if spec.sharding.split else accumulator_dtype(spec, accumulate)
    return math.prod(spec.shape) * dtype.itemsize


def _block_rows(chunk_rows: int, row_bytes: int, row_scratch: int) -> int:
    """Rows between the products: their temporaries take at most a tenth of the chunk's logits, or 128 KiB.

    As few blocks of distinct sizes as possible: a divisor of the chunk is preferred.
    """
    allowed_bytes = max(1 << 17, chunk_rows * row_bytes // 10)
    most = max(1, min(chunk_rows, allowed_bytes // max(1, row_scratch)))
    for size in range(most, max(1, most // 2), -1):
        if chunk_rows % size == 0:
            return size
    return most


def _gemm(region: Region, a: Any, index: dict) -> Gemm:
    leaf = a.leaf
    shardings = region.shardings[leaf.index]
    operand = lambda slot: index[leaf.inputs[slot].name, shardings[slot]]  # noqa: E731
    w = leaf.inputs[1 - a.rows]
    linear = leaf.bsym.sym.id == PrimIDs.LINEAR
    # linear: w is (V, D). matmul: (N, D) @ (D, V), or (V, D) @ (D, N).
    w_rows_first = linear or a.rows == 1
    depth, width = (w.shape[1], w.shape[0]) if w_rows_first else (w.shape[0], w.shape[1])
    return Gemm(
        x=operand(a.rows),
        w=operand(1 - a.rows),
        depth=depth,
        width=width,
        w_rows_first=w_rows_first,
        x_rows_last=a.rows == 1,
        out=_spec(a.out),
    )


def _sides(region: Region, index: dict) -> tuple[int, ...]:
    """Inputs that the block itself reads: everything but the products' operands."""
    found: dict[int, None] = {}
    for a in region.amplifiers:
        for slot in range(2, len(a.leaf.inputs)):
            found[index[a.leaf.inputs[slot].name, region.shardings[a.leaf.index][slot]]] = None
    for m in region.members:
        for slot, t in enumerate(m.inputs):
            if t.name not in region.values:
                found[index[t.name, region.shardings[m.index][slot]]] = None
    return tuple(sorted(found))


# --- the new trace ----------------------------------------------------------------------------------


def _splice(trace: TraceCtx, region: Region, loop: ChunkLoop) -> TraceCtx:
    """The trace with the region's leaves replaced by the loop.

    The loop stands where the region's last leaf stood, or before the first reader of its results;
    what it needs and is computed later moves up with it.

    Raises:
        Refused: what would move up passes an op that writes in place.
    """
    # What was pulled in stays outside too; nobody reads it there, or somebody does.
    derived = [m for m in region.members if any(o.name in region.derived for o in m.outputs)]
    gone = {id(m.bsym) for m in derived} | {id(a.leaf.bsym) for a in region.amplifiers}
    outputs = [v.proxy for v in region.outputs]
    names = {o.name for o in outputs}
    items: list[BoundSymbol | None] = []  # None: a removed leaf
    for root in region.program.roots:
        _expand(root, gone, items)
    last = max(i for i, b in enumerate(items) if b is None)
    readers = (i for i, b in enumerate(items) if b is not None and any(a.name in names for a in b.flat_proxy_args))
    place = min(last, next(readers, last))

    new = from_trace(trace)
    with tracectx(new):
        bsym = bind_loop(loop, [v.proxy for v in region.inputs], outputs)
    first = region.amplifiers[0].leaf
    origin = first.parents[0] if first.parents else first.bsym
    bsym.source_filename, bsym.source_positions, bsym.header = (
        origin.source_filename, origin.source_positions, origin.header,
    )  # fmt: skip
    before = [b for b in items[:place] if b is not None]
    after = [b for b in items[place:] if b is not None]
    needed = {v.proxy.name for v in region.inputs}
    moved: list[BoundSymbol] = []
    for b in reversed(after):
        made = {o.name for o in b.flat_proxy_outs}
        if made & needed:
            moved.insert(0, b)
            needed |= {a.name for a in b.flat_proxy_args}
    if moved and any(effects(leaf) for leaf in region.program.leaves if any(leaf.bsym is b for b in after)):
        raise Refused(first, "what the loop needs is computed after an op that writes in place")
    ids = {id(b) for b in moved}
    new.bound_symbols = [*before, *moved, bsym, *(b for b in after if id(b) not in ids)]
    return new


def _expand(bsym: BoundSymbol, gone: set[int], items: list[BoundSymbol | None]) -> None:
    if id(bsym) in gone:
        items.append(None)
    elif bsym.subsymbols and any(id(leaf) in gone for leaf, _ in walk(bsym)):
        for sub in bsym.subsymbols:
            if sub.flat_proxy_outs or sub.subsymbols:
                if not sub.source_filename:
                    sub.source_filename, sub.source_positions = bsym.source_filename, bsym.source_positions
                _expand(sub, gone, items)
    else:
        items.append(bsym)


register_missing()
