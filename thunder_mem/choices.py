"""What is decided about single storages before the minimum cut decides about the rest."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Choices"]


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
            marked by `torch.utils.checkpoint`.

    Raises:
        ValueError: a storage is in both `keep` and `recompute`.
    """

    keep: frozenset[int] = frozenset()
    recompute: frozenset[int] = frozenset()
    offered: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if both := self.keep & self.recompute:
            raise ValueError(f"storages {sorted(both)} are both to be kept and to be recomputed")
