"""The device's time for one tile: more rows share one reading of the weights and one addition to their gradients.

A loop of tiles computes what the whole stretch computes. But every tile reads all weights, adds their gradients to sums
in memory, and copies its rows to their places. So tiles cost time where weights are large beside the rows of a tile.
The roofline (`costs/roofline.py`) prices every kernel of a tile's compiled trace, and `sum_price.py` the sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from thunder_mem.chunk_loop.body import Body
from thunder_mem.chunk_loop.plan import LoopPlan, Spec
from thunder_mem.chunk_loop.price import with_block_calls
from thunder_mem.chunk_loop.sum_price import product_seconds, product_sum_seconds, sum_bytes
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.memory.device_models import DeviceModel
from thunder_mem.sharding.propagation import local_shape

__all__ = ["extra_seconds", "priced", "tile_seconds"]

# Of a cache, for what was just written: the rest holds what the same kernel read.
_CACHED = 0.5


def priced(plan: LoopPlan, forward: Mapping[int, Body], backward: Mapping[int, Body]) -> LoopPlan:
    """The plan of a stretch with the time of its tiles, and the host's calls to start them.

    Args:
        plan: of the stretch, with its dtypes of sums, which have a price too.
        forward, backward: its tiles, by rows; none of a half that the loop has not.
    """
    device, rows = device_model_of(torch.device(plan.device)), plan.chunk_rows
    plan = replace(
        plan,
        forward_tile_s=tile_seconds(plan, forward[rows], device) if forward else 0.0,
        backward_tile_s=tile_seconds(plan, backward[rows], device) if backward else 0.0,
    )
    return with_block_calls(plan, forward, backward)


def tile_seconds(plan: LoopPlan, body: Body, device: DeviceModel) -> float:
    """Seconds of the device for one tile: its kernels, copies of its rows, and sums of its gradients.

    On a GPU the host's calls are counted apart (`LoopPlan.forward_block_calls`), because they run beside.

    Args:
        plan: of the stretch.
        body: a tile, with gradients or without.
        device: the device with the rates of copies and sums.
    """
    alone_s = sum(product_seconds(plan, i, depth, device) for i, depth in _products(plan, body).items())
    return body.kernels_s + alone_s + sum(extra_seconds(plan, body, device))


def extra_seconds(plan: LoopPlan, body: Body, device: DeviceModel) -> tuple[float, float]:
    """The part of a tile's seconds that the whole stretch would not take: copies of its rows, and sums of gradients.

    Copies take as long for all tiles, whatever their rows. Sums take less, the fewer tiles there are.

    Args:
        plan, body, device: as for `tile_seconds`.
    """
    copied_bytes = sum(_row_bytes(spec, body.rows) for spec in plan.outputs) if body.outputs else 0
    sums_s, products = 0.0, _products(plan, body)
    for i in plan.sides:
        if not body.wants_gradients or i not in plan.grads:
            continue
        spec = plan.inputs[i]
        if spec.sharding.split:
            copied_bytes += _row_bytes(spec, body.rows)
        elif i in products:
            sums_s += product_sum_seconds(plan, i, products[i], device)
        else:
            sums_s += (spec.nbytes + sum_bytes(plan, i, device)) / device.bandwidth_bytes_per_s
    # The rows were just written, so a cache that holds them is read, and not the memory.
    moved_bytes = copied_bytes * (1 if copied_bytes <= _CACHED * device.cache_bytes else 2)
    return moved_bytes / device.bandwidth_bytes_per_s, sums_s


def _products(plan: LoopPlan, body: Body) -> dict[int, int]:
    """The inputs whose gradients a tile gives as the operands of a product, with the product's depth."""
    if not body.wants_gradients:
        return {}
    return {plan.sides[slot]: depth for slot, depth in body.pairs.items() if plan.sides[slot] in plan.grads}


def _row_bytes(spec: Spec, rows: int) -> int:
    """Bytes of a tile's rows of a value; those of a total or a whole value."""
    shape = local_shape(spec.shape, spec.sharding, rows) if spec.sharding.split else spec.shape
    return math.prod(shape) * spec.dtype.itemsize
