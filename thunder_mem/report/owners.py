"""Which module of the model each storage belongs to, from the parameters that operations read."""

from __future__ import annotations

from collections.abc import Mapping

from thunder.core.prims import PrimIDs
from thunder.core.trace import TraceCtx

from thunder_mem.report.facts import Facts

__all__ = ["modules_of", "parameter_paths"]

_UNPACKS = (PrimIDs.UNPACK_PARAMETER, PrimIDs.UNPACK_BUFFER)


def parameter_paths(prologue: TraceCtx) -> dict[str, str]:
    """The name of each parameter and buffer in a trace -> its path in the module, such as "blocks.0.up.weight"."""
    return {b.output.name: b.args[1] for b in prologue.bound_symbols if b.sym.id in _UNPACKS}


def modules_of(facts: Facts, paths: Mapping[str, str]) -> dict[int, str]:
    """Storage -> path of its module, "" for the model itself; storages without a module are missing.

    Parameters give their module to results as `Facts.spread` does. The higher of two modules is the one whose first
    operation with parameters is later.

    Args:
        facts: of a prediction, whose storages are sorted into modules.
        paths: of `parameter_paths`.
    """
    own = {i: paths[s.name].rpartition(".")[0] for i, s in enumerate(facts.prediction.storages) if s.name in paths}
    first: dict[str, int] = {}
    for position, reads in enumerate(facts.reads):
        for s in reads.values():
            if s in own:
                first.setdefault(own[s], position)
    seats = {s: (first[module], module) for s, module in own.items() if module in first}
    return {**{s: module for s, (_, module) in facts.spread(seats).items()}, **own}
