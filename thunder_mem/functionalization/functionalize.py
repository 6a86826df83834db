"""Functionalization: replace writes in place by new values where that is equivalent.

Thunder's autograd and its checkpointing repeat and save values by name, as if a name's value never changed. A write in
place breaks that: the backward reads overwritten memory, or a recomputation omits the write. `without_writes` runs
before autograd and replaces a write to an intermediate value by the new value itself. Thunder computes that value
anyway before it copies, so this costs nothing. Writes to the caller's tensors remain, and writes seen through another
view; see `rewrites/copy_before_write.py`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.torch import _inplace_to_out_of_place

from thunder_mem.functionalization.no_grad_writes import with_values_past_no_grad
from thunder_mem.functionalization.replaceable_writes import (
    arguments_of,
    copies_in,
    has_own_gradient,
    is_certain_view,
    replaceable_writes,
    tensors_in,
)
from thunder_mem.functionalization.undone_views import base_of, can_be_undone, shows_whole
from thunder_mem.semantics.aliases import Aliases
from thunder_mem.semantics.effects import is_copy, leaves
from thunder_mem.trace.rebuilding import rebuilt, recorded
from thunder_mem.trace.source_lines import place_of

__all__ = ["without_writes"]


def without_writes(trace: TraceCtx) -> TraceCtx:
    """The trace with new values in place of writes to intermediate values, where that is equivalent.

    Two conditions make it equivalent. No argument of the trace may share the memory. And after the write the
    memory is read only through the written view, through younger views, and through certain older ones. These
    must be views of the written one under all strides, and are taken again. The base of the written view is
    found from it, if that shows the base whole or the base was known before, and the same holds for the base. Any other
    write stays.

    Args:
        trace: a computation trace before autograd.
    """
    if not any(map(copies_in, trace.bound_symbols)):
        return trace
    if (own := _write_inside_an_own_gradient(trace)) is not None:
        raise NotImplementedError(
            f"the forward of a torch.autograd.Function writes in place at {place_of(own)}, and Thunder cannot "
            "differentiate it then: compute a new value there"
        )
    trace = _with_own_repeats(with_values_past_no_grad(trace))
    memory = Aliases(trace.bound_symbols)
    recipes = {p.name: b for b in trace.bound_symbols if is_certain_view(b) for p in tensors_in(b.output)}
    arguments = frozenset(p.name for p in arguments_of(trace))
    replaceable, missed = replaceable_writes(trace, memory, recipes)
    if missed is not None:
        _warn(
            missed,
            "it goes through a view, and the view's base is read afterwards. Gradients through it are wrong",
            "Index the tensor itself (x[1] = ...), or compute a new one (torch.cat, torch.where)",
        )
    if (lost := _write_to_a_diagonal(trace, memory)) is not None:
        _warn(
            lost,
            "it goes to a torch.diagonal, which is a copy in programs with gradients. The tensor keeps its old values",
            "Compute a new one (torch.where with a mask of the diagonal)",
        )
    rewriter = _Rewriter(memory, replaceable, recipes, arguments)
    why = "Writes to intermediate values become new values"
    return rebuilt(trace, lambda: rewriter.rewritten(trace.bound_symbols), why)


def _with_own_repeats(trace: TraceCtx) -> TraceCtx:
    """The trace in which a written `repeat` has memory of its own, as in eager.

    Thunder decomposes the `repeat` of a single row into a view of the row: a write would change the row itself.
    """
    memory = Aliases(trace.bound_symbols)
    written = {memory(copy.args[1].name) for b in trace.bound_symbols for copy in copies_in(b)}

    def copied() -> Iterator[BoundSymbol]:
        for bsym in trace.bound_symbols:
            if bsym.sym.name == "repeat" and memory(bsym.output.name) in written:
                shown = TensorProxy(like=bsym.output, requires_grad=bsym.output.requires_grad)
                yield bsym.from_bsym_swap_proxies({variableify(bsym.output): shown})
                yield prims.clone.bind(shown, output=bsym.output)
            else:
                yield bsym

    return rebuilt(trace, copied)


def _warn(write: BoundSymbol, why: str, instead: str) -> None:
    warnings.warn(
        f"Thunder's autograd misses the write at {place_of(write)}: {why}, with MemEfficient and without. {instead}",
        stacklevel=3,
    )


def _write_inside_an_own_gradient(trace: TraceCtx) -> BoundSymbol | None:
    """The first write in a function with the user's own gradient, which the function's parts do not have."""
    if not any(p.requires_grad for p in arguments_of(trace)):
        return None
    return next((b for b in trace.bound_symbols if has_own_gradient(b) and copies_in(b)), None)


def _write_to_a_diagonal(trace: TraceCtx, memory: Aliases) -> BoundSymbol | None:
    """The first write to a value that is a view in eager and a copy in Thunder's derivative, if gradients exist."""
    if not any(p.requires_grad for p in arguments_of(trace)):
        return None
    diagonals = {memory(p.name) for b in trace.bound_symbols if b.sym.name == "diagonal" for p in tensors_in(b.output)}
    writes = ((b, copy) for b in trace.bound_symbols for copy in copies_in(b))
    return next((b for b, copy in writes if memory(copy.args[1].name) in diagonals), None)


@dataclass
class _Rewriter:
    """Rewrites bound symbols in order.

    `current` is the content of a view of a replaceable class after that many writes to the class (`as_of`).
    """

    memory: Aliases
    classes: frozenset[str]
    recipes: Mapping[str, BoundSymbol]
    arguments: frozenset[str]
    done: list[BoundSymbol] = field(default_factory=list)
    same_view: dict[str, str] = field(default_factory=dict)
    current: dict[str, TensorProxy] = field(default_factory=dict)
    as_of: dict[str, int] = field(default_factory=dict)
    writes: Counter = field(default_factory=Counter)
    through_views: list[TensorProxy] = field(default_factory=list)

    def rewritten(self, bsyms: Sequence[BoundSymbol]) -> list[BoundSymbol]:
        """All of a trace, its return included."""
        *body, result = bsyms
        for bsym in body:
            self.take(bsym)
        self.end(result)
        return self.done

    def take(self, bsym: BoundSymbol) -> None:
        if bsym.sym.id is PrimIDs.UPDATE_ALIASES:
            self._update_aliases(bsym)
        elif self._changes(bsym):
            self._expand(bsym, _made_in(bsym, self.memory))
        else:
            self._append(bsym)

    def end(self, result: BoundSymbol) -> None:
        """The return statement. Thunder drops a write through a view, or runs it in the backward, if no op in the
        forward uses its result. So one output is made to use all results that are not outputs themselves."""
        self._append(result)
        returned_already = {p.name for p in self._outputs()}
        self._tell_outputs_apart()
        written = [p for p in self.through_views if p.name not in returned_already]
        anchor = next((p for p in self._outputs() if p.name not in self.arguments), None)
        if written and anchor is not None:
            olds = (*written, anchor)
            news = tuple(TensorProxy(like=p, requires_grad=p.requires_grad) for p in olds)
            self.done.insert(-1, prims.update_aliases.bind(olds, output=news))
            self.done[-1] = self.done[-1].from_bsym_swap_proxies({variableify(anchor): news[-1]})

    def _outputs(self) -> list[TensorProxy]:
        returned = self.done[-1].args[0] if self.done[-1].args else None
        return tensors_in(returned["output"]) if isinstance(returned, dict) else []

    def _tell_outputs_apart(self) -> None:
        """Give a value that is returned twice two names, because autograd needs a gradient for each."""
        result = self.done[-1]
        returned = result.args[0] if result.args else None
        if not isinstance(returned, dict) or not isinstance(returned["output"], tuple):
            return
        outputs: list[object] = []
        for p in returned["output"]:
            if isinstance(p, TensorProxy) and any(p is o or p.name == getattr(o, "name", None) for o in outputs):
                new = TensorProxy(like=p, requires_grad=p.requires_grad)
                self.done.insert(-1, prims.update_aliases.bind((p,), output=(new,)))
                p = new
            outputs.append(p)
        self.done[-1] = result.from_bsym(args=({**returned, "output": tuple(outputs)}, *result.args[1:]))

    def _replaces(self, name: str) -> bool:
        return self.memory(name) in self.classes

    def _is_through_view(self, copy: BoundSymbol) -> bool:
        return self._view(copy.args[1].name) not in self.arguments

    def _changes(self, bsym: BoundSymbol) -> bool:
        """Whether a part of it writes to memory other than a whole argument."""
        return any(self._replaces(copy.args[1].name) or self._is_through_view(copy) for copy in copies_in(bsym))

    def _view(self, name: str) -> str:
        return self.same_view.get(name, name)

    def _now(self, p: TensorProxy) -> TensorProxy:
        """The present content of the memory of `p`; a view that is older than a write is taken again."""
        if not self._replaces(p.name):
            return p
        stale = self._stale(p.name)
        assert stale is not None  # or the class would not be replaceable
        for recipe in reversed(stale):
            self._take_again(recipe)
        return self._known(p)

    def _stale(self, name: str) -> list[BoundSymbol] | None:
        """The views from a name up to one that is as new as what was written last; None if there is no such one."""
        stale: list[BoundSymbol] = []
        while self.as_of.get(view := self._view(name), 0) < self.writes[self.memory(view)]:
            if view not in self.recipes:
                return None
            stale.append(self.recipes[view])
            name = stale[-1].flat_proxy_args[0].name
        return stale

    def _known(self, p: TensorProxy) -> TensorProxy:
        return self.current.get(self._view(p.name), p)

    def _take_again(self, recipe: BoundSymbol) -> None:
        """Take a view again, of the present value of its base."""
        (base,) = recipe.flat_proxy_args
        again = recipe.from_bsym_swap_proxies({variableify(base): self._known(base)}, skip_output=True)
        with recorded() as made:
            outs = again.sym(*again.args, **again.kwargs)
        self.done += [b.from_bsym(tags=recipe.tags | b.tags) for b in made]
        for old, new in zip(tensors_in(recipe.output), tensors_in(outs), strict=True):
            self._set(old.name, new)

    def _set(self, view: str, value: TensorProxy) -> None:
        self.current[view] = value
        self.as_of[view] = self.writes[self.memory(view)]

    def _append(self, bsym: BoundSymbol) -> None:
        swap = {}
        for p in bsym.flat_proxy_args:
            if isinstance(p, TensorProxy) and (now := self._now(p)).name != p.name:
                swap[variableify(p)] = now
        self.done.append(bsym.from_bsym_swap_proxies(swap, skip_output=True) if swap else bsym)
        for copy in copies_in(bsym):  # its result is a view of the written memory
            self.same_view.update((p.name, self._view(copy.args[1].name)) for p in copy.flat_proxy_outs)
        if is_copy(bsym) and self._is_through_view(bsym):
            self.through_views.append(bsym.output)
        taken = {p.name for p in bsym.flat_proxy_args}
        for p in tensors_in(bsym.output):
            if p.name not in taken and self._replaces(p.name):
                self._set(p.name, p)

    def _update_aliases(self, bsym: BoundSymbol) -> None:
        """Rewrite an `update_aliases`: replaceable members are handled here, the others stay together."""
        pairs = list(zip(bsym.flat_proxy_args, bsym.flat_proxy_outs, strict=True))
        self.same_view.update((new.name, self._view(old.name)) for old, new in pairs)
        rest = [(old, new) for old, new in pairs if not self._replaces(old.name)]
        if rest:
            olds, news = (tuple(side) for side in zip(*rest, strict=True))
            bound = prims.update_aliases.bind(olds, output=news)
            self.done.append(bound.from_bsym(tags=bsym.tags.copy()))

    def _expand(self, bsym: BoundSymbol, made: set[str]) -> None:
        """The parts of a composite without its writes. `made` are the fresh tensors made inside it."""
        if is_copy(bsym) and self._replaces(bsym.args[1].name):
            self._write(bsym, made)
        elif is_copy(bsym) or not self._changes(bsym):
            self._append(bsym)
        else:
            for part in _whole_but_write(bsym):
                place = {"source_filename": bsym.source_filename, "source_positions": bsym.source_positions}
                self._expand(part.from_bsym(tags=part.tags | bsym.tags, **place), made)

    def _write(self, bsym: BoundSymbol, made: set[str]) -> None:
        source, target = bsym.args[:2]
        source, view = self._now(source), self._view(target.name)
        if source.name not in made:
            # Another op's value: its memory must not get a second name here.
            copy = prims.clone.bind(source, output=prims.clone.meta(source))
            self.done.append(copy.from_bsym(tags=bsym.tags.copy(), source_filename=bsym.source_filename))
            source = copy.output
        bases = self._bases(view)
        self.writes[self.memory(view)] += 1
        self._set(view, source)
        self.same_view.update((out.name, view) for out in bsym.flat_proxy_outs)
        for recipe, before in bases:
            with recorded() as undoing:
                source = base_of(recipe, source, before)
            self.done += [b.from_bsym(tags=bsym.tags | b.tags) for b in undoing]
            self._set(self._view(recipe.flat_proxy_args[0].name), source)

    def _bases(self, view: str) -> list[tuple[BoundSymbol, TensorProxy | None]]:
        """The views between a written one and the bases that can be found from it, and what these are before."""
        found: list[tuple[BoundSymbol, TensorProxy | None]] = []
        while view in self.recipes and can_be_undone(self.recipes[view]):
            recipe = self.recipes[view]
            (base,) = recipe.flat_proxy_args
            whole = shows_whole(recipe)
            if not whole and self._stale(base.name) is None:
                break
            found.append((recipe, None if whole else self._now(base)))
            view = self._view(base.name)
        return found


def _whole_but_write(bsym: BoundSymbol) -> Sequence[BoundSymbol]:
    """The parts of a composite; for an activation in place, the activation with a new value, and the write.

    As a whole the activation has its own kernel and derivative.
    """
    functional, inplace = _inplace_to_out_of_place.get(bsym.sym, (None, -1))
    *parts, last = bsym.subsymbols
    if functional is not bsym.sym or inplace < 0 or not is_copy(last) or any(map(copies_in, parts)):
        return bsym.subsymbols
    given = list(bsym.args[:inplace])
    kwargs = {name: value for name, value in bsym.kwargs.items() if name != "inplace"}
    return [bsym.sym.bind(*given, **kwargs, output=last.args[0], subsymbols=tuple(parts)), last]


def _made_in(bsym: BoundSymbol, memory: Aliases) -> set[str]:
    """The tensors made inside a composite that share memory with no other name in it."""
    made = {p.name for leaf in leaves(bsym) for p in leaf.flat_proxy_outs}
    names = made | {p.name for p in bsym.flat_proxy_args}
    sharing = Counter(map(memory, names))
    return {name for name in made if sharing[memory(name)] == 1}
