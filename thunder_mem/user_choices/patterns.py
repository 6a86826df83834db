"""Candidates for recomputation: values that the backward could recompute, named by their operations.

They are found as in ONNX Runtime's memory optimizer (microsoft/onnxruntime, PR 12852): from each forward value that the
backward receives, back through operations that may be repeated, to values that are alive in the backward anyway. The
operations on the way, joined by "+", are the pattern's name.

Names are those of `origins.word`: the operation as the program calls it ("Gelu", "LayerNorm", "Softmax", "Cast"), in
execution order, each once for all its parts, without views. So the GELU between two linear layers is "Gelu+", and with
a bias added before it "Add+Gelu+".

A GELU that one kernel runs (`kernels/registered.py`) only has its argument and its result. If the backward does not
need the result, as before a dropout, there is no candidate: the GELU is recomputed already (`leaves_nothing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from thunder_mem.kernels.kernel_executor import is_kernel
from thunder_mem.memory.graph import Graph
from thunder_mem.partition.min_cut_partition import saved_storages
from thunder_mem.runtime.repeatability import recompute_obstacle
from thunder_mem.trace.origins import Origin, origin_of, symbol_name, word
from thunder_mem.trace.reading import TraceGraph

__all__ = [
    "Occurrence",
    "RecomputeCandidate",
    "Single",
    "candidates",
    "leaves_nothing",
    "names_empty_values",
    "occurrences",
]


@dataclass(frozen=True)
class RecomputeCandidate:
    """One value that the backward needs and could recompute.

    Attributes:
        pattern: its name, such as "Gelu+".
        storage: the value, as a storage of the joint graph.
        maker: the op that makes it.
        inner: the other results of the operations to repeat.
        nbytes: bytes of the value.
        free: the backward recomputes it anyway, in fused code or by a checkpoint.
        compromise: storages along casts, from a smaller one that could be received instead, to the value;
            () if there is none.
        origins: of the operations to repeat, each once.
    """

    pattern: str
    storage: int
    maker: int
    inner: frozenset[int]
    nbytes: int
    free: bool
    compromise: tuple[int, ...]
    origins: tuple[Origin, ...]


@dataclass(frozen=True)
class Occurrence:
    """The values of one operation of the program that a pattern covers: one GELU, with all its values."""

    pattern: str
    candidates: tuple[RecomputeCandidate, ...]

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.candidates)


@dataclass(frozen=True)
class Single:
    """A value that the backward must receive: `reason` says why."""

    pattern: str
    storage: int
    nbytes: int
    reason: str


def candidates(
    source: TraceGraph, rebuilt: frozenset[int]
) -> tuple[tuple[RecomputeCandidate, ...], tuple[Single, ...]]:
    """All candidates of a joint trace in the order of the forward, and the values that are none.

    Args:
        source: a joint trace, without recomputation.
        rebuilt: the storages that the backward recomputes for free.
    """
    graph = source.graph
    needed = saved_storages(graph) - graph.outputs
    received = saved_storages(graph, rebuilt) - graph.outputs
    refusals = [None if op.backward else recompute_obstacle(source, op.index) for op in graph.ops]
    found, refused = [], []
    for s in sorted(needed | received, key=lambda s: (graph.allocator[s] or 0, s)):
        maker, nbytes = graph.allocator[s], graph.storages[s].nbytes
        if maker is None or not nbytes:
            continue
        if (reason := refusals[maker]) is not None:
            refused.append(Single(_name(source, [maker]), s, nbytes, reason))
            continue
        free = s not in received
        alive = needed if free else received
        ops, receives = _back(graph, s, alive, refusals)
        compromise = () if free else _compromise(source, s, alive, refusals)
        extra = sum(graph.storages[r].nbytes for r in receives)
        if extra >= nbytes and not compromise:
            names = ", ".join(graph.storages[r].name for r in sorted(receives))
            reason = f"for that the backward would have to receive {names} of {extra:,} bytes"
            refused.append(Single(_name(source, ops), s, nbytes, reason))
            continue
        inner = frozenset(made for op in ops for made in graph.ops[op].allocates) - {s}
        origins = tuple(dict.fromkeys(o for op in ops if (o := origin_of(source.bsyms[op])) is not None))
        found.append(RecomputeCandidate(_name(source, ops), s, maker, inner, nbytes, free, compromise, origins))
    return tuple(found), tuple(refused)


def occurrences(found: Sequence[RecomputeCandidate]) -> tuple[Occurrence, ...]:
    """Candidates of one pattern, grouped by their last operation, in program order."""
    together: dict[object, list[RecomputeCandidate]] = {}
    for c in found:
        last = max((o.index for o in c.origins), default=None)
        together.setdefault((c.pattern, ("op", c.maker) if last is None else last), []).append(c)
    return tuple(Occurrence(group[0].pattern, tuple(group)) for group in together.values())


def leaves_nothing(pattern: str, source: TraceGraph) -> int:
    """The number of operations of this name that run as one kernel, without results that the backward needs.

    Args:
        pattern: the name of one operation, such as "Gelu+"; for several operations the answer is 0.
        source: a joint trace, without recomputation.
    """
    graph = source.graph
    needed = saved_storages(graph) - graph.outputs
    named = (
        op
        for op in graph.ops
        if not op.backward and is_kernel(source.bsyms[op.index]) and _name(source, [op.index]) == pattern
    )
    return sum(needed.isdisjoint(op.allocates) for op in named)


def names_empty_values(pattern: str, source: TraceGraph) -> bool:
    """Whether the backward needs a value without bytes (a batch without rows) that ends such a pattern.

    Such values are no candidates. Only the last word counts, because earlier words depend on the received values,
    which are chosen by bytes.

    Args:
        pattern: its name, such as "Gelu+".
        source: a joint trace, without recomputation.
    """
    graph = source.graph
    empty = (s for s in saved_storages(graph) - graph.outputs if not graph.storages[s].nbytes)
    makers = {op for s in empty if (op := graph.allocator[s]) is not None}
    return any(f"+{pattern}".endswith(f"+{_name(source, [op])}") for op in makers)


def _back(
    graph: Graph, s: int, saved: frozenset[int], refusals: Sequence[str | None]
) -> tuple[list[int], frozenset[int]]:
    """The ops to repeat for `s`, in source order, and the additional storages to receive for them."""
    ops: set[int] = set()
    receives: set[int] = set()
    stack = [graph.allocator[s]]
    while stack:
        op = stack.pop()
        if op is None or op in ops:
            continue
        ops.add(op)
        for r in graph.ops[op].reads:
            maker = graph.allocator[r]
            if maker is None or r in saved or r in graph.outputs:
                continue
            if refusals[maker] is None:
                stack.append(maker)
            else:
                receives.add(r)
    return sorted(ops), frozenset(_smallest_form(graph, r, ops) for r in receives)


def _smallest_form(graph: Graph, s: int, ops: set[int]) -> int:
    """`s`, or a smaller value that is its only product: the mask for a dropout's uniform numbers."""
    best = s
    while True:
        readers = [op for op in graph.users[s] if op in ops and s in graph.ops[op].reads]
        made = graph.ops[readers[0]].allocates if len(readers) == 1 else ()
        if len(made) != 1 or graph.ops[readers[0]].reads != (s,):
            return best
        s = made[0]
        if graph.storages[s].nbytes < graph.storages[best].nbytes:
            best = s


def _compromise(source: TraceGraph, s: int, saved: frozenset[int], refusals: Sequence[str | None]) -> tuple[int, ...]:
    """The storages along casts to `s`, its smallest source first; () if no cast makes it larger."""
    graph = source.graph
    way = [s]
    while True:
        maker = graph.allocator[way[-1]]
        if maker is None or refusals[maker] is not None or word(source.bsyms[maker].sym.name) != "Cast":
            break
        before = [r for r in graph.ops[maker].reads if graph.allocator[r] is not None]
        if len(before) != 1 or before[0] in saved or before[0] in graph.outputs:
            break
        way.append(before[0])
    least = min(range(len(way)), key=lambda i: (graph.storages[way[i]].nbytes, i))
    return tuple(reversed(way[: least + 1])) if least else ()


def _name(source: TraceGraph, ops: Sequence[int]) -> str:
    return "".join(f"{part}+" for part in _words(source, ops))


def _words(source: TraceGraph, ops: Sequence[int]) -> Iterator[str]:
    last: object = None
    for op in ops:
        origin = origin_of(source.bsyms[op])
        if origin is None or origin != last:
            yield origin.word if origin is not None else word(symbol_name(source.bsyms[op].sym))
        last = origin
