"""Write results of fused regions and of some kernels over inputs that die there.

The pass works on the fused joint trace in its final order, where every name, its aliases and its last use are known. A
region of `mem_pointwise` may overwrite an input that is dense and whole and not held by the caller, and a kernel of
`kernels/in_place.py` its first argument. Nobody may read the input any more, under any name. `region_reuse.py` says
which result of a region may be written over which input. An executor that aliases by itself (nvFuser) keeps its own
aliasing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import le

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.fusion.arrangement import order_halves
from thunder_mem.kernels.in_place import in_place
from thunder_mem.memory.graph import Graph
from thunder_mem.memory.live_ranges import peaks_of
from thunder_mem.memory.plan import Decision, Plan
from thunder_mem.memory.shared_storages import with_shared_storages
from thunder_mem.regions.inplace_outputs import InplacePlan
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex, new_leaves, region_function
from thunder_mem.regions.region_kernels import region_function_of
from thunder_mem.rewrites.region_reuse import plan_reuse
from thunder_mem.schedule.registry import SortFunction
from thunder_mem.semantics.aliases import FRESH_EXECUTORS, Aliases
from thunder_mem.semantics.op_traits import traits_of
from thunder_mem.trace.reading import TraceGraph, proxies_in, read_trace
from thunder_mem.trace.rebuilding import in_order, rebuilt

__all__ = ["BufferReuse", "reuse_and_sort", "reuse_dying", "with_reuse"]

# Operations whose results, unless views, have their own memory.
_FRESH_EXECUTORS = FRESH_EXECUTORS | {"torch", "sdpa", "python"}


@dataclass(frozen=True)
class BufferReuse:
    """A trace whose regions write results over inputs, and its figures.

    Attributes:
        trace: the new trace.
        results: the number of results written over an input.
        nbytes: their bytes.
        peaks: bytes of the forward and of the backward, including the caller's tensors.
        graph: of the trace.
    """

    trace: TraceCtx
    graph: Graph
    results: int
    nbytes: int
    peaks: tuple[int, int]

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks)


def reuse_dying(trace: TraceCtx, source: TraceGraph | None = None, given: Collection[str] = ()) -> BufferReuse | None:
    """Let regions and kernels write results over inputs that die there.

    Args:
        trace: a joint or plain trace in its final order, fused; `del`s keep their places.
        source: the reading of `trace`, if it exists.
        given: the arguments, by name, that the caller does not keep.

    Returns:
        None if no result can be written over an input.
    """
    source = source or read_trace(trace)
    memory = _Memory(source, trace, given)
    swap: dict[int, BoundSymbol] = {}
    memory_of: dict[int, int] = {}  # per result's storage, the storage that it overwrites
    results = nbytes = 0
    for op, bsym in zip(source.graph.ops, source.bsyms, strict=True):
        if (new := _written_in_place(source, memory, op.index)) is None:
            continue
        swap[id(bsym)] = new
        for name, arg in traits_of(new).shares(new).items():
            memory_of[source.storage_of[name]] = source.storage_of[arg.name]
            results += 1
            nbytes += source.layout.nbytes(arg.name)
    if not swap:
        return None
    bsyms = [swap.get(id(b), b) for b in trace.bound_symbols]
    new_trace = rebuilt(trace, bsyms, "Results take over the memory of what dies")
    graph = with_shared_storages(source.graph, memory_of)
    return BufferReuse(new_trace, graph, results, nbytes, peaks_of(graph))


def with_reuse(plan: Plan, reused: BufferReuse) -> Plan:
    """The plan with the present peaks of its trace.

    Args:
        plan: the emitted plan.
        reused: its trace after reuse.
    """
    how = f"{reused.results} results written over values that die, {reused.nbytes:,} bytes"
    decision = Decision("reuse", how, "peak", plan.candidate.peak_bytes, reused.peak_bytes)
    return plan.after(decision, peaks=reused.peaks)


def reuse_and_sort(source: TraceGraph, trace: TraceCtx, sort: str | SortFunction) -> BufferReuse | None:
    """`reuse_dying`, and once more in the order that is best with reuse, if that lowers the peak.

    A region that writes over its inputs needs less memory than the sort assumed, so other steps may move.
    A sort other than "auto" is the user's, and stays. None if nothing is reused, or if either half would peak
    above `trace`.

    Args:
        source: the reading of `trace`.
        trace: a joint or plain trace in its final order, fused, without `del`s.
        sort: the sort of the trace.

    Raises:
        GraphError: from the sort.
    """
    if not any(region_function_of(b) or in_place(b) for b in trace.bound_symbols):
        return None
    peaks = peaks_of(source.graph)
    found = [reused for reused in _reused_and_sorted(source, trace, sort) if all(map(le, reused.peaks, peaks))]
    return min(found, key=lambda reused: reused.peak_bytes, default=None)


def _reused_and_sorted(source: TraceGraph, trace: TraceCtx, sort: str | SortFunction) -> Iterator[BufferReuse]:
    if (first := reuse_dying(trace, source)) is None:
        return
    yield first
    if sort != "auto":
        return
    order, _ = order_halves(first.graph, sort)
    if list(order) == sorted(order):
        return
    sorted_trace = in_order(trace, source, order, "Sorted for results that take over memory")
    if (second := reuse_dying(sorted_trace, read_trace(sorted_trace, earlier=source))) is not None:
        yield second


class _Memory:
    """Per class of names that may share memory: its last use, and whether it may be overwritten."""

    def __init__(self, source: TraceGraph, trace: TraceCtx, given: Collection[str]) -> None:
        self._aliases = Aliases(source.bsyms)
        self._last: dict[str, int] = {}
        self._forward: set[str] = set()  # classes with a name that the forward made
        self._kept: set[str] = set()
        kept = {p.name for p in proxies_in((trace.args, trace.kwargs))}
        kept |= {p.name for b in source.prefix for p in b.flat_proxy_outs}
        kept = kept.difference(given) | source.returned_names
        for i, (op, b, effects) in enumerate(zip(source.graph.ops, source.bsyms, source.effects, strict=True)):
            outs, names = _names(b.flat_proxy_outs), _names((*b.flat_proxy_args, *b.flat_proxy_outs))
            for name in names:
                self._last[self._aliases(name)] = i
            if not op.backward:
                self._forward.update(map(self._aliases, outs))
            kept.update(effects.writes)
            if effects.barrier or any(c.startswith("communication") for c in effects.channels):
                kept |= names
            if b.sym == prims.get_grad or not _is_fresh(b):
                kept |= outs
        self._kept = {self._aliases(name) for name in kept}

    def __call__(self, name: str) -> str:
        return self._aliases(name)

    def dies(self, name: str, index: int) -> bool:
        """Whether no op reads it after op `index`, and nobody else holds it."""
        memory = self._aliases(name)
        return memory not in self._kept and self._last.get(memory) == index

    def saved(self, name: str) -> bool:
        """Whether the forward made it."""
        return self._aliases(name) in self._forward


def _written_in_place(source: TraceGraph, memory: _Memory, index: int) -> BoundSymbol | None:
    """The operation with results over inputs that die at it; None if it can have none."""
    bsym = source.bsyms[index]
    if (over := in_place(bsym)) is not None:
        return over if _may_overwrite_first(source, memory, index) else None
    if region_function_of(bsym) is None:
        return None
    reuse = _reuse(source, memory, index)
    return _with_reuse(bsym, reuse) if reuse is not None else None


def _may_overwrite_first(source: TraceGraph, memory: _Memory, index: int) -> bool:
    """Whether an operation's result may take the memory of its first argument, which has the result's form."""
    bsym = source.bsyms[index]
    first, result = bsym.args[0], bsym.output
    saved = source.graph.ops[index].backward and memory.saved(first.name)
    alone = [memory(p.name) for p in bsym.flat_proxy_args].count(memory(first.name)) == 1
    alike = first.dtype == result.dtype and first.shape == result.shape
    return memory.dies(first.name, index) and not saved and alone and alike and source.layout.is_plain(first.name)


def _reuse(source: TraceGraph, memory: _Memory, index: int) -> InplacePlan | None:
    bsym = source.bsyms[index]
    inputs, outputs = list(bsym.args), list(bsym.output)
    classes = [memory(p.name) for p in (*inputs, *outputs)]
    alone = [classes.count(c) == 1 for c in classes]
    offered = {
        i: source.graph.ops[index].backward and memory.saved(p.name)
        for i, p in enumerate(inputs)
        if alone[i] and isinstance(p, TensorProxy) and memory.dies(p.name, index) and source.layout.is_plain(p.name)
    }
    if not offered:
        return None
    wanted = [
        o
        for o, p in enumerate(outputs)
        if alone[len(inputs) + o] and isinstance(p, TensorProxy) and source.layout.is_plain(p.name)
    ]
    if not wanted:
        return None
    return plan_reuse(new_leaves(bsym.subsymbols, inputs), inputs, outputs, offered, wanted)


def _with_reuse(bsym: BoundSymbol, reuse: InplacePlan) -> BoundSymbol:
    inputs, outputs = list(bsym.args), list(bsym.output)
    function = region_function(bsym.subsymbols, inputs, outputs, reuse)
    new = mem_pointwise_ex.register_temporary_operation(
        bsym.sym.name, function, inputs=inputs, outputs=outputs, bsyms=list(bsym.subsymbols)
    )
    told = ", ".join(f"{outputs[t.output].name} over {inputs[t.input].name}" for t in reuse.takes)
    return new.from_bsym(tags=bsym.tags, header=f"written in place: {told}")


def _is_fresh(bsym: BoundSymbol) -> bool:
    """Whether its results are views of its operands, or new memory."""
    if bsym.sym.is_fusion:
        return region_function_of(bsym) is not None
    if bsym.sym.executor is not None:
        return str(bsym.sym.executor.name) in _FRESH_EXECUTORS
    return isinstance(bsym.sym.id, PrimIDs) or bool(bsym.subsymbols)


def _names(proxies: Sequence) -> set[str]:
    return {p.name for p in proxies if isinstance(p, TensorProxy | FutureTensorProxy)}
