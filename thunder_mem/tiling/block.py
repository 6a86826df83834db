"""One chunk's program: the region replayed at the size of a block of rows, differentiated and compiled.

No loss is written by hand. Thunder's own grad transform differentiates the block, and the user's executors compile it,
so an executor's `cross_entropy` runs here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.codeutils import SigInfo
from thunder.core.langctxs import Languages, reset_langctx, resolve_language, set_langctx
from thunder.core.prims import PrimIDs
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.pytree import tree_flatten, tree_map, tree_unflatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transform_common import dce
from thunder.executors.passes import del_last_used, transform_for_execution
from thunder.transforms.autodiff import grad_transform_on_trace

from thunder_mem.chunk_loop.body import Body
from thunder_mem.sharding.propagation import RuleError, Sharding, local_shape
from thunder_mem.tiling.fusible_gathers import fusible_picks
from thunder_mem.tiling.leaves import is_cut, walk
from thunder_mem.tiling.log_sums import share_of_log_sum, unpack_log_sums
from thunder_mem.tiling.region import Refused, Region, Value, relation
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
) -> Body:
    """Trace, differentiate and compile the region for a block of `rows` rows.

    Args:
        region: the region to replay.
        sides: the inputs other than the amplifiers' operands, in the order of the call.
        wanted: for each amplifier and then each side, whether its gradient is needed.
        rows: rows in the block.
        executors: the user's executors, in order of preference.
        outputs: whether the region's outputs are also needed (always, without gradients).
        products: whether the gradient of a whole matrix may be given as the two operands of its product. Not where
            there are amplifiers.

    Raises:
        Refused: an op does not replay at the block's size.
        RuleError: a gradient is missing.
    """
    forward = _trace_block(region, sides, wanted, rows)
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
    pairs: tuple[int, ...] = ()
    fits: list[BoundSymbol] = []
    joint.push_scope(fits)
    with tracectx(joint), langctx_torch():
        grads = [_summed_to(g, a) for g, a, want in zip(returned["output"], forward.args, wanted, strict=False) if want]
    del joint.scopes[1:]
    body += fits
    results = grads
    if products:
        results, pairs = _as_products(body, grads, [i for i, want in enumerate(wanted) if want], sides)
    kept = list(returned["fw_flat_out"]) if outputs else []
    args += [tangents[i] for i in order]
    compiled = _compile(args, body, [*kept, *results], rows, executors, len(kept), order)
    return replace(compiled, pairs=pairs)


def _as_products(
    bsyms: Sequence[BoundSymbol], grads: Sequence[TensorProxy | None], which: Sequence[int], sides: Sequence[Value]
) -> tuple[list[TensorProxy | None], tuple[int, ...]]:
    """Gradients of whole matrices as the two operands of their products, which the loop adds to the sum itself.

    Returns:
        the results, two for each that is a product, and which sides these are.
    """
    made = {o.name: leaf for b in bsyms for leaf, _ in walk(b) for o in leaf.flat_proxy_outs}
    results: list[TensorProxy | None] = []
    pairs = []
    for i, grad in zip(which, grads, strict=True):
        leaf = None if grad is None or sides[i].sharding.split else made.get(grad.name)
        if leaf is not None and leaf.sym.id == PrimIDs.MATMUL and all(a.ndim == 2 for a in leaf.flat_proxy_args):
            results += leaf.flat_proxy_args
            pairs.append(i)
        else:
            results.append(grad)
    return results, tuple(pairs)


def _summed_to(grad: TensorProxy | None, arg: TensorProxy) -> TensorProxy | None:
    """Sum the gradient of a broadcast 0-dim CPU tensor, which Thunder leaves to autograd."""
    if grad is None or tuple(grad.shape) == tuple(arg.shape):
        return grad
    extra = grad.ndim - arg.ndim
    dims = [*range(extra), *(d + extra for d, s in enumerate(arg.shape) if s == 1 and grad.shape[d + extra] != 1)]
    return ltorch.reshape(ltorch.sum(grad, tuple(dims)), tuple(arg.shape))


# --- replay ---------------------------------------------------------------------------------------


def _trace_block(region: Region, sides: Sequence[Value], wanted: Sequence[bool], rows: int) -> TraceCtx:
    trace = TraceCtx(None)
    trace.kwargs = {}
    trace._siginfo = SigInfo("block")
    env: dict[tuple[str, Sharding], Any] = {}
    with tracectx(trace):
        args = []
        for i, value in enumerate([*(a.out for a in region.amplifiers), *sides]):
            shape = local_shape(value.proxy.shape, value.sharding, rows)
            p = TensorProxy(
                name=("logits" if i < len(region.amplifiers) else "side") + str(i),
                shape=shape,
                device=value.proxy.device,
                dtype=value.proxy.dtype,
                requires_grad=bool(wanted[i]),
            )
            prims.unpack_trivial(p, name=p.name)
            args.append(p)
            env[value.key] = p
        log_sums = unpack_log_sums(region) if any(wanted) else {}
        args += log_sums.values()
        replay = _Replay(region, trace, env, rows, log_sums)
        with langctx_torch():
            replay.amplifiers(args)
            for root in region.program.roots:
                replay.emit(root)
        outs = tuple(env[v.key] for v in region.outputs)
        prims.python_return({"output": outs, "flat_args": tuple(args)})
    trace.args = tuple(args)
    trace._siginfo.args = [(a.name, None) for a in args]
    return trace


@contextmanager
def langctx_torch() -> Iterator[None]:
    """Replay in the torch language, for user traces in any language."""
    token = set_langctx(resolve_language(Languages.TORCH))
    try:
        yield
    finally:
        reset_langctx(token)


class _Replay:
    """Replays the region's ops, in the largest composites that mean the same on a block."""

    def __init__(self, region: Region, trace: TraceCtx, env: dict, rows: int, log_sums: Mapping[str, TensorProxy]):
        self.region, self.trace, self.env, self.rows, self.log_sums = region, trace, env, rows, log_sums
        self.members = {id(m.bsym): m for m in region.members}
        self.seeds = {id(a.leaf.bsym) for a in region.amplifiers}

    def amplifiers(self, logits: Sequence[TensorProxy]) -> None:
        """Add the biases, which the matrix product outside the block omits."""
        for a, x in zip(self.region.amplifiers, logits, strict=False):
            if len(a.leaf.inputs) > 2:
                bias = Value(a.leaf.inputs[2], self.region.shardings[a.leaf.index][2])
                self.env[a.out.key] = ltorch.add(x, self.env[bias.key])
                if is_cut(a.leaf):
                    self.env[a.out.key].tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)

    def emit(self, bsym: BoundSymbol) -> None:
        inner = [b for b, _ in walk(bsym) if _touches_tensors(b)]
        if not any(id(b) in self.members for b in inner):
            return
        if inner == [bsym] or (len(inner) == 1 and inner[0] is bsym):
            self._leaf(bsym)
            return
        if self._whole(inner) and self._composite(bsym, inner):
            return
        for sub in bsym.subsymbols:
            self.emit(sub)

    def _whole(self, inner: Sequence[BoundSymbol]) -> bool:
        """Whether the region has all of a composite, without a cut gradient inside that its results do not show."""
        leaves = [self.members.get(id(b)) for b in inner]
        return all(leaf is not None and not is_cut(leaf) for leaf in leaves)

    def _operands(self, bsym: BoundSymbol) -> tuple[tuple, dict]:
        """The arguments of a leaf with the block's tensors."""
        leaf = self.members[id(bsym)]
        shardings = self.region.shardings[leaf.index]
        slots = iter(range(len(leaf.inputs)))

        def local(x: Any) -> Any:
            if not isinstance(x, TensorProxy):
                return x
            return self.env[x.name, shardings[next(slots)]]

        flat, spec = tree_flatten((bsym.args, bsym.kwargs))
        args, kwargs = tree_unflatten([local(x) for x in flat], spec)
        localise = relation(leaf).localise
        return localise(args, kwargs, self._shapes(bsym)) if localise else (args, kwargs)

    def _shapes(self, bsym: BoundSymbol) -> list[tuple[int, ...]]:
        leaf = self.members[id(bsym)]
        shardings = self.region.shardings[leaf.index]
        return [local_shape(o.shape, shardings[-1 - j], self.rows) for j, o in enumerate(leaf.outputs)]

    def _leaf(self, bsym: BoundSymbol) -> None:
        leaf = self.members[id(bsym)]
        try:
            self._call(bsym)
        except Exception as e:
            reason = str(e) if isinstance(e, RuleError) else f"split as its rule says, it fails: {e}"
            raise Refused(leaf, reason) from e

    def _call(self, bsym: BoundSymbol) -> None:
        args, kwargs = self._operands(bsym)
        whole = self.log_sums.get(bsym.flat_proxy_outs[0].name)
        result = bsym.sym(*args, **kwargs) if whole is None else share_of_log_sum(whole, *args, **kwargs)
        self._bind(bsym, result)

    def _bind(self, bsym: BoundSymbol, result: Any) -> None:
        for old, new in zip(bsym.flat_proxy_outs, tree_flatten(result)[0], strict=True):
            if isinstance(old, TensorProxy):
                value = self.region.values[old.name]
                expected = local_shape(old.shape, value.sharding, self.rows)
                if tuple(new.shape) != expected:
                    raise RuleError(f"it gives {tuple(new.shape)} for a block, but its rule says {expected}")
                if (leaf := self.members.get(id(bsym))) is not None and is_cut(leaf):
                    new.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
                self.env[value.key] = new

    def _composite(self, bsym: BoundSymbol, inner: Sequence[BoundSymbol]) -> bool:
        """Call a composite on the block; keep it only if its parts agree with the rules."""
        variants: dict[str, list] = {}
        for (name, _), p in self.env.items():
            variants.setdefault(name, []).append(p)
        if any(len(variants.get(a.name, ())) != 1 for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)):
            return False
        args, kwargs = tree_map(
            lambda x: variants[x.name][0] if isinstance(x, TensorProxy) else x, (bsym.args, bsym.kwargs)
        )
        scope: list[BoundSymbol] = []
        depth = len(self.trace.scopes)
        self.trace.push_scope(scope)
        try:
            result = bsym.sym(*args, **kwargs)
        except Exception:  # a composite may refuse the block's shape for reasons of its own
            result = None
        finally:
            del self.trace.scopes[depth:]  # an exception leaves unfinished ops' scopes behind
        if result is None or len(scope) != 1:
            return False
        replayed = [b for b, _ in walk(scope[0]) if _touches_tensors(b)]
        if not self._same(inner, replayed):
            return False
        self.trace.peek_scope().append(scope[0])
        self._bind(bsym, result)
        return True

    def _same(self, derived: Sequence[BoundSymbol], replayed: Sequence[BoundSymbol]) -> bool:
        if [b.sym.id for b in derived] != [b.sym.id for b in replayed]:
            return False
        for d, r in zip(derived, replayed, strict=True):
            leaf = self.members[id(d)]
            shapes = self._shapes(d)
            if [tuple(o.shape) for o in r.flat_proxy_outs] != list(shapes):
                return False
            localise = relation(leaf).localise
            args, kwargs = localise(d.args, d.kwargs, shapes) if localise else (d.args, d.kwargs)
            if _literals((args, kwargs)) != _literals((r.args, r.kwargs)):
                return False
        return True


def _literals(tree: Any) -> list[Any]:
    return [x for x in tree_flatten(tree)[0] if not isinstance(x, TensorProxy)]


def _touches_tensors(bsym: BoundSymbol) -> bool:
    return any(isinstance(o, TensorProxy) for o in bsym.flat_proxy_outs)


# --- compilation ----------------------------------------------------------------------------------


def _compile(
    args: Sequence[TensorProxy],
    bsyms: Sequence[BoundSymbol],
    results: Sequence[Any],
    rows: int,
    executors: Sequence[Any],
    outputs: int,
    tangents: tuple[int, ...],
) -> Body:
    trace = TraceCtx(None)
    trace.kwargs = {}
    trace.args = tuple(args)
    trace._siginfo = SigInfo("block")
    trace._siginfo.args = [(a.name, None) for a in args]
    for b in bsyms:
        for sub in _all(b):
            for o in sub.flat_proxy_outs:
                if o.name not in trace.names:
                    trace.add_name(o.name)
    for a in args:
        if a.name not in trace.names:
            trace.add_name(a.name)
    trace.bound_symbols = [prims.unpack_trivial.bind(a, name=a.name, output=a) for a in args]
    trace.bound_symbols += [b for b in bsyms if b.sym.id != PrimIDs.UNPACK_TRIVIAL]
    with tracectx(trace):
        prims.python_return(tuple(results))
    trace = fusible_picks(dce(without_round_trips(trace)), executors)
    _check_defined(trace)
    trace = transform_for_execution(trace, executors)
    trace = del_last_used(trace)
    fn = trace.python_callable(include_decorators=False)
    return Body(fn, trace, rows, outputs, tangents, _peak_bytes(trace))


def _check_defined(trace: TraceCtx) -> None:
    known: set[str] = set()
    for b in trace.bound_symbols:
        missing = [a.name for a in b.flat_proxy_args if a.name not in known and b.sym.id != PrimIDs.UNPACK_TRIVIAL]
        if missing:
            raise RuleError(f"{b.sym.name} needs the gradient of a result that has none ({missing[0]})")
        known.update(o.name for o in b.flat_proxy_outs)


def _all(bsym: BoundSymbol):
    yield bsym
    for sub in bsym.subsymbols:
        yield from _all(sub)


_VIEWS = {
    PrimIDs.SHALLOW_COPY, PrimIDs.BROADCAST_IN_DIM, PrimIDs.SQUEEZE, PrimIDs.TRANSPOSE, PrimIDs.RESHAPE, PrimIDs.SLICE,
}  # fmt: skip
_VIEW_NAMES = {
    "reshape",
    "permute",
    "unsqueeze",
    "squeeze",
    "expand",
    "view",
    "shallow_copy",
    "broadcast_in_dim",
    "detach",
}


def _peak_bytes(trace: TraceCtx) -> int:
    """Bytes of the block's own tensors at its peak; a view counts with its base."""
    args = {a.name for a in trace.args}
    owner: dict[str, str] = {}
    users: dict[str, int] = {}
    sizes: dict[str, int] = {}
    live = peak = 0
    for bsym in trace.bound_symbols:
        if bsym.sym.id in (PrimIDs.UNPACK_TRIVIAL, PrimIDs.RETURN):
            continue
        if bsym.sym.id == PrimIDs.DEL:
            for p in bsym.flat_proxy_args:
                base = owner.get(p.name, p.name)
                if base in args or base not in users:
                    continue
                users[base] -= 1
                if not users[base]:
                    live -= sizes[base]
            continue
        inputs = [a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
        is_view = bsym.sym.id in _VIEWS or bsym.sym.name in _VIEW_NAMES
        for o in bsym.flat_proxy_outs:
            if not isinstance(o, TensorProxy) or o.name in users or o.name in owner:
                continue
            if is_view and inputs:
                base = owner.get(inputs[0].name, inputs[0].name)
                owner[o.name] = base
                if base in users:
                    users[base] += 1
                continue
            users[o.name] = 1
            sizes[o.name] = math.prod(o.shape) * dtypes.to_dtype(o.dtype).bytes
            live += sizes[o.name]
        peak = max(peak, live)
    return peak
