"""Find loss heads in a computation trace and replace each by a chunk loop.

    computation trace -> Program (leaves) -> Region (what can run chunk by chunk) -> LoopPlan -> bound symbol

Each obstacle to a head becomes a `HeadRefusal`, and the trace stays unchanged there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import thunder
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance
from thunder.core.transform_common import dce

from thunder_mem.chunk_loop.plan import ACCUMULATE, ChunkRecord, Head, HeadRefusal, LoopPlan
from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.chunk_loop.symbols import check_autograd, is_chunk_loop, loop_of
from thunder_mem.loop_body.leaves import Leaf, Program, numel, read_program, size_bytes
from thunder_mem.loop_body.region import Refused, Region, amplifying_products, grow
from thunder_mem.loop_body.region_trimming import trim
from thunder_mem.loop_sizes.rows_per_chunk import AUTO_MIN_BYTES, default_rows
from thunder_mem.semantics.effects import with_subsymbols
from thunder_mem.tiling.build import build_loop, differentiable_of, head_label
from thunder_mem.tiling.hoist_slices import hoist_beside, hoist_rows
from thunder_mem.tiling.marks import Mark, strip_marks, strip_tile_marks, with_products
from thunder_mem.tiling.opening import grow_opening
from thunder_mem.tiling.opening_build import with_opening
from thunder_mem.tiling.splice import splice, unchunked
from thunder_mem.tiling.vocab_parallel import with_vocabulary_in_parts
from thunder_mem.torch_functions.missing_gradients import register_missing
from thunder_mem.trace.verification import VerificationError, verify_rewrite

__all__ = ["ChunkRecord", "ChunkingError", "Head", "HeadRefusal", "LoopPlan", "check_options", "chunk_trace"]

AUTO_RATIO = 4.0
"""In automatic mode a product counts as an amplifier when its result is this much larger than its rows."""

_MIN_SHARE = 16
"""Under a budget, results count from a sixteenth of it, where that is less."""

SAVES_NOTHING = "one chunk would save nothing: its gradients are much larger than its logits"


class ChunkingError(ValueError):
    """A head that the user marked cannot run chunk by chunk; the message says why."""


def chunk_trace(
    trace: TraceCtx,
    *,
    chunks: int | str | None = None,
    rows: int | str | None = None,
    accumulate: str | None = None,
    executors_list: Sequence[Any] = (),
    choose_rows: Callable[[Head], int | None] | None = None,
    budget_bytes: int | None = None,
    verify: bool = True,
) -> tuple[TraceCtx, ChunkRecord]:
    """Replace the loss heads of a computation trace (before autograd) by chunk loops.

    Args:
        trace: the computation trace; it is not changed.
        chunks: the number of chunks of every head.
        rows: the number of rows of a chunk. Give `chunks` or `rows`; if neither is a number (None or "auto"),
            `choose_rows`, or else `rows_per_chunk.default_rows`, decides, and only large heads are chunked.
        accumulate: dtype in which the gradients of whole 16-bit inputs add up: "float32" or "input";
            None is float32, which a budget may narrow.
        executors_list: the executors of the blocks; Thunder's own if empty.
        choose_rows: rows per chunk for a head whose rows the user did not set, None to leave it whole.
        budget_bytes: for the program's peak; heads that are large beside a small one are chunked, too.
        verify: check that the new trace computes the same values, apart from the inside of loops.

    Returns:
        the new trace (the same object when nothing was chunked) and the record.

    Raises:
        ValueError, TypeError: an argument is not accepted.
        ChunkingError: a head marked by `with thunder_mem.chunked():` cannot be chunked.
        VerificationError: the new trace is another program.
    """
    register_missing()
    check_options(chunks, rows, accumulate)
    least_bytes: int | None = None
    if not isinstance(chunks, int) and not isinstance(rows, int):
        least_bytes = AUTO_MIN_BYTES if budget_bytes is None else min(AUTO_MIN_BYTES, budget_bytes // _MIN_SHARE)
    start = time.perf_counter_ns()
    executors = tuple(executors_list) or tuple(thunder.get_default_executors())

    def decide(head: Head) -> tuple[int, str] | None:
        if isinstance(chunks, int):
            return max(1, -(-head.n // chunks)), "asked"
        if isinstance(rows, int):
            return rows, "asked"
        chosen = (choose_rows or default_rows)(head)
        return None if chosen is None else (chosen, "head")

    def decide_marked(head: Head) -> tuple[int, str]:
        return decide(head) or (default_rows(head), "head")

    loops: list[LoopPlan] = []
    refusals: dict[str, HeadRefusal] = {}  # by the name of the product's result
    tried: set[str] = set()
    new, marks = strip_marks(trace)
    tiled = frozenset().union(*(m.names for m in strip_tile_marks(trace)[1]))
    given = with_vocabulary_in_parts(new)
    whole = new = dce(given)  # `ltorch.dim` and similar ops seem to run for an effect
    done: set[str] = set()
    replaced: dict[str, tuple[BoundSymbol, ...]] = {}  # by a loop's name, the leaves that it replaces
    picked: frozenset[str] = frozenset()
    while True:
        marked = frozenset().union(*(m.names for m in marks))
        head = _next_head(read_program(new), least_bytes, marked, tiled, tried, refusals)
        if head is None:
            break
        region, first = head.region, head.region.amplifiers[0].leaf
        try:
            rows_of = decide_marked if marked & head.names else decide
            region, loop = _built(region, rows_of, accumulate, executors, f"chunk_loop{len(loops)}")
            if loop is not None:
                check_autograd(loop)
                new, gone = splice(region.program.trace, region, loop)
        except Exception as e:
            refused = e if isinstance(e, Refused) else _puzzled(first, e)
            refusals.update(dict.fromkeys(head.names, _refusal(first, refused)))
            continue
        picked |= head.picked
        marks = with_products(marks, head.leaf.outputs[0].name, head.products)
        if loop is None:
            new = head.picking or new  # selecting rows first leaves fewer rows, chunked or not
            refusals.update(dict.fromkeys(head.names, _refusal(first, Refused(first, SAVES_NOTHING))))
            continue
        loops.append(loop.plan)
        replaced[loop.plan.name] = gone
        done |= {*region.values, *head.names}
        for name in head.names:
            refusals.pop(name, None)
    if new is whole:
        new = given
    elif verify:
        try:
            before, after = unchunked(whole, new, replaced)
            # Where rows are selected of what was selected already, the value between is not the program's.
            known = {p.name for b in before.bound_symbols for p in b.flat_proxy_outs}
            verify_rewrite(before, after, trusted=picked & known)
        except VerificationError as error:
            if marks:
                raise ChunkingError(f"a head marked by thunder_mem.chunked() is not chunked: {error}") from error
            raise
    _check_marks(marks, done, _heads(new, refusals))
    record = ChunkRecord(tuple(loops), tuple(dict.fromkeys(refusals.values())))
    if new is not trace:
        millis = (time.perf_counter_ns() - start) // 1_000_000
        new.set_provenance(TraceProvenance(f"Chunk loss heads (took {millis} milliseconds)"))
    return new, record


def _built(
    region: Region,
    decide: Callable[[Head], tuple[int, str] | None],
    accumulate: str | None,
    executors: Sequence[Any],
    name: str,
) -> tuple[Region, ChunkLoop | None]:
    """A head's loop, if possible with the operations above its products, and the region that the loop replaces."""
    opening = grow_opening(region) if differentiable_of(region) else None
    if opening is not None:
        whole = replace(region, opening=opening)
        with suppress(Refused):
            loop = build_loop(whole, decide, accumulate, executors, name)
            return whole, loop and with_opening(loop, opening, executors)
    return region, build_loop(region, decide, accumulate, executors, name)


def check_options(chunks: Any, rows: Any, accumulate: Any) -> None:
    """Raise if `chunk_trace` does not accept these options."""
    for name, value in (("chunks", chunks), ("rows", rows)):
        if value is None or (isinstance(value, str) and value == "auto"):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f'{name} is a positive int, "auto" or None, but got {value!r}')
        if value < 1:
            raise ValueError(f"{name} must be at least 1, but got {value}")
    if chunks is not None and rows is not None and (chunks, rows) != ("auto", "auto"):
        raise ValueError(f"chunks={chunks!r} and rows={rows!r} both say how large a chunk is; give one of them")
    check_accumulate(accumulate)


def check_accumulate(accumulate: Any) -> None:
    """Raise if a loop cannot add up gradients so."""
    if accumulate is not None and accumulate not in ACCUMULATE:
        raise ValueError(f"accumulate is one of {', '.join(map(repr, ACCUMULATE))}, but got {accumulate!r}")


def _refusal(leaf: Leaf, e: Refused) -> HeadRefusal:
    return HeadRefusal(head_label(leaf), leaf.source, e.leaf.label, e.leaf.source, e.reason)


def _puzzled(leaf: Leaf, e: Exception) -> Refused:
    return Refused(leaf, f"the chunker does not understand it: {e!r}")


@dataclass(frozen=True)
class _Grown:
    """A head that was found.

    Attributes:
        leaf: its original product.
        region: the part that can run in chunks.
        picking: the trace that selects rows first; None if that changes nothing.
        products: names of the results of the products that replace it there.
        picked: names of the values whose rows are selected before a product there.
    """

    leaf: Leaf
    region: Region
    picking: TraceCtx | None = None
    products: tuple[str, ...] = ()
    picked: frozenset[str] = frozenset()

    @property
    def names(self) -> set[str]:
        """Names of the results of the region's products, and of the original product."""
        return {self.leaf.outputs[0].name, *(a.leaf.outputs[0].name for a in self.region.amplifiers)}


def _heads(trace: TraceCtx, refusals: Mapping[str, HeadRefusal]) -> dict[str, HeadRefusal]:
    """The refusals of heads, without smaller products from which a chunked head is computed: hidden layers."""
    largest: dict[str, int] = {}  # by value, the logits of the largest head that is computed from it
    bytes_of = {o.name: size_bytes(o) for b in trace.bound_symbols for o in _tensors_made(b)}
    for bsym in reversed(trace.bound_symbols):
        made = [o.name for o in _tensors_made(bsym)]
        logits_bytes = max((largest.get(name, 0) for name in made), default=0)
        if is_chunk_loop(bsym):
            logits_bytes = max(logits_bytes, loop_of(bsym).plan.whole_logits_bytes)
        for name in (*made, *(a.name for a in bsym.flat_proxy_args)):
            largest[name] = max(largest.get(name, 0), logits_bytes)
    return {name: r for name, r in refusals.items() if largest.get(name, 0) <= bytes_of.get(name, 0)}


def _tensors_made(bsym: BoundSymbol) -> list[TensorProxy]:
    return [o for b in with_subsymbols(bsym) for o in b.flat_proxy_outs if isinstance(o, TensorProxy)]


def _check_marks(marks: Sequence[Mark], done: set[str], refusals: Mapping[str, HeadRefusal]) -> None:
    for mark in marks:
        why = dict.fromkeys(str(r) for name, r in refusals.items() if name in mark.names)
        if done & mark.names and not why:
            continue
        reason = "; ".join(why) or "there is no matrix product in it that is larger than its input"
        at = f" at {mark.source}" if mark.source else ""
        raise ChunkingError(f"a head marked by thunder_mem.chunked(){at} is not chunked: {reason}")


def _next_head(
    program: Program,
    least_bytes: int | None,
    marked: frozenset[str],
    tiled: frozenset[str],
    tried: set[str],
    refusals: dict[str, HeadRefusal],
) -> _Grown | None:
    """The largest amplifier not yet tried that has a region. Refusals are noted on the way.

    Args:
        program: to search.
        least_bytes: of the results of products that count, which are much larger than their rows; None if all count.
        marked, tiled: names of values in the user's marks of heads, and in those of tiles, which no head takes.
        tried: keys of products that were refused.
        refusals: by name of the product's result; more are added.
    """
    for leaf, rows in amplifying_products(program):
        out = leaf.outputs[0]
        ratio = numel(out) / max(1, numel(leaf.inputs[rows]))
        large = least_bytes is None or (ratio > AUTO_RATIO and size_bytes(out) >= least_bytes)
        if not (large or out.name in marked) or out.name in tiled - marked:
            continue
        key = f"{out.name}/{rows}"
        if key in tried:
            continue
        tried.add(key)
        name = out.name
        try:
            head = _grow_hoisting(program, leaf, rows)
        except Refused as e:
            # An MLP also amplifies but does not end in a loss: report it only if it is as large as a loss head.
            if ratio > AUTO_RATIO or out.name in marked:
                refusals.setdefault(name, _refusal(leaf, e))
            continue
        except Exception as e:  # unknown kinds of traces must still compile
            refusals[name] = _refusal(leaf, _puzzled(leaf, e))
            continue
        if head.region.n < 2:
            refusals.setdefault(name, _refusal(leaf, Refused(leaf, "it has a single row")))
            continue
        tried.update(f"{a.out.proxy.name}/{r}" for a in head.region.amplifiers for r in (0, 1))
        return head
    return None


def _grow_hoisting(program: Program, leaf: Leaf, rows: int) -> _Grown:
    """Grow a region; a row selection in its way moves above the product."""
    original: Refused | None = None
    now, picking = leaf, None
    products: tuple[str, ...] = ()
    picked: frozenset[str] = frozenset()
    for _ in range(8):  # a chain of selections, each of which moves by itself
        try:
            region = trim(grow(program, now, rows))
            moved, name = hoist_beside(region), now.outputs[0].name
            if moved is None:
                return _Grown(leaf, region, picking, products, picked)
        except Refused as e:
            original = original or e
            moved = hoist_rows(program, e.leaf, now, rows)
            if moved is None:
                raise original from None
            products, name = (*products, *moved.products), moved.products[0]
        picked |= moved.picked
        picking = moved.trace
        program = read_program(picking)
        now = program.producer[name]
    raise original or Refused(leaf, "its rows are picked too many times in a row")
