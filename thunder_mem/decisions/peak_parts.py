"""The parts of a planned program's peak in words; their figures add up to the peak."""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.memory.live_ranges import price_order
from thunder_mem.memory.units import size
from thunder_mem.trace.origins import modules_in_words, numberless, origin_of, source_of, symbol_name, word
from thunder_mem.trace.reading import TraceGraph, read_trace

__all__ = ["peak_in_words"]

# The number of operations that are named.
_MAKERS = 4


def peak_in_words(final: TraceCtx, source: TraceGraph) -> str:
    """The parts of a final trace's peak; computed values by the operations and lines that make most of them.

    Args:
        final: a planned trace, in its final order.
        source: the unfused trace that it was made from, where every value has its operation.
    """
    read = read_trace(final)
    timeline = price_order(read.graph)
    if timeline.peak_step < 0:
        return f"{size(timeline.peak_bytes)} of arguments and results"
    storages = timeline.graph.storages
    alive = timeline.alive_at(timeline.peak_step)
    stays = sum(storages[s].nbytes for s in alive if storages[s].held or s in timeline.graph.outputs)
    others = [storages[s] for s in alive if not storages[s].held and s not in timeline.graph.outputs]
    makers: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
    for s in others:
        op = source.producer_of.get(s.name)
        made_by = (s.name, "", "") if op is None else _maker(source.bsyms[op], source.graph.ops[op].backward)
        maker, module, half = made_by
        makers.setdefault((maker, numberless(module), half), []).append((s.nbytes, module))
    sums = {kind: sum(nbytes for nbytes, _ in made) for kind, made in makers.items()}
    shown = "; ".join(
        f"{size(sums[kind])} of {f'{len(makers[kind])} ' if len(makers[kind]) > 1 else ''}"
        f"{_in_words(kind[0], [module for _, module in makers[kind]], kind[2])}"
        for kind in sorted(makers, key=lambda kind: -sums[kind])[:_MAKERS]
    )
    parts = [f"{size(stays)} of arguments and results", f"{size(sum(s.nbytes for s in others))} of computed values"]
    parts[-1] += f" ({shown})" if shown else ""
    here = read.graph.ops[timeline.order[timeline.peak_step]]
    if here.scratch_bytes:
        maker, module, half = _maker(read.bsyms[here.index], here.backward)
        parts.append(f"{size(here.scratch_bytes)} of scratch inside {_in_words(maker, [module], half)}")
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _in_words(maker: str, modules: Sequence[str], half: str) -> str:
    return f"{maker}{f' in {modules_in_words(modules)}' if modules[0] else ''}{half}"


def _maker(bsym: BoundSymbol, backward: bool) -> tuple[str, str, str]:
    """An operation (with the user's line where it has no module), its module, and its half."""
    origin = origin_of(bsym)
    made_by = word(symbol_name(bsym.sym)) if origin is None else origin.word
    module = "" if origin is None else origin.module
    line = source_of(bsym) if not module else ""
    return f"{made_by}{f' at {line}' if line else ''}", module, ", backward" if backward else ""
