"""Recompute chosen forward values in the backward.

`runtime/repeatability.py` says which operations must never run twice; `recompute_in_backward` rewrites a joint trace to
recompute chosen values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.rewrites.regathered_values import second_gathers
from thunder_mem.runtime.repeatability import recompute_obstacle
from thunder_mem.runtime.rng_replay import run_with_rng_state, save_rng_state
from thunder_mem.semantics.effects import Effects, effects_of, leaves, with_subsymbols
from thunder_mem.trace.reading import BACKWARD, TraceGraph
from thunder_mem.trace.rebuilding import rebuilt, with_body
from thunder_mem.trace.renaming import named, renamed

__all__ = ["forbid_rng_replay", "gathers_of_held", "recompute_in_backward", "repeat_late"]

_GATHERS = {PrimIDs.EMBEDDING, PrimIDs.TAKE, PrimIDs.TAKE_ALONG_AXIS, PrimIDs.GATHER}


def forbid_rng_replay(trace: TraceCtx) -> TraceCtx:
    """The trace, marked so that no random numbers may be drawn again.

    For programs that are recorded as CUDA graphs: a generator's state cannot be saved while recording.
    """
    bsyms = [
        b.from_bsym(tags=b.tags | {OpTags.DONT_RECOMPUTE_IN_BACKWARD}) if _draws(effects_of(b)) else b
        for b in trace.bound_symbols
    ]
    return rebuilt(trace, bsyms)


def _draws(effects: Effects) -> bool:
    return any(channel.startswith("rng") for channel in effects.channels)


def gathers_of_held(source: TraceGraph) -> frozenset[int]:
    """The storages that hold rows of the caller's tensors, such as rows of an embedding's table.

    Gathering them again moves as many bytes as writing and reading them, without computation.
    """
    graph = source.graph
    return frozenset(
        s
        for op in graph.ops
        if op.allocates
        and all(graph.allocator[r] is None and graph.storages[r].held for r in op.reads)
        and any(b.sym.id in _GATHERS for b in (source.bsyms[op.index], *leaves(source.bsyms[op.index])))
        and recompute_obstacle(source, op.index) is None
        for s in op.allocates
    )


def recompute_in_backward(source: TraceGraph, trace: TraceCtx, storages: Collection[int]) -> TraceCtx:
    """The joint trace whose backward recomputes `storages` from the other saved values.

    Args:
        source: the reading of `trace`.
        trace: a joint trace.
        storages: forward storages of `source.graph`, each made by an op that may be repeated.
    """
    chosen = frozenset(storages)
    late = {op.index: chosen for op in source.graph.ops if op.backward}
    return repeat_late(source, trace, late, chosen, "Recompute in the backward what fused code rebuilds for free")


def repeat_late(
    source: TraceGraph,
    trace: TraceCtx,
    late: Mapping[int, Collection[int]],
    storages: Collection[int],
    why: str,
) -> TraceCtx:
    """The trace whose late readers of some storages read recomputed ones.

    The bound symbols that make them are repeated under new names, once each, just before their first late use. So
    are the views that are used late. Repeated random draws give the same numbers (`runtime/rng_replay.py`).

    Args:
        source: the reading of `trace`.
        late: per op, the storages whose recomputed version it reads. All users of a storage after a late one
            must be late too.
        storages: those that may be recomputed, also on the way to others; each made by an op that may be repeated.
        why: for the trace's provenance.
    """
    return with_body(trace, source, partial(_body, source, late, frozenset(storages)), why)


def _body(source: TraceGraph, late: Mapping[int, Collection[int]], storages: frozenset[int]) -> list[BoundSymbol]:
    body: list[BoundSymbol] = []
    again: dict[str, Proxy] = {}  # the late readers' replacement of the first value
    gathered = second_gathers(source)
    repeated: set[int] = set()
    placed: dict[int, int] = {}  # the position of an op's first run in the body

    def made_early(proxies: Iterable[Proxy], of: Collection[int]) -> list[Proxy]:
        """The values of these storages, without views that a late reader made of the recomputed one."""
        found = []
        for p in proxies:
            s, maker = source.storage_of.get(p.name), source.producer_of.get(p.name)
            if s in of and maker is not None and s not in late.get(maker, ()):
                found.append(p)
        return found

    def repeat(wanted: Iterable[Proxy], backward: bool, before: int) -> None:
        """Repeat the missing ops that make `wanted`, with the ops that they need, in source order.

        Parameters that the backward has gathered `before` that op replace the forward's.
        """
        missing: set[int] = set()
        stack = [source.producer_of[p.name] for p in wanted]
        while stack:
            op = stack.pop()
            if op not in missing and op not in repeated:
                missing.add(op)
                stack += [source.producer_of[p.name] for p in made_early(source.bsyms[op].flat_proxy_args, storages)]
        repeated.update(missing)
        for op in sorted(missing):
            bsym = source.bsyms[op]
            taken = {p.name for p in bsym.flat_proxy_args}
            outs = [p for p in bsym.flat_proxy_outs if p.name not in taken]
            # Results of its subsymbols need other names too: two values of one name seem to share memory.
            results = {p.name: p for b in with_subsymbols(bsym) for p in b.flat_proxy_outs if p.name not in taken}
            new = {name: named(p, f"bw_{name}" if backward else f"again_{name}") for name, p in results.items()}
            here = {p.name: gathered[p.name] for p in bsym.flat_proxy_args if backward and p.name in gathered}
            copy = renamed(bsym, {n: p for n, (made, p) in here.items() if made < before} | again | new)
            if _draws(source.effects[op]):
                first = body[placed[op]] = save_rng_state(body[placed[op]])
                copy = run_with_rng_state(copy, first.output[0])
            body.append(copy.from_bsym(tags=copy.tags | {BACKWARD}) if backward else copy)
            again.update({p.name: new[p.name] for p in made_early(outs, storages)})

    for op, bsym in zip(source.graph.ops, source.bsyms, strict=True):
        wanted = made_early(bsym.flat_proxy_args, late[op.index]) if op.index in late else []
        repeat(wanted, op.backward, op.index)
        second = {p.name: again[p.name] for p in wanted}
        placed[op.index] = len(body)
        body.append(renamed(bsym, second, outputs=False) if wanted else bsym)
    return _without_unread(body, {placed[op] for op in repeated}, source.result)


def _without_unread(body: Sequence[BoundSymbol], firsts: Collection[int], result: BoundSymbol) -> list[BoundSymbol]:
    """The body without those `firsts`, by position, whose readers all take the recomputed values.

    A first op planned into the backward would keep its operands, and Thunder would find that nobody takes them.
    """
    read = {p.name for p in result.flat_proxy_args}
    kept = []
    for at in reversed(range(len(body))):
        bsym = body[at]
        if at not in firsts or any(p.name in read for p in bsym.flat_proxy_outs):
            kept.append(bsym)
            read.update(p.name for p in bsym.flat_proxy_args)
    return kept[::-1]
