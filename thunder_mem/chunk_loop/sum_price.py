"""The time that sums of weights' gradients take, which all chunks or tiles of a loop add to.

A product is added to a float32 sum in the product's own kernel, which hides the sum's traffic if there are enough
rows. No kernel adds to a finer sum. Some CPUs have instructions for 16 bits, but no kernel that adds to float32: there
such a product is made in float32, which the price leaves out.
"""

from __future__ import annotations

import math

from thunder_mem.chunk_loop.matmul import adds_to_float32
from thunder_mem.chunk_loop.plan import LoopPlan
from thunder_mem.memory.device_models import DeviceModel

__all__ = ["product_seconds", "product_sum_seconds", "sum_bytes"]

# Of a sum that keeps one more byte: it is read and stored in 3 bytes, and joined, added and split in float32.
_FINER_PASSES = 6

# AMX makes products so fast that the fixed cost of a tile's sum counts. Measured on one thread, beyond the tile's share
# of one product of all rows, tiles of 256 rows, weights of (256, 688) to (1024, 4096): 0 to 0.3 ms.
_AMX_SUM_S = 2e-4

# Bytes moved for each number of a finer sum on a CPU, where nine kernels take it apart and join it. Measured on one
# thread, weights of (688, 256) to (4096, 1024): 3.0 to 3.3 ns.
_FINER_CPU_BYTES = 64


def product_seconds(plan: LoopPlan, i: int, depth: int, device: DeviceModel, more_bytes: int = 0) -> float:
    """Seconds of the product (V, depth) x (depth, D), the gradient of the weight `i`, in a kernel that moves more."""
    spec = plan.inputs[i]
    flops = 2 * depth * math.prod(spec.shape)
    moved_s = (depth * sum(spec.shape) * spec.dtype.itemsize + more_bytes) / device.bandwidth_bytes_per_s
    return max(flops / device.matmul_flops(str(spec.dtype).removeprefix("torch.")), moved_s)


def product_sum_seconds(plan: LoopPlan, i: int, depth: int, device: DeviceModel) -> float:
    """Seconds to add that product to the sum, beyond the product's own."""
    spec, added_bytes = plan.inputs[i], sum_bytes(plan, i, device)
    if plan.finer(i):
        return added_bytes / device.bandwidth_bytes_per_s
    if plan.grad_dtype(i) != spec.dtype and device.name == "cpu" and adds_to_float32("cpu", spec.dtype):
        return _AMX_SUM_S
    return product_seconds(plan, i, depth, device, added_bytes) - product_seconds(plan, i, depth, device)


def sum_bytes(plan: LoopPlan, i: int, device: DeviceModel) -> int:
    """Bytes read and written of the sum of the gradients of input `i`, for one tile."""
    numbers = math.prod(plan.inputs[i].shape)
    if not plan.finer(i):
        return 2 * numbers * plan.grad_dtype(i).itemsize
    return numbers * (_FINER_CPU_BYTES if device.name == "cpu" else 2 * 3 + _FINER_PASSES * 4)
