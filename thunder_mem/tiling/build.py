"""From a region to a chunk loop: its rows, its mode and its compiled blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from thunder.core import dtypes
from thunder.core.compile_data import get_compile_data
from thunder.core.devices import DeviceType
from thunder.core.prims import PrimIDs

from thunder_mem.chunk_loop.body import BodiesByRows, Body
from thunder_mem.chunk_loop.plan import Gemm, Head, LoopPlan, Spec
from thunder_mem.chunk_loop.price import busy_rows, gpu_block_rows, row_scratch_bytes, with_block_calls
from thunder_mem.chunk_loop.row_blocks import block_sizes
from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.loop_body.block import build_body
from thunder_mem.loop_body.equal_blocks import EqualBlocks
from thunder_mem.loop_body.leaves import PRODUCTS, Leaf
from thunder_mem.loop_body.region import Amplifier, Refused, Region, Value
from thunder_mem.loop_sizes.rows_per_chunk import allowed_block_rows, even_part, even_rows, floor_rows
from thunder_mem.sharding.propagation import RuleError

__all__ = ["Blocks", "build_loop", "differentiable_of", "head_label", "spec_of", "sum_dtype"]

# The rows of the block that is built to measure its memory on a GPU, where Inductor's kernels depend on the rows.
_GPU_PROBE_ROWS = 512


def spec_of(value: Value) -> Spec:
    p = value.proxy
    return Spec(p.name, tuple(p.shape), dtypes.to_torch_dtype(p.dtype), str(p.device.device_str()), value.sharding)


def build_loop(
    region: Region,
    decide: Callable[[Head], tuple[int, str] | None],
    accumulate: str | None,
    executors: Sequence[Any],
    name: str,
) -> ChunkLoop | None:
    """Plan the region's loop and compile its blocks.

    Args:
        region: the part of the program that runs in chunks.
        decide: returns rows per chunk and their origin (see `LoopPlan.sized`), or None to leave the head whole.
        accumulate: dtype in which gradients of whole 16-bit inputs add up: "float32" or "input"; None
            is float32 that may still be narrowed.
        executors: the executors of the blocks.
        name: unique in the trace.

    Raises:
        Refused: a block cannot be built.
    """
    program = region.program
    first = region.amplifiers[0].leaf
    inputs = region.inputs
    index = {v.key: i for i, v in enumerate(inputs)}
    specs = tuple(map(spec_of, inputs))
    outputs = tuple(map(spec_of, region.outputs))
    differentiable = differentiable_of(region)
    gemms = tuple(_gemm(region, a, index, bool(differentiable)) for a in region.amplifiers)
    sides = _sides(region, index)
    above = tuple(index[v.key] for v in region.opening.inputs) if region.opening else ()
    reached = {i for g in gemms if g.flows for i in (g.x, g.w) if i is not None} | {*sides, *above}
    grads = tuple(i for i in sorted(reached) if inputs[i].proxy.name in program.needs_grad) if differentiable else ()
    mode, why = _mode(outputs, differentiable, gemms)

    def sums(chunks: int) -> tuple[torch.dtype, ...]:
        return tuple(sum_dtype(specs[i], accumulate, chunks > 1 or i in sides or i in above) for i in grads)

    blocks = Blocks(region, [inputs[i] for i in sides], executors)
    wanted = [g.wanted(grads) for g in gemms] + [i in grads for i in sides]
    nothing = [False] * len(wanted)

    def probed(plan: LoopPlan) -> Body:
        """A complete block, built to measure its memory."""
        size = plan.block_rows
        return blocks([size], wanted if grads else nothing, plan.mode == "grads-in-forward" or not grads)[size]

    gpu = device_model_of(torch.device(gemms[0].out.device)) if _on_gpu(region) else None
    few = min(region.n, _GPU_PROBE_ROWS)
    plan = LoopPlan(
        name=name,
        source=first.source,
        op=head_label(first),
        n=region.n,
        chunk_rows=few,
        block_rows=few,
        sized="head",
        mode=mode,
        why=why,
        inputs=specs,
        outputs=outputs,
        gemms=gemms,
        sides=sides,
        grads=grads,
        grad_dtypes=sums(2),
        sums_asked=accumulate is not None,
        differentiable=differentiable,
    )
    head = Head(
        op=plan.op,
        source=plan.source,
        n=plan.n,
        row_bytes=plan.row_bytes,
        fixed_bytes=_bytes_of(specs, grads, sums(2)),
        single_bytes=_bytes_of(specs, grads, sums(1)),
        device=gemms[0].out.device,
        dtype=gemms[0].out.dtype,
        busy_rows=0 if gpu is None else busy_rows(plan, probed(plan), gpu),
    )
    decided = decide(head)
    if decided is None:
        return None
    rows, sized = min(decided[0], region.n), decided[1]
    if mode == "grads-in-forward" and sized != "asked" and _hold_more_than_logits(region, head):
        why = "its gradients are larger than its logits, and much of the forward follows"
        mode = "recompute-in-backward"
    if gpu is None:  # most often the block that is built for its memory is the one to run
        few = rows = rows if sized == "asked" else even_rows(region.n, rows)
    few = min(few, rows)
    plan = replace(plan, chunk_rows=rows, block_rows=few, grad_dtypes=sums(plan.chunks))
    plan = replace(plan, sized=sized, mode=mode, why=why)
    probe = probed(plan)
    least_rows = _least_rows(region, head)
    if gpu is None:
        row_scratch = row_scratch_bytes(plan, probe)
        block_rows = _block_rows(head, rows, row_scratch, least_rows, asked=sized == "asked")
    else:
        block_rows = gpu_block_rows(plan, probe, least_rows, gpu)
        if sized != "asked" and block_rows < rows < region.n:
            rows -= rows % block_rows  # so that chunks of other numbers of blocks use the same blocks
    sizes = block_sizes(region.n, rows, block_rows)
    forward = {} if mode == "grads-in-forward" else blocks(sizes, nothing, True)
    backward = blocks(sizes, wanted, mode == "grads-in-forward") if grads else {}
    plan = replace(
        plan,
        chunk_rows=rows,
        block_rows=block_rows,
        forward_block_bytes=max(b.peak_bytes for b in (forward or backward).values()),
        backward_block_bytes=max((b.peak_bytes for b in backward.values()), default=0),
    )
    plan = with_block_calls(replace(plan, grad_dtypes=sums(plan.chunks)), forward, backward)
    return ChunkLoop(plan, BodiesByRows(forward), BodiesByRows(backward))


def _hold_more_than_logits(region: Region, head: Head) -> bool:
    """Whether gradients computed in the forward would take more memory than the logits, for a long time.

    They are held until the backward, while the forward computes everything after the head's products.
    """
    logits_bytes = head.n * head.row_bytes
    program = region.program
    after = range(max(a.leaf.index for a in region.amplifiers) + 1, len(program.leaves))
    later = (out for i in after if i not in region.inside for out in program.leaves[i].outputs)
    kept = (math.prod(map(int, out.shape)) * out.dtype.bytes for out in later if out.name in program.needs_grad)
    return head.fixed_bytes > logits_bytes and sum(kept) > logits_bytes // 16


def head_label(leaf: Leaf) -> str:
    """The product with its weight, which names the module; the source line is only `torch.nn.Linear`'s own."""
    weights = [t.name for t in leaf.inputs if t.name.startswith("t_")]
    return f"{leaf.label} with {', '.join(weights)}" if weights else leaf.label


def _on_gpu(region: Region) -> bool:
    return region.first.outputs[0].device.devicetype is DeviceType.CUDA


class Blocks:
    """The region's compiled blocks, each built once."""

    def __init__(
        self, region: Region, sides: Sequence[Value], executors: Sequence[Any], equal: EqualBlocks | None = None
    ):
        self.region, self.sides, self.executors, self.equal = region, sides, executors, equal
        self.built: dict[tuple[int, bool, bool], Body] = {}

    def __call__(self, sizes: Sequence[int], wanted: Sequence[bool], outputs: bool) -> dict[int, Body]:
        first = self.region.first
        try:
            for size in sizes:
                if (size, any(wanted), outputs) not in self.built:
                    self.built[size, any(wanted), outputs] = build_body(
                        self.region,
                        self.sides,
                        wanted,
                        size,
                        self.executors,
                        outputs,
                        not self.region.amplifiers,
                        self.equal,
                    )
        except Refused:
            raise
        except RuleError as e:
            raise Refused(first, str(e)) from None
        except Exception as e:  # Thunder cannot differentiate or execute an op; it will say so itself
            raise Refused(first, f"Thunder cannot build one chunk of it: {str(e) or type(e).__name__}") from e
        return {size: self.built[size, any(wanted), outputs] for size in sizes}


def differentiable_of(region: Region) -> tuple[int, ...]:
    cd = get_compile_data()
    if cd is not None and not cd.is_grad_enabled:
        return ()
    return tuple(i for i, v in enumerate(region.outputs) if v.proxy.name in region.program.needs_grad)


def sum_dtype(spec: Spec, accumulate: str | None, adds_up: bool) -> torch.dtype:
    """The dtype in which a gradient is collected: float32 for a 16-bit gradient with several parts."""
    wide = adds_up and not spec.sharding.split and accumulate != "input" and spec.dtype.itemsize < 4
    return torch.float32 if wide else spec.dtype


def _bytes_of(specs: Sequence[Spec], grads: Sequence[int], sums: Sequence[torch.dtype]) -> int:
    return sum(math.prod(specs[i].shape) * dtype.itemsize for i, dtype in zip(grads, sums, strict=True))


def _mode(outputs: Sequence[Spec], differentiable: Sequence[int], gemms: Sequence[Gemm]) -> tuple[str, str]:
    if not differentiable:
        return "forward", "no gradient is asked for"
    if len(differentiable) > 1:
        names = ", ".join(outputs[i].name for i in differentiable)
        return "recompute-in-backward", f"several results carry gradients ({names})"
    (spec,) = (outputs[i] for i in differentiable)
    if spec.sharding.partial == "logsumexp":
        return "recompute-in-backward", f"the gradient of {spec.name} in one chunk needs its value over all of them"
    if spec.sharding.partial != "sum" or math.prod(spec.shape) != 1:
        return "recompute-in-backward", f"the tangent of {spec.name} is a vector, known only in the backward"
    if any(g.out.dtype == torch.float16 for g in gemms):
        return "recompute-in-backward", "float16 gradients need the loss scale, known only in the backward"
    return "grads-in-forward", f"{spec.name} is one scalar, so its tangent is a factor applied at the end"


def _least_rows(region: Region, head: Head) -> int:
    """The least rows of a block: enough for the products inside it and the sum of its weight's gradients."""
    return floor_rows(head.device, head.dtype) if any(m.bsym.sym.id in PRODUCTS for m in region.members) else 1


def _block_rows(head: Head, chunk_rows: int, row_scratch: int, least_rows: int, asked: bool) -> int:
    """Rows of a block on a CPU: as many as its temporaries allow (`allowed_block_rows`), and its products need.

    A divisor of the chunk is preferred, so that few distinct block sizes exist.
    """
    allowed = allowed_block_rows(head.device, head.n, chunk_rows, head.row_bytes, row_scratch, asked=asked)
    return even_part(chunk_rows, min(chunk_rows, max(least_rows, allowed)))


def _gemm(region: Region, a: Amplifier, index: dict, differentiable: bool) -> Gemm:
    leaf = a.leaf
    shardings = region.shardings[leaf.index]
    operand = lambda slot: index[leaf.inputs[slot].name, shardings[slot]]  # noqa: E731
    needs_grad = region.program.needs_grad
    w = leaf.inputs[1 - a.rows]
    linear = leaf.bsym.sym.id == PrimIDs.LINEAR
    # linear: w is (V, D). matmul: (N, D) @ (D, V), or (V, D) @ (D, N).
    w_rows_first = linear or a.rows == 1
    depth, width = (w.shape[1], w.shape[0]) if w_rows_first else (w.shape[0], w.shape[1])
    return Gemm(
        x=None if region.opening else operand(a.rows),
        w=operand(1 - a.rows),
        depth=depth,
        width=width,
        w_rows_first=w_rows_first,
        x_rows_last=a.rows == 1,
        flows=a.out.proxy.name in needs_grad,
        wants_x=differentiable and leaf.inputs[a.rows].name in needs_grad,
        out=spec_of(a.out),
    )


def _sides(region: Region, index: dict) -> tuple[int, ...]:
    """The inputs that the block itself reads: all but the products' operands."""
    found: dict[int, None] = {}
    for a in region.amplifiers:
        for slot in range(2, len(a.leaf.inputs)):
            found[index[a.leaf.inputs[slot].name, region.shardings[a.leaf.index][slot]]] = None
    for m in region.members:
        for slot, t in enumerate(m.inputs):
            if t.name not in region.values:
                found[index[t.name, region.shardings[m.index][slot]]] = None
    return tuple(sorted(found))
