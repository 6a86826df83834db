"""What a plan takes by the roofline: every region one kernel, everything else its own (`cost.py`)."""

from __future__ import annotations

from thunder.core.proxies import Proxy

from thunder_mem.cost import DeviceModel, cost_s, region_cost_s
from thunder_mem.plan import Plan
from thunder_mem.trace_graph import TraceGraph

__all__ = ["plan_seconds"]


def plan_seconds(plan: Plan, source: TraceGraph, device: DeviceModel) -> float:
    """Seconds of a forward and a backward, one kernel after the other.

    Args:
        plan: of `source`.
        source: the joint trace that it is for, with what is repeated in it.
        device: whose rates count.
    """
    wanted_by: dict[str, set[int]] = {}  # proxy name -> the ops that take it
    for op, bsym in enumerate(source.bsyms):
        for p in bsym.flat_proxy_args:
            wanted_by.setdefault(p.name, set()).add(op)
    # A copy serves its own region, so only who runs an op as its own hands its results on.
    total = 0.0
    for region in plan.regions:
        bsyms = [source.bsyms[op] for op in region.ops]
        if region.executor is None:
            total += sum(cost_s(b, device) for b in bsyms)
            continue
        inside = frozenset(region.ops)
        made = {p.name for b in bsyms for p in b.flat_proxy_outs}
        inputs: dict[str, Proxy] = {p.name: p for b in bsyms for p in b.flat_proxy_args if p.name not in made}
        own = [source.bsyms[op] for op in region.ops if op not in region.copies]
        outputs: dict[str, Proxy] = {
            p.name: p
            for b in own
            for p in b.flat_proxy_outs
            if p.name in source.pinned or not wanted_by.get(p.name, set()) <= inside
        }
        total += region_cost_s(bsyms, inputs.values(), outputs.values(), device)
    return total
