"""Attention by groups of heads, beside stretches in tiles: keys are not repeated, and the kernel's memory is a group's.

    k -> broadcast (B, K, r, S, D) -> reshape (B, H, S, D) -> attention        k -> attention in groups -> transpose

The repetition of keys and values to all heads of queries disappears from the trace, with its gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.core.transform_common import dce

from thunder_mem.attention.choice import kernel_for, plain_call
from thunder_mem.attention.head_groups import attention_in_groups
from thunder_mem.attention.kernels import CUDNN
from thunder_mem.loop_body.leaves import Leaf, is_cut, read_program, size_bytes
from thunder_mem.memory.plan import Decision
from thunder_mem.memory.units import counted
from thunder_mem.trace.source_lines import place_of

__all__ = ["with_head_groups"]

_MOST_GROUPS, _BLOCK_ROWS = 32, 128
_WAVES, _CPU_BLOCKS = 2, 64
"""A group has about so many blocks of rows for each multiprocessor.

The backward's kernel has one block on each at a time, and of a causal mask the long ones come first: by a model of the
waves, two heads of 16,384 rows leave 2 % of an H200 idle, as four do.
"""


def with_head_groups(trace: TraceCtx, executors: Sequence[Any]) -> tuple[TraceCtx, tuple[Decision, ...]]:
    """The computation trace with its attention by groups of heads, where a kernel without scores would run it whole.

    Args:
        trace: a computation trace before autograd; it is not changed.
        executors: the user's, in order of preference.

    Returns:
        the new trace, the same object if nothing changed, and a decision for each attention.
    """
    if not any(b.sym == ltorch.scaled_dot_product_attention for b in trace.bound_symbols):
        return trace, ()
    producer = read_program(trace).producer
    new = from_trace(trace)
    decisions: list[Decision] = []
    for bsym in trace.bound_symbols:
        call = plain_call(bsym)
        kernel = None if call is None else kernel_for(bsym, call, executors)
        operands = None if call is None or kernel is None else _operands(producer, call)
        if call is None or kernel is None or operands is None:
            new.bound_symbols.append(bsym)
            continue
        groups = _groups(*operands[:2])
        new.bound_symbols += _in_groups(new, bsym, operands, call, groups, kernel)
        decisions.append(_decision(bsym, operands, groups, kernel))
    if not decisions:
        return trace, ()
    new = dce(new)
    new.set_provenance(TraceProvenance("Attention by groups of heads"))
    return new, tuple(decisions)


def _operands(
    producer: Mapping[str, Leaf], call: Mapping[str, Any]
) -> tuple[TensorProxy, TensorProxy, TensorProxy] | None:
    """Query, key and value, the last two before they are repeated; None where groups would change nothing."""
    query, key, value = (call[name] for name in ("query", "key", "value"))
    single = _before_repetition(producer, key), _before_repetition(producer, value)
    if single[0].shape[1] == single[1].shape[1]:
        key, value = single
    return (query, key, value) if key.shape[1] < query.shape[1] or _groups(query, key) > 1 else None


def _before_repetition(producer: Mapping[str, Leaf], t: TensorProxy) -> TensorProxy:
    """The tensor (B, K, S, D) whose heads `t` (B, H, S, D) repeats, each as often in a row; or `t` itself.

    `t` itself also if the user cut the gradient off within the repetition.
    """
    leaf = producer.get(t.name)
    if leaf is None or leaf.bsym.sym.id is not PrimIDs.RESHAPE or is_cut(leaf) or leaf.inputs[0].ndim != 5:
        return t
    now = leaf.inputs[0]
    batch, keys, times, rows, size = now.shape
    if (batch, keys * times, rows, size) != tuple(t.shape):
        return t
    dims: list[int | None] = list(range(5))  # for each dim of the repetition, the dim of `now`
    while (leaf := producer.get(now.name)) is not None and _broadcasts(leaf):
        now, _, to = leaf.bsym.args
        dims = [to.index(d) if d in to else None for d in dims]
        if now.ndim == 4:
            same = tuple(now.shape) == (batch, keys, rows, size)
            return now if same and dims == [0, 1, None, 2, 3] else t
    return t


def _broadcasts(leaf: Leaf) -> bool:
    return leaf.bsym.sym.id is PrimIDs.BROADCAST_IN_DIM and not is_cut(leaf)


def _groups(query: TensorProxy, key: TensorProxy) -> int:
    """As many groups as leave each enough blocks of rows to keep the device busy: at most the keys, or a multiple."""
    batch, heads, rows, _ = query.shape
    keys = key.shape[1]
    wanted = _CPU_BLOCKS
    if query.device.device_str().startswith("cuda"):
        device = torch.device(query.device.device_str())
        wanted = _WAVES * torch.cuda.get_device_properties(device).multi_processor_count
    heads_wanted = max(1, round(wanted / max(1, batch * ceil(rows / _BLOCK_ROWS))))
    most = max(1, min(_MOST_GROUPS, heads // heads_wanted))
    return min(keys, most) if most < 2 * keys else most // keys * keys


def _in_groups(
    trace: TraceCtx,
    bsym: BoundSymbol,
    operands: Sequence[TensorProxy],
    call: Mapping[str, Any],
    groups: int,
    kernel: str,
) -> list[BoundSymbol]:
    """The bound symbols that compute the same result by groups."""
    out = bsym.output
    batch, heads, rows, size = out.shape
    with tracectx(trace):
        lying = TensorProxy(like=out, shape=(batch, rows, heads, size), requires_grad=out.requires_grad)
        run = attention_in_groups.bind(*operands, call["is_causal"], call["scale"], groups, kernel, output=lying)
        shown = prims.transpose.bind(lying, (0, 2, 1, 3), output=out)
    for new in (run, shown):
        new.tags |= bsym.tags
        new.source_filename, new.source_positions, new.header = (
            bsym.source_filename, bsym.source_positions, bsym.header,
        )  # fmt: skip
    return [run, shown]


def _decision(bsym: BoundSymbol, operands: Sequence[TensorProxy], groups: int, kernel: str) -> Decision:
    query, key, _ = operands
    text = f"attention of {query.shape[1]} heads in {counted(groups, 'group')}"
    if kernel == CUDNN:
        text += " by cuDNN"
    if key.shape[1] < query.shape[1]:
        text += f", {counted(key.shape[1], 'head')} of keys not repeated"
    before = 3 * size_bytes(query)
    return Decision("heads", text, "query, key, value", before, sum(map(size_bytes, operands)), place_of(bsym))
