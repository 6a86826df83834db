"""The common interface of a configuration of patterns and a policy: decisions about single storages."""

from __future__ import annotations

from typing import Protocol

from thunder_mem.partition.constraints import Constraints
from thunder_mem.trace.reading import TraceGraph

__all__ = ["PartitionPolicy"]


class PartitionPolicy(Protocol):
    """Decides about single storages: a configuration of patterns, or a policy."""

    def choose(self, source: TraceGraph, rebuilt: frozenset[int]) -> Constraints:
        """The choices for a joint trace.

        Args:
            source: the joint trace, without recomputation.
            rebuilt: the storages that the backward would recompute without these choices.

        Raises:
            RecomputeError: the choices do not fit this program.
        """
