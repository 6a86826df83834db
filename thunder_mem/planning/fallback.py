"""The program as Thunder alone compiles it, used after a failure of this package.

Loss heads become loops before autograd, and most failures happen after it. So the computation from before the loops
is kept. After a failure Thunder's own steps run once more, up to the place of the failure. In their trace only writes
and checkpoints are rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform, dce
from thunder.distributed.utils import maybe_sort_waits
from thunder.executors.passes import _transform_for_operator_executor_execution, del_last_used
from thunder.extend import Executor, FusionExecutor, get_always_executors
from thunder.transforms.autodiff import grad_transform_on_trace, split_into_forward_and_backward

__all__ = ["Original", "final_halves"]


@dataclass(frozen=True)
class Original:
    """A computation before its heads became loops.

    Attributes:
        prologue, computation, epilogue: its traces.
        behind: the later transforms, which have only seen the loops.
    """

    prologue: TraceCtx
    computation: TraceCtx
    epilogue: TraceCtx | None
    behind: tuple[Transform, ...] = ()

    def unfused(self, data: Any) -> TraceCtx:
        """The trace that Thunder gives to fusion executors; a joint trace if a gradient is needed.

        Args:
            data: Thunder's compile data.
        """
        traces = self.prologue, self.computation, self.epilogue
        for transform in self.behind:
            traces = transform.transform_traces_pre_prologue(*traces, executors_list=data.executors_list)
        trace = dce(traces[1])
        asked = any(isinstance(a, TensorProxy) and a.requires_grad for a in trace.args)
        if asked and not data.disable_torch_autograd_support:
            trace = grad_transform_on_trace(trace)
        claimed = _transform_for_operator_executor_execution(trace, data.executors_list)
        are_sorted, claimed = maybe_sort_waits(claimed)
        trace = dce(claimed if are_sorted else trace)
        if torch.distributed.is_available():
            from thunder.distributed.transforms.ddp import apply_bucketing_to_grad_allreduce

            trace = dce(apply_bucketing_to_grad_allreduce(trace))
        return dce(_transform_for_operator_executor_execution(trace, data.executors_list))


def final_halves(
    unfused: TraceCtx, executors: Sequence[Executor], before: Iterable[Transform]
) -> tuple[TraceCtx, TraceCtx | None]:
    """The forward and the backward that Thunder makes from an unfused trace.

    Args:
        unfused: see `Original.unfused`.
        executors: the user's.
        before: transforms that change final traces, in order.
    """
    trace = unfused
    for executor in executors:
        if isinstance(executor, FusionExecutor):
            trace = executor.fusion_pass(trace)
    trace = _transform_for_operator_executor_execution(trace, get_always_executors())
    forward, backward = trace, None
    if "fw_flat_out" in trace.bound_symbols[-1].args[0]:
        forward, backward = split_into_forward_and_backward(trace)
    forward = del_last_used(forward)
    if backward is not None:
        backward = del_last_used(backward, clear_mutable_collections=True)
    for transform in before:
        forward = transform.transform_trace_post_optimization(forward, executors_list=executors)
        if backward is not None:
            backward = transform.transform_trace_post_optimization(backward, executors_list=executors)
    return forward, backward
