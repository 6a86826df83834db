"""The outputs of a fused region that may be written over its dying inputs.

The conditions make a write safe for any loops that the compiler makes of the region. Operations that read the input,
also through elementwise ops, read it element by element in memory order, or sum it up before the overwriting value
exists. And all these readers can become operands of the write; see `regions/inplace_outputs.py`. A broadcast,
permutation, slice or concatenation of the input, or of a value computed from it, prevents the write.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import thunder.torch as ltorch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_mem.regions.inplace_outputs import InplaceOutput, InplacePlan
from thunder_mem.semantics.fusible_prims import POINTWISE, REDUCTIONS
from thunder_mem.semantics.view_prims import VIEWS

__all__ = ["plan_reuse"]

# The most outputs that a late write may wait for: Inductor fuses so many loops into one on a CPU, with the writes.
MAX_READERS = 6

_IN_ORDER = {
    *(PrimIDs.RESHAPE, PrimIDs.SQUEEZE, PrimIDs.SHALLOW_COPY, PrimIDs.BROADCAST_IN_DIM),
    ltorch.contiguous.id,
}


@dataclass(frozen=True)
class _Reach:
    """The leaves that read a value element by element, and those that reduce it."""

    alike: frozenset[int]
    reduced: frozenset[int]

    @property
    def all(self) -> frozenset[int]:
        return self.alike | self.reduced


class _Flow:
    """How values flow through a region's leaf operations."""

    def __init__(
        self, leaves: Sequence[BoundSymbol], inputs: Sequence[TensorProxy], outputs: Sequence[TensorProxy]
    ) -> None:
        self.leaves, self.inputs, self.outputs = leaves, inputs, outputs
        self.made_by = {p.name: i for i, leaf in enumerate(leaves) for p in leaf.flat_proxy_outs}

    def is_view(self, leaf: BoundSymbol) -> bool:
        return leaf.sym.id in VIEWS

    def keeps_order(self, leaf: BoundSymbol) -> bool:
        """Whether its result has the elements of its operands, or of values computed from them, in their order."""
        outs, args = _tensors(leaf.flat_proxy_outs), _tensors(leaf.flat_proxy_args)
        if len(outs) != 1 or not args:
            return False
        if leaf.sym.id in POINTWISE:
            return all(tuple(a.shape) == tuple(outs[0].shape) for a in args)
        if leaf.sym.id not in _IN_ORDER:
            return False
        return numel(args[0]) == numel(outs[0])  # a broadcast then adds dims of size 1 only, in order

    def reach(self, name: str, stop: int | None = None) -> _Reach | None:
        """The readers of the value, direct or through elementwise ops, not continuing from leaf `stop`; None if
        an op reads it at another index."""
        reached, alike, reduced = {name}, set(), set()
        for i, leaf in enumerate(self.leaves):
            if reached.isdisjoint(p.name for p in leaf.flat_proxy_args):
                continue
            if self.keeps_order(leaf):
                alike.add(i)
                if i != stop:
                    reached.update(p.name for p in leaf.flat_proxy_outs)
            elif leaf.sym.id in REDUCTIONS:
                reduced.add(i)
            else:
                return None
        return _Reach(frozenset(alike), frozenset(reduced))

    @cached_property
    def ancestors(self) -> tuple[frozenset[int], ...]:
        """Per leaf, the leaves that it depends on, itself included."""
        found: list[frozenset[int]] = []
        for i, leaf in enumerate(self.leaves):
            before = {self.made_by[p.name] for p in leaf.flat_proxy_args if p.name in self.made_by}
            found.append(frozenset({i}).union(*(found[b] for b in before)))
        return tuple(found)

    def root(self, output: int) -> int | None:
        """The elementwise leaf that computes an output, if the output shows it in its order; else None."""
        name = self.outputs[output].name
        while (i := self.made_by.get(name)) is not None and self.is_view(leaf := self.leaves[i]):
            if not self.keeps_order(leaf):
                return None
            name = leaf.flat_proxy_args[0].name
        return i if i is not None and self.keeps_order(self.leaves[i]) else None

    def base(self, name: str) -> str:
        """The name that `name` is a view of."""
        while (i := self.made_by.get(name)) is not None and self.is_view(self.leaves[i]):
            name = self.leaves[i].flat_proxy_args[0].name
        return name


def plan_reuse(
    leaves: Sequence[BoundSymbol],
    inputs: Sequence[TensorProxy],
    outputs: Sequence[TensorProxy],
    offered: Mapping[int, bool],
    wanted: Sequence[int],
) -> InplacePlan | None:
    """The inputs that a region overwrites; None if it overwrites none.

    Args:
        leaves: its operations, each with a new result.
        inputs, outputs: of the region.
        offered: positions of the inputs that die here, dense and whole, with whether autograd saved them.
        wanted: positions of the outputs that are dense and that nothing else shares memory with.
    """
    flow = _Flow(leaves, inputs, outputs)
    bases = [flow.base(o.name) for o in outputs]
    roots = {o: root for o in wanted if bases.count(bases[o]) == 1 and (root := flow.root(o)) is not None}
    left = dict(offered)
    takes: list[InplaceOutput] = []
    for o, root in roots.items():
        for i in _alike(flow, o, left):
            if _early(flow, inputs[i].name, root):
                takes.append(InplaceOutput(o, i, root, left.pop(i)))
                break
    taken = {t.output for t in takes}
    readers: set[int] = set()
    for o, root in roots.items():
        if o in taken:
            continue
        for i in _alike(flow, o, left):
            needed = _late(flow, inputs[i].name, root)
            if needed is None or (doubles := _doubles(flow, bases, readers | needed)) is None:
                continue
            if len((readers | needed | {o}) - doubles.keys()) <= MAX_READERS:
                readers |= needed
                takes.append(InplaceOutput(o, i, None, left.pop(i)))
                break
    if not takes:
        return None
    late = [t.output for t in takes if t.after is None]
    if not late:
        return InplacePlan(tuple(takes))
    doubles = _doubles(flow, bases, readers) or {}
    return InplacePlan(tuple(takes), tuple(sorted(readers.union(late) - doubles.keys())), tuple(doubles.items()))


def _doubles(flow: _Flow, bases: Sequence[str], readers: Collection[int]) -> dict[int, int] | None:
    """By output, the earlier one that shows the same elements in the same order; None if one has another order."""
    first: dict[str, int] = {}
    doubles: dict[int, int] = {}
    for o in sorted(readers):
        if (earlier := first.setdefault(bases[o], o)) == o:
            continue
        root = flow.root(o)
        if root is None or flow.root(earlier) != root:
            return None
        doubles[o] = earlier
    return doubles


def _alike(flow: _Flow, output: int, offered: Mapping[int, bool]) -> list[int]:
    """The offered inputs of equal size and dtype; those that autograd did not save come first."""
    out = flow.outputs[output]
    fitting = [i for i in offered if flow.inputs[i].dtype == out.dtype and numel(flow.inputs[i]) == numel(out)]
    return sorted(fitting, key=lambda i: (offered[i], i))


def _early(flow: _Flow, name: str, root: int) -> bool:
    """Whether all readers of the input lead to the value, so that the value may be written at once."""
    reach = flow.reach(name, stop=root)
    return reach is not None and bool(reach.all) and reach.all <= flow.ancestors[root]


def _late(flow: _Flow, name: str, root: int) -> set[int] | None:
    """The outputs that read the input, if they and the value are one elementwise loop; else None."""
    reach, after = flow.reach(name), flow.reach(flow.leaves[root].flat_proxy_outs[0].name)
    if reach is None or after is None or reach.reduced or after.reduced:
        return None
    readers = {o for o, proxy in enumerate(flow.outputs) if flow.made_by.get(proxy.name) in reach.alike}
    for leaf in (root, *(flow.made_by[flow.outputs[o].name] for o in readers)):
        if any(flow.leaves[i].sym.id in REDUCTIONS for i in flow.ancestors[leaf]):
            return None
    return readers


def numel(p: TensorProxy) -> int:
    return math.prod(map(int, p.shape))


def _tensors(proxies) -> list[TensorProxy]:
    return [p for p in proxies if isinstance(p, TensorProxy)]
