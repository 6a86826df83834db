"""What `MemEfficient(offload=...)` says, and what that means for a program: which values may be offloaded."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from thunder_mem.choices import Choices, RecomputeError
from thunder_mem.cost import DeviceModel, cost_s
from thunder_mem.offload import why_not_offload
from thunder_mem.offload_link import Moves, moves_of
from thunder_mem.outside import quoted
from thunder_mem.patterns import candidates, names_empty_values
from thunder_mem.regions import Fusibility
from thunder_mem.trace_graph import TraceGraph

__all__ = ["OffloadOption", "moves_for", "parse_offload"]

_ONLY = "only:"


@dataclass(frozen=True)
class OffloadOption:
    """What may be offloaded: values of one pattern, or, if it is "", all."""

    pattern: str = ""

    def __str__(self) -> str:
        return f"{_ONLY}{self.pattern}" if self.pattern else "True"


def parse_offload(given: bool | str) -> OffloadOption | None:
    """What was written; None for False.

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
        raise TypeError(f'offload is True, False or "{_ONLY}PATTERN", not {quoted(given)}')
    words = given.removeprefix(_ONLY).strip().removesuffix("+").split("+")
    if not given.startswith(_ONLY) or not all(word.isidentifier() for word in words):
        raise ValueError(
            f'offload is True, False or "{_ONLY}PATTERN", with a pattern as recompute_table names them, such as '
            f'"{_ONLY}Gelu+", not {quoted(given)}'
        )
    return OffloadOption("+".join(words) + "+")


def moves_for(
    option: OffloadOption,
    source: TraceGraph,
    fuse: Fusibility,
    choices: Choices,
    free: frozenset[int],
    device: DeviceModel,
    where: str,
) -> Moves:
    """What may be offloaded in a program, and what that takes.

    Args:
        option: what was asked for.
        source: the joint trace, in which nothing is recomputed yet.
        fuse: which of its ops are cheap.
        choices: what is decided already, and so stays as it is.
        free: what the backward rebuilds without being asked.
        device: whose rates count.
        where: the device's name in storages; what lives elsewhere stays there.

    Raises:
        RecomputeError: the pattern matches nothing.
    """
    graph = source.graph
    if not any(op.backward for op in graph.ops):
        return moves_of(graph, (), (), device)
    decided = choices.keep | choices.recompute
    allowed = _matching(option.pattern, source, free) if option.pattern else frozenset(range(len(graph.storages)))
    here = (s for s in sorted(allowed - decided) if graph.storages[s].device == where)
    movable = [s for s in here if why_not_offload(source, s, device.least_copy_bytes) is None]
    # Fused work takes next to no time beside what it is fused with.
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
