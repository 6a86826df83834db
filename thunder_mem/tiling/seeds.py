"""Products from which a stretch may grow: their results are wide per row. Each comes with the rows it may run by.

A product of matrices has a row for each token. A convolution has a row for each sample of the batch, or for each
position if its windows are single positions. Experts whose weights are stacked are one product for all of them, with a
row for each token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy

from thunder_mem.loop_body.leaves import PRODUCTS, Leaf, Program, numel, size_bytes
from thunder_mem.semantics.view_prims import VIEWS
from thunder_mem.sharding.window_rules import positions_apart

__all__ = ["Seed", "seeds_of"]

_SAME_VALUES = {*VIEWS, PrimIDs.CONVERT_ELEMENT_TYPE}


@dataclass(frozen=True, eq=False)
class Seed:
    """A product and the rows of a stretch around it.

    Attributes:
        leaf: the product.
        rows: its operand with the rows, 0 or 1.
        dims: the dims of that operand that count the rows, the outermost first.
    """

    leaf: Leaf
    rows: int
    dims: tuple[int, ...]

    @property
    def key(self) -> tuple[str, int, tuple[int, ...]]:
        """Its identity in all traces of one program."""
        return self.leaf.outputs[0].name, self.rows, self.dims

    @property
    def positions(self) -> int:
        """The rows of the matrix product in one row of the stretch: a convolution's positions in one sample."""
        if self.leaf.bsym.sym.id != PrimIDs.CONVOLUTION:
            return 1
        space = enumerate(self.leaf.outputs[0].shape)
        return math.prod(size for d, size in space if d > 1 and d not in self.dims)


def seeds_of(program: Program, ratio: float) -> list[Seed]:
    """All seeds, the largest results first; of one product, the smallest rows first.

    Args:
        program: the flattened trace.
        ratio: the least ratio of the result's size to the row operand's size.
    """
    found = [
        seed
        for leaf in program.leaves
        for seed in _seeds_at(program, leaf)
        if numel(leaf.outputs[0]) > ratio * numel(leaf.inputs[seed.rows])
    ]
    return sorted(found, key=lambda s: -size_bytes(s.leaf.outputs[0]))


def _seeds_at(program: Program, leaf: Leaf) -> Iterator[Seed]:
    if leaf.bsym.sym.id == PrimIDs.CONVOLUTION:
        yield from _of_convolution(program, leaf)
    if leaf.bsym.sym.id not in PRODUCTS:
        return
    x, w = leaf.inputs[:2]
    if w.ndim == 2 and x.name not in program.fixed:
        yield Seed(leaf, 0, tuple(range(x.ndim - 1)))
    elif _is_stack(program, x, w):
        yield Seed(leaf, 0, (x.ndim - 2,))
    if x.ndim == w.ndim == 2 and leaf.bsym.sym.id == PrimIDs.MATMUL and _is_moving(program, w, x):
        yield Seed(leaf, 1, (1,))


def _is_stack(program: Program, x: TensorProxy, w: TensorProxy) -> bool:
    """Whether `w` is a stack of weights. In a plain function an argument is taken for weights."""
    return w.ndim > 2 and x.ndim == w.ndim and x.name not in program.fixed and not _is_computed(program, w)


def _is_moving(program: Program, x: TensorProxy, other: TensorProxy) -> bool:
    """Whether the columns of the right operand `x` are those of activations, and not the dims of a weight.

    Parameters of modules are known. In a plain function the right operand is the weight if it is an argument.
    """
    if other.name in program.fixed:
        return x.name not in program.fixed
    return _is_computed(program, x)


def _is_computed(program: Program, t: TensorProxy) -> bool:
    """Whether `t` is no argument, nor a view or a cast of one."""
    while (maker := program.producer.get(t.name)) is not None and maker.bsym.sym.id in _SAME_VALUES:
        t = maker.inputs[0]
    return t.name in program.producer


def _of_convolution(program: Program, leaf: Leaf) -> Iterator[Seed]:
    x, weight = leaf.inputs[:2]
    if x.name in program.fixed or _is_constant(program, weight):
        return
    _, _, _, stride, padding, _, _, output_padding, _ = leaf.bsym.args
    if apart := positions_apart(weight, stride, padding, output_padding):
        yield Seed(leaf, 0, (0, *apart))
    yield Seed(leaf, 0, (0,))


def _is_constant(program: Program, t: TensorProxy) -> bool:
    """Whether `t` depends on no argument, as the weight by which Thunder writes a pooling as a convolution."""
    pending = [t]
    while pending:
        maker = program.producer.get(pending.pop().name)
        if maker is None:
            return False
        pending += maker.inputs
    return True
