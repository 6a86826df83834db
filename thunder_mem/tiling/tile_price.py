"""The device's time for one tile: more rows share one reading of the weights and one addition to their gradients.

A loop of tiles computes what the whole stretch computes. But every tile reads all weights, adds their gradients to sums
in memory, and copies its rows to their places. So tiles cost time where weights are large beside the rows of a tile.
The roofline (`costs/roofline.py`) prices every kernel of a tile's compiled trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from thunder_mem.chunk_loop.body import Body
from thunder_mem.chunk_loop.plan import LoopPlan, Spec
from thunder_mem.chunk_loop.price import with_block_calls
from thunder_mem.costs.plan_time import trace_seconds
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.memory.device_models import DeviceModel
from thunder_mem.sharding.propagation import local_shape

__all__ = ["priced", "tile_seconds"]

# Of a sum that keeps one more byte: it is read and stored in 3 bytes, and joined, added and split in float32.
_FINER_PASSES = 6

# Of a cache, for what was just written: the rest holds what the same kernel read.
_CACHED = 0.5


def priced(plan: LoopPlan, forward: Mapping[int, Body], backward: Mapping[int, Body]) -> LoopPlan:
    """The plan of a stretch with the time of its tiles, and the host's calls to start them.

    Args:
        plan: of the stretch, with its dtypes of sums, which have a price too.
        forward, backward: its tiles, by rows; no backward without gradients.
    """
    device, rows = device_model_of(torch.device(plan.device)), plan.chunk_rows
    plan = replace(
        plan,
        forward_tile_s=tile_seconds(plan, forward[rows], device),
        backward_tile_s=tile_seconds(plan, backward[rows], device) if backward else 0.0,
    )
    return with_block_calls(plan, forward, backward)


def tile_seconds(plan: LoopPlan, body: Body, device: DeviceModel) -> float:
    """Seconds of the device for one tile: its kernels, copies of its rows, and sums of its gradients.

    On a GPU the host's calls are counted apart (`LoopPlan.forward_block_calls`), because they run beside.

    Args:
        plan: of the stretch.
        body: a tile, with gradients or without.
        device: the device with the rates.
    """
    kernels = replace(device, launch_s=0.0) if body.launches else device
    seconds = trace_seconds(body.trace, kernels)
    copied_bytes = sum(_row_bytes(spec, body.rows) for spec in plan.outputs) if body.outputs else 0
    moved_bytes = 0
    for slot, i in enumerate(plan.sides):
        if not body.wants_gradients or i not in plan.grads:
            continue
        spec = plan.inputs[i]
        if spec.sharding.split:
            copied_bytes += _row_bytes(spec, body.rows)
        elif slot in body.pairs:
            seconds += _product_sum_seconds(plan, i, body.pairs[slot], device)
        else:
            moved_bytes += spec.nbytes + _sum_bytes(plan, i)
    # The rows were just written, so a cache that holds them is read, and not the memory.
    moved_bytes += copied_bytes * (1 if copied_bytes <= _CACHED * device.cache_bytes else 2)
    return seconds + moved_bytes / device.bandwidth_bytes_per_s


def _product_sum_seconds(plan: LoopPlan, i: int, depth: int, device: DeviceModel) -> float:
    """Seconds to add the product (V, depth) x (depth, D) to the gradient of the weight `i`."""
    spec = plan.inputs[i]
    flops = 2 * depth * math.prod(spec.shape)
    operands_bytes = depth * sum(spec.shape) * spec.dtype.itemsize
    moved_s = (operands_bytes + _sum_bytes(plan, i)) / device.bandwidth_bytes_per_s
    return max(flops / device.matmul_flops(str(spec.dtype).removeprefix("torch.")), moved_s)


def _sum_bytes(plan: LoopPlan, i: int) -> int:
    """Bytes read and written of the sum of the gradients of input `i`, for one tile."""
    numbers = math.prod(plan.inputs[i].shape)
    if plan.finer(i):
        return numbers * (2 * 3 + _FINER_PASSES * 4)
    return 2 * numbers * plan.grad_dtypes[plan.grads.index(i)].itemsize


def _row_bytes(spec: Spec, rows: int) -> int:
    """Bytes of a tile's rows of a value; those of a total or a whole value."""
    shape = local_shape(spec.shape, spec.sharding, rows) if spec.sharding.split else spec.shape
    return math.prod(shape) * spec.dtype.itemsize
