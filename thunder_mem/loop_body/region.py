"""The region around an amplifying matrix product that can run in chunks with it.

A region starts at products whose results are far larger than their inputs. It takes in every operation that touches
such a result. It grows while rows stay apart, up to totals over rows or a few numbers a row. Small side inputs
(labels, masks, weights) are computed before the loop. Side inputs as large as the logits (a one-hot target, a
teacher's logits) are pulled in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten, tree_unflatten

from thunder_mem.loop_body.leaves import PRODUCTS, Leaf, Program, effects, numel, size_bytes, symbolic
from thunder_mem.sharding.propagation import RULES, Relation, RowDim, RuleError, Sharding, propagate

__all__ = [
    "RETURNED_WHOLE",
    "Amplifier",
    "Refused",
    "Region",
    "Value",
    "amplifying_products",
    "arguments",
    "escapes",
    "grow",
    "propagate_leaf",
    "row_space",
]

RETURNED_WHOLE = "is returned whole"
"""The end of a refusal's reason if the program, or its compiled part, returns the value."""


class Refused(Exception):
    """A head cannot be chunked: the leaf that prevents it, and the reason."""

    def __init__(self, leaf: Leaf, reason: str):
        super().__init__(reason)
        self.leaf = leaf
        self.reason = reason


@dataclass(frozen=True)
class Value:
    """A tensor together with how it splits."""

    proxy: TensorProxy
    sharding: Sharding

    @property
    def key(self) -> tuple[str, Sharding]:
        """The identity: tensor and split, because one tensor may be read with two splits."""
        return self.proxy.name, self.sharding


@dataclass(frozen=True, eq=False)
class Amplifier:
    """A matrix product whose result is one of the region's large values.

    Attributes:
        leaf: `prims.linear` or `prims.matmul`.
        rows: the operand that carries rows, 0 or 1; the other one is whole.
        out: the result.
    """

    leaf: Leaf
    rows: int
    out: Value

    @property
    def width(self) -> int:
        """The numbers in a row of the result: the vocabulary size of a language model."""
        return math.prod(s for s, d in zip(self.out.proxy.shape, self.out.sharding.dims, strict=True) if d is None)


@dataclass(frozen=True, eq=False)
class Region:
    """The operations inside one chunk loop.

    Attributes:
        n: rows in the row space.
        amplifiers: the products at its start.
        members: the other leaves, in order.
        shardings: for each member and amplifier leaf index, the sharding of every slot.
        inputs: the values read from outside, including amplifiers' operands, each reading once.
        values: all values computed inside, by name.
        derived: names of those that depend on an amplifier. The others are pulled in: other users
            compute them anew.
        opening: the operations above the amplifiers that make their rows, as a region of its own, if they run with it.
    """

    program: Program
    n: int
    amplifiers: tuple[Amplifier, ...]
    members: tuple[Leaf, ...]
    shardings: Mapping[int, Mapping[int, Sharding]]
    values: Mapping[str, Value]
    derived: frozenset[str]
    opening: Region | None = None

    @property
    def first(self) -> Leaf:
        """The product that it grew from, or its first leaf."""
        return self.amplifiers[0].leaf if self.amplifiers else self.members[0]

    @cached_property
    def inside(self) -> frozenset[int]:
        """Indices of all leaves of the region."""
        return frozenset(leaf.index for leaf in self.leaves)

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """All leaves of the region, in order."""
        opening = self.opening.members if self.opening else ()
        return tuple(sorted((*opening, *(a.leaf for a in self.amplifiers), *self.members), key=lambda leaf: leaf.index))

    @property
    def replaced(self) -> tuple[Leaf, ...]:
        """The leaves whose place the loop takes. Those that were pulled in also stay outside."""
        return tuple(leaf for leaf in self.leaves if any(o.name not in self.pulled_in for o in leaf.outputs))

    @property
    def pulled_in(self) -> frozenset[str]:
        """The values that do not depend on an amplifier, without those of the opening."""
        return frozenset(self.values) - self.derived

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """Values read from outside, in the order of their first reader; those of the opening come first."""
        found = {value.key: value for value in self.opening.inputs} if self.opening else {}
        made = {*self.values, *(self.opening.values if self.opening else ())}
        for leaf in sorted((*(a.leaf for a in self.amplifiers), *self.members), key=lambda leaf: leaf.index):
            for slot, t in enumerate(leaf.inputs):
                if t.name not in made:
                    value = Value(t, self.shardings[leaf.index][slot])
                    found.setdefault(value.key, value)
        return tuple(found.values())

    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        """Values that are read outside, in the order they are made."""
        return tuple(
            v for name, v in self.values.items() if name in self.derived and escapes(self.program, name, self.inside)
        )

    @cached_property
    def differentiable(self) -> tuple[Value, ...]:
        """The outputs through which a gradient flows."""
        return tuple(v for v in self.outputs if v.proxy.name in self.program.needs_grad)

    @property
    def width(self) -> int:
        """The numbers in a row of the widest amplifier's result."""
        return max(a.width for a in self.amplifiers)


def escapes(program: Program, name: str, inside: frozenset[int] | set[int]) -> bool:
    """Whether a leaf outside `inside` reads the value."""
    return name in program.returned or any(r.index not in inside for r in program.consumers.get(name, ()))


def amplifying_products(program: Program) -> list[tuple[Leaf, int]]:
    """Matrix products whose result is larger than the operand that carries rows, with that operand; largest first."""
    found = []
    for leaf in program.leaves:
        if leaf.bsym.sym.id not in PRODUCTS:
            continue
        (out,) = leaf.outputs
        operands = (0,) if leaf.bsym.sym.id == PrimIDs.LINEAR else (0, 1)
        for rows in operands:
            x, w = leaf.inputs[rows], leaf.inputs[1 - rows]
            if w.ndim == 2 and (x.ndim == 2 or rows == 0) and numel(out) > numel(x):
                found.append((leaf, rows))
    return sorted(found, key=lambda c: (-size_bytes(c[0].outputs[0]), c[0].index, c[1]))


def row_space(leaf: Leaf, rows: int, dims: Sequence[int], parts: str) -> tuple[Sharding, int]:
    """The sharding of the row operand of a product, and the number of its rows.

    Args:
        leaf: the product.
        rows: the operand with the rows.
        dims: its dims that count the rows, the outermost first.
        parts: the noun for parts of the rows, for the message.

    Raises:
        Refused: a size is a symbol.
    """
    if any(map(symbolic, (*leaf.inputs, *leaf.outputs))):
        raise Refused(leaf, f'its sizes are symbols (cache="symbolic values"), and {parts} need numbers')
    shape = leaf.inputs[rows].shape
    n = math.prod(shape[d] for d in dims)
    sharding: list[RowDim | None] = [None] * len(shape)
    stride = 1
    for d in reversed(dims):
        if shape[d] > 1 or n == 1:
            sharding[d] = RowDim(shape[d], stride)
            stride *= shape[d]
    return Sharding(tuple(sharding)), n


def relation(leaf: Leaf) -> Relation:
    """The relation that the rule gives for a leaf.

    Raises:
        RuleError: there is no rule, or it refuses.
    """
    rule = RULES.get(leaf.bsym.sym.id)
    if rule is None:
        raise RuleError(f"there is no rule for how {leaf.name} splits along rows (see register_rule)")
    try:
        found = rule(*leaf.bsym.args, **leaf.bsym.kwargs)
    except RuleError:
        raise
    except Exception as e:
        raise RuleError(f"the rule of {leaf.name} fails: {e!r}") from e
    if not isinstance(found, Relation):
        raise RuleError(f"the rule of {leaf.name} gives {found!r}, which is no Relation")
    for slot, dim in found.axes:
        shapes = leaf.inputs if slot >= 0 else leaf.outputs
        at = slot if slot >= 0 else -1 - slot
        if at >= len(shapes) or not 0 <= dim < shapes[at].ndim:
            raise RuleError(f"the rule of {leaf.name} speaks of the axis ({slot}, {dim}), which it does not have")
    return found


def arguments(
    leaf: Leaf, operand: Callable[[int, TensorProxy], TensorProxy], shapes: Sequence[tuple[int, ...]]
) -> tuple[tuple, dict]:
    """The arguments of a leaf with `operand(slot, tensor)` instead of each tensor, for results of these shapes."""
    flat, spec = tree_flatten((leaf.bsym.args, leaf.bsym.kwargs))
    slots = count()
    args, kwargs = tree_unflatten([operand(next(slots), x) if isinstance(x, TensorProxy) else x for x in flat], spec)
    localise = relation(leaf).localise
    return localise(args, kwargs, shapes) if localise else (args, kwargs)


def propagate_leaf(leaf: Leaf, known: Mapping[int, Sharding], n: int) -> dict[int, Sharding]:
    shapes = [tuple(t.shape) for t in leaf.inputs], [tuple(t.shape) for t in leaf.outputs]
    return propagate(relation(leaf), *shapes, known, n)


class _Regrow(Exception):
    """The region must be grown anew with one more seed, or with one value taken from outside."""


class _Growth:
    """The region while it grows."""

    def __init__(self, program: Program, n: int, width: int, seeds: dict[int, tuple[int, Sharding]], given: set[str]):
        self.program, self.n, self.seeds, self.given = program, n, seeds, given
        self.threshold = n * max(1, width // 8)
        self.values: dict[str, Value] = {}
        self.shardings: dict[int, dict[int, Sharding]] = {}
        self.members: dict[int, Leaf] = {}
        self.late: set[str] = set()
        self.derived: set[str] = set()  # values that depend on an amplifier; the others are pulled in

    def wide(self, t: TensorProxy) -> bool:
        return t.numel > self.threshold

    def run(self) -> None:
        for leaf in self.program.leaves[min(self.seeds) :]:
            if leaf.index in self.seeds:
                self._seed(leaf)
            elif leaf.index not in self.members:
                self._visit(leaf)

    def _seed(self, leaf: Leaf) -> None:
        rows, out = self.seeds[leaf.index]
        if any(t.name in self.values or t.name in self.late for t in leaf.inputs):
            raise Refused(leaf, "one large matrix product feeds on the result of another")
        shardings = propagate_leaf(leaf, {-1: out}, self.n)
        if not shardings[rows].complete(self.n) or not shardings[1 - rows].whole:
            raise Refused(leaf, "its rows are not those of the other large matrix products")
        self.shardings[leaf.index] = shardings
        self.values[leaf.outputs[0].name] = Value(leaf.outputs[0], out)
        self.derived.add(leaf.outputs[0].name)

    def _visit(self, leaf: Leaf) -> None:
        known = {s: self.values[t.name].sharding for s, t in enumerate(leaf.inputs) if t.name in self.values}
        late = [t.name for t in leaf.inputs if t.name in self.late]
        if not any(t.name in self.derived for t in leaf.inputs):
            if late:
                self.late.update(o.name for o in leaf.outputs)
            return
        try:
            if late:
                raise RuleError(f"it needs {late[0]}, which depends on all rows and is known only after the last chunk")
            if effects(leaf):
                raise RuleError("it writes into a tensor in place")
            shardings = propagate_leaf(leaf, known, self.n)
            self._check_outputs(leaf, shardings)
            for slot, t in enumerate(leaf.inputs):
                if slot not in known:
                    self._demand(leaf, t, shardings[slot])
        except RuleError as e:
            if any(self.wide(leaf.inputs[slot]) for slot in known):
                raise Refused(leaf, str(e)) from e
            self.late.update(o.name for o in leaf.outputs)
            return
        self._add(leaf, shardings)
        self.derived.update(o.name for o in leaf.outputs)

    def _check_outputs(self, leaf: Leaf, shardings: Mapping[int, Sharding]) -> None:
        for j, out in enumerate(leaf.outputs):
            sharding = shardings[-1 - j]
            if sharding.whole:
                raise RuleError("its result does not depend on rows in a way that chunks can be combined")
            if sharding.split and not sharding.complete(self.n):
                raise RuleError("it carries only a part of the row dims")
            if sharding.partial in ("max", "min") and out.name in self.program.needs_grad:
                raise RuleError(f"the gradient of a {sharding.partial} over rows needs all rows at once")

    def _add(self, leaf: Leaf, shardings: Mapping[int, Sharding]) -> None:
        self.members[leaf.index] = leaf
        self.shardings[leaf.index] = dict(shardings)
        for j, out in enumerate(leaf.outputs):
            self.values[out.name] = Value(out, shardings[-1 - j])

    def _demand(self, reader: Leaf, t: TensorProxy, sharding: Sharding) -> None:
        """Take a side value as it is, or, if it is as large as the logits, make it inside."""
        if t.name in self.values:
            if self.values[t.name].sharding != sharding:
                raise RuleError(f"it needs {t.name} split in two ways")
            return
        if sharding.partial is not None:
            raise RuleError("it mixes a total over rows with a value from outside")
        if not sharding.split:
            return
        producer = self.program.producer.get(t.name)
        # A small value from the reader's own composite moves along, so that the composite stays whole.
        near = producer is not None and any(p is q for p in producer.parents for q in reader.parents)
        if producer is None or t.name in self.given or not (self.wide(t) or near):
            if not sharding.complete(self.n):
                raise RuleError(f"{t.name} carries only a part of the row dims")
            return
        slot = -1 - [o.name for o in producer.outputs].index(t.name)
        if producer.bsym.sym.id in PRODUCTS:
            operands = propagate_leaf(producer, {slot: sharding}, self.n)
            rows = [s for s in (0, 1) if operands[s].split]
            if len(rows) == 1 and operands[1 - rows[0]].whole and producer.inputs[1 - rows[0]].ndim == 2:
                self.seeds[producer.index] = (rows[0], sharding)
                raise _Regrow
        try:
            shardings = propagate_leaf(producer, {slot: sharding}, self.n)
            for s, x in enumerate(producer.inputs):
                self._demand(producer, x, shardings[s])
        except RuleError:
            if not sharding.complete(self.n):
                raise
            self.given.add(t.name)  # it exists anyway; read it chunk by chunk
            raise _Regrow from None
        self._add(producer, shardings)


def grow(program: Program, leaf: Leaf, rows: int) -> Region:
    """The region of the amplifier `leaf`, whose operand `rows` carries the row space.

    Raises:
        Refused: something large cannot be computed chunk by chunk.
    """
    x, n = row_space(leaf, rows, range(leaf.inputs[0].ndim - 1) if rows == 0 else (1,), "chunks")
    try:
        out = propagate_leaf(leaf, {rows: x}, n)[-1]
    except RuleError as e:
        raise Refused(leaf, str(e)) from None
    width = leaf.outputs[0].numel // n
    seeds, given = {leaf.index: (rows, out)}, set[str]()
    while True:
        growth = _Growth(program, n, width, seeds, given)
        try:
            growth.run()
        except _Regrow:
            continue
        # A pulled-in value that is also read outside exists anyway.
        inside = {*growth.members, *growth.seeds}
        shared = [
            name
            for name, v in growth.values.items()
            if name not in growth.derived and growth.wide(v.proxy) and escapes(program, name, inside)
        ]
        if not shared:
            break
        given.update(shared)
    amplifiers = tuple(
        Amplifier(program.leaves[i], r, growth.values[program.leaves[i].outputs[0].name])
        for i, (r, _) in sorted(seeds.items())
    )
    members = tuple(growth.members[i] for i in sorted(growth.members))
    values = dict(sorted(growth.values.items(), key=lambda item: program.producer[item[0]].index))
    region = Region(program, n, amplifiers, members, growth.shardings, values, frozenset(growth.derived))
    for value in region.outputs:
        if growth.wide(value.proxy):
            name = value.proxy.name
            if name in program.returned:
                raise Refused(program.producer[name], f"its result {name}, one large value a row, {RETURNED_WHOLE}")
            reader = next(r for r in program.consumers[name] if r.index not in region.inside)
            raise Refused(reader, f"it needs {name}, one large value a row, whole")
    return region
