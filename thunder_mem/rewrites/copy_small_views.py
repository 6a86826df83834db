"""Copy a small view that alone keeps a large tensor alive.

A view keeps all of its base alive. For example `v`, a third of a recomputed qkv projection, holds the projection until
attention's backward, through the whole backward of the MLP. A copy of `v`, made while the base is alive anyway, frees
the base. A plan shows the bases that are held at the peak in this way. All bases that are made and used alike are
treated alike, so that the peak does not just move to the next layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.memory.plan import Decision, Plan
from thunder_mem.memory.plan_steps import plan_steps
from thunder_mem.memory.units import counted
from thunder_mem.semantics.layout import is_view
from thunder_mem.trace.reading import BACKWARD, TraceGraph
from thunder_mem.trace.rebuilding import with_body
from thunder_mem.trace.renaming import renamed

__all__ = ["ViewCopy", "about_views", "pinned_bases", "with_copied_views"]


@dataclass(frozen=True)
class ViewCopy:
    """A base, and the ops that will read copies of its views.

    Attributes:
        storage: index of the base.
        readers: ops that read it late, in source order.
        views: the names that these ops read; each gets one copy.
        saved_bytes: the base's bytes less those of the copies.
    """

    storage: int
    readers: tuple[int, ...]
    views: tuple[str, ...]
    saved_bytes: int


@dataclass(frozen=True)
class _Use:
    """One name of a base that an op reads, unless the op is a view; equal uses of other bases have the same `kind`."""

    op: int
    name: str
    nbytes: int
    kind: tuple


def pinned_bases(source: TraceGraph, plan: Plan) -> tuple[ViewCopy, ...]:
    """The bases that only small views hold at the plan's peak, and all bases that are used alike.

    Only bases that are made and used in one half of the trace, and never overwritten, count.

    Args:
        source: the trace that `plan` was made for, as read.
    """
    steps = plan_steps(source.graph, plan)
    if (peak := steps.peak) is None:
        return ()
    step_of, uses = steps.of_op, _uses(source)
    splits: dict[tuple, int] = {}  # by how a base is used: how many of its uses come before its copies
    for s, of_base in uses.items():
        if not all(step_of[u.op] for u in of_base):
            continue
        before = [u for u in of_base if max(step_of[u.op]) < peak]
        if len(before) < len(of_base) and (first := steps.first(s)) is not None and first < peak:
            split = _split(source, s, of_base, len(before))
            # The source order tells which uses are late, for all bases alike.
            if split and of_base[: len(before)] == before:
                splits.setdefault(_kinds(of_base), len(before))
    found = [_split(source, s, u, splits[k]) for s, u in uses.items() if (k := _kinds(u)) in splits]
    return tuple(split for split in found if split)


def _kinds(uses: Iterable[_Use]) -> tuple:
    return tuple(use.kind for use in uses)


def _split(source: TraceGraph, storage: int, uses: Sequence[_Use], early: int) -> ViewCopy | None:
    late = uses[early:]
    views = {use.name: use.nbytes for use in late}
    saved_bytes = source.graph.storages[storage].nbytes - sum(views.values())
    readers = tuple(dict.fromkeys(use.op for use in late))
    return ViewCopy(storage, readers, tuple(views), saved_bytes) if saved_bytes > 0 else None


def _uses(source: TraceGraph) -> dict[int, list[_Use]]:
    """Per base that may be freed: the reads of its views by ops that are not views, in source order."""
    graph = source.graph
    half = [None if made is None else graph.ops[made].backward for made in graph.allocator]
    kept = {s for op, touched in zip(graph.ops, graph.touches, strict=True) for s in touched if half[s] != op.backward}
    kept |= graph.outputs | source.overwritten
    uses: dict[int, list[_Use]] = {}
    for op, bsym in zip(graph.ops, source.bsyms, strict=True):
        if is_view(bsym) and not op.allocates:  # what copies for want of a stride reads
            continue
        for position, p in enumerate(bsym.flat_proxy_args):
            s = source.storage_of.get(p.name)
            if s is None or s in kept or not isinstance(p, TensorProxy):
                continue
            made = graph.allocator[s]
            if made is None or made == op.index:
                continue
            shape = tuple(map(int, p.shape))
            kind = (bsym.sym.name, position, shape, graph.ops[made].name, graph.storages[s].nbytes)
            uses.setdefault(s, []).append(_Use(op.index, p.name, source.layout.shown_bytes(p.name), kind))
    return uses


def with_copied_views(source: TraceGraph, trace: TraceCtx, splits: Iterable[ViewCopy]) -> TraceCtx:
    """The trace whose late readers of each split read copies, made right after the view itself.

    Args:
        source: the reading of `trace`.
        trace: a plain or joint trace before fusion.
        splits: from `pinned_bases`.
    """

    def body() -> Iterator[BoundSymbol]:
        due: dict[int, list[BoundSymbol]] = {}
        swap_at: dict[int, dict[str, Proxy]] = {}
        for split in splits:
            backward = source.graph.ops[split.readers[0]].backward
            for name in split.views:
                maker = source.producer_of[name]
                view = next(p for p in source.bsyms[maker].flat_proxy_outs if p.name == name)
                copy = prims.clone.bind(view, output=prims.clone.meta(view))
                due.setdefault(maker, []).append(copy.from_bsym(tags=copy.tags | {BACKWARD}) if backward else copy)
                for reader in split.readers:
                    swap_at.setdefault(reader, {})[view.name] = copy.output
        for index, bsym in enumerate(source.bsyms):
            yield renamed(bsym, swap_at.get(index, {}), outputs=False)
            yield from due.get(index, [])

    return with_body(trace, source, body, "Copy small views that hold large tensors")


def about_views(copied: int, before_bytes: int, after_bytes: int) -> Decision:
    """The decision to copy small views that keep their bases alive: peaks without and with it."""
    return Decision(
        "views",
        f"{counted(copied, 'small view')} copied, to let {'its base' if copied == 1 else 'their bases'} go",
        "peak",
        before_bytes,
        after_bytes,
    )
