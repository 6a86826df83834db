"""What each decision of a plan was worth, in the planner's own figures: before it, and after."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thunder_mem.chunk_plan import LoopPlan
from thunder_mem.graph import Graph
from thunder_mem.plan import Decision, PlannedRegion
from thunder_mem.saving import saved_storages
from thunder_mem.sizes import size

__all__ = ["about_chunks", "about_kernels", "about_order", "about_recompute", "about_regions", "about_saving", "about_views"]


def about_chunks(loops: Iterable[LoopPlan]) -> tuple[Decision, ...]:
    """Loss heads that run chunk by chunk: bytes of the logits that exist at once."""
    return tuple(
        Decision(
            "loss head",
            f"{loop.op} in {_count(loop.chunks, 'chunk')} of {loop.chunk_rows:,} rows, {loop.mode}: {loop.why}",
            "logits",
            loop.whole_logits_bytes,
            loop.logits_bytes,
            loop.source,
        )
        for loop in loops
    )


def about_saving(before: Graph, after: Graph) -> Decision:
    """What the backward receives of what the forward made, where the program is `after` instead of `before`."""
    names_before, bytes_before = _saved(before)
    names_after, bytes_after = _saved(after)
    rebuilt = len(names_before - names_after)
    how = f"{len(names_after)} tensors received, {rebuilt} others rebuilt" if rebuilt else "all received, none rebuilt"
    return Decision("saved for the backward", how, "saved", bytes_before, bytes_after)


def about_recompute(asked: str, graph: Graph, free: frozenset[int], chosen: frozenset[int]) -> Decision:
    """What the user asked to keep or recompute: bytes that the backward receives without, and with that."""

    def received(rebuilt: frozenset[int]) -> int:
        return sum(graph.storages[s].nbytes for s in saved_storages(graph, rebuilt))

    return Decision("recompute", asked, "saved", received(free), received(chosen))


def _saved(graph: Graph) -> tuple[set[str], int]:
    allocator = graph.allocator
    saved = {
        s
        for op in graph.ops
        if op.backward
        for s in (*op.reads, *op.writes)
        if (made := allocator[s]) is not None and not graph.ops[made].backward
    }
    return {graph.storages[s].name for s in saved}, sum(graph.storages[s].nbytes for s in saved)


def about_regions(regions: Sequence[PlannedRegion], before: Sequence[int], after: Sequence[int]) -> Decision:
    """Which operations run as one: peaks (forward, backward) of neighbours fused, and of these, in source order."""
    fused = [r for r in regions if r.executor is not None]
    copies = sum(len(r.copies) for r in regions)
    inside = sum(len(r.ops) for r in fused)
    where = "1 region" if len(fused) == 1 else f"{len(fused)} regions"
    how = f"{inside} operations in {where}, {copies} of them copies" if fused else "nothing is fused"
    return Decision("regions", how, "peak", max(before), max(after))


def about_order(algorithm: str, before: Sequence[int], after: Sequence[int]) -> Decision:
    """In which order the regions run: peaks (forward, backward) of source order, and of this one, regions merged."""
    return Decision("order", f"by {algorithm}, then neighbours merged", "peak", max(before), max(after))


def about_kernels(
    regions: int, launches: int, most_bytes: int, before: Sequence[int], after: Sequence[int]
) -> Decision:
    """What regions run as on a GPU: peaks (forward, backward) without what their kernels keep between them, and with it."""
    kept = f"keep at most {size(most_bytes)} between them" if most_bytes else "keep nothing between them"
    how = f"{_count(launches, 'kernel')} of {_count(regions, 'region')}, which {kept}"
    return Decision("kernels", how, "peak", max(before), max(after))


def about_views(copied: int, before_bytes: int, after_bytes: int) -> Decision:
    """Small views that are copied to let go of what they show: peaks without and with that."""
    return Decision(
        "views",
        f"{_count(copied, 'small view')} copied, to let {'its base' if copied == 1 else 'their bases'} go",
        "peak",
        before_bytes,
        after_bytes,
    )


def about_remakes(remade: int, before_bytes: int, after_bytes: int) -> Decision:
    """Values that are made a second time instead of being held over the peak: peaks without and with that."""
    how = f"{_count(remade, 'idle value')} made again after the peak"
    return Decision("rematerialized", how, "peak", before_bytes, after_bytes)


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"
