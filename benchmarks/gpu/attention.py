"""Attention on a GPU: what each kernel holds beside what is predicted, how exact it is, and how long it takes.

Operands lie as a projection leaves them, (B, T, H, D).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from thunder.core import dtypes
from thunder.core.devices import Device
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor

from benchmarks.gpu.probes import median_ms
from thunder_mem import measure_peak
from thunder_mem.attention import head_groups
from thunder_mem.attention.kernels import ATTENTION_KERNELS

__all__ = ["GROUPED", "SHAPES", "Shape", "in_groups", "kernels"]

_TOLERANCE = 5e-3  # of results in 16 bits, relative to their norm
_ROUNDING_BYTES = 16 * 512  # of a group's parts, which a plan counts in blocks of the allocator


@dataclass(frozen=True)
class Shape:
    """Of one attention: batch, heads, heads of keys, rows, columns, and the size of a head."""

    batch: int
    heads: int
    keys: int
    rows: int
    columns: int
    size: int
    causal: bool = True
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        mask = "causal" if self.causal else "whole"
        sizes = "x".join(map(str, (self.batch, self.heads, self.keys, self.rows, self.columns, self.size)))
        return f"{sizes} {mask} {str(self.dtype).removeprefix('torch.')}"


_LONG = Shape(1, 32, 32, 16384, 16384, 128)
_SHORT = Shape(1, 4, 4, 1024, 1024, 128)
SHAPES = (
    *(replace(_LONG, heads=heads, keys=heads) for heads in (32, 16, 8, 4, 2, 1)),
    *(replace(_LONG, heads=heads, keys=keys) for heads, keys in ((32, 8), (16, 4), (8, 2), (4, 1), (2, 1))),
    _SHORT,
    *(replace(_SHORT, batch=batch) for batch in (2, 3)),
    *(replace(_SHORT, heads=heads, keys=heads) for heads in (1, 2, 3)),
    *(replace(_SHORT, keys=keys) for keys in (1, 2)),
    *(replace(_SHORT, batch=2, keys=keys) for keys in (1, 2)),
    *(replace(_SHORT, size=size) for size in (64, 80, 96, 192, 256)),
    *(replace(_SHORT, rows=rows, columns=rows) for rows in (64, 100, 500, 1000, 1025, 2048, 4096)),
    replace(_SHORT, causal=False),
    *(replace(_SHORT, causal=False, rows=512, columns=columns) for columns in (1024, 700)),
    replace(_SHORT, dtype=torch.float16),
)
"""Those of longchat first, then one of each kind on which a kernel's memory may depend."""

GROUPED = (
    *((replace(_LONG, keys=keys), groups) for keys, groups in ((32, 1), (32, 16), (8, 8), (8, 16))),
    *(
        (replace(_SHORT, batch=batch, heads=8, keys=keys), groups)
        for batch in (1, 2)
        for keys, groups in ((8, 4), (2, 4))
    ),
)
"""Shapes, and in how many groups of heads."""


def kernels(shape: Shape, name: str) -> dict[str, Any]:
    """A kernel's forward and backward: the bytes it asks for, those that are predicted, and its times.

    Args:
        shape: of the attention.
        name: of the kernel, a key of `ATTENTION_KERNELS`.
    """
    kernel = ATTENTION_KERNELS[name]
    q, k, v, grad = _operands(shape)
    out, log_sums = kernel.forward(q, k, v, shape.causal, None)
    exact = _exact(q, k, v, grad, shape.causal) if shape.rows <= 4096 else None
    shapes = q.shape, k.shape, q.element_size()
    forward = _found(lambda: kernel.forward(q, k, v, shape.causal, None), kernel.forward_bytes(*shapes), exact, 0)
    backward = _found(
        lambda: kernel.backward(grad, q, k, v, out, log_sums, shape.causal, None),
        kernel.backward_bytes(*shapes),
        exact,
        1,
    )
    return {"forward": forward, "backward": backward, "right": forward["right"] and backward["right"]}


def in_groups(shape: Shape, groups: int, name: str) -> dict[str, Any]:
    """The same for attention by groups of heads, without and with the projection of its gradient."""
    q, k, v, grad = _operands(shape)
    how = shape.causal, None, groups, name
    out, log_sums = head_groups._forward(q, k, v, *how)
    exact = _exact(q, k, v, grad, shape.causal) if shape.rows <= 4096 else None
    forward = _found(
        lambda: _shown(head_groups._forward(q, k, v, *how)), _predicted(how, q, k, v), exact, 0, _ROUNDING_BYTES
    )
    found = {"forward": forward}
    lying = grad.transpose(1, 2).contiguous()
    weight = torch.randn(96, shape.heads * shape.size, device="cuda", dtype=shape.dtype)
    narrow = torch.randn(shape.batch * shape.rows, 96, device="cuda", dtype=shape.dtype)
    for title, given, by in (("backward", lying, None), ("backward, projected", narrow, weight)):
        found[title] = _found(
            lambda given=given, by=by: head_groups._backward(given, q, k, v, out, log_sums, *how, by, ()),
            _predicted(how, given, q, k, v, out, log_sums, by),
            exact if by is None else None,
            1,
            _ROUNDING_BYTES,
        )
    return found | {"right": all(part["right"] for part in found.values())}


def _shown(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results[0].transpose(1, 2), *results[1:]


def _predicted(how: tuple[Any, ...], *tensors: Tensor | None) -> int:
    """The scratch of attention in groups on such tensors: q, k, v, or those of its backward and a weight."""
    with tracectx(TraceCtx()):
        given = [None if t is None else _proxy(t) for t in tensors]
        if len(given) == 3:
            bsym = head_groups._forward_in_groups.bind(*given, *how, output=(given[0], given[0]))
        else:
            bsym = head_groups._backward_in_groups.bind(*given[:6], *how, given[6], (), output=tuple(given[1:4]))
    return head_groups._scratch_bytes(bsym)


def _proxy(t: Tensor) -> TensorProxy:
    shape, dtype = tuple(t.shape), dtypes.to_dtype(t.dtype)
    return TensorProxy(shape=shape, device=Device("cuda:0"), dtype=dtype, requires_grad=False)


def _operands(shape: Shape) -> tuple[Tensor, ...]:
    """Query, key, value, and the output's gradient."""
    generator = torch.Generator("cuda").manual_seed(0)

    def made(rows: int, heads: int) -> Tensor:
        lying = (shape.batch, rows, heads, shape.size)
        return torch.randn(lying, device="cuda", dtype=shape.dtype, generator=generator).transpose(1, 2)

    keys = (shape.columns, shape.keys)
    return made(shape.rows, shape.heads), made(*keys), made(*keys), made(shape.rows, shape.heads)


def _exact(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Output, and gradients, in float64."""
    times = q.shape[1] // k.shape[1]
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    wide = [leaves[0], *(t.repeat_interleave(times, 1) for t in leaves[1:])]
    scores = wide[0] @ wide[1].mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    out = scores.softmax(-1) @ wide[2]
    return [out.detach()], list(torch.autograd.grad(out, leaves, grad.double()))


def _found(
    run: Callable[[], tuple[Tensor, ...]], predicted_bytes: int, exact: Any, part: int, slack_bytes: int = 0
) -> dict[str, Any]:
    results = run()
    scratch_bytes = measure_peak(run, device="cuda") - sum(t.nbytes for t in results)
    found: dict[str, Any] = {
        "ms": round(median_ms(run), 4),
        "scratch_bytes": scratch_bytes,
        "predicted_bytes": predicted_bytes,
        "right": 0 <= predicted_bytes - scratch_bytes <= slack_bytes,
    }
    if exact is not None:
        errors = (float((t.double() - e).norm() / e.norm()) for t, e in zip(results, exact[part], strict=False))
        found["distance"] = max(errors)
        found["right"] = found["right"] and found["distance"] < _TOLERANCE
    return found
