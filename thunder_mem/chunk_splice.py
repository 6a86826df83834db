"""Put a chunk loop into a computation trace, in the place of the leaves that it replaces."""

from __future__ import annotations

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx

from thunder_mem.chunk_exec import ChunkLoop
from thunder_mem.chunk_loop import bind_loop
from thunder_mem.chunk_program import effects, walk
from thunder_mem.chunk_region import Refused, Region

__all__ = ["splice"]


def splice(trace: TraceCtx, region: Region, loop: ChunkLoop) -> TraceCtx:
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
