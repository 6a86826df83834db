"""What a configuration of patterns and a policy have in common: they decide about single storages."""

from __future__ import annotations

from typing import Protocol

from thunder_mem.partition.constraints import Constraints
from thunder_mem.trace.reading import TraceGraph

__all__ = ["PartitionPolicy"]


class PartitionPolicy(Protocol):
    """Whoever decides about single storages: a configuration of patterns, a policy."""

    def choose(self, source: TraceGraph, rebuilt: frozenset[int]) -> Constraints:
        """The choices for a joint trace.

        Args:
            source: the joint trace, in which nothing is recomputed yet.
            rebuilt: the storages that the backward would rebuild without these choices.

        Raises:
            RecomputeError: they make no sense for this program.
        """
