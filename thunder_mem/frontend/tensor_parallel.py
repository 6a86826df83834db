"""The place of a transform that must see how Thunder's tensor parallelism splits parameters.

`column_parallel` and `row_parallel` are applied to a module that is already jitted. So their transforms stand behind
all others, and earlier transforms see whole parameters and no communication.
"""

from __future__ import annotations

from typing import Any

import torch
from thunder.core.proxies import DistParallelType, TensorProxy
from thunder.core.trace import TraceCtx

__all__ = ["waits_for_shards"]

_SHARDED = (DistParallelType.COLUMN_WISE, DistParallelType.ROW_WISE)


def waits_for_shards(transform: object, transforms: list[Any], trace: TraceCtx) -> bool:
    """Whether parameters of `trace` are still to be split; `transform` is then appended to the list once more.

    Thunder takes the transforms from the list one by one, so it reaches that place in the same compilation.

    Args:
        transform: the present transform.
        transforms: Thunder's list of all transforms, in order.
        trace: the present computation.
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
