"""Gradients of inputs that all chunks share: added up over chunks, scaled and rounded once at the end."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from thunder_mem.chunk_loop.matmul import bytes_beside_stretch, gemm
from thunder_mem.chunk_loop.plan import ALIGNED_ROWS, LoopPlan, Spec

__all__ = ["Accumulator", "finer_bounds", "finish", "part_bounds", "rounding_calls", "sole_owner", "sum_calls"]

SPLIT_BYTES = 1 << 16
_ALONE_BYTES = SPLIT_BYTES * 7 // 4  # without a product beside
_STRETCH_CALLS = 9  # to join the parts, add, and split again
_ROUND_CALLS = 4  # to join the parts and round them
_FEW_ROWS = 512  # of which a longer first part, whose memory the result gets, would waste a share


class Accumulator:
    """The gradient of an input that every chunk reads whole. The first part of the sum is written, not added.

    A float32 accumulator of a large 16-bit input is kept in two parts. `finish` writes the 16-bit result over
    the first part and frees the second, so the float32 sum and the 16-bit result never exist together.

    Every chunk would round a plain 16-bit sum to 8 or 11 bits. While chunks run, a `finer` one holds the upper
    half of each float32 number and one further byte. So it is rounded once, at the end.

    Args:
        spec: the input.
        dtype: of the sum.
        finer: whether it is a finer one.
        alone_bytes: temporaries of a finer one take at most this much where no product is made beside.
    """

    def __init__(self, spec: Spec, dtype: torch.dtype, finer: bool, alone_bytes: int = _ALONE_BYTES):
        self.spec, self.bounds, self.alone_bytes = spec, part_bounds(spec, dtype), alone_bytes
        shapes = [(hi - lo, *spec.shape[1:]) for lo, hi in self.bounds] if spec.shape else [()]
        self.parts = [torch.empty(shape, dtype=dtype, device=spec.device) for shape in shapes]
        self.bytes = torch.empty(spec.shape, dtype=torch.uint8, device=spec.device) if finer else None
        self.begun = False

    def add(self, grad: Tensor) -> None:
        """Add a gradient of the input's shape."""
        if self.bytes is not None:
            for total, lo, hi in self._stretches(self.alone_bytes):
                total.add_(grad[lo:hi] if self.spec.shape else grad)
                del total  # before the next one is made
        else:
            for part, (lo, hi) in zip(self.parts, self.bounds, strict=True):
                mine = grad[lo:hi] if self.spec.shape else grad
                part.add_(mine) if self.begun else part.copy_(mine)
        self.begun = True

    def add_product(self, left: Tensor, right: Tensor, scratch_bytes: int) -> None:
        """Add left (V, rows) x right (rows, D), in the layout of the weight, without a temporary of its size."""
        if self.bytes is not None:
            targets: Iterable[tuple[Tensor, int, int]] = self._stretches(scratch_bytes)
            add, scratch_bytes = True, bytes_beside_stretch(scratch_bytes)
        else:
            targets = [(part, lo, hi) for part, (lo, hi) in zip(self.parts, self.bounds, strict=True)]
            add = self.begun
        for part, lo, hi in targets:
            gemm(part, left[lo:hi], right, add=add, scratch_bytes=scratch_bytes)
            del part  # before the next one is made
        self.begun = True

    def result(self) -> list[Tensor]:
        """The parts, once everything is added."""
        if not self.begun:
            for part in self.parts:
                part.zero_()
        elif self.bytes is not None:
            (part,) = self.parts
            for total, lo, hi in self._stretches(self.alone_bytes, keep=False):
                (part[lo:hi] if self.spec.shape else part).copy_(total)
                del total
            self.bytes = None
        return self.parts

    def _stretches(self, scratch_bytes: int, keep: bool = True) -> Iterator[tuple[Tensor, int, int]]:
        """Stretches of dim 0 in float32, to be changed in place and stored again; temporaries are no larger."""
        assert self.bytes is not None
        upper, lower = self.parts[0].view(torch.int16), self.bytes
        for lo, hi in finer_bounds(self.spec, scratch_bytes):
            some = slice(lo, hi) if self.spec.shape else ...
            if self.begun:  # the numbers cut off after their upper halves, and then the byte
                total = upper[some].int().bitwise_left_shift_(16)
                total = total.add_(lower[some], alpha=1 << 8).view(torch.float32)
            else:
                total = torch.zeros_like(upper[some], dtype=torch.float32)
            yield total, lo, hi
            if keep:
                bits = total.view(torch.int32).add_(1 << 7)  # to nearest
                upper[some].copy_(bits >> 16)
                lower[some].copy_(bits.bitwise_right_shift_(8))
                del bits  # a view of `total`
            del total
            if isinstance(upper, FakeTensor):
                break  # every stretch takes the same memory


def part_bounds(spec: Spec, dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    """The ranges of dim 0 of the parts of an accumulator of that dtype."""
    size = spec.shape[0] if spec.shape else 1
    if dtype == spec.dtype or size < 2 or spec.nbytes < SPLIT_BYTES:
        return ((0, size),)
    half = -(-size // 2)
    if spec.device.startswith("cuda") and size > _FEW_ROWS:
        half += -half % ALIGNED_ROWS
    return ((0, half), (half, size))


def finer_bounds(spec: Spec, scratch_bytes: int) -> tuple[tuple[int, int], ...]:
    """The ranges of dim 0 of a finer sum that are in float32, one after the other."""
    rows, step = spec.shape[0] if spec.shape else 1, spec.finer_rows(scratch_bytes)
    return tuple((lo, min(lo + step, rows)) for lo in range(0, rows, step))


def sum_calls(plan: LoopPlan, i: int) -> int:
    """The number of kernels that add one part to the gradient of input `i`."""
    spec, dtype = plan.inputs[i], plan.grad_dtype(i)
    if spec.sharding.split or not plan.finer(i):
        return 1 if spec.sharding.split else len(part_bounds(spec, dtype))
    return _STRETCH_CALLS * _stretch_count(plan, spec)


def rounding_calls(plan: LoopPlan) -> int:
    """The number of kernels that round finer sums at the end of a loop on a GPU."""
    return sum(_ROUND_CALLS * _stretch_count(plan, plan.inputs[i]) for i in plan.grads if plan.finer(i))


def _stretch_count(plan: LoopPlan, spec: Spec) -> int:
    return len(finer_bounds(spec, plan.tiles_bytes(plan.backward_block_bytes)))


def finish(plan: LoopPlan, scale: Tensor | None, parts: Sequence[Tensor]) -> list[Tensor]:
    """Scale the gradients by the tangent, in place if nobody else holds them, and round them once.

    Under `retain_graph` autograd keeps the saved gradients, which then stay unchanged.
    """
    queue = list(parts)
    results = []
    for i, dtype in zip(plan.grads, plan.grad_dtypes, strict=True):
        spec = plan.inputs[i]
        count = 1 if spec.sharding.split else len(part_bounds(spec, dtype))
        mine, queue = queue[:count], queue[count:]
        results.append(_finish_one(spec, scale, mine))
    return results


def sole_owner(t: Tensor) -> bool:
    """Whether only the tensor's own Python object holds its memory: not autograd, not another view.

    Beside a view its base holds the memory, which must be all that holds the base. PyTorch's `linear` with a bias
    returns such a view.
    """
    if t._use_count() != 1:  # type: ignore[attr-defined]
        return False
    if t._base is None:
        return _are_holders(1, t)
    return _are_holders(2, t) and _holders_of_base(t) == _held_by_a_view_alone(isinstance(t, FakeTensor))


def _are_holders(count: int, t: Tensor) -> bool:
    """Whether so many tensors hold the tensor's memory.

    In PyTorch 2.11 a storage's Python object lives as long as the storage, and counts as a holder. So autograd adds
    nothing to that memory in place any more. The object is made only if there are other holders; it may be one.
    """
    if torch._C._storage_Use_Count(torch._C._storage_address(t)) == count:  # type: ignore[attr-defined]
        return True
    storage = t.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1 == count


def _holders_of_base(view: Tensor) -> tuple[int, int]:
    """How often a view's base is held, by C++ and by Python, this function included."""
    base = view._base
    return base._use_count(), sys.getrefcount(base)  # type: ignore[union-attr]


@cache
def _held_by_a_view_alone(fake: bool) -> tuple[int, int]:
    """`_holders_of_base` of a view whose base nobody else holds; versions of PyTorch and fake tensors count otherwise.

    The first call may be inside a fake mode, so no mode of the caller counts.
    """
    mode = FakeTensorMode() if fake else nullcontext()
    with _disable_current_modes(), torch.inference_mode(False), mode:
        return _holders_of_base(torch.empty(2)[:1])


def _finish_one(spec: Spec, scale: Tensor | None, parts: list[Tensor]) -> Tensor:
    first = parts[0]
    if first.dtype == spec.dtype:
        if scale is None:
            return first
        return _scaled(first, scale) if sole_owner(first) else first * scale.to(first.dtype)
    if len(parts) == 1 or not all(map(sole_owner, parts)):
        out = torch.empty(spec.shape, dtype=spec.dtype, device=first.device)
        at = 0
        for part in parts:
            _round_into(out[at : at + part.shape[0]] if spec.shape else out, part, scale)
            at += part.shape[0] if spec.shape else 1
        return out
    return _round_in_place(spec, parts, scale)


def _scaled(part: Tensor, scale: Tensor) -> Tensor:
    """The part times the tangent, in place; untouched if the tangent is 1."""
    return part if _is_known_to_be_one(scale) else part.mul_(scale)


def _is_known_to_be_one(scale: Tensor) -> bool:
    """Whether a tangent is 1, as a loss's mostly is. A GPU's is not read, because the host would wait."""
    return scale.device.type == "cpu" and not isinstance(scale, FakeTensor) and scale.item() == 1


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

    Element i of the result lies where element i / 2 of the part was. So a stretch [k, 2k) of the part lands on
    [k / 2, k), which has been read already. Stretches double from a small first one.
    """
    if scale is not None and spec.device == "cpu":  # in place, where a product would be a temporary
        for part in parts:
            _scaled(part, scale)
        scale = None
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
