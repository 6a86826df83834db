"""Number, scratch and memory traffic of the kernels of a fused region on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KernelFigures", "NotWritten"]


@dataclass(frozen=True)
class KernelFigures:
    """Figures of a region's kernels.

    Attributes:
        launches: the number of kernels that start.
        scratch_bytes: the most bytes held between kernels, beyond the region's inputs and outputs.
        moved_bytes: the bytes that the kernels read and write.
    """

    launches: int
    scratch_bytes: int
    moved_bytes: int


@dataclass(frozen=True)
class NotWritten:
    """The kernels of a region are unknown; the message says why."""

    sentence: str
