"""Replace leaves of a computation trace by a chunk loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transform_common import dce

from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.chunk_loop.symbols import bind_loop, is_chunk_loop, loop_of
from thunder_mem.loop_body.leaves import read_program, rewritten, walk
from thunder_mem.loop_body.region import Refused, Region
from thunder_mem.semantics.aliases import Aliases
from thunder_mem.semantics.effects import effects_of
from thunder_mem.trace.rebuilding import rebuilt
from thunder_mem.trace.verification import VerificationError

__all__ = ["splice", "unchunked"]


def splice(trace: TraceCtx, region: Region, loop: ChunkLoop) -> tuple[TraceCtx, tuple[BoundSymbol, ...]]:
    """The trace with the region's leaves replaced by the loop, and these leaves, with those that were pulled in.

    The loop stands at the earliest of three places: the region's last leaf, the first reader of its results,
    and the first op after the region's start that writes into memory which the loop may read. Operands of
    the loop that are computed later move up with it.

    Raises:
        Refused: an operand would move past an op with effects.
    """
    gone = {id(leaf.bsym) for leaf in region.replaced}
    outputs = [v.proxy for v in region.outputs]
    names = {o.name for o in outputs}
    lost = {o.name for leaf in region.replaced for o in leaf.outputs} - names
    needed = {v.proxy.name for v in region.inputs}
    items = rewritten(region.program.roots, dict.fromkeys(gone, (None,)), needed, lost)  # None: a removed leaf
    removed = [i for i, b in enumerate(items) if b is None]
    readers = [i for i, b in enumerate(items) if b is not None and any(a.name in names for a in b.flat_proxy_args)]
    writers = _writers(items[removed[0] : removed[-1]], region)
    place = min([removed[-1], *readers[:1], *(removed[0] + w for w in writers[:1])])

    new = from_trace(trace)
    with tracectx(new):
        bsym = bind_loop(loop, [v.proxy for v in region.inputs], outputs)
    first = region.first
    origin = first.parents[0] if first.parents else first.bsym
    bsym.source_filename, bsym.source_positions, bsym.header = (
        origin.source_filename, origin.source_positions, origin.header,
    )  # fmt: skip
    before = [b for b in items[:place] if b is not None]
    after = [b for b in items[place:] if b is not None]
    moved = _makers(after, needed)
    if moved and not all(effects_of(b).pure for b in after[: moved[-1] + 1]):
        raise Refused(first, "an operand of the loop is computed after an op that writes in place or has other effects")
    rest = (b for i, b in enumerate(after) if i not in moved)
    new.bound_symbols = [*before, *(after[i] for i in moved), bsym, *rest]
    return new, tuple(leaf.bsym for leaf in region.leaves)


def unchunked(
    before: TraceCtx, after: TraceCtx, replaced: Mapping[str, Sequence[BoundSymbol]]
) -> tuple[TraceCtx, TraceCtx]:
    """A trace before and after chunking, both as leaves, for comparison.

    Args:
        before, after: computation traces.
        replaced: by the name of a loop, the leaves that it replaces.

    Raises:
        VerificationError: a loop takes or gives other values than its leaves.
    """
    flat = []
    for trace in (before, after):
        leaves = (leaf for root in read_program(trace).roots for leaf, _ in walk(root))
        flat.append(dce(rebuilt(trace, [b for leaf in leaves for b in _opened(leaf, replaced)])))
    return flat[0], flat[1]


def _opened(bsym: BoundSymbol, replaced: Mapping[str, Sequence[BoundSymbol]]) -> Sequence[BoundSymbol]:
    if not is_chunk_loop(bsym) or loop_of(bsym).plan.name not in replaced:
        return (bsym,)
    plan = loop_of(bsym).plan
    names = tuple(p.name for p in (*bsym.args[1:], *bsym.output))
    if names != tuple(spec.name for spec in (*plan.inputs, *plan.outputs)):
        raise VerificationError(f"{plan.name} takes or gives other values than what it stands for")
    return replaced[plan.name]


def _writers(items: Sequence[BoundSymbol | None], region: Region) -> list[int]:
    """Positions of the items that may overwrite values that the region reads."""
    effects = {i: effects_of(b) for i, b in enumerate(items) if b is not None}
    suspects = [i for i, e in effects.items() if e.writes or e.barrier]
    if not suspects:
        return []
    memory = Aliases(region.program.roots)
    # By the region's own leaves, because pulled-in values may have names that the trace does not know.
    made = {o.name for leaf in region.leaves for o in leaf.outputs}
    read = {memory(t.name) for leaf in region.leaves for t in leaf.inputs if t.name not in made}
    read |= {memory(v.proxy.name) for v in region.inputs}
    found = []
    for i in suspects:
        b, e = items[i], effects[i]
        assert b is not None
        names = [a.name for a in b.flat_proxy_args] if e.barrier else e.writes
        if any(memory(name) in read for name in names):
            found.append(i)
    return found


def _makers(items: Sequence[BoundSymbol], wanted: set[str]) -> list[int]:
    """Positions of the items that the wanted names depend on."""
    needed, found = set(wanted), []
    for i in reversed(range(len(items))):
        if any(o.name in needed for o in items[i].flat_proxy_outs):
            found.append(i)
            needed |= {a.name for a in items[i].flat_proxy_args}
    return found[::-1]
