"""Read a Thunder trace into a `Graph`.

The trace may be a plain one, or the joint trace of forward and backward on which fusion runs. Unpacking, comments and
the return stay outside the graph and keep their places.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

from thunder.core.prims import PrimIDs
from thunder.core.proxies import FutureTensorProxy, Proxy, ProxyTag, TensorProxy
from thunder.core.pytree import tree_flatten_with_dataclass, tree_iter
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, TraceTag
from torch.utils._python_dispatch import _disable_current_modes

from thunder_mem.memory.device_bytes import block_bytes, host_bytes
from thunder_mem.memory.graph import Graph, Op, Storage, make_graph
from thunder_mem.semantics.aliases import Aliases
from thunder_mem.semantics.effects import WRITTEN_ELSEWHERE, Effects, effects_of
from thunder_mem.semantics.kernel_scratch import (
    attention_copies_bytes,
    empty_outputs,
    estimated_scratch_bytes,
    region_scratch_bytes,
    scratch_follows_layout,
)
from thunder_mem.semantics.layout import Layout, dense_bytes
from thunder_mem.semantics.op_traits import traits_of
from thunder_mem.trace.missing_tangents import takes_none
from thunder_mem.trace.origins import symbol_name

__all__ = ["BACKWARD", "UNPACKING", "TraceGraph", "joint_results", "proxies_in", "read_trace"]

BACKWARD = BoundSymbolTag.BACKWARD
_STATIC = ProxyTag.STATIC_MEMORY_LOCATION
UNPACKING = {PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE, PrimIDs.COMMENT}


@dataclass(frozen=True)
class TraceGraph:
    """A trace and its `Graph`; op `i` of the graph is `bsyms[i]`.

    Attributes:
        graph: forward ops, then backward ops; its order is the source order of each half.
        bsyms: the bound symbol of each op.
        effects: what each op does besides computing.
        prefix: bound symbols that stay in front (unpacking).
        result: the return statement, which stays last.
        storage_of: proxy name -> storage index.
        producer_of: proxy name -> op index; arguments of the trace have none.
        returned_names: names that must exist under their own name at the end: the trace's results.
        overwritten: storages that an op overwrites, or may overwrite through a view that is a view only for
            some strides of the arguments, and what other programs write before the backward. Storages that are written
            only after their last use are left out.
        layout: the meta tensor behind each proxy.
    """

    graph: Graph
    bsyms: tuple[BoundSymbol, ...]
    effects: tuple[Effects, ...]
    prefix: tuple[BoundSymbol, ...]
    result: BoundSymbol
    storage_of: dict[str, int]
    producer_of: dict[str, int]
    returned_names: frozenset[str]
    overwritten: frozenset[int]
    layout: Layout = field(repr=False)


def _lay_out(layout: Layout, body: Iterable[BoundSymbol], seen: Collection[int]) -> None:
    """Lay out new bound symbols, and views of values that they moved: views of a recomputed value show the new one."""
    moved: set[str] = set()
    for b in body:
        if id(b) in seen and (not moved or moved.isdisjoint(p.name for p in b.flat_proxy_args)):
            continue
        before = {p.name: layout.storage_key(p.name) for p in b.flat_proxy_outs if p.name in layout}
        layout.run(b)
        moved.update(name for name, key in before.items() if layout.storage_key(name) != key)


def read_trace(trace: TraceCtx, earlier: TraceGraph | None = None) -> TraceGraph:
    """Read a trace (plain or joint, before its `del`s or after) into a graph.

    Args:
        trace: the trace to read.
        earlier: a reading of the trace from which `trace` was made. Bound symbols in both are not read again,
            except for the storages of their results if those of their arguments changed.

    Raises:
        ValueError: the trace has no return statement, or uses a proxy that no op produces.
    """
    symbols: list[BoundSymbol] = [
        b for b in trace.bound_symbols if b.sym.id is not PrimIDs.DEL and b.sym.name != "clear_mutable_collection"
    ]
    if not symbols or symbols[-1].sym.id is not PrimIDs.RETURN:
        raise ValueError("the trace does not end with a return statement")
    *body, result = symbols
    prefix = [b for b in body if b.sym.id in UNPACKING]
    body = [b for b in body if b.sym.id not in UNPACKING]
    names_of = {id(b): _names(b) for b in body}
    in_forward = _forward_half(body, names_of, result)
    backward = [b for b, forward in zip(body, in_forward, strict=True) if not forward]
    body = [b for b, forward in zip(body, in_forward, strict=True) if forward]
    forward_count = len(body)
    body += sorted(backward, key=lambda b: b.sym.id is not PrimIDs.GET_GRAD)
    seen = {id(b): e for b, e in zip(earlier.bsyms, earlier.effects, strict=True)} if earlier else {}
    effects = [seen.get(id(b)) or effects_of(b) for b in body]

    arguments = [p for p in proxies_in((trace.args, trace.kwargs)) if isinstance(p, TensorProxy)]
    arguments += [p for b in prefix for p in b.flat_proxy_outs if isinstance(p, TensorProxy)]
    layout = Layout(earlier.layout if earlier else None)
    with _disable_current_modes():  # meta tensors answer alone; a fake mode around them would only be slow
        layout.define_arguments(arguments)
        _lay_out(layout, body, seen)

    storages, storage_of = _storages(layout, arguments, body, _held(trace, arguments))
    zeros = _zeros_for_outputs(body, result, len(storages))
    names = [names_of[id(b)] for b in body]
    producer_of: dict[str, int] = {}
    for i, (taken, made) in enumerate(names):
        for name in made:
            if name not in taken:
                producer_of.setdefault(name, i)

    returned_names = frozenset(p.name for p in proxies_in((result.args, result.kwargs)))
    known = {id(op.payload): op for op in earlier.graph.ops} if earlier else {}
    ops = _ops(body, names, effects, forward_count, arguments, storage_of, layout, known)
    if zeros:
        first = ops[forward_count]
        ops[forward_count] = replace(first, allocates=(*first.allocates, *(s.index for s in zeros)))
    alias_edges, overwritten = _possible_aliases(body, names, effects, storage_of)
    overwritten |= {storage_of[p.name] for p in arguments if WRITTEN_ELSEWHERE in p.tags and p.name in storage_of}
    edges = [*_data_edges(names, producer_of), *_effect_edges(effects), *alias_edges]
    edges += _cotangent_edges(body, forward_count, edges)
    outputs = {storage_of[name] for name in returned_names if name in storage_of}
    outputs |= {s.index for s in zeros[-1:]}  # Thunder's backward keeps the last one's name, `_`, to its end
    graph = make_graph(ops, [*storages, *zeros], edges, outputs)
    return TraceGraph(
        graph,
        tuple(body),
        tuple(effects),
        tuple(prefix),
        result,
        storage_of,
        producer_of,
        returned_names,
        overwritten,
        layout,
    )


class _Names(NamedTuple):
    """The names of a bound symbol's arguments and results."""

    taken: tuple[str, ...]
    made: tuple[str, ...]


def _names(bsym: BoundSymbol) -> _Names:
    return _Names(tuple([p.name for p in bsym.flat_proxy_args]), tuple([p.name for p in bsym.flat_proxy_outs]))


def joint_results(result: BoundSymbol) -> dict[str, Any] | None:
    """What the return of a joint trace returns, by Thunder's names; None for the return of any other trace."""
    returned = result.args[0] if result.args else None
    return returned if isinstance(returned, dict) and "fw_flat_out" in returned else None


def _forward_half(body: Sequence[BoundSymbol], names_of: Mapping[int, _Names], result: BoundSymbol) -> list[bool]:
    """The symbols that Thunder will run in the forward: those that the forward's outputs need.

    The same walk as `thunder.transforms.autodiff.split_into_forward_and_backward`, which cuts the
    joint trace after fusion; a plain trace is forward throughout.
    """
    returned = joint_results(result)
    if returned is None:
        return [True] * len(body)
    needed = {p.name for p in tree_iter(returned["fw_flat_out"]) if isinstance(p, Proxy)}
    needed |= {p.name for p in returned["flat_args"] if isinstance(p, Proxy)}
    in_forward = [False] * len(body)
    for i in range(len(body) - 1, -1, -1):
        b = body[i]
        if b.sym.id is PrimIDs.GET_GRAD:
            continue
        taken, made = names_of[id(b)]
        copies_forward_value = b.sym.name == "copy_" and b.args[1].name in needed
        if copies_forward_value or not needed.isdisjoint(made):
            in_forward[i] = True
            needed.update(taken)
            needed.update(made)
    return in_forward


def _held(trace: TraceCtx, arguments: Sequence[Proxy]) -> set[str]:
    """The arguments that the caller keeps: all of a forward; only parameters and buffers of a backward, because
    it clears the list of saved values."""
    if TraceTag.BACKWARD not in trace.tags:
        return {p.name for p in arguments}
    return {p.name for p in arguments if _STATIC in p.tags}


def _storages(
    layout: Layout, arguments: Sequence[Proxy], body: Sequence[BoundSymbol], held: set[str]
) -> tuple[list[Storage], dict[str, int]]:
    on_host = {name: device for b in body for name, device in traits_of(b).on_host(b).items()}
    without_memory = {p.name for b in body for p in empty_outputs(b)}
    by_key: dict[int, int] = {}
    storages: list[Storage] = []
    storage_of: dict[str, int] = {}
    seen: set[int] = set()
    for p in chain(arguments, *((*b.flat_proxy_args, *b.flat_proxy_outs) for b in body)):
        if id(p) in seen:
            continue
        seen.add(id(p))
        name = p.name
        if name in storage_of or not isinstance(p, TensorProxy | FutureTensorProxy):
            continue
        if name not in layout:
            raise ValueError(f"the trace uses {name}, which nothing produces")
        key = layout.storage_key(name)
        if key not in by_key:
            by_key[key] = len(storages)
            device, nbytes = p.device.device_str(), layout.nbytes(name)
            host = host_bytes(nbytes, on_host[name]) if name in on_host else 0
            device_bytes = 0 if name in on_host or name in without_memory else block_bytes(nbytes, device)
            storages.append(Storage(len(storages), device_bytes, name, device, name in held, host))
        storage_of[name] = by_key[key]
    return storages, storage_of


def _zeros_for_outputs(body: Sequence[BoundSymbol], result: BoundSymbol, count: int) -> list[Storage]:
    """The zeros that autograd passes to the backward for outputs without a gradient (integers), unless it accepts None.

    Args:
        body: of a joint trace, whose backward starts with the gradients of outputs; a single half has none.
        result: its return.
        count: the number of existing storages.
    """
    returned = joint_results(result)
    if returned is None:
        return []
    asked = {b.args[0].name for b in body if b.sym.id is PrimIDs.GET_GRAD}
    outputs = {p.name: p for p in returned["fw_flat_out"] if isinstance(p, TensorProxy)}
    if takes_none(outputs.values()):
        return []
    without = [p for p in outputs.values() if p.name not in asked] if asked else []
    return [
        Storage(count + i, block_bytes(dense_bytes(p), device), f"zeros for {p.name}", device)
        for i, p in enumerate(without)
        for device in [p.device.device_str()]
    ]


def _ops(
    body: Sequence[BoundSymbol],
    names: Sequence[_Names],
    effects: Sequence[Effects],
    forward_count: int,
    arguments: Sequence[Proxy],
    storage_of: dict[str, int],
    layout: Layout,
    known: Mapping[int, Op],
) -> list[Op]:
    """The ops of `body`, which have the scratch of those that were read before, by their bound symbols' identity."""
    born = {storage_of[p.name] for p in arguments}
    started: dict[str, tuple[int, ...]] = {}  # the storages that a collective in flight still reads, by its future
    ops = []
    for i, (b, (taken, made), effect) in enumerate(zip(body, names, effects, strict=True)):
        reads = dict.fromkeys([storage_of[name] for name in taken if name in storage_of])
        for name in taken if started else ():
            reads |= dict.fromkeys(started.get(name, ()))
        allocates = []
        for name in made:
            s = storage_of.get(name)
            if s is not None and s not in born and s not in reads:
                allocates.append(s)
                born.add(s)
        started |= {p.name: tuple(reads) for p in b.flat_proxy_outs if isinstance(p, FutureTensorProxy)}
        earlier = known.get(id(b))
        ops.append(
            Op(
                i,
                symbol_name(b.sym) if earlier is None else earlier.name,
                tuple(reads),
                tuple(dict.fromkeys([storage_of[name] for name in effect.writes])) if effect.writes else (),
                tuple(allocates),
                _scratch_bytes(b, layout, earlier),
                i >= forward_count,
                b,
            )
        )
    return ops


def _scratch_bytes(bsym: BoundSymbol, layout: Layout, known: Op | None) -> int:
    if known is not None and not scratch_follows_layout(bsym):
        return known.scratch_bytes
    by_layout = region_scratch_bytes(bsym, layout) + attention_copies_bytes(bsym, layout)
    return estimated_scratch_bytes(bsym) + by_layout


def _data_edges(names: Sequence[_Names], producer_of: dict[str, int]) -> list[tuple[int, int]]:
    edges = []
    for i, (taken, _) in enumerate(names):
        for name in taken:
            producer = producer_of.get(name, i)
            if producer < i:
                edges.append((producer, i))
    return edges


def _effect_edges(effects: Sequence[Effects]) -> list[tuple[int, int]]:
    """Chains per channel, and barriers between all ops before and after them."""
    edges: list[tuple[int, int]] = []
    last: dict[str, int] = {}
    barrier: int | None = None
    since_barrier: list[int] = []
    for i, effect in enumerate(effects):
        for channel in effect.channels:
            if channel in last:
                edges.append((last[channel], i))
            last[channel] = i
        if effect.barrier:
            edges += [(before, i) for before in since_barrier]
            if barrier is not None:
                edges.append((barrier, i))
            barrier, since_barrier = i, []
        else:
            if barrier is not None:
                edges.append((barrier, i))
            since_barrier.append(i)
    return edges


def _cotangent_edges(
    body: Sequence[BoundSymbol], first_backward: int, edges: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Edges that put the gradients of the outputs first in the backward, because they are its arguments."""
    given = [i for i in range(first_backward, len(body)) if body[i].sym.id is PrimIDs.GET_GRAD]
    if not given:
        return []
    later = {target for source, target in edges if source > given[-1]}
    return [*pairwise(given), *((given[-1], i) for i in range(given[-1] + 1, len(body)) if i not in later)]


def _possible_aliases(
    body: Sequence[BoundSymbol], names: Sequence[_Names], effects: Sequence[Effects], storage_of: dict[str, int]
) -> tuple[list[tuple[int, int]], frozenset[int]]:
    """Edges around every write, for all names that may share its memory; and the storages that may be overwritten.

    For order, every possible view counts as a view (`aliases.py`).
    """
    if not any(effect.writes for effect in effects):
        return [], frozenset()
    aliases = Aliases(body)
    first: dict[int, str] = {}  # a storage's first name
    for name, storage in storage_of.items():
        aliases.join(name, first.setdefault(storage, name))
    written = {aliases(name) for effect in effects for name in effect.writes}
    futures = {p.name for b in body for p in b.flat_proxy_outs if isinstance(p, FutureTensorProxy)}
    memory_of = {name: m for name in storage_of if (m := aliases(name)) in written and name not in futures}
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    edges: list[tuple[int, int]] = []
    for i, ((taken, made), effect) in enumerate(zip(names, effects, strict=True)):
        writes = {aliases(name) for name in effect.writes}
        for memory in dict.fromkeys([memory_of[name] for name in (*taken, *made) if name in memory_of]):
            if memory in writer:
                edges.append((writer[memory], i))
            if memory in writes:
                edges += [(reader, i) for reader in readers.pop(memory, ())]
                writer[memory] = i
            else:
                readers.setdefault(memory, []).append(i)
    early = {
        aliases(name)
        for b, effect in zip(body, effects, strict=True)
        for name in effect.writes
        if not traits_of(b).last_write
    }
    return edges, frozenset(s for name, s in storage_of.items() if aliases(name) in early)


def proxies_in(tree: object) -> list[Proxy]:
    """The proxies in a tree of arguments or results, in order."""
    flat, _ = tree_flatten_with_dataclass(tree)
    return [x for x in flat if isinstance(x, Proxy)]
