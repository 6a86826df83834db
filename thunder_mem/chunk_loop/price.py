"""The cost of a chunk loop on a GPU: the work of the device by a roofline, and the host's calls to start it.

A loop of small blocks makes the GPU wait for Python. So a block has at least 512 rows, or temporaries of 32 MiB. It
also has enough rows for the host to need at most a twentieth of the device's time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from thunder_mem.chunk_loop.body import Body
from thunder_mem.chunk_loop.gradient_sums import rounding_calls, sum_calls
from thunder_mem.chunk_loop.plan import Gemm, LoopPlan
from thunder_mem.chunk_loop.row_blocks import block_count
from thunder_mem.chunk_loop.sum_price import product_sum_seconds
from thunder_mem.memory.device_models import DeviceModel

__all__ = [
    "HOST_SHARE",
    "block_calls",
    "busy_rows",
    "device_seconds",
    "gpu_block_rows",
    "host_calls",
    "loop_seconds",
    "opening_calls",
    "rounding_seconds",
    "row_scratch_bytes",
    "row_seconds",
    "with_block_calls",
]

HOST_SHARE = 0.05
"""The largest share of a loop's time on a GPU that the host may take to start its kernels."""

_FLOOR_ROWS, _FLOOR_BYTES = 512, 32 << 20

# Read and written to round a number of a finer sum: 3 bytes are joined in float32 and rounded to 2.
_FINER_BYTES = 3 + 4 + 4 + 2

_TILE_ROWS = 128  # of a product; the rest of a tile would be wasted


def row_seconds(gemms: Sequence[Gemm], grads: Collection[int], device: DeviceModel, *, backward: bool) -> float:
    """Seconds of the device for one row of all chunks: its products, and one kernel between them that moves a row."""
    seconds = 0.0
    for gemm in gemms:
        products = _products([gemm], grads, backward)
        dtype = str(gemm.out.dtype).removeprefix("torch.")
        seconds += products * 2 * gemm.depth * gemm.width / device.matmul_flops(dtype)
        seconds += 2 * products * gemm.width * gemm.out.dtype.itemsize / device.bandwidth_bytes_per_s
    return seconds


def _products(gemms: Sequence[Gemm], grads: Collection[int], backward: bool) -> int:
    return len(gemms) + backward * sum(g.wants_x + (g.w in grads) for g in gemms if g.flows)


def device_seconds(plan: LoopPlan, device: DeviceModel, *, backward: bool) -> float:
    """Seconds of the device for one run of the loop."""
    if plan.is_stretch:  # which was priced when its tiles were built
        tiles = plan.n / plan.chunk_rows
        return (
            tiles * plan.backward_tile_s + rounding_seconds(plan, device) if backward else tiles * plan.forward_tile_s
        )
    seconds = row_seconds(plan.gemms, plan.grads, device, backward=backward)
    if plan.opening:
        seconds += plan.opening.forward_row_s + backward * plan.opening.backward_row_s
    return plan.n * seconds + backward * _sum_seconds(plan, device)


def _sum_seconds(plan: LoopPlan, device: DeviceModel) -> float:
    """Seconds that all chunks of a loss head add their products to the sums of its weights' gradients."""
    weights = [g.w for g in plan.gemms if g.flows and g.w in plan.grads]
    return plan.n / plan.chunk_rows * sum(product_sum_seconds(plan, w, plan.chunk_rows, device) for w in weights)


def rounding_seconds(plan: LoopPlan, device: DeviceModel) -> float:
    """Seconds to round the sums of gradients once, at the end: each is read, and a gradient is written."""
    specs = [plan.inputs[i] for i in plan.grads]
    wider = [(s, d) for s, d in zip(specs, plan.grad_dtypes, strict=True) if d != s.dtype]
    moved_bytes = sum(math.prod(s.shape) * (s.dtype.itemsize + d.itemsize) for s, d in wider)
    moved_bytes += _FINER_BYTES * plan.finer_sums_bytes
    return moved_bytes / device.bandwidth_bytes_per_s


def loop_seconds(plan: LoopPlan, device: DeviceModel, *, backward: bool) -> float:
    """Seconds of one run of the loop, one kernel after the other."""
    calls = host_calls(plan, backward=backward)
    if not plan.forward_block_calls:  # nobody counted them
        calls = 2 * plan.chunks * _products(plan.gemms, plan.grads, backward)
    return device_seconds(plan, device, backward=backward) + calls * device.launch_s


def host_calls(plan: LoopPlan, *, backward: bool) -> int:
    """The host's calls to start the kernels of one run of the loop."""
    blocks = block_count(plan.n, plan.chunk_rows, plan.block_rows)
    a_block = plan.backward_block_calls if backward else plan.forward_block_calls
    calls = plan.chunks * _chunk_calls(plan, backward) + blocks * a_block + backward * rounding_calls(plan)
    if plan.opening:
        a_block = plan.opening.forward_block_calls + backward * plan.opening.backward_block_calls
        calls += block_count(plan.n, plan.chunk_rows, plan.opening.block_rows) * a_block
    return calls


def _chunk_calls(plan: LoopPlan, backward: bool) -> int:
    calls = len(plan.gemms)
    if backward:  # the products of rows, and the parts of those that add up
        calls += sum(sum_calls(plan, g.w) for g in plan.gemms if g.flows and g.w in plan.grads)
        calls += sum(g.flows and g.wants_x for g in plan.gemms)
    return calls


def block_calls(plan: LoopPlan, body: Body) -> int:
    """The host's calls to start a block: its kernels, and copies of its results to their places."""
    calls = body.launches + body.outputs
    if body.wants_gradients:
        calls += sum(g.wanted(plan.grads) for g in plan.gemms) - len(body.over)
        calls += sum(sum_calls(plan, i) for i in plan.sides if i in plan.grads)
    return calls


def opening_calls(plan: LoopPlan, sides: Sequence[int], body: Body) -> int:
    """The host's calls to start a block of an opening, and copies of its results to their places.

    Args:
        plan: of the loop, with its dtypes of sums.
        sides: the inputs that the opening reads.
        body: the block, with gradients or without.
    """
    calls = body.launches + body.outputs
    return calls + body.wants_gradients * sum(sum_calls(plan, i) for i in sides if i in plan.grads)


def with_block_calls(plan: LoopPlan, forward: Mapping[int, Body], backward: Mapping[int, Body]) -> LoopPlan:
    """The plan with the host's calls to start its blocks; the same plan on a CPU, which is the host.

    Args:
        plan: of the loop, with its dtypes of sums.
        forward, backward: its blocks, by rows.
    """
    if torch.device(plan.device).type != "cuda":
        return plan
    return replace(
        plan,
        forward_block_calls=max(block_calls(plan, b) for b in (forward or backward).values()),
        backward_block_calls=max((block_calls(plan, b) for b in backward.values()), default=0),
    )


def busy_rows(plan: LoopPlan, body: Body, device: DeviceModel) -> int:
    """The rows of a chunk of one block such that the host can start all chunks in its share of the time.

    It is 0 if a chunk of one block would hold more than half of its logits a second time. It is also 0 if the GPU
    waits for the host even with a single chunk: such a program is too small for the host's share.

    Args:
        plan: of the loop, with any rows.
        body: one of its blocks, with gradients if it has any.
        device: the device with the rates.
    """
    if 2 * row_scratch_bytes(plan, body) > plan.row_bytes:
        return 0
    backward = bool(plan.grads)
    calls = _chunk_calls(plan, backward) + block_calls(plan, body)
    allowed_s = HOST_SHARE * row_seconds(plan.gemms, plan.grads, device, backward=backward)
    chunks = int(plan.n * allowed_s / (calls * device.launch_s))
    if not chunks:
        return 0
    return min(plan.n, -(-plan.n // chunks // _TILE_ROWS) * _TILE_ROWS)


def gpu_block_rows(plan: LoopPlan, body: Body, least_rows: int, device: DeviceModel) -> int:
    """Rows of a block: a divisor of the chunk's rows, at most all of them.

    To reduce the host's calls, temporaries may grow to half of the chunk's logits, unless the user set the chunks.

    Args:
        plan: of the loop, with any rows in its blocks.
        body: one of its blocks.
        least_rows: the rows that the block's own products need.
        device: the device with the rates.
    """
    backward = bool(plan.grads)
    scratch_bytes = max(1, row_scratch_bytes(plan, body))
    floor = min(_FLOOR_ROWS, math.ceil(_FLOOR_BYTES / scratch_bytes))
    row_s = row_seconds(plan.gemms, plan.grads, device, backward=backward)
    # The time left for the calls of blocks, a row, after the chunk's own calls.
    left_s = HOST_SHARE * row_s - _chunk_calls(plan, backward) * device.launch_s / plan.chunk_rows
    enough = math.ceil(block_calls(plan, body) * device.launch_s / left_s) if left_s > 0 else plan.chunk_rows
    most = 0 if plan.sized == "asked" else plan.logits_bytes // 2 // scratch_bytes
    least = min(plan.chunk_rows, max(floor, least_rows, min(enough, most)))
    return next(rows for rows in range(least, plan.chunk_rows + 1) if plan.chunk_rows % rows == 0)


def row_scratch_bytes(plan: LoopPlan, body: Body) -> int:
    """Bytes of a block's row beside its logits, without gradients of inputs that all rows share."""
    shared = (plan.inputs[i] for i in plan.sides if i in plan.grads)
    whole_bytes = sum(spec.nbytes for spec in shared if not spec.sharding.split)
    return -(-max(0, body.peak_bytes - whole_bytes) // body.rows)
