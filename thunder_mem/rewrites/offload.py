"""Move chosen forward values to the host until the backward needs them.

`offload_obstacle` alone decides which values must stay; `offload_in_backward` rewrites a joint trace to move chosen
values. `transfer_scheduling.py` later decides when copies run: here each value is fetched just before its first use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from thunder.core.devices import cpu
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, get_tracectx

from thunder_mem.runtime.host_transfers import offload, offload_wait, prefetch, prefetch_wait
from thunder_mem.trace.reading import BACKWARD, TraceGraph, read_trace
from thunder_mem.trace.rebuilding import with_body
from thunder_mem.trace.renaming import named, renamed

__all__ = ["offload_in_backward", "offload_obstacle", "offloading"]


def offload_obstacle(source: TraceGraph, s: int, least_bytes: int = 0) -> str | None:
    """The reason why a storage must not be offloaded, in words; None if it may be.

    Args:
        source: a joint trace.
        s: index of the storage.
        least_bytes: smaller storages are not worth a copy.
    """
    graph = source.graph
    maker, storage = graph.allocator[s], graph.storages[s]
    if maker is None or graph.ops[maker].backward:
        return "the forward does not make it"
    if storage.held or s in graph.outputs:
        return "the caller holds it"
    if s in source.overwritten:
        return "it is overwritten"
    if storage.nbytes < max(1, least_bytes):
        return f"its {storage.nbytes:,} bytes are too few"
    if _base(source, s) is None:
        return "no tensor shows all of it"
    if _handed_through(source) is None:
        return "the program has no argument that stays as it is"
    return None


def _base(source: TraceGraph, s: int) -> TensorProxy | None:
    """The only result that shows a storage where it is made, if it shows all of it."""
    maker = source.graph.allocator[s]
    outs = source.bsyms[maker].flat_proxy_outs if maker is not None else ()
    shown = [p for p in outs if source.storage_of.get(p.name) == s]
    if len(shown) == 1 and type(shown[0]) is TensorProxy and source.layout.is_dense(shown[0].name):
        return shown[0]
    return None


def _handed_through(source: TraceGraph) -> TensorProxy | None:
    """An argument of the forward that nobody overwrites; see `offload_exec.offload_wait`."""
    returned = source.result.args[0] if source.result.args else None
    if not isinstance(returned, dict) or "flat_args" not in returned:
        return None
    for p in returned["flat_args"]:
        given = type(p) is TensorProxy and p.name not in source.producer_of and p.name in source.storage_of
        if given and source.storage_of[p.name] not in source.overwritten:
            return p
    return None


def offload_in_backward(source: TraceGraph, trace: TraceCtx, storages: Collection[int]) -> TraceCtx:
    """The joint trace in which the backward fetches `storages` from the host instead of receiving them.

    Args:
        source: the reading of `trace`.
        trace: a joint trace with all its recomputation.
        storages: of `source.graph`; none that `offload_obstacle` refuses.
    """
    moves = _Moves(source, storages)
    return with_body(trace, source, moves.body, "Offload what the backward fetches again")


def offloading(
    before: TraceGraph, source: TraceGraph, trace: TraceCtx, storages: Collection[int]
) -> tuple[TraceCtx, TraceGraph]:
    """`offload_in_backward` for storages of a trace before recomputation; also returns the new reading.

    Args:
        before: the reading of that trace.
        source: the reading of `trace`.
        trace: the joint trace now.
        storages: of `before.graph`.
    """
    names = {before.graph.storages[s].name for s in storages}
    graph = source.graph
    wanted = {s for op in graph.ops if op.backward for s in op.reads if graph.storages[s].name in names}
    new = offload_in_backward(source, trace, [s for s in sorted(wanted) if offload_obstacle(source, s) is None])
    return new, read_trace(new, earlier=source)


class _Moves:
    """The trace's body with copies to the host and back. The views of fetched values are made anew."""

    def __init__(self, source: TraceGraph, storages: Collection[int]) -> None:
        self.source = source
        self.base: dict[int, TensorProxy] = {}
        self.last: dict[int, list[int]] = {}  # per op of the forward, the values that it uses last
        for s in sorted(storages):
            base = _base(source, s)
            assert base is not None, offload_obstacle(source, s)
            self.base[s] = base
            self.last.setdefault(
                max(op for op in source.graph.users[s] if not source.graph.ops[op].backward), []
            ).append(s)
        self.handed_through = _handed_through(source)
        self.host: dict[int, TensorProxy] = {}
        self.fetched: dict[str, Proxy] = {}  # the backward's replacement of the forward's value
        self.out: list[BoundSymbol] = []

    def body(self) -> list[BoundSymbol]:
        graph = self.source.graph
        for op, bsym in zip(graph.ops, self.source.bsyms, strict=True):
            if op.backward:
                self._fetch(self._moved(bsym.flat_proxy_args))
                self.out.append(renamed(bsym, self.fetched, outputs=False))
                continue
            self.out.append(bsym)
            for s in op.allocates:
                if s in self.base:
                    self._start(s)
            for s in self.last.get(op.index, ()):
                self._end(s)
        return self.out

    def _start(self, s: int) -> None:
        host = self._on_host(self.base[s], "going")
        self.out.append(offload.bind(self.base[s], output=host))
        self.host[s] = host

    def _end(self, s: int) -> None:
        host = self._on_host(self.base[s], "host")
        through = self.handed_through
        self.out.append(offload_wait.bind(self.host[s], self.base[s], through, output=(host, through)))
        self.host[s] = host

    def _on_host(self, t: TensorProxy, prefix: str) -> TensorProxy:
        name, count = f"{prefix}_{t.name}", 0
        while get_tracectx().has_name(name):  # of an earlier attempt
            name, count = f"{prefix}_{t.name}_{count}", count + 1
        return TensorProxy(name, shape=t.shape, device=cpu, dtype=t.dtype, requires_grad=False)

    def _moved(self, proxies: Iterable[Proxy]) -> list[Proxy]:
        """The offloaded values among the forward's results."""
        made = (p for p in proxies if self.source.storage_of.get(p.name) in self.base)
        return [p for p in made if not self.source.graph.ops[self.source.producer_of[p.name]].backward]

    def _fetch(self, wanted: Sequence[Proxy]) -> None:
        """Append the missing ops that make `wanted`: a copy from the host, and views of it."""
        for p in wanted:
            if p.name in self.fetched:
                continue
            op = self.source.producer_of[p.name]
            bsym = self.source.bsyms[op]
            s = self.source.storage_of[p.name]
            if op == self.source.graph.allocator[s]:
                self.fetched[p.name] = self._prefetched(s)
                continue
            self._fetch(self._moved(bsym.flat_proxy_args))
            taken = {a.name for a in bsym.flat_proxy_args}
            new = {o.name: named(o, f"bw_{o.name}") for o in bsym.flat_proxy_outs if o.name not in taken}
            copy = renamed(bsym, self.fetched | new)
            self.out.append(copy.from_bsym(tags=copy.tags | {BACKWARD}))
            self.fetched |= new

    def _prefetched(self, s: int) -> Proxy:
        base = self.base[s]
        coming, there = named(base, f"coming_{base.name}"), named(base, f"bw_{base.name}")
        self.out.append(prefetch.bind(self.host[s], base.device.device_str(), output=coming))
        self.out.append(prefetch_wait.bind(coming, output=there))
        return there
