"""The peak of a plan whose loss the caller computes outside of the compiled function.

The caller's loss is unknown. The usual one, a cross entropy of logits, holds a normalised copy, and in its backward
the gradients of the copy and of the logits: three times the bytes of the outputs' gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy

from thunder_mem.decisions.program import Planned
from thunder_mem.fusion.arrangement import between_halves
from thunder_mem.trace.reading import TraceGraph

__all__ = ["Rank", "bytes_at_loss_outside", "has_loss_inside", "peak_with_loss_outside", "rank_with_loss_outside"]

# While the caller computes a loss and its gradient, so many times the gradient's bytes are alive.
_LOSS_COPIES = 3

Rank = tuple[int, ...]
"""What makes one plan better than another: the smaller, the better."""


def bytes_at_loss_outside(source: TraceGraph) -> int:
    """The bytes alive while the caller computes a loss of the outputs of a joint trace."""
    tangents = {source.storage_of[p.name] for p in _tangents(source)}
    tangent_bytes = sum(source.graph.storages[s].nbytes for s in tangents)
    return between_halves(source.graph) + _LOSS_COPIES * tangent_bytes


def has_loss_inside(source: TraceGraph) -> bool:
    """Whether the backward of a joint trace starts from single numbers."""
    tangents = _tangents(source)
    sizes = [n for p in tangents if isinstance(p, TensorProxy) for n in p.shape]
    return bool(tangents) and all(isinstance(n, int) and n == 1 for n in sizes)


def _tangents(source: TraceGraph) -> list[Proxy]:
    return [p for b in source.bsyms if b.sym == prims.get_grad for p in b.flat_proxy_outs]


def peak_with_loss_outside(planned: Planned) -> int:
    """The larger of a plan's peak and the bytes alive at a loss outside."""
    return max(planned.peak_bytes, bytes_at_loss_outside(planned.source))


def rank_with_loss_outside(reuse: bool) -> Callable[[Planned], Rank]:
    """Ranks plans by their peak with a loss outside, and then by their own.

    Args:
        reuse: whether the peak is the one with all results written over dying values.
    """

    def rank(planned: Planned) -> Rank:
        peak_bytes = planned.plan.overwritten_peak_bytes if reuse else planned.peak_bytes
        return max(peak_bytes, bytes_at_loss_outside(planned.source)), planned.peak_bytes

    return rank
