"""The time of a collective on the link between ranks, and the part of it that an order hides.

A collective over n ranks moves (n - 1) / n of the gathered or reduced tensor through every rank's link, and an
all-reduce moves twice that (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005). Collectives run one after the other beside the computation; a wait stops the computation until its
collective has ended.

The figures come from data sheets for GPUs in one machine. They suffice to compare orders, not to predict a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_mem.costs.roofline import cost_s, tensor_bytes
from thunder_mem.memory.device_models import DeviceModel
from thunder_mem.semantics.collectives import (
    awaited_futures,
    group_inside,
    group_of,
    is_gather,
    starts,
)
from thunder_mem.trace.reading import TraceGraph

__all__ = ["Collective", "collectives_of", "computing_seconds", "exposed_s", "transfer_s"]

# GB/s in one direction: NVLink where a GPU has it, else PCIe.
_GB_PER_S = {
    "V100-16GB": 150, "V100-32GB": 150, "T4": 16, "RTX3090": 32, "RTX4090": 32, "A10G": 32, "L4": 32, "L40S": 32,
    "A100-40GB": 300, "A100-80GB": 300, "H100-80GB": 450, "H200-141GB": 450, "B200-180GB": 900, "cpu": 1,
}  # fmt: skip
_LATENCY_S = 20e-6


@dataclass(frozen=True)
class Collective:
    """One collective of a graph.

    Attributes:
        start: the op that starts it.
        wait: the op that waits for it; the start itself if that blocks, None if no op waits.
        seconds: its time alone.
        gather: it gathers shards.
    """

    start: int
    wait: int | None
    seconds: float
    gather: bool


def transfer_s(bsym: BoundSymbol, device: DeviceModel) -> float:
    """Seconds of a collective alone; a loop that communicates a few numbers a row takes its latencies."""
    group = group_of(bsym)
    if group_inside(bsym) is not None:
        return _LATENCY_S * -(-bsym.args[0].plan.n // bsym.args[0].plan.block_rows)
    ranks = group.size() if group is not None else 2
    tensors = [
        p for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs) if isinstance(p, TensorProxy | FutureTensorProxy)
    ]
    whole = max((tensor_bytes(p) for p in tensors), default=0)
    passes = 2 if "all_reduce" in bsym.sym.name else 1
    return passes * whole * (ranks - 1) / ranks / (_GB_PER_S.get(device.name, 100) * 1e9) + _LATENCY_S


def collectives_of(source: TraceGraph, device: DeviceModel) -> list[Collective]:
    """A trace's collectives in the order in which they start."""
    waits = {future: op for op, bsym in enumerate(source.bsyms) for future in awaited_futures(bsym)}
    found = []
    for op, bsym in enumerate(source.bsyms):
        if starts(bsym):
            futures = [p.name for p in bsym.flat_proxy_outs if isinstance(p, FutureTensorProxy)]
            wait = waits.get(futures[0]) if futures else op
            found.append(Collective(op, wait, transfer_s(bsym, device), is_gather(bsym)))
    return found


def computing_seconds(source: TraceGraph, device: DeviceModel) -> list[float]:
    """Seconds that each op computes; 0 for ops that communicate."""
    return [0.0 if _only_communicates(b) else cost_s(b, device) for b in source.bsyms]


def _only_communicates(bsym: BoundSymbol) -> bool:
    return group_inside(bsym) is None and (starts(bsym) or any(True for _ in awaited_futures(bsym)))


def exposed_s(order: Sequence[int], seconds: Sequence[float], collectives: Sequence[Collective]) -> float:
    """Seconds for which the computation waits for collectives in this order.

    Example:
        >>> gather = Collective(start=0, wait=2, seconds=3.0, gather=True)
        >>> exposed_s([0, 1, 2, 3], [0.0, 2.0, 0.0, 1.0], [gather])
        1.0
    """
    by_start = {c.start: c for c in collectives}
    by_wait: Mapping[int, Collective] = {c.wait: c for c in collectives if c.wait is not None}
    now = link_free = still = 0.0
    ends: dict[int, float] = {}
    for op in order:
        if (collective := by_start.get(op)) is not None:
            link_free = ends[op] = max(now, link_free) + collective.seconds
        if (collective := by_wait.get(op)) is not None and ends[collective.start] > now:
            still += ends[collective.start] - now
            now = ends[collective.start]
        now += seconds[op]
    return still + max(0.0, link_free - now)
