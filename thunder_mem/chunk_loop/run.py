"""Running a chunk loop: plain torch on plain tensors, one chunk after another, into buffers that stay.

A chunk has two levels. The matrix products work on `chunk_rows` rows at once, so that they run at full speed. All
operations between them work on `block_rows` rows, so that their temporaries are small and in cache. They write the
gradient of the logits over the logits themselves. An opening makes the chunk's rows first, and turns their gradient
into gradients of its own inputs last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup

from thunder_mem.chunk_loop.body import Body
from thunder_mem.chunk_loop.gradient_sums import Accumulator, sole_owner
from thunder_mem.chunk_loop.matmul import adds_to_float32, gemm
from thunder_mem.chunk_loop.plan import Gemm, LoopPlan, Opening, Spec
from thunder_mem.chunk_loop.row_blocks import read_rows, row_views, write_rows
from thunder_mem.chunk_loop.totals import Total
from thunder_mem.sharding.propagation import Sharding, local_shape

__all__ = ["ChunkLoop", "run"]


class ChunkLoop:
    """A plan with its compiled blocks; opaque to Thunder, which passes it through as an object.

    Attributes:
        plan: the decisions about the loop.
        forward: blocks without gradients, by rows.
        backward: blocks with gradients, by rows; also with outputs in mode "grads-in-forward".
        opening, closing: blocks of the opening, by rows: without gradients, and the gradients alone.
    """

    def __init__(
        self,
        plan: LoopPlan,
        forward: Mapping[int, Body],
        backward: Mapping[int, Body],
        opening: Mapping[int, Body] = MappingProxyType({}),
        closing: Mapping[int, Body] = MappingProxyType({}),
    ):
        self.plan, self.forward, self.backward = plan, forward, backward
        self.opening, self.closing = opening, closing
        halves = {(s.device, s.dtype) for s in (*plan.inputs, *(g.out for g in plan.gemms)) if s.dtype.itemsize == 2}
        for device, dtype in halves:
            adds_to_float32(device.split(":")[0], dtype)  # now, as no loop may wait for it

    @cached_property
    def group(self) -> ProcessGroup | None:
        """The process group that its blocks communicate with; None if they do not."""
        for body in (b for bodies in self._bodies for b in bodies.values()):
            for bsym in body.trace.bound_symbols:
                if (found := next((a for a in bsym.flat_args if isinstance(a, ProcessGroup)), None)) is not None:
                    return found
        return None

    @property
    def _bodies(self) -> tuple[Mapping[int, Body], ...]:
        return self.forward, self.backward, self.opening, self.closing

    def with_plan(self, plan: LoopPlan) -> ChunkLoop:
        """The same loop under another plan of the same region."""
        return ChunkLoop(plan, *self._bodies)

    def __repr__(self) -> str:
        return f"<{self.plan.name}: {self.plan.n} rows in {self.plan.chunks} chunks of {self.plan.chunk_rows}>"


# --- the loop -------------------------------------------------------------------------------------


def run(
    loop: ChunkLoop,
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor] | None,
    outputs: bool,
    log_sums: Sequence[Tensor] = (),
    over: Sequence[int] = (),
) -> tuple[list[Tensor], list[Tensor]]:
    """Run all chunks.

    Args:
        loop: the loop.
        inputs: in the plan's order.
        tangents: of the differentiable outputs; None runs the forward alone.
        outputs: whether outputs are needed.
        log_sums: with tangents, the whole values of the plan's `log_sums`.
        over: inputs beside the plan's own `over` that their gradients may overwrite.

    Returns:
        the outputs, and the gradients of the plan's `grads`: a whole input's as the parts of its
        `Accumulator`, still to be merged by `finish`.
    """
    plan = loop.plan
    bodies = loop.forward if tangents is None else loop.backward
    state = _State(
        plan=plan,
        inputs=inputs,
        tangents=tangents,
        log_sums=log_sums,
        totals=[Total(spec, plan.n) for spec in plan.outputs] if outputs else [],
        sums={} if tangents is None else _new_sums(plan),
        grads={} if tangents is None else _new_grads(plan, inputs, {*plan.over, *over}),
        fake=any(isinstance(t, FakeTensor) for t in inputs),
        tiles_bytes=plan.tiles_bytes(plan.forward_block_bytes if tangents is None else plan.backward_block_bytes),
    )
    logits = [
        torch.empty(min(plan.chunk_rows, plan.n), g.width, dtype=g.out.dtype, device=g.out.device) for g in plan.gemms
    ]
    opened = _new_rows(plan)
    for start in range(0, plan.n, plan.chunk_rows):
        stop = min(start + plan.chunk_rows, plan.n)
        rows = stop - start
        chunk = [buffer[:rows] for buffer in logits]
        if plan.opening:
            _open(state, plan.opening, loop.opening, opened[:rows], start)
        xs = [
            opened[:rows]
            if g.x is None
            else _matrix(read_rows(inputs[g.x], plan.inputs[g.x].sharding, start, stop), g, rows)
            for g in plan.gemms
        ]
        for g, x, out in zip(plan.gemms, xs, chunk, strict=True):
            w = inputs[g.w]
            gemm(out, x, w.t() if g.w_rows_first else w, add=False, scratch_bytes=state.tiles_bytes)
        for at in range(0, rows, plan.block_rows):
            end = min(at + plan.block_rows, rows)
            _run_block(state, bodies[end - at], [buffer[at:end] for buffer in chunk], start + at)
            if state.fake:
                break
        if tangents is not None:
            _multiply_back(state, xs, chunk, start, stop)
            if plan.opening:
                _close(state, plan.opening, loop.closing, opened[:rows], start)
        if state.fake:  # every chunk takes the same memory, and fake numbers are no numbers
            break
    results = [total.result() for total in state.totals]
    flat: list[Tensor] = []
    for i in plan.grads if tangents is not None else ():
        flat += state.sums[i].result() if i in state.sums else [state.grads[i]]
    return results, flat


@dataclass(frozen=True, kw_only=True)
class _State:
    """What all blocks of a run share.

    Attributes:
        plan, inputs, tangents, log_sums: as for `run`.
        totals: the outputs so far; none if they are not needed.
        sums: the gradients of whole inputs so far, by input.
        grads: those of inputs by rows.
        fake: whether the inputs have no numbers.
        tiles_bytes: the memory in which products of the chunk's gradients may work.
    """

    plan: LoopPlan
    inputs: Sequence[Tensor]
    tangents: Sequence[Tensor] | None
    log_sums: Sequence[Tensor]
    totals: Sequence[Total]
    sums: Mapping[int, Accumulator]
    grads: Mapping[int, Tensor]
    fake: bool
    tiles_bytes: int


def _new_sums(plan: LoopPlan) -> dict[int, Accumulator]:
    asked = [(i, plan.inputs[i], dtype) for i, dtype in zip(plan.grads, plan.grad_dtypes, strict=True)]
    # Small stretches are so many kernels that a GPU would wait for the host.
    more = {"alone_bytes": plan.tiles_bytes(plan.backward_block_bytes)} if plan.device.startswith("cuda") else {}
    return {i: Accumulator(spec, dtype, plan.finer(i), **more) for i, spec, dtype in asked if not spec.sharding.split}


def _new_grads(plan: LoopPlan, inputs: Sequence[Tensor], over: Collection[int]) -> dict[int, Tensor]:
    grads: dict[int, Tensor] = {}
    for i, dtype in zip(plan.grads, plan.grad_dtypes, strict=True):
        spec, t = plan.inputs[i], inputs[i]
        if not spec.sharding.split:
            continue
        # The plan guarantees that nobody reads it any more, but a view due to a caller's strides may still exist.
        if i in over and t.is_contiguous() and sole_owner(t) and t.untyped_storage().nbytes() == spec.nbytes:
            grads[i] = t.detach()
        else:
            grads[i] = torch.empty(spec.shape, dtype=dtype, device=spec.device)
    return grads


def _run_block(state: _State, body: Body, logits: Sequence[Tensor], lo: int) -> None:
    """Run a block of rows from `lo` on, which overwrites its logits (rows, width) by their gradients."""
    plan, hi = state.plan, lo + body.rows
    blocks = [_block_view(rows, g, body.rows) for rows, g in zip(logits, plan.gemms, strict=True)]
    args = [*_rows_of(state, plan.sides, lo, hi), *_tangents(state, body, lo, hi)]
    results = _called(state, body, blocks, args, plan.outputs, plan.sides)
    for total, value in zip(state.totals, results[: body.outputs], strict=False):
        total.add(value, lo, hi)
    if state.tangents is not None:
        _take_gradients(state, body, blocks, plan.sides, results[body.outputs :], lo, hi)


def _called(
    state: _State,
    body: Body,
    blocks: Sequence[Tensor],
    args: Sequence[Tensor],
    outputs: Sequence[Spec],
    sides: Sequence[int],
) -> Sequence[Any]:
    """The results of a block, which adds products to the sums of gradients itself."""

    def add(side: int, left: Tensor, right: Tensor) -> None:
        state.sums[sides[side]].add_product(left, right, state.tiles_bytes)

    if state.fake:
        return _pretend(state.plan, body, blocks, outputs, sides, add)
    return body.fn(*blocks, *args, add) if body.pairs else body.fn(*blocks, *args)


def _rows_of(state: _State, sides: Sequence[int], lo: int, hi: int) -> list[Tensor]:
    """The inputs that a block reads beside its logits."""
    return [_some_rows(state.inputs[i], state.plan.inputs[i].sharding, lo, hi) for i in sides]


def _some_rows(t: Tensor, sharding: Sharding, lo: int, hi: int) -> Tensor:
    return read_rows(t, sharding, lo, hi) if sharding.split else t


def _tangents(state: _State, body: Body, lo: int, hi: int) -> list[Tensor]:
    """What a block with gradients reads beside its inputs: log-sums and tangents."""
    plan = state.plan
    if state.tangents is None:
        return []
    given = [state.tangents[plan.differentiable.index(j)] for j in body.tangents]
    tangents = [_some_rows(t, plan.outputs[j].sharding, lo, hi) for t, j in zip(given, body.tangents, strict=True)]
    return [*state.log_sums, *tangents]


def _new_rows(plan: LoopPlan) -> Tensor:
    """Memory for a chunk of the rows that an opening makes; empty without one."""
    if plan.opening is None:
        return torch.empty(0)
    out = plan.opening.out
    depth = math.prod(out.shape) // plan.n
    return torch.empty(min(plan.chunk_rows, plan.n), depth, dtype=out.dtype, device=out.device)


def _open(state: _State, opening: Opening, bodies: Mapping[int, Body], rows: Tensor, start: int) -> None:
    """Make a chunk's rows of the products."""
    for block, lo, hi in _blocks_of(state, opening, rows, start):
        body = bodies[hi - lo]
        (made,) = _called(state, body, (), _rows_of(state, opening.sides, lo, hi), (opening.out,), opening.sides)
        block.copy_(made)
        del made  # before the next one is made


def _close(state: _State, opening: Opening, bodies: Mapping[int, Body], tangent: Tensor, start: int) -> None:
    """From the gradient of a chunk's rows to those of what the opening reads."""
    for block, lo, hi in _blocks_of(state, opening, tangent, start):
        body = bodies[hi - lo]
        sides = opening.sides
        found = _called(state, body, (), [*_rows_of(state, sides, lo, hi), block], (), sides)
        _take_gradients(state, body, (), sides, found, lo, hi)
        del found  # before the next ones are made


def _blocks_of(state: _State, opening: Opening, rows: Tensor, start: int) -> Iterator[tuple[Tensor, int, int]]:
    """A chunk's rows in blocks, in the shape that the trace gave them, with their range."""
    for at in range(0, len(rows), opening.block_rows):
        block = rows[at : at + opening.block_rows]
        shape = local_shape(opening.out.shape, opening.out.sharding, len(block))
        yield block.view(shape), start + at, start + at + len(block)
        if state.fake:
            break


def _take_gradients(
    state: _State, body: Body, blocks: Sequence[Tensor], sides: Sequence[int], found: Sequence[Any], lo: int, hi: int
) -> None:
    """Write a block's gradients, None for zeros, over its logits and into rows of its sides, or add them to sums.

    Rows come last, because their gradient may overwrite the rows, of which other gradients may be views.
    """
    plan, gradients = state.plan, iter(found)
    for block, want in zip(blocks, _wanted_gemms(plan), strict=False):
        if want:
            g = next(gradients)
            if g is None:
                block.zero_()
            elif not _lies_in(g, block):
                block.copy_(g)
    of_rows = []
    for k, i in enumerate(sides):
        if i not in plan.grads or k in body.pairs:
            continue
        g = next(gradients)
        if i in state.grads:
            elsewhere = g is not None and any(_lies_in(g, grad) for j, grad in state.grads.items() if j != i)
            of_rows.append((i, g.clone() if elsewhere else g))
        elif g is not None:
            state.sums[i].add(g)
    for i, g in of_rows:
        grad = state.grads[i]
        rows = torch.zeros((), dtype=grad.dtype, device=grad.device) if g is None else g
        write_rows(grad, plan.inputs[i].sharding, lo, hi, rows)


def _lies_in(gradient: Tensor, block: Tensor) -> bool:
    """Whether a gradient has the memory of a block, or of rows."""
    address = torch._C._storage_address  # type: ignore[attr-defined]
    return address(gradient) == address(block)


def _wanted_gemms(plan: LoopPlan) -> list[bool]:
    return [g.wanted(plan.grads) for g in plan.gemms]


def _block_view(rows: Tensor, g: Gemm, count: int) -> Tensor:
    """A block of the logits in the shape that the trace gave the amplifier's result."""
    shape = local_shape(g.out.shape, g.out.sharding, count)
    return rows.t().view(shape) if g.x_rows_last else rows.view(shape)


def _multiply_back(state: _State, xs: Sequence[Tensor], chunk: Sequence[Tensor], start: int, stop: int) -> None:
    """From the gradient of the chunk's logits to those of the weights and then of its rows.

    The rows come last, because their gradient may overwrite the rows; always, if an opening made them.
    """
    plan = state.plan
    for g, x, dlogits in zip(plan.gemms, xs, chunk, strict=True):
        if g.flows and g.w in plan.grads:
            left, right = (dlogits, x) if g.w_rows_first else (x, dlogits)
            state.sums[g.w].add_product(left.t(), right, state.tiles_bytes)
    written: set[int | None] = {i for i in plan.sides if i in plan.grads}
    for g, x, dlogits in zip(plan.gemms, xs, chunk, strict=True):
        if not g.flows or not g.wants_x:
            continue
        w = state.inputs[g.w] if g.w_rows_first else state.inputs[g.w].t()
        at = 0
        views = [x] if g.x is None else row_views(state.grads[g.x], plan.inputs[g.x].sharding, start, stop)
        for view in views:
            rows = math.prod(view.shape) // g.depth
            # A view's rows lie evenly, so this is a view too and the product lands in the gradient.
            out = view.view(g.depth, rows).t() if g.x_rows_last else view.view(rows, g.depth)
            gemm(out, dlogits[at : at + rows], w, add=g.x in written, scratch_bytes=state.tiles_bytes)
            at += rows
        written.add(g.x)


def _matrix(t: Tensor, gemm: Gemm, rows: int) -> Tensor:
    """A block of the row operand, or of its gradient, as (rows, D), without a copy if strides allow."""
    return t.reshape(gemm.depth, rows).t() if gemm.x_rows_last else t.reshape(rows, gemm.depth)


# --- without numbers ------------------------------------------------------------------------------


def _pretend(
    plan: LoopPlan,
    body: Body,
    blocks: Sequence[Tensor],
    outputs: Sequence[Spec],
    sides: Sequence[int],
    add: Callable[[int, Tensor, Tensor], None],
) -> list[Tensor]:
    """Allocate like a block without running it, because compiled code does not take fake tensors."""
    rows = body.rows
    torch.empty(body.peak_bytes, dtype=torch.uint8, device=plan.inputs[0].device)
    specs = outputs if body.outputs else ()
    out = [torch.empty(local_shape(s.shape, s.sharding, rows), dtype=s.dtype, device=s.device) for s in specs]
    if not body.wants_gradients:
        return out
    for i, (block, want) in enumerate(zip(blocks, _wanted_gemms(plan), strict=False)):
        if want:
            out.append(block if i in body.over else torch.empty_like(block))
    # Without logits all results are gradients of sides, which may share memory or be views of the block's inputs.
    held = None if blocks else torch.empty(body.adding_bytes, dtype=torch.uint8, device=plan.inputs[0].device)
    for k, i in enumerate(sides):
        if i not in plan.grads:
            continue
        s = plan.inputs[i]
        if k in body.pairs:
            shapes = (s.shape[0], body.pairs[k]), (body.pairs[k], s.shape[1])
            add(k, *(_memory_for(held, shape, s.dtype, s.device) for shape in shapes))
        else:
            out.append(_memory_for(held, local_shape(s.shape, s.sharding, rows), s.dtype, s.device))
    return out


def _memory_for(held: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """A tensor without numbers, within the given memory if that suffices."""
    nbytes = math.prod(shape) * dtype.itemsize
    if held is None or nbytes > held.nbytes:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return held[:nbytes].view(dtype).view(tuple(shape))
