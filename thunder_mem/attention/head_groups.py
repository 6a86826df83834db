"""Attention by groups of heads, which share no values but those of their keys.

A kernel of `kernels.py` works for a few heads at a time. Keys and values that several heads share
need no repetition for all heads at once, and the kernel's own memory is that of one group. The numbers of each head
are those of the kernel for all heads. The result lies as the next product reads it, so that it needs no copy.

Shapes: query (B, H, T, D), key and value (B, K, S, D) with H a multiple of K, output (B, T, H, D), log-sum-exp
(B, H, T). Where a product (B*T, C) @ (C, H*D) makes the output's gradient, the backward takes its factors instead, and
multiplies for one group at a time (`rewrites/projection_in_groups.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.transforms import get_grad, put_grads, register_grad
from torch import Tensor

from thunder_mem.attention.call import backward_meta, last_dim_dense, log_sums_like
from thunder_mem.attention.kernels import ATTENTION_KERNELS, CPU
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.memory.device_bytes import block_bytes
from thunder_mem.semantics.op_traits import PLAIN, MemoryTraits, declare

__all__ = [
    "attention_in_groups",
    "group_bounds",
    "groups_of",
    "is_backward_in_groups",
    "kernel_of",
    "projecting",
    "runs_in_groups",
    "writes_over_operands",
    "writing_over",
]

_FORWARD, _BACKWARD = "mem_attention_groups_forward", "mem_attention_groups_backward"


def group_bounds(heads: int, groups: int) -> list[tuple[int, int]]:
    """The heads of keys of each group, as even as possible.

    >>> group_bounds(8, 3)
    [(0, 3), (3, 6), (6, 8)]
    """
    size, more = divmod(heads, groups)
    ends = [size * (i + 1) + min(i + 1, more) for i in range(groups)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _parts(query: Tensor, key: Tensor, groups: int) -> Iterator[tuple[slice, slice]]:
    """The heads of queries and of keys of each group. More groups than keys divide the queries of one head of keys."""
    keys = key.shape[1]
    shared = query.shape[1] // keys
    if groups <= keys:
        for lo, hi in group_bounds(keys, groups):
            yield slice(lo * shared, hi * shared), slice(lo, hi)
        return
    for at in range(keys):
        for lo, hi in group_bounds(shared, groups // keys):
            yield slice(at * shared + lo, at * shared + hi), slice(at, at + 1)


_BACKWARD_GROUPS_IN_FORWARD = 8


def _forward_groups(keys: int, groups: int, on_cpu: bool) -> int:
    """The groups of the forward, which on a GPU are fewer than those of the backward.

    The kernel begins with short blocks of rows and ends with long ones, so the last wave of a small group leaves most
    multiprocessors idle. By a model of the waves, groups of four heads of 16,384 rows take 1.5 times the time of 32
    heads on an H200. The forward of eight groups holds about what the backward of one holds, beside fewer other values.

    >>> _forward_groups(32, 16, on_cpu=False), _forward_groups(2, 32, on_cpu=False), _forward_groups(32, 8, on_cpu=True)
    (2, 4, 8)
    """
    if on_cpu:
        return groups
    fewer = max(1, groups // _BACKWARD_GROUPS_IN_FORWARD)
    return fewer if fewer <= keys else fewer // keys * keys


# --- forward ---------------------------------------------------------------------------------------


def _output_meta(query: TensorProxy) -> TensorProxy:
    batch, heads, rows, size = query.shape
    return TensorProxy(like=query, shape=(batch, rows, heads, size))


def _forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, groups: int, kernel: str
) -> tuple[Tensor, Tensor]:
    batch, heads, rows, size = query.shape
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = torch.empty((batch, rows, heads, size), dtype=query.dtype, device=query.device)
    log_sums = torch.empty((batch, heads, rows), dtype=wide, device=query.device)
    forward = ATTENTION_KERNELS[kernel].forward
    for of_query, of_key in _parts(query, key, _forward_groups(key.shape[1], groups, kernel == CPU)):
        q, k, v = (last_dim_dense(t) for t in (query[:, of_query], key[:, of_key], value[:, of_key]))
        found = forward(q, k, v, is_causal, scale)
        out[:, :, of_query].copy_(found[0].transpose(1, 2))
        log_sums[:, of_query].copy_(found[1])
        del found  # before the next ones are made
    return out, log_sums


_forward_in_groups = mem_attention_ex.register_operator(
    _FORWARD,
    meta=lambda query, *_: (_output_meta(query), log_sums_like(query)),
    fn=_forward,
    tags=(OpTags.DONT_AUTO_RECOMPUTE_IN_BACKWARD,),
)


# --- backward --------------------------------------------------------------------------------------


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    is_causal: bool,
    scale: float | None,
    groups: int,
    kernel: str,
    weight: Tensor | None,
    over: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    given = (query, key, value)
    grads = [
        t if i in over and _fills_its_memory(t) else torch.empty(t.shape, dtype=t.dtype, device=t.device)
        for i, t in enumerate(given)
    ]
    sums: tuple[Tensor, ...] = ()  # of the gradients of one head of keys, over the groups of its queries
    shared, backward = query.shape[1] // key.shape[1], ATTENTION_KERNELS[kernel].backward
    for of_query, of_key in _parts(query, key, groups):
        q, k, v = (last_dim_dense(t[:, h]) for t, h in zip(given, (of_query, of_key, of_key), strict=True))
        dout = grad_out[:, :, of_query] if weight is None else _projected(grad_out, weight, query, of_query)
        dout, o = (last_dim_dense(t).transpose(1, 2) for t in (dout, out[:, :, of_query]))
        found = backward(dout, q, k, v, o, log_sums[:, of_query], is_causal, scale)
        grads[0][:, of_query].copy_(found[0])
        sums = _summed_up(sums, found[1:], log_sums.dtype) if groups > key.shape[1] else found[1:]
        if of_query.stop % shared == 0:  # no other group reads these keys and values
            for i, total in enumerate(sums):
                grads[1 + i][:, of_key].copy_(total)
                del total
            sums = ()
        del found, dout, o  # before those of the next group are made
    return grads[0], grads[1], grads[2]


def _summed_up(sums: tuple[Tensor, ...], parts: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The sums with the parts added, in that dtype; copies of the first parts."""
    if not sums:
        return tuple(t.to(dtype, copy=True) for t in parts)
    return tuple(total.add_(part) for total, part in zip(sums, parts, strict=True))


def _projected(grad_result: Tensor, weight: Tensor, query: Tensor, heads: slice) -> Tensor:
    """The gradient (B, T, h, D) of the output of some heads."""
    batch, _, rows, size = query.shape
    return (grad_result @ weight[:, heads.start * size : heads.stop * size]).view(batch, rows, -1, size)


def _fills_its_memory(t: Tensor) -> bool:
    """Whether each element of the memory is one of the tensor, in any order; the plan expects that."""
    dense = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride != dense:
            return False
        dense *= size
    return t.untyped_storage().nbytes() == t.nbytes


_backward_in_groups = mem_attention_ex.register_operator(_BACKWARD, meta=backward_meta, fn=_backward)
_backward_over_operands = mem_attention_ex.register_operator(f"{_BACKWARD}_over", meta=backward_meta, fn=_backward)


def runs_in_groups(bsym: BoundSymbol) -> bool:
    """Whether the bound symbol is attention in groups, forward or backward."""
    return bsym.sym.executor is mem_attention_ex and bsym.sym.name.startswith("mem_attention_groups")


def groups_of(bsym: BoundSymbol) -> int:
    """The number of groups of attention in groups."""
    return bsym.args[5 + 3 * is_backward_in_groups(bsym)]


def kernel_of(bsym: BoundSymbol) -> str:
    """The kernel of attention in groups, a key of `ATTENTION_KERNELS`."""
    return bsym.args[6 + 3 * is_backward_in_groups(bsym)]


def is_backward_in_groups(bsym: BoundSymbol) -> bool:
    """Whether the bound symbol is the backward of attention in groups; its second to fourth arguments are q, k, v."""
    return bsym.sym.executor is mem_attention_ex and bsym.sym.name.startswith(_BACKWARD)


def writes_over_operands(bsym: BoundSymbol) -> bool:
    """Whether the bound symbol is a backward that `writing_over` made."""
    return bsym.sym is _backward_over_operands


def writing_over(bsym: BoundSymbol, over: tuple[int, ...]) -> BoundSymbol:
    """The backward that writes gradients over some of query (0), key (1) and value (2), which nobody reads later."""
    return bsym.from_bsym(sym=_backward_over_operands, args=(*bsym.args[:-1], over), _call_ctx={})


def projecting(bsym: BoundSymbol, grad_result: TensorProxy, weight: TensorProxy) -> BoundSymbol:
    """The backward that makes the gradient of its output, grad_result (B*T, C) @ weight (C, H*D), by groups."""
    args = (grad_result, *bsym.args[1:-2], weight, bsym.args[-1])
    return bsym.from_bsym(args=args, _call_ctx={})


# --- before autograd -------------------------------------------------------------------------------


attention_in_groups = mem_attention_ex.register_operator(
    "mem_attention_groups",
    # Thunder's own transforms take the arguments' names from here.
    meta=lambda query, key, value, is_causal, scale, groups, kernel: _output_meta(query),
    fn=lambda *args: _forward(*args)[0],
)
"""Attention without a mask: (query, key, value, is_causal, scale, groups, kernel) -> output."""


def _differentiate(query: TensorProxy, key: TensorProxy, value: TensorProxy, *how: Any) -> TensorProxy:
    out, log_sums = _forward_in_groups(query, key, value, *how)
    grads = _backward_in_groups(get_grad(out), query, key, value, out, log_sums, *how, None, ())
    put_grads((query, key, value), grads)
    return out


register_grad(attention_in_groups, _differentiate)


# --- for those who plan ----------------------------------------------------------------------------


def _scratch_bytes(bsym: BoundSymbol) -> int:
    """The bytes of the largest group: its results before they go to their place, and the kernel's own.

    They are a bound where the queries of a head of keys are divided unevenly.
    """
    backward, kernel = is_backward_in_groups(bsym), ATTENTION_KERNELS[kernel_of(bsym)]
    query, key = bsym.args[backward : backward + 2]
    device, itemsize = query.device.device_str(), query.dtype.bytes
    batch, heads, rows, size = map(int, query.shape)
    keys, columns, groups = int(key.shape[1]), int(key.shape[2]), groups_of(bsym)
    if not backward:
        groups = _forward_groups(keys, groups, kernel_of(bsym) == CPU)
    divided = groups > keys
    of_group = 1 if divided else -(-keys // groups)
    queries = -(-(heads // keys) // (groups // keys)) if divided else of_group * (heads // keys)

    def nbytes(count: int, length: int, each: int) -> int:
        return block_bytes(batch * count * length * each, device)

    wide = 8 if itemsize == 8 else 4
    of_query, of_key = nbytes(queries, rows, size * itemsize), nbytes(of_group, columns, size * itemsize)
    log_sums = nbytes(queries, rows, wide)
    shapes = (batch, queries, rows, size), (batch, of_group, columns, size)
    if not backward:
        return of_query + log_sums + kernel.forward_bytes(*shapes, itemsize)
    results = of_query + 2 * of_key + (2 * nbytes(1, columns, size * wide) if divided else 0)
    projected = of_query if bsym.args[-2] is not None else 0
    copies = 2 * of_query if kernel.copies_parts and groups > 1 else projected
    if kernel_of(bsym) != CPU and groups > 1 and batch > 1:
        copies += log_sums  # which a GPU's kernels read side by side
    return results + copies + kernel.backward_bytes(*shapes, itemsize)


_TRAITS = MemoryTraits(scratch_bytes=_scratch_bytes, attention_kernel=kernel_of, products=True)
_OVER_OPERANDS = MemoryTraits(
    writes=lambda bsym: tuple(bsym.args[1 + i] for i in bsym.args[-1]),
    last_write=True,
    in_place=True,
    shares=lambda bsym: {bsym.output[i].name: bsym.args[1 + i] for i in bsym.args[-1]},
    scratch_bytes=_scratch_bytes,
    attention_kernel=kernel_of,
    runs=lambda bsym: bsym.from_bsym(sym=_backward_in_groups, args=(*bsym.args[:-1], ())),
    products=True,
)
_BY_NAME = {_FORWARD: _TRAITS, _BACKWARD: _TRAITS, f"{_BACKWARD}_over": _OVER_OPERANDS}
declare(mem_attention_ex, lambda name: _BY_NAME.get(name, PLAIN))
