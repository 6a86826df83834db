"""Where a transform stands that has to see how Thunder's tensor parallelism splits parameters.

`column_parallel` and `row_parallel` are applied to a module that is compiled already, so their transforms stand
behind all others, and what runs before them sees whole parameters and no communication.
"""

from __future__ import annotations

from typing import Any

import torch
from thunder.core.proxies import DistParallelType, TensorProxy
from thunder.core.trace import TraceCtx

__all__ = ["waits_for_shards"]

_SHARDED = (DistParallelType.COLUMN_WISE, DistParallelType.ROW_WISE)


def waits_for_shards(transform: object, transforms: list[Any], trace: TraceCtx) -> bool:
    """Whether parameters of `trace` are still to be split; `transform` then stands in the list once more, at its end.

    Thunder takes the transforms from the list one by one, so it comes to that place in the same compilation.

    Args:
        transform: that is being applied.
        transforms: Thunder's list of all that are applied, in order.
        trace: the computation as it is now.
    """
    if not torch.distributed.is_available():
        return False
    from thunder.distributed.tensor_parallel.common import TransformForTensorParallel

    if any(isinstance(a, TensorProxy) and a.distparallel_type in _SHARDED for a in trace.args):
        return False
    splitting = [i for i, other in enumerate(transforms) if isinstance(other, TransformForTensorParallel)]
    first = next((i for i, other in enumerate(transforms) if other is transform), len(transforms))
    if not splitting or splitting[-1] < first:
        return False
    if transforms[-1] is not transform:
        transforms.append(transform)
    return True
