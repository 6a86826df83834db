"""What holds the peak of a planned program, in words whose figures add up to it."""

from __future__ import annotations

import re

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.origins import origin_of, source_of, word
from thunder_mem.sizes import size
from thunder_mem.timeline import simulate
from thunder_mem.trace_graph import TraceGraph, read_trace

__all__ = ["peak_in_words"]

# So many operations are named.
_MAKERS = 4


def peak_in_words(final: TraceCtx, source: TraceGraph) -> str:
    """The parts of a final trace's peak: of computed values the operations that make most, by where they stand.

    Args:
        final: a planned trace, in its final order.
        source: the unfused trace that it was made from, where every value has its operation.
    """
    read = read_trace(final)
    timeline = simulate(read.graph)
    if timeline.peak_step < 0:
        return f"{size(timeline.peak_bytes)} of arguments and results"
    storages = timeline.graph.storages
    alive = timeline.alive_at(timeline.peak_step)
    stays = sum(storages[s].nbytes for s in alive if storages[s].held or s in timeline.graph.outputs)
    others = [storages[s] for s in alive if not storages[s].held and s not in timeline.graph.outputs]
    makers: dict[str, list[int]] = {}
    for s in others:
        op = source.producer_of.get(s.name)
        maker = s.name if op is None else _maker(source.bsyms[op], source.graph.ops[op].backward)
        makers.setdefault(maker, []).append(s.nbytes)
    largest = sorted(makers.items(), key=lambda m: -sum(m[1]))[:_MAKERS]
    shown = "; ".join(f"{size(sum(n))} of {f'{len(n)} ' if len(n) > 1 else ''}{m}" for m, n in largest)
    parts = [f"{size(stays)} of arguments and results", f"{size(sum(s.nbytes for s in others))} of computed values"]
    parts[-1] += f" ({shown})" if shown else ""
    here = read.graph.ops[timeline.order[timeline.peak_step]]
    if here.scratch_bytes:
        scratch = f"{size(here.scratch_bytes)} of scratch inside {_maker(read.bsyms[here.index], here.backward)}"
        parts.append(scratch)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _maker(bsym: BoundSymbol, backward: bool) -> str:
    """An operation, with its module (equal layers' alike) or the user's line."""
    origin = origin_of(bsym)
    made_by = word(bsym.sym.name) if origin is None else origin.word
    module = "" if origin is None else re.sub(r"\d+", "#", origin.module)
    line = source_of(bsym)
    where = f" in module {module}" if module else f" at {line}" if line else ""
    return f"{made_by}{where}{', backward' if backward else ''}"
