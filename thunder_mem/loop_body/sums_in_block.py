"""Add the products that are gradients of whole matrices to their sums inside the block, where their operands exist.

A block gives the gradient of a weight as the two operands of a product, which the loop adds to its sum without a
temporary of the weight's size. At the block's end all such operands would exist together: of an MLP its wide value, and
the gradients of two others. Where each product is added as soon as its operands exist, they are gone earlier.
"""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.prims import OpTags
from thunder.core.proxies import AnyProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.extend import OperatorExecutor

from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["adds_to_sum", "with_sums"]

_executor = OperatorExecutor("mem_block_sums")
_add_product = _executor.register_operator(
    "add_product",
    meta=lambda *_: None,
    fn=lambda add, side, left, right: add(side, left, right),
    tags=(OpTags.DONT_DCE,),
)


def with_sums(trace: TraceCtx, sides: Sequence[int]) -> TraceCtx:
    """The block's trace that calls its last argument, `add(side, left, right)`, for each product.

    Args:
        trace: of a block, for execution, without `del`s. It returns the operands last, two for each of `sides`.
        sides: numbers of the sides whose gradients are products.
    """
    if not sides:
        return trace
    *body, result = trace.bound_symbols
    results = result.args[0]
    first = len(results) - 2 * len(sides)
    place = {p.name: i for i, b in enumerate(body) for p in b.flat_proxy_outs}
    after: dict[int, list[tuple[int, TensorProxy, TensorProxy]]] = {}
    for side, left, right in zip(sides, results[first::2], results[first + 1 :: 2], strict=True):
        after.setdefault(max(place[left.name], place[right.name]), []).append((side, left, right))
    with tracectx(trace):
        add = AnyProxy(None, prefix="add")
    bsyms = [prims.unpack_trivial.bind(add, name=add.name, output=add)]
    for i, bsym in enumerate(body):
        bsyms += [bsym, *(_add_product.bind(add, *product, output=None) for product in after.get(i, ()))]
    new = rebuilt(trace, [*bsyms, result.from_bsym(args=(results[:first],))])
    new.args = (*trace.args, add)
    new._siginfo = SigInfo("block")
    new._siginfo.args = [(a.name, None) for a in new.args]
    return new


def adds_to_sum(bsym: BoundSymbol) -> bool:
    """Whether the bound symbol adds a product to a sum."""
    return bsym.sym is _add_product
