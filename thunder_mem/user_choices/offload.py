"""The option `MemEfficient(offload=...)`, and the values of a program that it allows to offload."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from thunder_mem.costs.roofline import cost_s
from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.device_models import DeviceModel
from thunder_mem.memory.outside_input import quoted
from thunder_mem.partition.constraints import Constraints, RecomputeError
from thunder_mem.partition.transfer_windows import Moves, moves_of
from thunder_mem.rewrites.offload import offload_obstacle
from thunder_mem.trace.reading import TraceGraph
from thunder_mem.user_choices.patterns import candidates, names_empty_values
from thunder_mem.user_choices.written import ONLY, offload_pattern

__all__ = ["OffloadOption", "moves_for", "parse_offload"]


@dataclass(frozen=True)
class OffloadOption:
    """The values that may be offloaded: those of one pattern, or all if the pattern is ""."""

    pattern: str = ""

    def __str__(self) -> str:
        return f"{ONLY}{self.pattern}" if self.pattern else "True"


def parse_offload(given: bool | str) -> OffloadOption | None:
    """Parse the option; None for False.

    Raises:
        TypeError: neither a bool nor a string.
        ValueError: a string that is not "only:PATTERN".

    Example:
        >>> parse_offload("only:Gelu"), parse_offload(False)
        (OffloadOption(pattern='Gelu+'), None)
    """
    if isinstance(given, bool):
        return OffloadOption() if given else None
    if not isinstance(given, str):
        raise TypeError(f'offload is True, False or "{ONLY}PATTERN", not {quoted(given)}')
    return OffloadOption(offload_pattern(given))


def moves_for(
    option: OffloadOption,
    source: TraceGraph,
    fuse: FusionCapabilities,
    choices: Constraints,
    free: frozenset[int],
    device: DeviceModel,
    where: str,
) -> Moves:
    """The values of a program that may be offloaded, and the cost of that.

    Args:
        option: the user's option.
        source: the joint trace, without recomputation.
        fuse: the facts about its cheap ops.
        choices: decisions already made, which stay.
        free: the storages that the backward recomputes for free.
        device: the device with the rates.
        where: the device's name in storages; values on other devices stay there.

    Raises:
        RecomputeError: the pattern matches nothing.
    """
    graph = source.graph
    if not any(op.backward for op in graph.ops):
        return moves_of(graph, (), (), device)
    decided = choices.must_save | choices.must_recompute
    allowed = _matching(option.pattern, source, free) if option.pattern else frozenset(range(len(graph.storages)))
    here = (s for s in sorted(allowed - decided) if graph.storages[s].device == where)
    movable = [s for s in here if offload_obstacle(source, s, device.least_copy_bytes) is None]
    # Fused work takes almost no time beside its region.
    op_s = [0.0 if fuse.cheap[op.index] else cost_s(source.bsyms[op.index], device) for op in graph.ops]
    return moves_of(graph, movable, op_s, device)


def _matching(pattern: str, source: TraceGraph, free: frozenset[int]) -> frozenset[int]:
    found, kept = candidates(source, free)
    named = [*((c.pattern, c.storage) for c in found), *((k.pattern, k.storage) for k in kept)]
    matched = frozenset(storage for name, storage in named if name == pattern)
    if not matched and not names_empty_values(pattern, source):
        names = sorted({name for name, _ in named})
        near = get_close_matches(pattern, names, n=5, cutoff=0.5) or names[:20]
        raise RecomputeError(
            f"offload: the pattern {pattern} matches nothing in this program; near it are {', '.join(near) or 'none'}"
        )
    return matched
