"""What the kernels of a fused region on a GPU come to."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KernelFigures", "NotWritten"]


@dataclass(frozen=True)
class KernelFigures:
    """What a region's kernels come to.

    Attributes:
        launches: how many start.
        scratch_bytes: held between them at most, beyond the region's inputs and outputs.
        moved_bytes: what they read and write.
    """

    launches: int
    scratch_bytes: int
    moved_bytes: int


@dataclass(frozen=True)
class NotWritten:
    """A region whose kernels are not known, and the sentence that says why."""

    sentence: str
