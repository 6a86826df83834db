"""The time that sums of weights' gradients take, which all chunks or tiles of a loop add to.

A product is added to a float32 sum in the product's own kernel, which hides the sum's traffic if there are enough
rows. Only a CPU that has instructions for 16-bit products makes the product first, and then adds it. Nor does a kernel
add to a finer sum.
"""

from __future__ import annotations

import math

from thunder_mem.chunk_loop.gradient_sums import finer_bounds, part_bounds
from thunder_mem.chunk_loop.matmul import bytes_beside_stretch, multiplies, rounded_rows
from thunder_mem.chunk_loop.plan import LoopPlan
from thunder_mem.memory.device_models import DeviceModel

__all__ = ["product_seconds", "product_sum_seconds", "sum_bytes"]

# Of a sum that keeps one more byte: it is read and stored in 3 bytes, and joined, added and split in float32.
_FINER_PASSES = 6

# Of a number of a 16-bit product on a CPU: it is written and read to be added to a float32 sum, which is read and
# written. Measured on one thread with AMX, weights of (688, 256) to (4096, 1024), tiles of 192 and 1,024 rows: 0.6 to
# 0.8 ns beside the product. A finer sum is taken apart and joined by nine kernels: 3.0 to 3.3 ns.
_ADDED_BYTES, _FINER_ADDED_BYTES = 2 + 2 + 4 + 4, 64

# Such a product is made in stretches, each by calls of its own, which pack the narrower operand again. Measured there,
# weights of (256, 256) to (4096, 1024), sums of up to 98 stretches: the price is 0.8 to 2 times the time.
_STRETCH_S, _PACKED_PASSES = 30e-6, 5


def product_seconds(plan: LoopPlan, i: int, depth: int, device: DeviceModel, more_bytes: int = 0) -> float:
    """Seconds of the product (V, depth) x (depth, D), the gradient of the weight `i`, in a kernel that moves more."""
    spec = plan.inputs[i]
    flops = 2 * depth * math.prod(spec.shape)
    moved_s = (depth * sum(spec.shape) * spec.dtype.itemsize + more_bytes) / device.bandwidth_bytes_per_s
    return max(flops / device.matmul_flops(str(spec.dtype).removeprefix("torch.")), moved_s)


def product_sum_seconds(plan: LoopPlan, i: int, depth: int, device: DeviceModel) -> float:
    """Seconds to add that product to the sum, beyond the product's own."""
    spec, finer = plan.inputs[i], plan.finer(i)
    apart = finer or plan.grad_dtype(i) != spec.dtype
    if apart and device.name == "cpu" and spec.dtype.itemsize == 2 and multiplies("cpu", spec.dtype):
        return _rounded_sum_seconds(plan, i, depth, device)
    added_bytes = sum_bytes(plan, i)
    if finer:
        return added_bytes / device.bandwidth_bytes_per_s
    return product_seconds(plan, i, depth, device, added_bytes) - product_seconds(plan, i, depth, device)


def _rounded_sum_seconds(plan: LoopPlan, i: int, depth: int, device: DeviceModel) -> float:
    """Seconds to add a 16-bit product to a wider or finer sum, one stretch after the other."""
    spec, finer = plan.inputs[i], plan.finer(i)
    scratch_bytes, stretches = plan.tiles_bytes(plan.backward_block_bytes), 0
    if finer:
        parts, product_bytes = finer_bounds(spec, scratch_bytes), bytes_beside_stretch(scratch_bytes)
    else:
        parts, product_bytes = part_bounds(spec, plan.grad_dtype(i)), scratch_bytes
    moved_bytes = math.prod(spec.shape) * (_FINER_ADDED_BYTES if finer else _ADDED_BYTES)
    for lo, hi in parts:
        width, length = sorted((hi - lo, spec.shape[1]))
        count = math.ceil(length / rounded_rows(width, product_bytes))
        moved_bytes += count * _PACKED_PASSES * depth * width * spec.dtype.itemsize
        stretches += count
    return moved_bytes / device.bandwidth_bytes_per_s + stretches * _STRETCH_S


def sum_bytes(plan: LoopPlan, i: int) -> int:
    """Bytes read and written of the sum of the gradients of input `i`, for one tile."""
    numbers = math.prod(plan.inputs[i].shape)
    if plan.finer(i):
        return numbers * (2 * 3 + _FINER_PASSES * 4)
    return 2 * numbers * plan.grad_dtype(i).itemsize
