"""From an amplifying product inside the program to the token-wise stretch around it that can run tile by tile.

A stretch starts at products whose results are wide per row and ends at values that are narrow per row: an MLP with
its norm and its residual sum reads one narrow value and gives one, and everything between exists for a few rows at a
time. It grows downwards until every wide value is consumed, and from there, and upwards from its products, through
narrow values to where the fewest bytes a row cross its border. What couples rows (attention's scores, a sum over
tokens) ends it. Random numbers stay outside: they are drawn for all rows, so that any tiling has the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import thunder.torch as ltorch
from numpy.typing import NDArray
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy

from thunder_mem.loop_body.borders import Borders, Mask, borders_between
from thunder_mem.loop_body.leaves import Leaf, Program, effects, numel, size_bytes
from thunder_mem.loop_body.region import RETURNED_WHOLE, Refused, Region, Value, propagate_leaf, row_space
from thunder_mem.semantics.view_prims import VIEWS
from thunder_mem.sharding.propagation import RuleError, Sharding
from thunder_mem.tiling.seeds import Seed
from thunder_mem.trace.origins import symbol_name

__all__ = [
    "PASSING",
    "WIDE_RATIO",
    "Closure",
    "above",
    "cut_composites",
    "grow_stretch",
    "read_otherwise",
    "region_of",
]

WIDE_RATIO = 1.25
"""A value is wide if a row of it takes more than this many times what a row of the product's operand takes."""

PASSING = {*VIEWS, PrimIDs.CONVERT_ELEMENT_TYPE, PrimIDs.ADD, PrimIDs.SUB, PrimIDs.NEG}
"""Operations whose gradients do not depend on their operands."""

_RANDOM = {PrimIDs.UNIFORM, PrimIDs.UNIFORM_PHILOX, PrimIDs.RANDN, PrimIDs.RANDINT}

_SUM_OF_PARTS = {ltorch.dropout.id, ltorch.matmul.id}
"""Composites that no executor computes in another way than their parts."""

_LOW_RANK = 8
"""A product is of low rank if rows of its operand and of its result differ in length by at least this factor."""

_REACH = 80
"""Operations that a stretch takes in beyond its products, upwards and downwards."""


class Closure:
    """Leaves whose rows stay apart, with the sharding of every value that they read and make."""

    def __init__(self, program: Program, n: int):
        self.program, self.n = program, n
        self.narrow = 0.0  # bytes of a row at most
        self.values: dict[str, Sharding] = {}
        self.members: dict[int, dict[int, Sharding]] = {}
        self.drawn = _drawn(program)

    def row_bytes(self, t: TensorProxy) -> int:
        return numel(t) * t.dtype.bytes // self.n

    def is_wide(self, t: TensorProxy) -> bool:
        return self.row_bytes(t) > self.narrow

    def splits(self, t: TensorProxy) -> bool:
        return t.name in self.values and self.values[t.name].split

    def takes_narrow(self, leaf: Leaf, known: Mapping[int, Sharding]) -> bool:
        """Whether the leaf costs little to repeat, and its rows stay apart; then it is taken."""
        try:
            found = self._shardings(leaf, known)
        except RuleError:
            return False
        if leaf.is_product and not self._has_low_rank(leaf, found):
            return False
        self._add(leaf, found)
        return True

    def _has_low_rank(self, leaf: Leaf, found: Mapping[int, Sharding]) -> bool:
        """Whether a product of narrow values is as cheap as one of LoRA's factors."""
        out = leaf.outputs[0]
        rows = [t for slot, t in enumerate(leaf.inputs) if found[slot].split]
        small, *_, large = sorted(map(numel, (*rows, out)))
        return _LOW_RANK * small <= large and not self.is_wide(out)

    def take(self, leaf: Leaf, known: Mapping[int, Sharding]) -> None:
        """Add a leaf.

        Raises:
            RuleError: its rows depend on one another, or on rows in two ways.
        """
        self._add(leaf, self._shardings(leaf, known))

    def _shardings(self, leaf: Leaf, known: Mapping[int, Sharding]) -> Mapping[int, Sharding]:
        if effects(leaf):
            raise RuleError("it writes into a tensor in place")
        if any(o.name in self.drawn for o in leaf.outputs):
            raise RuleError("it draws random numbers, which are drawn for all rows at once")
        found = propagate_leaf(leaf, known, self.n)
        tensors = [*enumerate(leaf.inputs), *((-1 - j, o) for j, o in enumerate(leaf.outputs))]
        for slot, t in tensors:
            if found[slot].partial not in (None, "sum") or (found[slot].partial and slot >= 0):
                raise RuleError("it combines rows")
            if slot < 0 and found[slot].whole:
                raise RuleError("its result does not depend on rows")
            if found[slot].split and not found[slot].complete(self.n):
                raise RuleError("it carries only a part of the row dims")
            if t.name in self.values and self.values[t.name] != found[slot]:
                raise RuleError(f"it needs {t.name} split in two ways")
        return found

    def _add(self, leaf: Leaf, found: Mapping[int, Sharding]) -> None:
        tensors = [*enumerate(leaf.inputs), *((-1 - j, o) for j, o in enumerate(leaf.outputs))]
        self.members[leaf.index] = dict(found)
        self.values.update({t.name: found[slot] for slot, t in tensors if found[slot].split or slot < 0})


def _drawn(program: Program) -> frozenset[str]:
    """Random numbers, and what is computed from them alone and takes fewer bytes, as the mask of a dropout does."""
    found: set[str] = set()
    for leaf in program.leaves:
        alone = bool(leaf.inputs) and all(t.name in found for t in leaf.inputs)
        if leaf.bsym.sym.id in _RANDOM or (alone and _is_narrower(leaf)):
            found.update(o.name for o in leaf.outputs)
    return frozenset(found)


def _is_narrower(leaf: Leaf) -> bool:
    return sum(map(size_bytes, leaf.outputs)) < sum(map(size_bytes, leaf.inputs))


def grow_stretch(
    program: Program, seed: Seed, allowed: Callable[[Borders], Mask] = lambda borders: ~borders.inside[-1]
) -> Region | None:
    """The stretch around a product, by its rows.

    It is a region without amplifiers: its products are members.

    Args:
        program: the flattened trace.
        seed: the product with its rows.
        allowed: which stretches may be.

    Returns:
        the stretch that fewest bytes cross; None if no allowed one can run by rows.

    Raises:
        Refused: a wide value of it is needed whole.
    """
    leaf, rows = seed.leaf, seed.rows
    start, n = row_space(leaf, rows, seed.dims, "tiles")
    closure = Closure(program, n)
    try:
        closure.take(leaf, {rows: start})
    except RuleError as e:
        raise Refused(leaf, str(e)) from None
    closure.narrow = WIDE_RATIO * closure.row_bytes(leaf.inputs[rows])
    _take_wide(closure, leaf)
    core = frozenset(closure.members)
    borders = borders_between(program, [core, *above(closure, core)], [core, *_below(closure, core)])
    obstacles = [*read_otherwise(closure, borders), *cut_composites(closure, borders)]
    blocked = borders.either(mask for mask, _ in obstacles)
    whole = borders.only(~(blocked | borders.comes_back()))
    if not len(whole):
        first = int(blocked.argmax())
        words = (why for mask, why in obstacles if mask[first])
        raise Refused(leaf, next(words, "a value leaves it and comes back to it"))
    fit = whole.only(allowed(whole))
    if not len(fit):
        return None
    crossing = _crossing_bytes(closure, fit, leaf.index)
    fewest = fit.only(crossing == crossing.min())
    up, down = fewest.reach
    best = np.lexsort((-down, up, _passing_bytes(closure, fewest)))[0]
    return region_of(closure, fewest.members(int(best)))


def _take_wide(closure: Closure, seed: Leaf) -> None:
    """Take in all readers of wide values, and what makes the wide values that they take beside."""
    program = closure.program
    wide, done = [*seed.outputs], set[str]()
    while wide:
        t = wide.pop(0)
        if t.name in done or not closure.is_wide(t):
            continue
        done.add(t.name)
        if t.name in program.returned:
            raise Refused(seed, f"its result {t.name}, one wide value a row, {RETURNED_WHOLE}")
        for reader in program.consumers.get(t.name, ()):
            if reader.index in closure.members:
                continue
            known = {s: closure.values[x.name] for s, x in enumerate(reader.inputs) if x.name in closure.values}
            try:
                closure.take(reader, known)
            except RuleError as e:
                raise Refused(reader, f"it needs {t.name}, one wide value a row, whole: {e}") from None
            wide += reader.outputs
            wide += _take_makers(closure, reader)


def _take_makers(closure: Closure, reader: Leaf) -> list[TensorProxy]:
    """Take in what makes the reader's wide operands; returns the values that this makes."""
    made: list[TensorProxy] = []
    pending = list(reader.inputs)
    while pending:
        t = pending.pop()
        producer = closure.program.producer.get(t.name)
        if producer is None or producer.index in closure.members or not (closure.splits(t) and closure.is_wide(t)):
            continue
        slot = -1 - [o.name for o in producer.outputs].index(t.name)
        try:
            closure.take(producer, {slot: closure.values[t.name]})
        except RuleError:
            continue  # it exists anyway, and is read tile by tile
        made += producer.outputs
        pending += producer.inputs
    return made


def above(
    closure: Closure, core: frozenset[int], may_take: Callable[[Leaf], bool] = lambda leaf: True
) -> Iterator[frozenset[int]]:
    """The core with more and more of the narrow values that it is made of, the latest first."""
    program, now, refused = closure.program, set(core), set[int]()
    while len(now) < len(core) + _REACH:
        read = (t.name for i in now for t in program.leaves[i].inputs if closure.splits(t))
        makers = {program.producer[name].index for name in read if name in program.producer} - now - refused
        if not makers:
            return
        leaf = program.leaves[max(makers)]
        known = {-1 - j: closure.values[o.name] for j, o in enumerate(leaf.outputs) if closure.splits(o)}
        if not (may_take(leaf) and closure.takes_narrow(leaf, known)):
            refused.add(leaf.index)
            continue
        now.add(leaf.index)
        yield frozenset(now)


def _below(closure: Closure, core: frozenset[int]) -> Iterator[frozenset[int]]:
    """The core with more and more of what its narrow results go into, the earliest first."""
    program, now, refused = closure.program, set(core), set[int]()
    while len(now) < len(core) + _REACH:
        made = (o.name for i in now for o in program.leaves[i].outputs)
        readers = {r.index for name in made for r in program.consumers.get(name, ())} - now - refused
        if not readers:
            return
        leaf = program.leaves[min(readers)]
        known = {s: closure.values[t.name] for s, t in enumerate(leaf.inputs) if closure.splits(t)}
        if not closure.takes_narrow(leaf, known):
            refused.add(leaf.index)
            continue
        now.add(leaf.index)
        now.update(_sides_of(closure, leaf, min(core)))
        yield frozenset(now)


def _sides_of(closure: Closure, leaf: Leaf, start: int) -> Iterator[int]:
    """What makes the leaf's other operands after the stretch has begun, such as a conversion: it comes along."""
    pending = list(leaf.inputs)
    while pending:
        t = pending.pop()
        producer = closure.program.producer.get(t.name)
        if producer is None or producer.index < start or not closure.splits(t):
            continue
        slot = -1 - [o.name for o in producer.outputs].index(t.name)
        if producer.index not in closure.members and closure.takes_narrow(producer, {slot: closure.values[t.name]}):
            yield producer.index
            pending += producer.inputs


def _crossing_bytes(closure: Closure, borders: Borders, at: int) -> NDArray[np.int64]:
    """Bytes of one row of all values of members or around them that exist whole while a stretch runs at leaf `at`."""
    leaves = (closure.program.leaves[i] for i in closure.members)
    touched = {t.name: t for leaf in leaves for t in (*leaf.inputs, *leaf.outputs)}
    total = np.zeros(len(borders), dtype=np.int64)
    for t in filter(closure.splits, touched.values()):
        total += closure.row_bytes(t) * borders.exists_whole(t.name, at)
    return total


def read_otherwise(closure: Closure, borders: Borders) -> Iterator[tuple[Mask, str]]:
    """Members' results that other members read whole, or by other rows, such as a table that a stretch indexes."""
    program = closure.program
    made = {o.name: closure.members[i][-1 - j] for i in borders.row_of for j, o in enumerate(program.leaves[i].outputs)}
    for i in borders.row_of:
        for slot, t in enumerate(program.leaves[i].inputs):
            if t.name in made and made[t.name] != closure.members[i][slot]:
                why = f"{program.leaves[i].label} in it needs rows of {t.name} that other tiles compute"
                yield borders.holds(i) & borders.makes(t.name), why


def cut_composites(closure: Closure, borders: Borders) -> Iterator[tuple[Mask, str]]:
    """Composites in which a value by rows crosses the border, so that executors could not run them whole."""
    program = closure.program
    leaves = (program.leaves[i] for i in borders.row_of)
    touched = {t.name: t for leaf in leaves for t in (*leaf.inputs, *leaf.outputs)}
    for t in filter(closure.splits, touched.values()):
        producer = program.producer.get(t.name)
        if producer is None or not producer.parents or producer.parents[0].sym.id in _SUM_OF_PARTS:
            continue
        for reader in program.consumers.get(t.name, ()):
            if reader.parents and reader.parents[0] is producer.parents[0]:
                why = f"only a part of {symbol_name(reader.parents[0].sym)} could run in tiles"
                yield borders.makes(t.name) ^ borders.holds(reader.index), why


def _passing_bytes(closure: Closure, borders: Borders) -> NDArray[np.int64]:
    """Bytes of one row of all values from outside that members only add, as an expert adds to the others' sum.

    The backward would receive each for nothing, and copy a gradient to be its gradient.
    """
    read = {t.name: t for i in borders.row_of for t in closure.program.leaves[i].inputs if closure.splits(t)}
    total = np.zeros(len(borders), dtype=np.int64)
    for name, t in read.items():
        given = borders.reads(name) & ~borders.makes(name)
        if given.any():
            total += closure.row_bytes(t) * (given & ~_is_used(borders, name))
    return total


def _is_used(borders: Borders, name: str) -> Mask:
    """Whether a gradient of the members depends on the value: something else than sums reads it, or a sum of it."""
    used = borders.inside[-1]
    reached = {name: ~used}
    for leaf in (borders.program.leaves[i] for i in borders.row_of):
        if names := {t.name for t in leaf.inputs} & reached.keys():
            reading = borders.holds(leaf.index) & borders.either(reached[n] for n in names)
            if leaf.bsym.sym.id in PASSING:
                reached.update((o.name, reading) for o in leaf.outputs)
            else:
                used = used | reading
    return used


def region_of(closure: Closure, inside: frozenset[int]) -> Region:
    """The region of some leaves of a closure."""
    program = closure.program
    members = tuple(program.leaves[i] for i in sorted(inside))
    values = {o.name: Value(o, closure.members[m.index][-1 - j]) for m in members for j, o in enumerate(m.outputs)}
    shardings = {i: closure.members[i] for i in inside}
    return Region(program, closure.n, (), members, shardings, values, frozenset(values))
