"""Running a chunk loop: plain torch on plain tensors, one chunk after another, into buffers that stay.

A chunk is two levels deep. The matrix products see `chunk_rows` rows at once, so that they run at
full speed; everything between them sees `block_rows` rows, so that its temporaries are small and in
cache, and writes the gradient of the logits over the logits themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thunder_mem.chunk_body import Body
from thunder_mem.chunk_gemm import gemm, scratch_bytes_of
from thunder_mem.chunk_plan import Gemm, LoopPlan, Spec
from thunder_mem.chunk_rules import Sharding, local_shape

__all__ = ["Accumulator", "ChunkLoop", "block_sizes", "finish", "run"]

SPLIT_BYTES = 1 << 16


class ChunkLoop:
    """A plan with its compiled blocks; opaque to Thunder, which passes it through as an object.

    Attributes:
        plan: what was decided.
        forward: blocks without gradients, by rows.
        backward: blocks with gradients, by rows; with outputs too in mode "grads-in-forward".
    """

    def __init__(self, plan: LoopPlan, forward: dict[int, Body], backward: dict[int, Body]):
        self.plan, self.forward, self.backward = plan, forward, backward

    def __repr__(self) -> str:
        return f"<{self.plan.name}: {self.plan.n} rows in {self.plan.chunks} chunks of {self.plan.chunk_rows}>"


def block_sizes(n: int, chunk_rows: int, block_rows: int) -> tuple[int, ...]:
    """The distinct numbers of rows that blocks have, largest first.

    >>> block_sizes(1000, 300, 128)
    (128, 100, 44)
    """
    sizes = set()
    for chunk in {min(chunk_rows, n), n % chunk_rows or chunk_rows}:
        sizes.update({min(block_rows, chunk), chunk % block_rows or min(block_rows, chunk)})
    return tuple(sorted(sizes, reverse=True))


# --- rows of a tensor -----------------------------------------------------------------------------


def row_views(t: Tensor, sharding: Sharding, start: int, stop: int) -> list[Tensor]:
    """Views of rows [start, stop) of `t`, in order, each with the shape that a block expects.

    One view where the row dims lie evenly in memory, several where they do not (a slice of a
    sequence), never a copy.
    """
    dims = [d for d, row in enumerate(sharding.dims) if row is not None]
    *outer, last = dims
    inner = t.shape[last]
    span = inner
    for d in reversed(outer):
        if t.shape[d] != 1 and t.stride(d) != span * t.stride(last):
            break
        span *= t.shape[d]
    views = []
    while start < stop:
        end = min(stop, (start // span + 1) * span)
        offset, rest = t.storage_offset(), start
        for d in dims:
            row = sharding.dims[d]
            assert row is not None
            offset += (rest // row.stride) * t.stride(d)
            rest %= row.stride
        shape = local_shape(t.shape, sharding, end - start)
        views.append(t.as_strided(shape, t.stride(), offset))
        start = end
    return views


def read_rows(t: Tensor, sharding: Sharding, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of `t`: a view where possible."""
    views = row_views(t, sharding, start, stop)
    return views[0] if len(views) == 1 else torch.cat(views, dim=_row_dim(sharding))


def write_rows(t: Tensor, sharding: Sharding, start: int, stop: int, value: Tensor) -> None:
    """Copy `value` over rows [start, stop) of `t`."""
    views = row_views(t, sharding, start, stop)
    if len(views) == 1:
        views[0].copy_(value)
        return
    dim, at = _row_dim(sharding), 0
    for view in views:
        view.copy_(value.narrow(dim, at, view.shape[dim]))
        at += view.shape[dim]


def _row_dim(sharding: Sharding) -> int:
    return max(d for d, row in enumerate(sharding.dims) if row is not None)


def _matrix(t: Tensor, gemm: Gemm, rows: int) -> Tensor:
    """A block of the row operand, or of its gradient, as (rows, D), without a copy where strides allow."""
    return t.reshape(gemm.depth, rows).t() if gemm.x_rows_last else t.reshape(rows, gemm.depth)


# --- gradients of what every chunk shares ---------------------------------------------------------


class Accumulator:
    """The gradient of an input that every chunk reads whole.

    A float32 accumulator of a large 16-bit input is kept in two parts, so that `finish` can write
    the 16-bit result over the first part and free the second: at no time do the float32 sum and the
    16-bit result both exist.
    """

    def __init__(self, spec: Spec, accumulate: str, parts: Sequence[Tensor] | None = None):
        self.spec = spec
        self.dtype = accumulator_dtype(spec, accumulate)
        self.bounds = part_bounds(spec, accumulate)
        self.parts = (
            list(parts)
            if parts is not None
            else [
                torch.zeros(hi - lo, *spec.shape[1:], dtype=self.dtype, device=spec.device)
                if spec.shape
                else torch.zeros((), dtype=self.dtype, device=spec.device)
                for lo, hi in self.bounds
            ]
        )

    def add(self, grad: Tensor) -> None:
        """Add a gradient of the input's shape."""
        if not self.spec.shape:
            self.parts[0].add_(grad)
            return
        for part, (lo, hi) in zip(self.parts, self.bounds, strict=True):
            part.add_(grad[lo:hi])

    def add_product(self, plan: Gemm, dlogits: Tensor, x: Tensor, scratch_bytes: int) -> None:
        """Add dlogits^T x, (V, rows) x (rows, D), in the layout of the weight, without a temporary of its size."""
        for part, (lo, hi) in zip(self.parts, self.bounds, strict=True):
            if plan.w_rows_first:
                gemm(part, dlogits[:, lo:hi].t(), x, add=True, scratch_bytes=scratch_bytes)
            else:
                gemm(part, x[:, lo:hi].t(), dlogits, add=True, scratch_bytes=scratch_bytes)


def accumulator_dtype(spec: Spec, accumulate: str) -> torch.dtype:
    """float32 for 16-bit inputs, unless the user asked for the input's own dtype."""
    return torch.float32 if accumulate == "float32" and spec.dtype.itemsize < 4 else spec.dtype


def part_bounds(spec: Spec, accumulate: str) -> tuple[tuple[int, int], ...]:
    """Ranges of dim 0 that the accumulator's parts hold."""
    size = spec.shape[0] if spec.shape else 1
    if accumulator_dtype(spec, accumulate) == spec.dtype or size < 2 or spec.nbytes < SPLIT_BYTES:
        return ((0, size),)
    half = -(-size // 2)
    return ((0, half), (half, size))


# --- the loop -------------------------------------------------------------------------------------


def run(
    loop: ChunkLoop, inputs: Sequence[Tensor], tangents: Sequence[Tensor] | None, outputs: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Run all chunks.

    Args:
        loop: the loop.
        inputs: in the plan's order.
        tangents: of the differentiable outputs; None runs the forward alone.
        outputs: whether outputs are asked for.

    Returns:
        the outputs, and the gradients of the plan's `grads`: a whole input's as the parts of its
        `Accumulator`, still to be merged by `finish`.
    """
    plan = loop.plan
    bodies = loop.forward if tangents is None else loop.backward
    totals = [_Total(spec, plan.n) for spec in plan.outputs] if outputs else []
    grads = {} if tangents is None else {i: _new_grad(plan.inputs[i], plan.accumulate) for i in plan.grads}
    logits = [
        torch.empty(min(plan.chunk_rows, plan.n), g.width, dtype=g.out.dtype, device=g.out.device) for g in plan.gemms
    ]
    fake = _is_fake(inputs)
    tiles = scratch_bytes_of(plan.logits_bytes)
    for start in range(0, plan.n, plan.chunk_rows):
        stop = min(start + plan.chunk_rows, plan.n)
        rows = stop - start
        chunk = [buffer[:rows] for buffer in logits]
        xs = [_matrix(read_rows(inputs[g.x], plan.inputs[g.x].sharding, start, stop), g, rows) for g in plan.gemms]
        for g, x, out in zip(plan.gemms, xs, chunk, strict=True):
            w = inputs[g.w]
            gemm(out, x, w.t() if g.w_rows_first else w, add=False, scratch_bytes=tiles)
        for at in range(0, rows, plan.block_rows):
            end = min(at + plan.block_rows, rows)
            _run_block(plan, bodies[end - at], inputs, tangents, chunk, (at, end), start, totals, grads, fake)
            if fake:
                break
        if tangents is not None:
            _multiply_back(plan, inputs, grads, xs, chunk, start, stop, tiles)
        if fake:  # every chunk takes the same memory, and fake numbers are no numbers
            break
    results = [total.result() for total in totals]
    flat: list[Tensor] = []
    for i in plan.grads if tangents is not None else ():
        grad = grads[i]
        flat += grad.parts if isinstance(grad, Accumulator) else [grad]
    return results, flat


def _new_grad(spec: Spec, accumulate: str) -> Tensor | Accumulator:
    if not spec.sharding.split:
        return Accumulator(spec, accumulate)
    return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)


def _run_block(plan, body, inputs, tangents, chunk, span, start, totals, grads, fake) -> None:
    at, end = span
    lo, hi = start + at, start + end
    blocks = [_block_view(buffer[at:end], g, end - at) for buffer, g in zip(chunk, plan.gemms, strict=True)]
    sides = []
    for i in plan.sides:
        sharding = plan.inputs[i].sharding
        sides.append(read_rows(inputs[i], sharding, lo, hi) if sharding.split else inputs[i])
    args = [*blocks, *sides]
    if tangents is not None:
        for j in body.tangents:
            t, sharding = tangents[plan.differentiable.index(j)], plan.outputs[j].sharding
            args.append(read_rows(t, sharding, lo, hi) if sharding.split else t)
    results = _pretend(plan, body, inputs, end - at) if fake else body.fn(*args)
    for total, value in zip(totals, results[: body.outputs], strict=False):
        total.add(value, lo, hi)
    if tangents is None:
        return
    found = list(results[body.outputs :])
    for block, want in zip(blocks, _wanted_gemms(plan), strict=True):
        if want:
            g = found.pop(0)
            block.zero_() if g is None else block.copy_(g)
    for i in plan.sides:
        if i in plan.grads:
            g, grad = found.pop(0), grads[i]
            if isinstance(grad, Accumulator):
                if g is not None:
                    grad.add(g)
            else:
                value = g if g is not None else torch.zeros((), dtype=grad.dtype, device=grad.device)
                if g is None:
                    for view in row_views(grad, plan.inputs[i].sharding, lo, hi):
                        view.copy_(value)
                else:
                    write_rows(grad, plan.inputs[i].sharding, lo, hi, g)


def _wanted_gemms(plan: LoopPlan) -> list[bool]:
    return [g.x in plan.grads or g.w in plan.grads for g in plan.gemms]


def _block_view(rows: Tensor, g: Gemm, count: int) -> Tensor:
    """A block of the logits in the shape that the trace gave the amplifier's result."""
    shape = local_shape(g.out.shape, g.out.sharding, count)
    return rows.t().view(shape) if g.x_rows_last else rows.view(shape)


def _multiply_back(plan, inputs, grads, xs, chunk, start, stop, tiles) -> None:
    """From the gradient of the chunk's logits to those of its rows and of the weights."""
    written = {i for i in plan.sides if i in plan.grads}
    for g, x, dlogits in zip(plan.gemms, xs, chunk, strict=True):
        if g.x in plan.grads:
            w = inputs[g.w] if g.w_rows_first else inputs[g.w].t()
            views = row_views(grads[g.x], plan.inputs[g.x].sharding, start, stop)
            at = 0
            for view in views:
                rows = math.prod(view.shape) // g.depth
                # A view's rows lie evenly, so this is a view too and the product lands in the gradient.
                out = view.view(g.depth, rows).t() if g.x_rows_last else view.view(rows, g.depth)
                gemm(out, dlogits[at : at + rows], w, add=g.x in written, scratch_bytes=tiles)
                at += rows
            written.add(g.x)
        if g.w in plan.grads:
            grads[g.w].add_product(g, dlogits, x, tiles)


class _Total:
    """An output while it is put together: rows side by side, or a sum in at least float32."""

    def __init__(self, spec: Spec, n: int):
        self.spec = spec
        kind = spec.sharding.partial
        self.value: Any  # a tensor; None until the first part of a maximum or minimum
        if kind is None:
            self.value = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        elif kind == "sum":
            wide = torch.float32 if spec.dtype.is_floating_point and spec.dtype.itemsize < 4 else spec.dtype
            self.value = torch.zeros(spec.shape, dtype=wide, device=spec.device)
        else:
            self.value = None

    def add(self, value: Tensor, lo: int, hi: int) -> None:
        kind = self.spec.sharding.partial
        if kind is None:
            write_rows(self.value, self.spec.sharding, lo, hi, value)
        elif kind == "sum":
            self.value.add_(value)
        elif self.value is None:
            self.value = value.clone()
        else:
            combine = torch.maximum if kind == "max" else torch.minimum
            self.value = combine(self.value, value)

    def result(self) -> Tensor:
        if self.value is None:
            return torch.empty(self.spec.shape, dtype=self.spec.dtype, device=self.spec.device)
        return self.value.to(self.spec.dtype)


# --- the last pass --------------------------------------------------------------------------------


def finish(plan: LoopPlan, scale: Tensor | None, parts: Sequence[Tensor]) -> list[Tensor]:
    """Scale the gradients by the tangent, in place where nobody else holds them, and round them once.

    Under `retain_graph` autograd keeps the saved gradients, and they stay as they are.
    """
    queue = list(parts)
    results = []
    for i in plan.grads:
        spec = plan.inputs[i]
        count = 1 if spec.sharding.split else len(part_bounds(spec, plan.accumulate))
        mine, queue = queue[:count], queue[count:]
        # Only this frame and the caller's know these tensors from Python, so a C++ count above one is autograd's.
        free = all(t._use_count() == 1 and _storage_holders(t) == 1 for t in mine)  # type: ignore[attr-defined]
        results.append(_finish_one(spec, scale, mine, free))
    return results


def _storage_holders(t: Tensor) -> int:
    storage = t.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # less `storage` itself


def _finish_one(spec: Spec, scale: Tensor | None, parts: list[Tensor], free: bool) -> Tensor:
    first = parts[0]
    if first.dtype == spec.dtype:
        if scale is None:
            return first
        return first.mul_(scale) if free else first * scale.to(first.dtype)
    if len(parts) == 1 or not free:
        out = torch.empty(spec.shape, dtype=spec.dtype, device=first.device)
        at = 0
        for part in parts:
            _round_into(out[at : at + part.shape[0]] if spec.shape else out, part, scale)
            at += part.shape[0] if spec.shape else 1
        return out
    return _round_in_place(spec, parts, scale)


def _round_into(out: Tensor, part: Tensor, scale: Tensor | None) -> None:
    """out = part * scale, rounded, without a float32 temporary of its size."""
    if scale is None:
        out.copy_(part)
        return
    if out.device.type == "cuda":
        torch.mul(part, scale, out=out)
        return
    out, part = out.view(-1), part.view(-1)
    step = 1 << 14
    for lo in range(0, part.numel(), step):
        out[lo : lo + step].copy_(part[lo : lo + step] * scale)


def _round_in_place(spec: Spec, parts: list[Tensor], scale: Tensor | None) -> Tensor:
    """The 16-bit result over the first part's memory.

    Element i of the result lies where element i / 2 of the part was, so a stretch [k, 2k) of the
    part lands on [k / 2, k), which has been read already; stretches double from a small first one.
    """
    first, second = parts
    result = first.view(-1).view(spec.dtype)[: math.prod(spec.shape)]
    flat = first.view(-1)
    done = min(1 << 10, flat.numel())
    head = flat[:done].clone()
    _round_into(result[:done], head, scale)
    while done < flat.numel():
        end = min(2 * done, flat.numel())
        _round_into(result[done:end], flat[done:end], scale)
        done = end
    _round_into(result[done:], second.view(-1), scale)
    return result.view(spec.shape)


# --- without numbers ------------------------------------------------------------------------------


def _is_fake(inputs: Sequence[Tensor]) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return any(isinstance(t, FakeTensor) for t in inputs)


def _pretend(plan: LoopPlan, body: Body, inputs: Sequence[Tensor], rows: int) -> list[Tensor]:
    """What a block allocates, without running it: compiled code knows no fake tensors."""
    torch.empty(body.peak_bytes, dtype=torch.uint8, device=inputs[0].device)
    specs = list(plan.outputs) if body.outputs else []
    out = [torch.empty(local_shape(s.shape, s.sharding, rows), dtype=s.dtype, device=s.device) for s in specs]
    for g, want in zip(plan.gemms, _wanted_gemms(plan), strict=True):
        if want:
            out.append(
                torch.empty(local_shape(g.out.shape, g.out.sharding, rows), dtype=g.out.dtype, device=g.out.device)
            )
    for i in plan.sides:
        if i in plan.grads:
            s = plan.inputs[i]
            out.append(torch.empty(local_shape(s.shape, s.sharding, rows), dtype=s.dtype, device=s.device))
    return out
