"""Which module of the model each storage belongs to, from the parameters that operations read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thunder.core.prims import PrimIDs
from thunder.core.trace import TraceCtx

from thunder_mem.prediction.predict import Prediction
from thunder_mem.report.facts import Facts

__all__ = ["modules_of", "parameter_paths"]

_UNPACKS = (PrimIDs.UNPACK_PARAMETER, PrimIDs.UNPACK_BUFFER)


def parameter_paths(prologue: TraceCtx) -> dict[str, str]:
    """The name of each parameter and buffer in a trace -> its path in the module, such as "blocks.0.up.weight"."""
    return {b.output.name: b.args[1] for b in prologue.bound_symbols if b.sym.id in _UNPACKS}


@dataclass(frozen=True, order=True)
class _Seat:
    """A module's place in the forward: the position of its first operation with parameters."""

    position: int
    module: str


def modules_of(prediction: Prediction, facts: Facts, paths: Mapping[str, str]) -> dict[int, str]:
    """Storage -> path of its module, "" for the model itself; storages without a module are missing.

    A result belongs to the module of the parameters that its operation reads. Without parameters it belongs to its
    operands' module: the latest of them in the forward, and the earliest in the backward.

    Args:
        prediction: its storages are sorted into modules.
        facts: of the same prediction.
        paths: of `parameter_paths`.
    """
    own = {i: paths[s.name].rpartition(".")[0] for i, s in enumerate(prediction.storages) if s.name in paths}
    first: dict[str, int] = {}
    seats: dict[int, _Seat] = {}
    for i, (event, reads, results) in enumerate(zip(prediction.timeline, facts.reads, facts.results, strict=True)):
        read = list(reads.values())
        here = [_Seat(first.setdefault(own[s], i), own[s]) for s in read if s in own]
        found: list[Any] = here or [seats[s] for s in read if s in seats]
        if not found:
            continue
        seat = min(found) if event.phase == "backward" else max(found)
        for s in results.values():
            if prediction.storages[s].born == event.index:
                seats.setdefault(s, seat)
    return {**{s: seat.module for s, seat in seats.items()}, **own}
