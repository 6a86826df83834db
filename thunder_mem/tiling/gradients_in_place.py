"""On a GPU, the gradient of a block's logits takes the place of the logits: nothing else of their size exists.

So a block may be as large as the chunk at no cost in memory, and the host starts few kernels. A block's program is
handed its logits for good, so that a region may write their gradient over them, as regions do with what dies
(`rewrites/buffer_reuse.py`). What a block holds and starts is read from its final trace, as for a whole program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from thunder.core.proxies import TensorProxy

from thunder_mem.chunk_loop.body import Body
from thunder_mem.memory.kernel_figures import KernelFigures
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.regions.region_kernels import kernel_figures
from thunder_mem.rewrites.buffer_reuse import reuse_dying
from thunder_mem.trace.layout import is_view
from thunder_mem.trace.reading import TraceGraph, read_trace

__all__ = ["with_gradients_over_logits"]


def with_gradients_over_logits(body: Body, wanted: Sequence[bool]) -> Body:
    """The block with its logits' gradients over them where its regions allow that, and with what it takes, by layouts.

    Args:
        body: a block; afterwards its logits belong to it, and may hold anything.
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
    """Whose gradients lie in their logits' memory, by number; None if any other result lies in that of logits."""
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
    """With the bytes and the kernels of its trace."""
    held_bytes = sum(s.nbytes for s in source.graph.storages if s.held)
    launches = 0
    for bsym in source.bsyms:
        figures = kernel_figures(bsym, source.layout)
        launches += figures.launches if isinstance(figures, KernelFigures) else not is_view(bsym)
    return replace(body, peak_bytes=price_order(source.graph).peak_bytes - held_bytes, launches=launches)
