"""A computation trace as a flat list of leaf operations, each with the composites around it.

The chunker reasons on leaves (prims, and ops without parts). It writes traces in the largest composites that still
mean the same, because executors claim composites.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.core.transforms import nondifferentiable_vjp_symbols

from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.sharding.propagation import RULES
from thunder_mem.torch_functions.loss_decompositions import DECOMPOSITIONS, decomposed
from thunder_mem.trace.origins import symbol_name
from thunder_mem.trace.source_lines import place_of

__all__ = [
    "PRODUCTS",
    "Leaf",
    "Program",
    "effects",
    "is_cut",
    "numel",
    "read_program",
    "rewritten",
    "size_bytes",
    "symbolic",
    "walk",
]

PRODUCTS = frozenset({PrimIDs.LINEAR, PrimIDs.MATMUL})
"""What may be at the start of a head."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """One operation that the chunker does not decompose.

    Attributes:
        index: position in `Program.leaves`.
        bsym: the bound symbol.
        parents: the composites around it, outermost first.
        inputs, outputs: its tensors, by slot.
    """

    index: int
    bsym: BoundSymbol
    parents: tuple[BoundSymbol, ...]
    inputs: tuple[TensorProxy, ...]
    outputs: tuple[TensorProxy, ...]

    @property
    def name(self) -> str:
        """The op's name as a trace prints it."""
        return symbol_name(self.bsym.sym)

    @property
    def is_product(self) -> bool:
        """A matrix product or a convolution."""
        return self.bsym.sym.id in PRODUCTS or self.bsym.sym.id == PrimIDs.CONVOLUTION

    @property
    def label(self) -> str:
        """The op as the user wrote it: the outermost composite, and the leaf if that adds information."""
        if not self.parents:
            return self.name
        outer = symbol_name(self.parents[0].sym)
        return f"{outer} ({self.name})" if outer != self.name else self.name

    @property
    def source(self) -> str:
        """``file:line`` of the user's code, or an empty string."""
        return place_of(self.parents[0] if self.parents else self.bsym)


def symbolic(t: TensorProxy) -> bool:
    """Whether some size is a symbol, as under ``thunder.jit(cache="symbolic values")``."""
    return any(isinstance(size, Proxy) for size in t.shape)


def numel(t: TensorProxy) -> int:
    """The number of elements; if sizes are symbols, that of the traced example."""
    return math.prod(getattr(size, "value", size) for size in t.shape)


def size_bytes(t: TensorProxy) -> int:
    """The bytes; if sizes are symbols, those of the traced example."""
    return numel(t) * t.dtype.bytes


@dataclass(frozen=True, eq=False)
class Program:
    """A computation trace, flattened.

    Attributes:
        trace: the source of new names; its bound symbols are `roots`.
        roots: the top-level bound symbols, decomposed where `DECOMPOSITIONS` says so.
        leaves: in order.
        args: names of the trace's tensor arguments.
        returned: names that the trace returns to its caller.
    """

    trace: TraceCtx
    roots: tuple[BoundSymbol, ...]
    leaves: tuple[Leaf, ...]
    args: tuple[TensorProxy, ...]
    returned: frozenset[str]

    @cached_property
    def producer(self) -> dict[str, Leaf]:
        """The leaf that makes each value."""
        return {out.name: leaf for leaf in self.leaves for out in leaf.outputs}

    @cached_property
    def consumers(self) -> dict[str, list[Leaf]]:
        """The leaves that read each value, in order."""
        readers: dict[str, list[Leaf]] = {}
        for leaf in self.leaves:
            for name in dict.fromkeys(t.name for t in leaf.inputs):
                readers.setdefault(name, []).append(leaf)
        return readers

    @cached_property
    def fixed(self) -> frozenset[str]:
        """Values of parameters and constants alone: none of their dims has a row for each token."""
        moving = {a.name for a in self.args if ProxyTag.STATIC_MEMORY_LOCATION not in a.tags}
        for leaf in self.leaves:
            if any(t.name in moving for t in leaf.inputs):
                moving.update(o.name for o in leaf.outputs)
        return frozenset({a.name for a in self.args}.union(self.producer) - moving)

    @cached_property
    def needs_grad(self) -> frozenset[str]:
        """Values through which a gradient flows from a returned value back to an argument that requires one."""
        reached = {a.name for a in self.args if a.requires_grad}
        flows = []
        for leaf in self.leaves:
            outs = [o.name for o in _with_gradients(leaf) if dtypes.is_inexact_dtype(o.dtype)]
            if outs and any(t.name in reached for t in leaf.inputs) and not is_constant(leaf):
                reached.update(outs)
                flows.append((leaf, outs))
        wanted = set(self.returned)
        for leaf, outs in reversed(flows):
            if not wanted.isdisjoint(outs):
                wanted.update(t.name for t in leaf.inputs)
        return frozenset(reached & wanted)


def _with_gradients(leaf: Leaf) -> Sequence[TensorProxy]:
    """The outputs that may have gradients: of a loop those that its plan differentiates, else all."""
    if not is_chunk_loop(leaf.bsym):
        return leaf.outputs
    return [leaf.outputs[i] for i in loop_of(leaf.bsym).plan.differentiable]


def is_constant(leaf: Leaf) -> bool:
    """Whether no gradient flows through the op."""
    return leaf.bsym.sym.id in nondifferentiable_vjp_symbols or is_cut(leaf)


def is_cut(leaf: Leaf) -> bool:
    """Whether the user cut the gradient off there, by `detach` or under `no_grad`."""
    if leaf.bsym.sym.id == "torch.detach":
        return True
    chain = (*leaf.parents, leaf.bsym)
    return any(ProxyTag.DETACHED_AUTOGRAD_GRAPH in o.tags for b in chain for o in b.flat_proxy_outs if _tensor(o))


def _tensor(x: Any) -> bool:
    return isinstance(x, TensorProxy)


def read_program(trace: TraceCtx) -> Program:
    """Flatten `trace` without changing it."""
    scratch = from_trace(trace)
    roots = tuple(decomposed(b, scratch) for b in trace.bound_symbols)
    leaves: list[Leaf] = []
    for root in roots:
        for bsym, parents in walk(root):
            inputs = tuple(a for a in bsym.flat_args if _tensor(a))
            outputs = tuple(o for o in bsym.flat_proxy_outs if _tensor(o))
            if bsym.sym.id in (PrimIDs.RETURN, PrimIDs.DEL, PrimIDs.UNPACK_TRIVIAL, PrimIDs.SHAPE) or not (
                inputs or outputs
            ):
                continue
            leaves.append(Leaf(len(leaves), bsym, parents, inputs, outputs))
    returned = trace.bound_symbols[-1].args[0]
    output = returned["output"] if isinstance(returned, dict) and "output" in returned else returned
    flat = {p.name for p in _proxies(output)}
    args = tuple(
        o for b in trace.bound_symbols if b.sym.id == PrimIDs.UNPACK_TRIVIAL for o in b.flat_proxy_outs if _tensor(o)
    )
    return Program(scratch, roots, tuple(leaves), args, frozenset(flat))


def _proxies(tree: Any) -> Iterator[Proxy]:
    return (x for x in tree_iter(tree) if isinstance(x, Proxy))


def walk(
    bsym: BoundSymbol, parents: tuple[BoundSymbol, ...] = ()
) -> Iterator[tuple[BoundSymbol, tuple[BoundSymbol, ...]]]:
    """The leaves of a bound symbol, each with the composites around it."""
    known = bsym.sym.id in RULES and bsym.sym.id not in DECOMPOSITIONS
    if not bsym.subsymbols or known or bsym.sym.executor is not None or bsym.sym.id == ltorch.checkpoint.id:
        yield bsym, parents
        return
    for sub in bsym.subsymbols:
        yield from walk(sub, (*parents, bsym))


_Stand = TypeVar("_Stand")


def rewritten(
    roots: Sequence[BoundSymbol],
    instead: Mapping[int, Sequence[_Stand]],
    wanted: Collection[str],
    lost: Collection[str] = (),
) -> list[BoundSymbol | _Stand]:
    """The bound symbols with some leaves replaced; composites are opened where that is necessary.

    Args:
        roots: from a `Program`.
        instead: the replacement of a leaf, by the `id` of its bound symbol.
        wanted: names that are read from outside. A composite that makes one without returning it is opened.
        lost: names that no operation makes any more. A composite that only names one, for its shape, is opened.
    """
    done: list[BoundSymbol | _Stand] = []
    for bsym in roots:
        if id(bsym) in instead:
            done += instead[id(bsym)]
        elif bsym.subsymbols and (_holds(bsym, instead, wanted) or any(a.name in lost for a in bsym.flat_proxy_args)):
            parts = [sub for sub in bsym.subsymbols if sub.flat_proxy_outs or sub.subsymbols]
            for sub in parts:
                if not sub.source_filename:
                    sub.source_filename, sub.source_positions = bsym.source_filename, bsym.source_positions
            done += rewritten(parts, instead, wanted, lost)
        else:
            done.append(bsym)
    return done


def _holds(bsym: BoundSymbol, instead: Collection[int], wanted: Collection[str]) -> bool:
    """Whether the composite holds a leaf to replace, or hides a wanted name."""
    handed_out = {p.name for p in bsym.flat_proxy_outs}
    return any(
        id(leaf) in instead or any(p.name in wanted and p.name not in handed_out for p in leaf.flat_proxy_outs)
        for leaf, _ in walk(bsym)
    )


def effects(leaf: Leaf) -> bool:
    """Whether the op writes to memory that others may read, so that nothing may move past it."""
    if leaf.bsym.sym.id in (PrimIDs.COPY_, PrimIDs.COPY_WITH_SETITEM, PrimIDs.UPDATE_ALIASES, PrimIDs.SINK):
        return True
    tags = leaf.bsym.sym.tags or ()
    return OpTags.IN_PLACE in tags or leaf.name == "copy_"
