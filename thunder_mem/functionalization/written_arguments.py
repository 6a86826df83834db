"""Make writes to arguments with a gradient known to autograd.

Eager autograd rebases a tensor that is written in place: its history becomes that of the written value. Thunder's
compiled function is one node of autograd's graph, which knows its arguments and results, but not its writes. So the
argument's own gradient is lost, because Thunder differentiates the written name. Later users of the argument see its
old history. ThunderFX splits programs in such places: `scores += bias`, where Inductor compiles only the bias.

Here Thunder differentiates the argument as it was given, and the compiled function returns a view of the written value.
The epilogue, which runs outside the function, gives the argument that view's history.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from thunder.core import dtypes, prims
from thunder.core.codeutils import SigInfo
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.extend import OperatorExecutor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from thunder_mem.functionalization.no_grad_writes import past_no_grad
from thunder_mem.semantics.aliases import Aliases
from thunder_mem.semantics.effects import is_copy, leaves
from thunder_mem.trace.origins import source_of
from thunder_mem.trace.rebuilding import rebuilt

__all__ = ["with_histories"]

LOST = (
    "Thunder's autograd loses gradients by the write at {line}, to an argument that has one: {why}, with MemEfficient "
    "and without. Compute a new value instead"
)

mem_writes_ex = OperatorExecutor("mem_writes", version="0.1")
"""Owns the one symbol of the epilogue."""


class _Rebase(torch.autograd.Function):
    """Gives a written tensor the history of a view of the written value."""

    @staticmethod
    def forward(ctx: Any, written: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(written)
        return written

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad


def _rebase(written: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    # The content is the one that the backward saved: only later writes are a new version.
    with torch.enable_grad(), _unsafe_preserve_version_counter(written):
        return _Rebase.apply(written, content) if content.requires_grad else written


def _like_written(written: TensorProxy, content: TensorProxy) -> TensorProxy:
    return TensorProxy(like=written)


rebase = mem_writes_ex.register_operator("rebase", meta=_like_written, fn=_rebase)


def with_histories(
    prologue: TraceCtx, computation: TraceCtx, epilogue: TraceCtx | None, options: dict[str, Any]
) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
    """The program's three traces, changed so that autograd sees writes to arguments; a warning names a missed write.

    Args:
        prologue, computation, epilogue: as Thunder passes them to a transform.
        options: the compile options, in which ThunderFX lists the outputs with a gradient.
    """
    result = computation.bound_symbols[-1]
    if epilogue is None or not result.args or not isinstance(result.args[0], dict):
        return prologue, computation, epilogue
    whole = _whole_names(computation)
    written = _written(computation, whole)
    with_grad = {whole.get(leaf.args[1].name) for leaf in _copies(computation) if leaf.kwargs["grad_enabled"]}
    # A new history is one more result. Without any result no gradient flows, and Thunder runs every write.
    if not written or not (_tensors(result.args[0]["output"]) or any(p.name in with_grad for p in written)):
        return prologue, computation, epilogue
    computation = _with_newest_names(computation, whole, {p.name for p in written})
    whole = _whole_names(computation)
    written.sort(key=lambda p: p.name not in with_grad)  # a write under no_grad may need another one's result
    computation = past_no_grad(computation, _is_under_no_grad(whole, {p.name for p in written}))
    whole = _whole_names(computation)
    for p in written:
        count = len(computation.bound_symbols[-1].args[0]["output"])
        computation, contents, places = _asking(p, whole, computation, rebased=p.name in with_grad)
        if p.name not in with_grad:
            continue
        prologue = _handing_on(prologue, [q.name for q in _tensors(computation.args)].index(p.name))
        epilogue = _rebasing(p, contents, places, epilogue, count)
        if places == [count] and "is_differentiable_outputs" in options:
            # ThunderFX's list covers only its own outputs; if it compiles the graph again, the list ends here.
            options["is_differentiable_outputs"] = [*options["is_differentiable_outputs"][:count], True]
    return prologue, computation, epilogue


def _tensors(tree: object) -> list[TensorProxy]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, TensorProxy)]


def _copies(trace: TraceCtx) -> list[BoundSymbol]:
    """Each write in place."""
    return [leaf for bsym in trace.bound_symbols for leaf in leaves(bsym) if is_copy(leaf)]


def _whole_names(trace: TraceCtx) -> dict[str, str]:
    """A name -> the argument for which it stands as a whole, before or after a write."""
    known = {p.name: p.name for p in _tensors(trace.args)}
    for bsym in trace.bound_symbols:
        for leaf in leaves(bsym):
            if leaf.sym.id in (PrimIDs.UPDATE_ALIASES, PrimIDs.SHALLOW_COPY):
                pairs = list(zip(leaf.flat_proxy_args, leaf.flat_proxy_outs, strict=True))
            else:
                pairs = [(leaf.args[1], p) for p in leaf.flat_proxy_outs] if is_copy(leaf) else []
            known.update((new.name, known[old.name]) for old, new in pairs if old.name in known)
    return known


def _with_newest_names(trace: TraceCtx, whole: Mapping[str, str], written: Collection[str]) -> TraceCtx:
    """The trace in which each name of a written argument, such as that of `x.to(x.dtype)`, follows all its writes."""
    if not any(leaf.sym.id is PrimIDs.SHALLOW_COPY for bsym in trace.bound_symbols for leaf in leaves(bsym)):
        return trace

    def renamed() -> Iterator[BoundSymbol]:
        newest: dict[str, TensorProxy] = {}
        for bsym in trace.bound_symbols:
            swap: dict[Any, TensorProxy] = {
                variableify(p): newest[whole[p.name]] for p in bsym.flat_proxy_args if whole.get(p.name) in newest
            }
            now = bsym.from_bsym_swap_proxies(swap, skip_output=True) if swap else bsym
            if now.sym.id is PrimIDs.UPDATE_ALIASES:
                pairs = {p.name: (p, q) for p, q in zip(now.flat_proxy_args, now.flat_proxy_outs, strict=True)}
                olds, news = (tuple(side) for side in zip(*pairs.values(), strict=True))
                now = prims.update_aliases.bind(olds, output=news).from_bsym(tags=bsym.tags.copy())
            yield now
            if now.sym.id is PrimIDs.UPDATE_ALIASES or any(map(is_copy, leaves(now))):
                newest.update((whole[p.name], p) for p in _tensors(now.output) if whole.get(p.name) in written)

    return rebuilt(trace, renamed)


def _written(trace: TraceCtx, whole: Mapping[str, str]) -> list[TensorProxy]:
    """The arguments with a gradient that are written as a whole; of one written in another way, a warning says so."""
    arguments = {p.name: p for p in _tensors(trace.args)}
    as_wholes: set[str] = set()
    otherwise: dict[str, tuple[BoundSymbol, str]] = {}
    memory = Aliases([])  # of the program so far: a write does not reach what later operations make of its memory
    for bsym in trace.bound_symbols:
        memory.follow(bsym)
        for to in (leaf.args[1].name for leaf in leaves(bsym) if is_copy(leaf)):
            reached = [name for name in arguments if memory(name) == memory(to)]
            if len(reached) > 1:
                why = "another argument may share its memory"
            elif reached and whole.get(to) != reached[0]:
                why = "it goes through a view"
            else:
                as_wholes.update(reached)
                continue
            for name in reached:
                otherwise.setdefault(name, (bsym, why))
    with_gradient = [p for p in arguments.values() if p.requires_grad and dtypes.is_inexact_dtype(p.dtype)]
    for bsym, why in (otherwise[p.name] for p in with_gradient if p.name in otherwise):
        warnings.warn(LOST.format(line=source_of(bsym) or bsym.sym.name, why=why), stacklevel=3)
    return [p for p in with_gradient if p.name in as_wholes - otherwise.keys()]


def _is_under_no_grad(whole: Mapping[str, str], written: Collection[str]) -> Callable[[BoundSymbol], bool]:
    """A function that is true of a write under `torch.no_grad` to one of these arguments, as a whole."""
    return lambda leaf: is_copy(leaf) and not leaf.kwargs["grad_enabled"] and whole.get(leaf.args[1].name) in written


def _asking(
    p: TensorProxy, whole: Mapping[str, str], trace: TraceCtx, *, rebased: bool
) -> tuple[TraceCtx, list[TensorProxy], list[int]]:
    """The trace that differentiates an argument as it was given, and runs the write in the forward.

    Returns:
        The trace. For an argument to be `rebased`, also views of its new value and their positions among the
        outputs: where the program returns the argument, else at the end.
    """
    *body, result = trace.bound_symbols
    returned = result.args[0]
    outputs = list(returned["output"])
    made = (q for bsym in reversed(body) for q in bsym.flat_proxy_outs if isinstance(q, TensorProxy))
    newest = next(q for q in made if whole.get(q.name) == p.name)
    places = [i for i, o in enumerate(outputs) if isinstance(o, TensorProxy) and whole.get(o.name) == p.name]
    new = from_trace(trace)
    with tracectx(new):
        if rebased:
            places = places or [len(outputs)]
            views = [TensorProxy(like=newest, requires_grad=True) for _ in places]
            for i, view in zip(places, views, strict=True):
                outputs[i : i + 1] = [view]
                body.append(prims.reshape.bind(newest, tuple(newest.shape), output=view))
        elif not places:
            # Thunder runs only ops in the forward that its outputs need, so one output waits for the write.
            i, waits = next((i, o) for i, o in enumerate(outputs) if isinstance(o, TensorProxy))
            outputs[i] = TensorProxy(like=waits, requires_grad=waits.requires_grad)
            together = (TensorProxy(like=newest, requires_grad=True), outputs[i])
            body.append(prims.update_aliases.bind((newest, waits), output=together))
    at = [q.name for q in _tensors(trace.args)].index(p.name)
    flat_args = [p if i == at else a for i, a in enumerate(returned["flat_args"])]
    given = {**returned, "output": tuple(outputs), "flat_args": flat_args}
    new.bound_symbols = [*body, result.from_bsym(args=(given, *result.args[1:]))]
    new.set_provenance(TraceProvenance(f"Ask for the gradient of {p.name} as it was given"))
    return new, [outputs[i] for i in places], places


def _handing_on(prologue: TraceCtx, at: int) -> TraceCtx:
    """The prologue that also gives the epilogue an argument of the computation."""
    *body, result = prologue.bound_symbols
    ((inputs, handed_on),) = result.args
    handing_on = result.from_bsym(args=((inputs, (*handed_on, inputs[at])),))
    return rebuilt(prologue, [*body, handing_on], f"Hand {inputs[at].name} on")


def _rebasing(
    p: TensorProxy,
    contents: Sequence[TensorProxy],
    places: Sequence[int],
    epilogue: TraceCtx,
    count: int,
) -> TraceCtx:
    """The epilogue that gives an argument its history first, and returns it where the program does.

    Args:
        p: the argument, the last one that the prologue passes on.
        contents: its new values, at these `places` among the outputs.
        epilogue: takes the values of the prologue, and then `count` outputs of the computation.
    """
    names = [name for name, _ in epilogue.siginfo().args]
    of_prologue, outputs = names[: len(names) - count], names[len(names) - count :]
    new = from_trace(epilogue)
    with tracectx(new):
        argument, rebased = (TensorProxy(name=f"{p.name}_{what}", like=p) for what in ("written", "rebased"))
    swap, kept = {}, []
    for bsym in epilogue.bound_symbols:
        if bsym.sym.id is PrimIDs.UNPACK_TRIVIAL and bsym.output.name in (outputs[i] for i in places if i < count):
            swap[variableify(bsym.output)] = rebased
        else:
            kept.append(bsym)
    for place, content in zip(places, contents, strict=True):
        outputs[place : place + 1] = [content.name]
    new._siginfo = SigInfo(epilogue.siginfo().name)
    new._siginfo.args = [(name, None) for name in (*of_prologue, argument.name, *outputs)]
    takes = [prims.unpack_trivial.bind(q, name=q.name, output=q) for q in (argument, *contents)]
    call = rebase.bind(argument, contents[0], output=rebased)
    new.bound_symbols = [*takes, call, *(b.from_bsym_swap_proxies(swap, skip_output=True) for b in kept)]
    new.set_provenance(TraceProvenance("Give a written argument its history"))
    return new
