"""The outputs of a chunk loop while its chunks run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_mem.chunk_loop.plan import Spec
from thunder_mem.chunk_loop.row_blocks import write_rows

__all__ = ["Total"]

_COMBINE = {"max": torch.maximum, "min": torch.minimum, "logsumexp": torch.logaddexp}


class Total:
    """An output while it is assembled: rows side by side, or a total in at least float32."""

    def __init__(self, spec: Spec, n: int):
        self.spec = spec
        kind = spec.sharding.partial
        self.value: Any  # a tensor; None until the first part of a total that is no sum
        if kind is None:
            self.value = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        elif kind == "sum":
            wide = torch.float32 if spec.dtype.is_floating_point and spec.dtype.itemsize < 4 else spec.dtype
            self.value = torch.zeros(spec.shape, dtype=wide, device=spec.device)
        else:
            self.value = None

    def add(self, value: Tensor, lo: int, hi: int) -> None:
        kind = self.spec.sharding.partial
        if kind is None:
            write_rows(self.value, self.spec.sharding, lo, hi, value)
        elif kind == "sum":
            self.value.add_(value)
        elif self.value is None:
            wide = kind == "logsumexp" and value.dtype.itemsize < 4
            self.value = value.float() if wide else value.clone()
        else:
            self.value = _COMBINE[kind](self.value, value)

    def result(self) -> Tensor:
        if self.value is None:
            return torch.empty(self.spec.shape, dtype=self.spec.dtype, device=self.spec.device)
        return self.value.to(self.spec.dtype)
