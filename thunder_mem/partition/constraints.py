"""What is decided about single storages before the minimum cut decides about the rest."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UNDECIDED", "Constraints", "RecomputeError"]


class RecomputeError(ValueError):
    """What was asked to be kept or recomputed makes no sense for the program; the message says what would."""


@dataclass(frozen=True)
class Constraints:
    """Forward storages of a joint graph that are not left to the minimum cut alone.

    Patterns, configurations, policies and the user's checkpoints all come down to this;
    `min_cut_partition` respects it.

    Attributes:
        must_save: if the backward needs them, it receives them.
        must_recompute: never received; the backward computes them again (unless they are alive anyway, as
            outputs or arguments are).
        may_recompute: may be computed again although that is not cheap, where it saves bytes: what the user
            marked by `torch.utils.checkpoint`, and what lies on the way to `must_recompute`.
        free_to_save: what the backward has, whether it receives it or not: parameters that it gathers again.
        offload: those in `must_save` that wait in the host's memory until the backward wants them.

    Raises:
        RecomputeError: a storage is in both `must_save` and `must_recompute`.

    Example:
        >>> both = Constraints(must_recompute=frozenset({1})) | Constraints(must_save=frozenset({2}))
        >>> both.must_save, both.must_recompute
        (frozenset({2}), frozenset({1}))
    """

    must_save: frozenset[int] = frozenset()
    must_recompute: frozenset[int] = frozenset()
    may_recompute: frozenset[int] = frozenset()
    free_to_save: frozenset[int] = frozenset()
    offload: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if both := self.must_save & self.must_recompute:
            raise RecomputeError(f"storages {sorted(both)} are both to be kept and to be recomputed")

    def __or__(self, other: Constraints) -> Constraints:
        return Constraints(
            self.must_save | other.must_save,
            self.must_recompute | other.must_recompute,
            self.may_recompute | other.may_recompute,
            self.free_to_save | other.free_to_save,
            self.offload | other.offload,
        )


UNDECIDED = Constraints()
"""Nothing is decided."""
