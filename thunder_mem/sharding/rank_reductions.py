"""Values that combine over the ranks of a group, with their gradients under tensor parallelism.

Each rank has a part of a vocabulary, and the same loss. A sum over ranks passes its gradient to every part unchanged. A
value that all ranks share and use with their own part gets the sum of the parts' gradients. (These are g and f of
Shoeybi et al., "Megatron-LM", 2019.) Nothing is reduced in place, so values for the backward are never overwritten.
"""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.transforms import register_grad
from thunder.distributed.prims import PrimIDs
from thunder.distributed.tensor_parallel.common import TensorParallelLayerType
from thunder.extend import OperatorExecutor
from torch import distributed
from torch.distributed import ProcessGroup

from thunder_mem.sharding.op_rules import pointwise, rule
from thunder_mem.sharding.propagation import Relation, RuleError

__all__ = ["GATHERS_LAST_DIM", "log_sum_over_ranks", "of_all_ranks", "sum_over_ranks"]

executor = OperatorExecutor("thunder_mem_ranks", version="0.1")
GATHERS_LAST_DIM = TensorParallelLayerType.COLUMN_PARALLEL_LINEAR


def _like(a: TensorProxy, group: ProcessGroup) -> TensorProxy:
    return TensorProxy(like=a, requires_grad=False)


def _sum(a: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    total = a.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=group)
    return total


def _log_sum(a: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    parts = torch.empty(group.size() * a.numel(), dtype=a.dtype, device=a.device)
    distributed.all_gather_into_tensor(parts, a.reshape(-1), group)
    return torch.logsumexp(parts.view(group.size(), *a.shape), 0)


sum_over_ranks = executor.register_operator("sum_over_ranks", meta=_like, fn=_sum)
log_sum_over_ranks = executor.register_operator("log_sum_over_ranks", meta=_like, fn=_log_sum)


def _of_all_ranks(a: TensorProxy, group: ProcessGroup) -> TensorProxy:
    """The value itself, equal on all ranks; its gradient is the sum of all ranks' gradients."""
    return prims.shallow_copy(a)


of_all_ranks = Symbol("of_all_ranks", _of_all_ranks, id="thunder_mem.of_all_ranks", is_prim=False)


def _sum_grad(a: TensorProxy, group: ProcessGroup) -> TensorProxy:
    total = sum_over_ranks(a, group)
    prims.put_grad(a, prims.get_grad(total))
    return total


def _log_sum_grad(a: TensorProxy, group: ProcessGroup) -> TensorProxy:
    whole = log_sum_over_ranks(a, group)
    shift = ltorch.where(ltorch.eq(ltorch.abs(whole), float("inf")), 0.0, whole)  # nothing but minus infinities
    prims.put_grad(a, ltorch.mul(prims.get_grad(whole), ltorch.exp(ltorch.sub(a, shift))))
    return whole


def _of_all_ranks_grad(a: TensorProxy, group: ProcessGroup) -> TensorProxy:
    same = prims.shallow_copy(a)
    prims.put_grad(a, sum_over_ranks(prims.get_grad(same), group))
    return same


register_grad(sum_over_ranks, _sum_grad)
register_grad(log_sum_over_ranks, _log_sum_grad)
register_grad(of_all_ranks, _of_all_ranks_grad)


# --- rows pass through all of them -----------------------------------------------------------------


rule(sum_over_ranks.id, log_sum_over_ranks.id, of_all_ranks.id)(lambda a, group: pointwise(a))


@rule(PrimIDs.SYNCHRONIZE_TENSOR_PARALLEL_OUTPUT)
def _gathered(a: TensorProxy, group: ProcessGroup, layer_type: Any) -> Relation:
    if layer_type is not GATHERS_LAST_DIM:
        raise RuleError("it is summed over ranks in place")
    last = a.ndim - 1
    return Relation(
        links=tuple(((0, d), (-1, d)) for d in range(last)),
        blocked=dict.fromkeys(((0, last), (-1, last)), "it is gathered over ranks, row by row"),
    )
