"""Which writes in place can become new values, and which write autograd will miss."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from thunder.core import dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.pytree import tree_flatten_with_dataclass
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.functionalization.decided_views import SURE_VIEW
from thunder_mem.functionalization.undone_views import can_be_undone, shows_whole
from thunder_mem.semantics.aliases import Aliases
from thunder_mem.semantics.effects import effects_of, is_copy, leaves
from thunder_mem.semantics.view_prims import CERTAIN_VIEWS

__all__ = [
    "arguments_of",
    "copies_in",
    "has_own_gradient",
    "is_certain_view",
    "is_detached",
    "replaceable_writes",
    "tensors_in",
]


def copies_in(bsym: BoundSymbol) -> list[BoundSymbol]:
    return [leaf for leaf in leaves(bsym) if is_copy(leaf)]


def _updates_of_statistics(bsym: BoundSymbol) -> list[BoundSymbol]:
    """The writes by which a normalisation updates its running statistics, which have no gradient in eager."""
    if bsym.sym.name in ("batch_norm", "_native_batch_norm"):
        return copies_in(bsym)
    return [copy for part in bsym.subsymbols for copy in _updates_of_statistics(part)]


def arguments_of(trace: TraceCtx) -> list[Proxy]:
    unpacked = (p for b in trace.bound_symbols if b.sym.id is PrimIDs.UNPACK_TRIVIAL for p in b.flat_proxy_outs)
    return [*tensors_in((trace.args, trace.kwargs)), *unpacked]


def has_own_gradient(bsym: BoundSymbol) -> bool:
    """Whether its gradient is the user's, as of a `torch.autograd.Function`, and not that of its parts."""
    return bsym.sym.executor is not None and bsym.sym.executor.get_grad_transform(bsym.sym) is not None


def is_certain_view(bsym: BoundSymbol) -> bool:
    """Whether it makes views of its only argument for all strides, and autograd treats them as views."""
    parts = [leaf for leaf in leaves(bsym) if leaf.flat_proxy_outs]
    reshapes = bsym.sym.name in ("unflatten", "view", "view_as") or SURE_VIEW in bsym.tags
    allowed = CERTAIN_VIEWS | ({PrimIDs.RESHAPE} if reshapes else set())
    return (
        bool(parts)
        and len(bsym.flat_proxy_args) == 1
        and all(leaf.sym.id in allowed for leaf in parts)
        and not any(map(is_detached, bsym.flat_proxy_outs))
    )


def is_detached(p: Proxy) -> bool:
    """Whether Thunder recorded it while gradients were disabled."""
    return ProxyTag.DETACHED_AUTOGRAD_GRAPH in p.tags


def replaceable_writes(
    trace: TraceCtx, memory: Aliases, recipes: Mapping[str, BoundSymbol]
) -> tuple[frozenset[str], BoundSymbol | None]:
    """The classes of `memory` all of whose writes can be replaced, and a write that autograd will miss."""
    arguments = arguments_of(trace)
    needs_grad = any(p.requires_grad for p in arguments if isinstance(p, TensorProxy))
    kept = {memory(p.name) for p in arguments}
    written: set[str] = set()
    same_view: dict[str, str] = {}  # a name -> the name under which its view was made
    newest: dict[str, tuple[frozenset[str], int]] = {}  # a class -> the views known after its last write, and when
    born: dict[str, int] = {}

    def parent_of(view: str) -> str:
        parent = recipes[view].flat_proxy_args[0].name
        return same_view.get(parent, parent)

    def follows(view: str, known: Collection[str]) -> bool:
        while view not in known:
            if view not in recipes:
                return False
            view = parent_of(view)
        return True

    def known_after_write(view: str) -> frozenset[str]:
        """The written view, and the bases that can be found from it and from what they were."""
        before, found = newest.get(memory(view)), {view}
        while view in recipes and can_be_undone(recipes[view]):
            base = parent_of(view)
            if not (shows_whole(recipes[view]) or before is None or follows(base, before[0])):
                break
            found.add(view := base)
        return frozenset(found)

    with_grad = {p.name for p in arguments if isinstance(p, TensorProxy) and p.requires_grad}
    writer: dict[str, BoundSymbol] = {}  # a class -> the last bound symbol that wrote what has a gradient
    missed: BoundSymbol | None = None
    own = {memory(p.name) for p in arguments}
    statistics = {id(copy) for bsym in trace.bound_symbols for copy in _updates_of_statistics(bsym)}
    for now, (bsym, leaf) in enumerate((b, part) for b in trace.bound_symbols for part in leaves(b)):
        args = [p.name for p in leaf.flat_proxy_args]
        handed_in = [p.name for p in bsym.flat_proxy_args]
        if leaf.sym.id is PrimIDs.UPDATE_ALIASES:
            outs = [p.name for p in leaf.flat_proxy_outs]
            same_view.update(zip(outs, (same_view.get(a, a) for a in args), strict=True))
            with_grad.update(out for out, arg in zip(outs, args, strict=True) if arg in with_grad)
            continue
        reads = args
        if is_copy(leaf):
            source, target = leaf.args[:2]
            reads = [source.name]
            if needs_grad and (not leaf.kwargs.get("grad_enabled", True) or id(leaf) in statistics):
                kept.add(memory(target.name))  # writes that autograd must not see
        for name in reads:
            view = same_view.get(name, name)
            known, when = newest.get(memory(name), (frozenset((view,)), now))
            if born.get(view, -1) < when and not follows(view, known):
                kept.add(memory(name))
                # `y[1] += 1` writes to the view, and then the view to itself.
                last = {same_view.get(a, a) for a in handed_in}
                puts_back = bsym.sym.name.startswith("setitem") and not known.isdisjoint(last)
                if missed is None and memory(name) not in own and not puts_back:
                    missed = writer.get(memory(name))
        carries = not with_grad.isdisjoint(args) and leaf.sym.name != "detach"
        for p in leaf.flat_proxy_outs:
            if p.name not in args:
                born.setdefault(p.name, now)
            if carries and isinstance(p, TensorProxy) and dtypes.is_inexact_dtype(p.dtype) and not is_detached(p):
                with_grad.add(p.name)
        if is_copy(leaf):
            view = same_view.get(target.name, target.name)
            same_view.update((p.name, view) for p in leaf.flat_proxy_outs)
            written.add(memory(target.name))
            if not with_grad.isdisjoint(args) and leaf.kwargs.get("grad_enabled", True):
                writer[memory(target.name)] = bsym
            newest[memory(target.name)] = (known_after_write(view), now)
        else:
            kept.update(memory(name) for name in effects_of(leaf).writes)
    return frozenset(written - kept), missed


def tensors_in(tree: object) -> list[TensorProxy]:
    return [x for x in tree_flatten_with_dataclass(tree)[0] if isinstance(x, TensorProxy)]
