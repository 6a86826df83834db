"""The bound symbols that communicate: those that start a collective, and those that wait for one.

Thunder splits every collective of `ddp` and `fsdp` in two: a start that returns a future at once, and
a wait that turns the future into a tensor. A blocking collective is a start whose result is a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.distributed.prims import PrimIDs

from thunder_mem.semantics.op_traits import traits_of

__all__ = [
    "START_NAMES",
    "awaited_futures",
    "group_inside",
    "group_of",
    "is_gather",
    "is_reduction",
    "overwritten_by",
    "starts",
]

_STARTS = {
    PrimIDs.ALL_GATHER, PrimIDs.ALL_REDUCE, PrimIDs.BROADCAST, PrimIDs.REDUCE_SCATTER, PrimIDs.SYNCHRONIZE,
    PrimIDs.SYNCHRONIZE_TENSOR_PARALLEL_INPUT, PrimIDs.SYNCHRONIZE_TENSOR_PARALLEL_OUTPUT,
}  # fmt: skip
_KINDS = ("all_gather", "all_reduce", "broadcast", "reduce_scatter", "synchronize")
START_NAMES = {
    *_KINDS,
    *(f"torch_{kind}_prim_impl" for kind in _KINDS),
    "sum_over_ranks",
    "log_sum_over_ranks",
}


def starts(bsym: BoundSymbol) -> bool:
    """Whether it starts a collective itself, without regard to a composite's subsymbols."""
    if bsym.sym.id in _STARTS or bsym.sym.name in START_NAMES or group_inside(bsym) is not None:
        return True
    return any(isinstance(p, FutureTensorProxy) for p in bsym.flat_proxy_outs)


def awaited_futures(bsym: BoundSymbol) -> Iterator[str]:
    """The names of the futures that it takes and waits for."""
    return (p.name for p in bsym.flat_proxy_args if isinstance(p, FutureTensorProxy))


def is_gather(bsym: BoundSymbol) -> bool:
    """Whether it starts a gather of shards, such as those of a parameter."""
    return bsym.sym.id is PrimIDs.ALL_GATHER or bsym.sym.name in ("all_gather", "torch_all_gather_prim_impl")


def is_reduction(bsym: BoundSymbol) -> bool:
    """Whether it starts a sum over ranks, such as that of a gradient."""
    name = bsym.sym.name.removeprefix("torch_").removesuffix("_prim_impl")
    return bsym.sym.id in (PrimIDs.ALL_REDUCE, PrimIDs.REDUCE_SCATTER) or name in ("all_reduce", "reduce_scatter")


def group_of(bsym: BoundSymbol) -> torch.distributed.ProcessGroup | None:
    """The process group that it names, if any."""
    values = (*bsym.args, *bsym.kwargs.values())
    return next((v for v in values if isinstance(v, torch.distributed.ProcessGroup)), group_inside(bsym))


def group_inside(bsym: BoundSymbol) -> torch.distributed.ProcessGroup | None:
    """The process group that a chunk loop's blocks communicate with, chunk by chunk."""
    return traits_of(bsym).group(bsym)


def overwritten_by(bsym: BoundSymbol) -> TensorProxy | None:
    """The tensor that a collective reduces in place: the argument of `all_reduce(..., skip_clone=True)`."""
    if bsym.sym.id is not PrimIDs.ALL_REDUCE and bsym.sym.name not in ("all_reduce", "torch_all_reduce_prim_impl"):
        return None
    skip_clone = bsym.kwargs.get("skip_clone", bsym.args[4] if len(bsym.args) > 4 else False)
    return bsym.args[0] if skip_clone else None
