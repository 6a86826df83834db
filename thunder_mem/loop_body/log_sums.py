"""The gradient of a log-sum-exp over rows, one chunk at a time.

Each chunk has a log-sum-exp of its own, and another log-sum-exp combines the chunks. The gradient, exp(a - whole),
needs the value over all rows. The forward computes that value, and in the backward every block reads it in place of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy

from thunder_mem.loop_body.region import Region

__all__ = ["share_of_log_sum", "unpack_log_sums"]


def unpack_log_sums(region: Region) -> dict[str, TensorProxy]:
    """New arguments of the traced block for whole values, by the names of these outputs."""
    made: dict[str, TensorProxy] = {}
    for value in region.differentiable:
        if value.sharding.partial == "logsumexp":
            out = value.proxy
            p = TensorProxy(
                name=f"log_sum{len(made)}", shape=out.shape, device=out.device, dtype=out.dtype, requires_grad=False
            )
            prims.unpack_trivial(p, name=p.name)
            made[out.name] = p
    return made


def share_of_log_sum(
    whole: TensorProxy, a: TensorProxy, dim: int | Sequence[int], keepdim: bool = False
) -> TensorProxy:
    """The sum of exp(a - whole) over some of the rows `a`: its gradient in `a` is that of the log-sum-exp over
    all rows.
    """
    dims = {d % a.ndim for d in (dim if isinstance(dim, Sequence) else (dim,))}
    whole = ltorch.reshape(whole, tuple(1 if d in dims else s for d, s in enumerate(a.shape)))
    infinite = ltorch.eq(ltorch.abs(whole), float("inf"))  # for a class masked in all rows
    shift = ltorch.where(infinite, 0.0, whole)
    return ltorch.sum(ltorch.exp(ltorch.sub(a, shift)), tuple(sorted(dims)), keepdim)
