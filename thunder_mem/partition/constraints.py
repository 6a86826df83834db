"""Decisions about single storages, made before the minimum cut decides about the rest."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UNDECIDED", "Constraints", "RecomputeError"]


class RecomputeError(ValueError):
    """A request to keep or recompute does not fit the program; the message says what would."""


@dataclass(frozen=True)
class Constraints:
    """Forward storages of a joint graph that the minimum cut does not decide alone.

    Patterns, configurations, policies and the user's checkpoints all become such constraints;
    `min_cut_partition` respects them.

    Attributes:
        must_save: if the backward needs them, it receives them.
        must_recompute: never received; the backward recomputes them (unless they are alive anyway, as
            outputs or arguments are).
        may_recompute: may be recomputed to save bytes, although that is not cheap: values marked by
            `torch.utils.checkpoint`, and values on the way to `must_recompute`.
        free_to_save: values that the backward has without receiving them: parameters that it gathers again.
        offload: those in `must_save` that wait in the host's memory until the backward needs them.

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
