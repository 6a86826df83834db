"""Sums of gradients in the weights' own 16-bit dtype, where a budget has no room for float32.

A float32 sum of the gradient of a (V, D) weight takes 2VD bytes more than the gradient itself. On a joint trace, loops
whose dtype the user did not set get the narrower one. So do the values passed from their forward to their backward.
"""

from __future__ import annotations

from dataclasses import replace

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.chunk_loop.price import with_block_calls
from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of, makes_gradients, saved_proxies
from thunder_mem.loop_sizes.tile_price import priced
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["narrow_sums"]


def narrow_sums(trace: TraceCtx, only: ChunkLoop | None = None) -> TraceCtx | None:
    """The trace with sums in the inputs' own dtypes where the user did not set float32, or None if there are none.

    Args:
        trace: a joint trace, before it is split into forward and backward.
        only: the one loop to narrow; None for all.
    """
    swap: dict[int, ChunkLoop] = {}
    for loop in map(loop_of, filter(is_chunk_loop, trace.bound_symbols)):
        plan = loop.plan
        own = tuple(plan.inputs[i].dtype for i in plan.grads)
        wanted = only is None or loop is only
        if wanted and not plan.sums_asked and own != plan.grad_dtypes and id(loop) not in swap:
            why = f"{plan.why}; gradients add up in the weights' own dtype, as the budget has no room for float32"
            priced_again = priced if plan.is_stretch else with_block_calls
            narrow = priced_again(replace(plan, grad_dtypes=own, why=why), loop.forward, loop.backward)
            swap[id(loop)] = loop.with_plan(narrow)
    if not swap:
        return None
    saved: dict[int, tuple[TensorProxy, ...]] = {}
    why = "Gradients of loss heads added up in the weights' own dtype"
    return rebuilt(trace, lambda: [_narrowed(b, swap, saved) for b in trace.bound_symbols], why)


def _narrowed(bsym: BoundSymbol, swap: dict[int, ChunkLoop], saved: dict[int, tuple[TensorProxy, ...]]) -> BoundSymbol:
    if not is_chunk_loop(bsym) or id(loop_of(bsym)) not in swap:
        return bsym
    key = id(loop_of(bsym))
    loop = swap[key]
    changes = {"args": (loop, *bsym.args[1:]), "_object_ctx": {}}
    if makes_gradients(bsym):
        saved[key] = tuple(saved_proxies(loop.plan))
        changes["output"] = (*bsym.output[: len(loop.plan.outputs)], *saved[key])
    elif bsym.sym.name == "chunk_loop_finish":
        changes["args"] = (loop, bsym.args[1], *saved[key])
    return bsym.from_bsym(**changes)
