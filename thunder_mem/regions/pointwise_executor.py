"""thunder_mem's own fusion executor: Inductor, restricted to operations that nvFuser would fuse.

`mem_pointwise_ex` fuses pointwise operations, reductions and views, on a CPU and on CUDA, and nothing
else: no random number, no gather or scatter, no matmul, nothing in place. It stands in Thunder's
registry as ``"mem_pointwise"``, so ``thunder.jit(fn, executors=["mem_pointwise"])`` works, with
`MemEfficient` and without.

Regions of the same content (operations, scalars, shapes, dtypes, devices and connections, but not names) share one
`RegionFunction`, so that 32 equal layers compile once. It lives as long as a trace that calls it, so a deleted jitted
function leaves nothing behind.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from itertools import count, groupby
from numbers import Number
from typing import Any

import thunder.torch as ltorch
from thunder.core import devices, dtypes, utils
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, pyval, unvariableify
from thunder.core.rematerialization import rematerialize
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance
from thunder.core.transform_common import dce
from thunder.executors.data_dependent_partition import Node, fuse_bound_symbols
from thunder.executors.passes import update_fusion_call_ctx
from thunder.executors.pythonex import ex as python_ex
from thunder.executors.torch_compile import TorchCompileExecutor
from thunder.executors.torchex import ex as torch_ex
from thunder.executors.utils import Region
from thunder.extend import ImplInfo, register_executor

from thunder_mem.regions import region_kernels  # noqa: F401 - declares what regions' kernels come to
from thunder_mem.regions.compiled_region import RegionFunction, literal
from thunder_mem.regions.inplace_outputs import InplacePlan
from thunder_mem.regions.region_views import views_outside
from thunder_mem.semantics.fusible_prims import POINTWISE, REDUCTIONS, SHAPES
from thunder_mem.semantics.layout import is_dense_function
from thunder_mem.trace.rebuilding import rebuilt
from thunder_mem.trace.renaming import renamed, under

__all__ = ["MemPointwiseExecutor", "mem_pointwise_ex", "new_leaves", "region_function"]

# Whole Thunder operations. `contiguous` looks at the strides before it copies, which its prim does not;
# the prim inside `lerp` is one that the torch executor does not know.
_COMPOSITES = frozenset({ltorch.contiguous.id, ltorch.lerp.id})

_INTEGERS = (dtypes.uint8, dtypes.int8, dtypes.int16, dtypes.int32, dtypes.int64)
_FLOATS = (dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.float64)
_DTYPES = frozenset((dtypes.bool8, *_INTEGERS, *_FLOATS))
_DEVICES = (devices.DeviceType.CPU, devices.DeviceType.CUDA)


def _is_fusible_value(x: Any) -> bool:
    if isinstance(x, tuple | list | dict):  # flattened here, because Thunder's own way is very slow
        return all(map(_is_fusible_value, x.values() if isinstance(x, dict) else x))
    if isinstance(x, TensorProxy):
        # A subclass is a tensor of another kind (a DTensor, say).
        known = type(x) is TensorProxy and dtypes.to_strong_dtype(x.dtype) in _DTYPES
        return known and x.device.devicetype in _DEVICES
    if isinstance(x, (NumberProxy, Number)):
        return not isinstance(pyval(x) if isinstance(x, NumberProxy) else x, complex)
    if isinstance(x, dtypes.dtype):
        return dtypes.to_strong_dtype(x) in _DTYPES
    if isinstance(x, devices.Device):
        return x.devicetype in _DEVICES
    return not isinstance(x, Proxy)


def _is_fusible_leaf(bsym: BoundSymbol) -> bool:
    if bsym.sym.id not in mem_pointwise_ex.implmap:
        return False
    if not all(map(_is_fusible_value, (*bsym.args, *bsym.kwargs.values(), *bsym.flat_proxy_outs))):
        return False
    # Under `cache="symbolic values"` there is arithmetic on numbers too, which Python may know how to do.
    return torch_ex.can_execute(bsym) or python_ex.can_execute(bsym)


def _is_fusible(bsym: BoundSymbol) -> bool:
    # An executor runs operations that it has claimed or registered itself, not their parts.
    open_to_all = bool(bsym.subsymbols) and bsym.sym.executor is None
    return _is_fusible_leaf(bsym) or (open_to_all and all(map(_is_fusible, bsym.subsymbols)))


def _has_effect(bsym: BoundSymbol) -> bool:
    """Whether it, or a part of it, writes in place or has another side effect."""
    if bsym.sym.id in (PrimIDs.RETURN, PrimIDs.UNPACK_TRIVIAL):
        return False
    tags = {OpTags.IN_PLACE, OpTags.DONT_DCE}
    return not tags.isdisjoint(bsym.sym.tags or ()) or any(map(_has_effect, bsym.subsymbols))


def _computed_once(bsym: BoundSymbol) -> BoundSymbol:
    """`bsym` with the mark of a reduction, which Thunder's `rematerialize` leaves in its region."""
    return bsym.from_bsym(tags=bsym.tags | {OpTags.REDUCTION_OP})


class MemPointwiseExecutor(TorchCompileExecutor):
    """Fuses pointwise operations, reductions and views into regions named ``MemPointwise<n>``.

    Its own `fusion_pass` is that of Thunder's torch.compile executors, but views that other operations read stay
    outside of regions. In a trace that writes in place only neighbours fuse, and nothing moves: Thunder's partition
    has no edge from a reader to a later write; Thunder's executors hide that by fusing the write. Fusion passes of
    other executors must not move the region either: their `rematerialize` would read overwritten values.
    """

    def can_execute(self, bsym: BoundSymbol) -> bool:
        return _is_fusible_leaf(bsym)

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        """Whether `fuse` takes `bsym` as a member of a region: it makes new tensors, only from pointwise
        operations, reductions and views over supported dtypes on a CPU or on CUDA."""
        outs, args = bsym.flat_proxy_outs, {x.name for x in bsym.flat_proxy_args}
        makes_tensors = bool(outs) and all(isinstance(o, TensorProxy) and o.name not in args for o in outs)
        return makes_tensors and _is_fusible(bsym)

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        bsyms: list[Any] = trace.bound_symbols
        if not any(map(_has_effect, bsyms)):
            return self._fused(trace)
        producers, consumers = utils.producers_and_consumers(trace)
        fused: list[Any] = []
        regions = count()
        for fusible, group in groupby(bsyms, self.can_fuse):
            run = list(group)
            if fusible:
                region = Region(producers, consumers, run)
                region.bound_symbols = list(map(_computed_once, run))
                run = [self.fuse(region, next(regions))]
            fused += run
        return rebuilt(trace, fused, "Fusion of neighbours")

    def _fused(self, trace: TraceCtx) -> TraceCtx:
        """The fusion pass of a trace without effects."""
        bsyms, outside = views_outside(trace.bound_symbols, self.can_fuse)
        ordered = rebuilt(trace, bsyms)

        def takes(bsym: BoundSymbol) -> bool:
            return outside.isdisjoint(o.name for o in bsym.flat_proxy_outs) and self.can_fuse(bsym)

        def is_taken(node: Node) -> bool:
            return len(node.group_bsyms) > 1 or takes(node.group_bsyms[0])

        producers, consumers = utils.producers_and_consumers(ordered)
        fused: list[BoundSymbol] = []
        regions = count()
        for group in fuse_bound_symbols(ordered, lambda a, b: is_taken(a) and is_taken(b)):
            if len(group) > 1 or takes(group[0]):
                group = [self.fuse(Region(producers, consumers, group), next(regions))]
            fused += group
        new_trace = update_fusion_call_ctx(dce(rematerialize(rebuilt(trace, fused))))
        new_trace.set_provenance(TraceProvenance("Fusion"))
        return new_trace

    def fuse(self, region: Region, fusion_counter: int) -> BoundSymbol:
        """The bound symbol that runs `region` as one function of data; nothing is compiled yet.

        Raises:
            ValueError: `can_fuse` refuses a member, or a member reads a value that is neither an input of the
                region nor made in it.
        """
        inputs = [unvariableify(x) for x in region.inputs]
        outputs = [unvariableify(x) for x in region.outputs]
        function = region_function(region.bound_symbols, inputs, outputs)
        return self.register_temporary_operation(
            f"MemPointwise{fusion_counter}", function, inputs=inputs, outputs=outputs, bsyms=region.bound_symbols
        )


mem_pointwise_ex = MemPointwiseExecutor("mem_pointwise")
mem_pointwise_ex._implmap = {
    op: ImplInfo() for op in torch_ex.implmap if op in POINTWISE | REDUCTIONS | SHAPES | _COMPOSITES
}
register_executor(mem_pointwise_ex)


def _leaves(bsyms: Sequence[BoundSymbol]) -> Iterator[BoundSymbol]:
    """The leaf operations of `bsyms`, in order."""
    for bsym in bsyms:
        if _is_fusible_leaf(bsym):
            yield bsym
        elif bsym.subsymbols and is_dense_function(bsym) and isinstance(out := bsym.output, TensorProxy):
            # Its parts would have the operand's layout, and `dropout` draws in memory order.
            computed = {out.name: under(out, f"{out.name}_as_computed")}
            yield from _leaves([renamed(b, computed) for b in bsym.subsymbols])
            yield ltorch.contiguous.bind(computed[out.name], output=out)
        elif bsym.subsymbols:
            yield from _leaves(bsym.subsymbols)
        elif bsym.flat_proxy_outs:
            raise ValueError(f"mem_pointwise cannot fuse {bsym.sym.name}: ask can_fuse() before fuse()")


def _signature(proxy: Proxy) -> Hashable:
    if isinstance(proxy, TensorProxy):
        shape = tuple(pyval(n) if isinstance(n, NumberProxy) else int(n) for n in proxy.shape)
        return (shape, str(dtypes.to_strong_dtype(proxy.dtype)), str(proxy.device))
    return type(proxy).__name__


def new_leaves(bsyms: Sequence[BoundSymbol], inputs: Sequence[Proxy]) -> list[BoundSymbol]:
    """The leaf operations of a region, without those whose results exist already."""
    known = {proxy.name for proxy in inputs}
    leaves = []
    for leaf in _leaves(bsyms):
        made = {o.name for o in leaf.flat_proxy_outs}
        if not made <= known:
            known |= made
            leaves.append(leaf)
    return leaves


_lock = threading.Lock()
_functions: weakref.WeakValueDictionary[Hashable, RegionFunction] = weakref.WeakValueDictionary()


def region_function(
    bsyms: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy], reuse: InplacePlan | None = None
) -> RegionFunction:
    """The function from `inputs` to `outputs`, one object for all regions of the same content.

    With `reuse` (see `inplace_outputs.py`) it writes outputs over inputs.
    """
    number = {proxy.name: i for i, proxy in enumerate(inputs)}

    def content(x: Any) -> Hashable:
        if isinstance(x, Proxy):
            if x.name not in number:
                raise ValueError(f"the region reads {x.name}, which is neither an input of it nor made in it")
            return number[x.name]
        if isinstance(x, (tuple, list)):
            return tuple(content(e) for e in x)
        if isinstance(x, dict):
            return tuple((k, content(x[k])) for k in sorted(x))
        return literal(x)

    program, leaves = [], new_leaves(bsyms, inputs)
    for leaf in leaves:
        program.append((leaf.sym.id, content(leaf.args), content(leaf.kwargs)))
        for o in leaf.flat_proxy_outs:
            number.setdefault(o.name, len(number))

    key = (tuple(map(_signature, inputs)), tuple(program), tuple(content(o) for o in outputs), reuse)
    with _lock:
        function = _functions.get(key)
        if function is None:
            function = _functions[key] = RegionFunction(leaves, inputs, outputs, reuse, key)
    return function
