"""The time of a plan by the roofline: one kernel for every region and every other op (`roofline.py`)."""

from __future__ import annotations

from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors.torchex import ex as torch_ex

from thunder_mem.costs.roofline import bound_symbol_bytes, cost_s, is_free, kernels_cost_s, region_cost_s
from thunder_mem.memory.device_models import DeviceModel
from thunder_mem.memory.plan import Plan
from thunder_mem.semantics.kernel_figures import KernelFigures
from thunder_mem.semantics.op_traits import traits_of
from thunder_mem.trace.reading import TraceGraph, read_trace

__all__ = ["bound_symbol_seconds", "final_seconds", "overlapped_seconds", "plan_seconds", "trace_seconds"]


def plan_seconds(plan: Plan, source: TraceGraph, device: DeviceModel) -> float:
    """Seconds of a forward and a backward, one kernel after the other.

    Args:
        plan: of `source`.
        source: the joint trace of the plan, with its recomputation.
        device: the device with the rates.
    """
    wanted_by: dict[str, set[int]] = {}  # proxy name -> the ops that take it
    for op, bsym in enumerate(source.bsyms):
        for p in bsym.flat_proxy_args:
            wanted_by.setdefault(p.name, set()).add(op)
    # A copy serves only its own region; the original op passes its results on.
    total = 0.0
    for region in plan.regions:
        bsyms = [source.bsyms[op] for op in region.ops]
        if region.executor is None:
            total += sum(bound_symbol_seconds(b, device) for b in bsyms)
            continue
        inside = frozenset(region.ops)
        made = {p.name for b in bsyms for p in b.flat_proxy_outs}
        inputs: dict[str, Proxy] = {p.name: p for b in bsyms for p in b.flat_proxy_args if p.name not in made}
        own = [source.bsyms[op] for op in region.ops if op not in region.copies]
        outputs: dict[str, Proxy] = {
            p.name: p
            for b in own
            for p in b.flat_proxy_outs
            if p.name in source.returned_names or not wanted_by.get(p.name, set()) <= inside
        }
        total += region_cost_s(bsyms, inputs.values(), outputs.values(), device)
    return total


def trace_seconds(trace: TraceCtx, device: DeviceModel) -> float:
    """Seconds of any final trace by the same count: one kernel for every bound symbol.

    But a region of `mem_pointwise` on a GPU counts as the kernels that Inductor writes for it, with their traffic.
    """
    return _serial_seconds(read_trace(trace), device)


def _serial_seconds(source: TraceGraph, device: DeviceModel) -> float:
    return sum(final_seconds(bsym, source, device) for bsym in source.bsyms)


def final_seconds(bsym: BoundSymbol, source: TraceGraph, device: DeviceModel) -> float:
    """Seconds of one bound symbol of a final trace, read as `source`, by its region's kernels if they are known."""
    figures = traits_of(bsym).kernels(bsym, source.layout)
    if isinstance(figures, KernelFigures):
        return kernels_cost_s([bsym], figures.moved_bytes, figures.launches, device)
    if _is_one_kernel(bsym):
        return kernels_cost_s([bsym], bound_symbol_bytes(bsym), 1, device)
    return bound_symbol_seconds(bsym, device)


def _is_one_kernel(bsym: BoundSymbol) -> bool:
    """Whether Thunder still has to claim a composite, which one kernel of PyTorch's runs whole."""
    unclaimed = bsym.subsymbols and bsym.sym.executor is None and not bsym.sym.is_fusion
    return bool(unclaimed) and not is_free(bsym) and torch_ex.can_execute(bsym)


def overlapped_seconds(source: TraceGraph, device: DeviceModel) -> float:
    """Seconds of any final trace where the host starts kernels ahead of the device; on a CPU one after the other.

    A GPU waits for the host only where kernels are shorter than their launches, so many small kernels between large
    ones are free.
    """
    instant = device.without_launches
    if instant == device:
        return _serial_seconds(source, device)
    host_s = device_s = 0.0
    for bsym in source.bsyms:
        serial_s, busy_s = (final_seconds(bsym, source, model) for model in (device, instant))
        if serial_s:
            begins_s, host_s = max(device_s, host_s + device.launch_s), host_s + serial_s - busy_s
            device_s = max(begins_s + busy_s, host_s)
    return device_s


def bound_symbol_seconds(bsym: BoundSymbol, device: DeviceModel) -> float:
    """Seconds of one bound symbol of a final trace; none of a copy to the host or back, which runs beside."""
    traits = traits_of(bsym)
    if traits.transfers:
        return 0.0
    declared = traits.seconds(bsym, device)
    return cost_s(bsym, device) if declared is None else declared
