"""What a published figure is: who measured what, and how it is predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thunder_mem.analysis.capacity import Capacity

__all__ = ["UNITS", "Case", "Predicted", "of_fit"]

UNITS = {"MiB": 2**20, "GB": 10**9, "GiB": 2**30}


@dataclass(frozen=True)
class Predicted:
    """A predicted `torch.cuda.max_memory_allocated`: what tensors take of it, and what libraries do."""

    tensor_bytes: int
    library_bytes: int

    @property
    def nbytes(self) -> int:
        return self.tensor_bytes + self.library_bytes


@dataclass(frozen=True)
class Case:
    """A figure that somebody measured.

    Attributes:
        source: of the figure: where it stands, and when it was measured.
        url: where to read it.
        configuration: what ran, in words.
        device: on what.
        published: the figure, a peak of `torch.cuda.max_memory_allocated`.
        unit: its unit, one of `UNITS`; "MB" of sources that mean 2**20 bytes is "MiB" here.
        predict: what is predicted; builds nothing and computes nothing.
        cause: why it is off by more than 2 %, where it is: something that is known, and not modelled.
    """

    source: str
    url: str
    configuration: str
    device: str
    published: float
    unit: str
    predict: Callable[[], Predicted]
    cause: str = ""

    @property
    def published_bytes(self) -> int:
        return round(self.published * UNITS[self.unit])


def of_fit(fit: Capacity) -> Predicted:
    """What `estimate` says, as the allocator counts it."""
    allocation = fit.allocation
    return Predicted(allocation.allocated_peak_bytes - allocation.library_bytes, allocation.library_bytes)
