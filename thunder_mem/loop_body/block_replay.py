"""A region replayed at the size of a block of rows: its trace, in the largest composites that mean the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

from thunder_mem.loop_body.leaves import is_cut, walk
from thunder_mem.loop_body.log_sums import share_of_log_sum, unpack_log_sums
from thunder_mem.loop_body.region import Refused, Region, Value, arguments, relation
from thunder_mem.sharding.propagation import RuleError, Sharding, local_shape
from thunder_mem.trace.rebuilding import recorded

__all__ = ["trace_block"]


def trace_block(region: Region, sides: Sequence[Value], wanted: Sequence[bool], rows: int) -> TraceCtx:
    """The forward of a block; arguments and errors are those of `build_body`."""
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
        replay.amplifiers(args)
        for root in region.program.roots:
            replay.emit(root)
        outs = tuple(env[v.key] for v in region.outputs)
        prims.python_return({"output": outs, "flat_args": tuple(args)})
    trace.args = tuple(args)
    trace._siginfo.args = [(a.name, None) for a in args]
    return trace


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
        return arguments(leaf, lambda slot, t: self.env[t.name, shardings[slot]], self._shapes(bsym))

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
        result = None
        # A composite may refuse the block's shape for reasons of its own.
        with suppress(Exception), recorded(self.trace) as scope:
            result = bsym.sym(*args, **kwargs)
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
