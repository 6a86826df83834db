"""What is decided about single storages before the minimum cut decides about the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from thunder_mem.trace_graph import TraceGraph

__all__ = ["UNDECIDED", "Choices", "Chooser", "RecomputeError"]


class RecomputeError(ValueError):
    """What was asked to be kept or recomputed makes no sense for the program; the message says what would."""


@dataclass(frozen=True)
class Choices:
    """Forward storages of a joint graph that are not left to the minimum cut alone.

    Patterns, configurations, policies and the user's checkpoints all come down to this;
    `saving.storages_to_rebuild` respects it.

    Attributes:
        keep: if the backward needs them, it receives them.
        recompute: never received; the backward computes them again (unless they are alive anyway, as
            outputs or arguments are).
        offered: may be computed again although that is not cheap, where it saves bytes: what the user
            marked by `torch.utils.checkpoint`, and what lies on the way to `recompute`.
        there_anyway: what the backward has, whether it receives it or not: parameters that it gathers again.
        offload: those in `keep` that wait in the host's memory until the backward wants them.

    Raises:
        RecomputeError: a storage is in both `keep` and `recompute`.

    Example:
        >>> both = Choices(recompute=frozenset({1})) | Choices(keep=frozenset({2}))
        >>> both.keep, both.recompute
        (frozenset({2}), frozenset({1}))
    """

    keep: frozenset[int] = frozenset()
    recompute: frozenset[int] = frozenset()
    offered: frozenset[int] = frozenset()
    there_anyway: frozenset[int] = frozenset()
    offload: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if both := self.keep & self.recompute:
            raise RecomputeError(f"storages {sorted(both)} are both to be kept and to be recomputed")

    def __or__(self, other: Choices) -> Choices:
        return Choices(
            self.keep | other.keep,
            self.recompute | other.recompute,
            self.offered | other.offered,
            self.there_anyway | other.there_anyway,
            self.offload | other.offload,
        )


class Chooser(Protocol):
    """Whoever decides about single storages: a configuration of patterns, a policy."""

    def choose(self, source: TraceGraph, rebuilt: frozenset[int]) -> Choices:
        """The choices for a joint trace.

        Args:
            source: the joint trace, in which nothing is recomputed yet.
            rebuilt: the storages that the backward would rebuild without these choices.

        Raises:
            RecomputeError: they make no sense for this program.
        """


UNDECIDED = Choices()
"""Nothing is decided."""
