"""Write the gradient of a block's logits over the logits, so that no other value of their size exists.

So a block may be large at no cost in memory, and the host starts few kernels. A block's program owns its logits, so a
region may write their gradient over them, as over other dying values (`rewrites/buffer_reuse.py`). The bytes and
kernels of a block are read from its final trace, as for a whole program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from operator import attrgetter

import torch
from thunder.core.proxies import TensorProxy

from thunder_mem.chunk_loop.body import Body
from thunder_mem.costs.plan_time import final_seconds
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.loop_body.sums_in_block import adds_to_sum
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.regions.region_kernels import kernel_figures
from thunder_mem.rewrites.buffer_reuse import reuse_dying
from thunder_mem.semantics.kernel_figures import KernelFigures
from thunder_mem.semantics.layout import is_view
from thunder_mem.trace.reading import TraceGraph, read_trace

__all__ = ["with_gradients_over_logits"]


def with_gradients_over_logits(body: Body, wanted: Sequence[bool]) -> Body:
    """The block with gradients written over its logits, if its regions allow that, and with its figures by layout.

    Args:
        body: a block; it owns its logits, whose content is undefined afterwards.
        wanted: for each of the block's logits, whether it returns their gradient.
    """
    names = [p.name for p in body.trace.args[: len(wanted)]]
    reused = reuse_dying(body.trace, given=names)
    if reused is not None:
        source = read_trace(reused.trace)
        over = _own_gradients(body, source, names, wanted)
        if over is not None:
            fn = reused.trace.python_callable(include_decorators=False)
            return _counted(replace(body, fn=fn, trace=reused.trace, over=over), source)
    return _counted(body, read_trace(body.trace))


def _own_gradients(
    body: Body, source: TraceGraph, names: Sequence[str], wanted: Sequence[bool]
) -> tuple[int, ...] | None:
    """The numbers of the logits whose gradients lie in their memory; None if any other result does."""
    memory = [source.storage_of[name] for name in names]
    own = dict(zip(count(body.outputs), (i for i, gradient in enumerate(wanted) if gradient), strict=False))
    over = []
    for position, result in enumerate(source.result.args[0]):
        storage = source.storage_of[result.name] if isinstance(result, TensorProxy) else None
        if storage in memory:
            if position not in own or memory[own[position]] != storage:
                return None
            over.append(own[position])
    return tuple(over)


def _counted(body: Body, source: TraceGraph) -> Body:
    """The block with the bytes, the kernels and the modelled time of its trace."""
    storages = source.graph.storages
    held_bytes = sum(s.nbytes for s in storages if s.held)
    results = {source.storage_of[p.name] for p in source.result.args[0] if isinstance(p, TensorProxy)}
    given = {source.storage_of.get(p.name) for p in body.trace.args}
    adding_bytes = sum(storages[s].nbytes for s in results - given)
    timeline = price_order(source.graph)
    for bsym, live_bytes in zip(source.bsyms, timeline.live_bytes, strict=True):
        if adds_to_sum(bsym):
            adding_bytes = max(adding_bytes, live_bytes - held_bytes)
    device = device_model_of(torch.device(max(storages, key=attrgetter("nbytes")).device)).without_launches
    launches, kernels_s = 0, 0.0
    for bsym in source.bsyms:
        kernels_s += final_seconds(bsym, source, device)
        figures = kernel_figures(bsym, source.layout)
        launches += figures.launches if isinstance(figures, KernelFigures) else not is_view(bsym)
    peak_bytes = timeline.peak_bytes - held_bytes
    return replace(body, peak_bytes=peak_bytes, adding_bytes=adding_bytes, launches=launches, kernels_s=kernels_s)
