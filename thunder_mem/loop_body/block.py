"""One chunk's program: the region at the size of a block of rows (`block_replay.py`), differentiated and compiled.

No loss is written by hand. Thunder's own grad transform differentiates the block, and the user's executors compile it,
so an executor's `cross_entropy` runs here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.compile_data import get_compile_data
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transform_common import dce
from thunder.executors.passes import del_last_used, transform_for_execution
from thunder.transforms.autodiff import grad_transform_on_trace

from thunder_mem.chunk_loop.body import Body
from thunder_mem.fusers.nvfuser_fallback import with_guarded_fusions
from thunder_mem.loop_body.block_replay import trace_block
from thunder_mem.loop_body.equal_blocks import EqualBlocks
from thunder_mem.loop_body.fusible_gathers import fusible_picks
from thunder_mem.loop_body.gradients_in_place import with_gradients_over_logits
from thunder_mem.loop_body.leaves import walk
from thunder_mem.loop_body.region import Region, Value
from thunder_mem.loop_body.sums_in_block import with_sums
from thunder_mem.semantics.effects import with_subsymbols
from thunder_mem.sharding.propagation import RuleError
from thunder_mem.trace.equal_views import without_equal_views
from thunder_mem.trace.rebuilding import recorded
from thunder_mem.trace.round_trips import without_round_trips

__all__ = ["build_body"]


def build_body(
    region: Region,
    sides: Sequence[Value],
    wanted: Sequence[bool],
    rows: int,
    executors: Sequence[Any],
    outputs: bool,
    products: bool = False,
    equal: EqualBlocks | None = None,
) -> Body:
    """Trace, differentiate and compile the region for a block of `rows` rows, and count its bytes.

    Args:
        region: the region to replay.
        sides: the inputs other than the amplifiers' operands, in the order of the call.
        wanted: for each amplifier and then each side, whether its gradient is needed.
        rows: rows in the block.
        executors: the user's executors, in order of preference.
        outputs: whether the region's outputs are also needed (always, without gradients).
        products: whether the block may add products to sums itself (`sums_in_block.py`). Not where there are
            amplifiers.
        equal: the blocks built before; an equal one is used again.

    Raises:
        Refused: an op does not replay at the block's size.
        RuleError: a gradient is missing.
    """
    forward = trace_block(region, sides, wanted, rows)
    data = get_compile_data()
    again = partial(_rebuilt, region, sides, wanted, executors, outputs, products, data.executors_list if data else ())

    def build() -> Body:
        built = _build(forward, region, sides, wanted, rows, executors, outputs, products)
        return replace(with_gradients_over_logits(built, wanted[: len(region.amplifiers)]), resized=again)

    if equal is None:
        return build()
    differentiable = {v.proxy.name for v in region.differentiable}
    flows = tuple(v.proxy.name in differentiable for v in region.outputs)
    use = tuple(wanted), rows, outputs, products, flows, tuple(side.sharding.split for side in sides)
    return equal.built(forward, use, build)


def _rebuilt(
    region: Region,
    sides: Sequence[Value],
    wanted: Sequence[bool],
    executors: Sequence[Any],
    outputs: bool,
    products: bool,
    differentiated_by: Sequence[Any],
    rows: int,
) -> Body:
    """The block for other rows, differentiated with the gradients of the same executors, also while a plan is made."""
    data = get_compile_data()
    if data is None:
        return build_body(region, sides, wanted, rows, executors, outputs, products)
    planners, data.executors_list = data.executors_list, differentiated_by
    try:
        return build_body(region, sides, wanted, rows, executors, outputs, products)
    finally:
        data.executors_list = planners


def _build(
    forward: TraceCtx,
    region: Region,
    sides: Sequence[Value],
    wanted: Sequence[bool],
    rows: int,
    executors: Sequence[Any],
    outputs: bool,
    products: bool,
) -> Body:
    args, outs = list(forward.args), list(forward.bound_symbols[-1].args[0]["output"])
    if not any(wanted):
        return _compile(args, forward.bound_symbols[:-1], outs, rows, executors, len(outs), ())
    joint = grad_transform_on_trace(forward)
    returned = joint.bound_symbols[-1].args[0]
    position = {o.name: i for i, o in enumerate(returned["fw_flat_out"]) if isinstance(o, TensorProxy)}
    differentiable = {v.proxy.name for v in region.differentiable}
    tangents: dict[int, TensorProxy] = {}
    body: list[BoundSymbol] = []
    for bsym in joint.bound_symbols[:-1]:
        if bsym.sym.id != PrimIDs.GET_GRAD:
            body.append(bsym)
        # Thunder needs a tangent for every output; one that cannot arrive flows only into dead code.
        elif region.outputs[j := position[bsym.args[0].name]].proxy.name in differentiable:
            tangents[j] = bsym.output
    order = tuple(sorted(tangents))
    with recorded(joint) as fits:
        grads = [_summed_to(g, a) for g, a, want in zip(returned["output"], forward.args, wanted, strict=False) if want]
    body += fits
    which = [i for i, want in enumerate(wanted) if want]
    results, operands = _without_products(body, grads, which, sides) if products else (grads, {})
    kept = list(returned["fw_flat_out"]) if outputs else []
    args += [tangents[i] for i in order]
    return _compile(args, body, [*kept, *results], rows, executors, len(kept), order, operands)


def _without_products(
    bsyms: Sequence[BoundSymbol], grads: Sequence[TensorProxy | None], which: Sequence[int], sides: Sequence[Value]
) -> tuple[list[TensorProxy | None], dict[int, tuple[TensorProxy, TensorProxy]]]:
    """The gradients without those of whole matrices that are products, and the operands of these by side."""
    made = {o.name: leaf for b in bsyms for leaf, _ in walk(b) for o in leaf.flat_proxy_outs}
    results: list[TensorProxy | None] = []
    operands = {}
    for i, grad in zip(which, grads, strict=True):
        leaf = None if grad is None or sides[i].sharding.split else made.get(grad.name)
        if leaf is not None and leaf.sym.id == PrimIDs.MATMUL and all(a.ndim == 2 for a in leaf.flat_proxy_args):
            left, right = leaf.flat_proxy_args
            operands[i] = left, right
        else:
            results.append(grad)
    return results, operands


def _summed_to(grad: TensorProxy | None, arg: TensorProxy) -> TensorProxy | None:
    """Sum the gradient of a broadcast 0-dim CPU tensor, which Thunder leaves to autograd."""
    if grad is None or tuple(grad.shape) == tuple(arg.shape):
        return grad
    extra = grad.ndim - arg.ndim
    dims = [*range(extra), *(d + extra for d, s in enumerate(arg.shape) if s == 1 and grad.shape[d + extra] != 1)]
    return ltorch.reshape(ltorch.sum(grad, tuple(dims)), tuple(arg.shape))


def _compile(
    args: Sequence[TensorProxy],
    bsyms: Sequence[BoundSymbol],
    results: Sequence[Any],
    rows: int,
    executors: Sequence[Any],
    outputs: int,
    tangents: tuple[int, ...],
    products: Mapping[int, tuple[TensorProxy, TensorProxy]] = MappingProxyType({}),
) -> Body:
    trace = TraceCtx(None)
    trace.kwargs = {}
    trace.args = tuple(args)
    trace._siginfo = SigInfo("block")
    trace._siginfo.args = [(a.name, None) for a in args]
    made = (o for top in bsyms for b in with_subsymbols(top) for o in b.flat_proxy_outs)
    trace.names = {p.name for p in (*args, *made)}
    trace.bound_symbols = [prims.unpack_trivial.bind(a, name=a.name, output=a) for a in args]
    trace.bound_symbols += [b for b in bsyms if b.sym.id != PrimIDs.UNPACK_TRIVIAL]
    with tracectx(trace):
        prims.python_return((*results, *chain.from_iterable(products.values())))
    trace = fusible_picks(dce(without_equal_views(without_round_trips(trace))), executors)
    _check_defined(trace)
    trace = with_guarded_fusions(with_sums(transform_for_execution(trace, executors), list(products)))
    trace = del_last_used(trace)
    fn = trace.python_callable(include_decorators=False)
    depths = {side: right.shape[0] for side, (_, right) in products.items()}
    return Body(fn, trace, rows, outputs, tangents, pairs=depths)


def _check_defined(trace: TraceCtx) -> None:
    known: set[str] = set()
    for b in trace.bound_symbols:
        missing = [a.name for a in b.flat_proxy_args if a.name not in known and b.sym.id != PrimIDs.UNPACK_TRIVIAL]
        if missing:
            raise RuleError(f"{b.sym.name} needs the gradient of a result that has none ({missing[0]})")
        known.update(o.name for o in b.flat_proxy_outs)
