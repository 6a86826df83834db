"""Changes to ThunderFX, for programs of this package.

ThunderFX has no hooks for a transform: it splits a program before it calls `thunder.jit`. So functions of it are
replaced when a transform is made. For all other programs they do as before. Importing ThunderFX takes seconds, so a
change waits until somebody has imported it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import TensorProxy
from thunder.torch import _torch_to_thunder_function_map
from torch.utils._pytree import tree_leaves

from thunder_mem.semantics.effects import WRITTEN_ELSEWHERE

__all__ = ["keep_written_out", "mark_written", "replace_waiting", "tag_written_elsewhere", "when_imported"]

_MENDED = {
    symbol
    for function in (torch.detach, F.nll_loss, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    if (symbol := _torch_to_thunder_function_map.get(function)) is not None
}
_KNOWN_AS: dict[Any, Callable[..., Any]] = {torch.rms_norm: F.rms_norm}

_IN_PLACE = {
    f"i{name}"
    for name in ["add", "and", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor"]
}

_WRITTEN = "thunder_mem_written"

_changes: dict[str, Callable[[], None]] = {}


def when_imported(name: str, change: Callable[[], None]) -> None:
    """Make a change to ThunderFX now if it is imported, else at the next `replace_waiting`.

    Args:
        name: of the change; a later one of the same name replaces one that waits.
        change: does nothing if it was made before.
    """
    _changes[name] = change
    replace_waiting()


def replace_waiting() -> None:
    """Make the changes that wait, if ThunderFX is imported."""
    if "thunder.dynamo.compiler" in sys.modules:
        while _changes:
            _changes.popitem()[1]()


def keep_written_out(is_ours: Callable[[Any], bool], written: Mapping[Any, Callable[..., Any]]) -> None:
    """From now on, Thunder's parts of our programs keep functions that this package writes out.

    Thunder's splitter gives all functions that Thunder passes to PyTorch whole to Inductor. There no plan sees them,
    and they draw other random numbers than in eager. Thunder's parts also keep functions whose gradients this package
    mends, `detach`, and what Thunder knows by another name or convention than PyTorch 2.11's: `nn.RMSNorm`,
    `nn.LogSoftmax`, `torch.autograd.Function`.

    Args:
        is_ours: whether a transform writes them out.
        written: by the id of Thunder's symbol, `fn(*args, **kwargs)`; None where it does not know the arguments.
    """
    when_imported("keep_written_out", lambda: _ask_first(is_ours, written))


def _ask_first(is_ours: Callable[[Any], bool], written: Mapping[Any, Callable[..., Any]]) -> None:
    from thunder.dynamo import splitter, utils

    by_thunder = utils.is_node_supported_by_thunder
    if hasattr(by_thunder, "__wrapped__"):
        return

    def is_written_out(node: torch.fx.Node) -> bool:
        if node.target is operator.getitem:  # Thunder cannot look into a tuple with None
            return isinstance(of := node.args[0], torch.fx.Node) and is_written_out(of)
        symbol = _symbol(node)
        fn = symbol if symbol in _MENDED else _refusing_none(written.get(getattr(symbol, "id", None)))
        return fn is not None and utils.try_execute_thunder_symbol(fn, node, {"disable_torch_autograd": True})[0]

    @wraps(by_thunder)
    def supported(node: torch.fx.Node, thunder_options: dict[str, Any]) -> tuple[bool, Any]:
        if not any(map(is_ours, thunder_options.get("transforms", ()))):
            return by_thunder(node, thunder_options)
        if node.target is torch.ops.higher_order.autograd_function_apply and "args_tensor_mask" not in node.kwargs:
            for body in _bodies(node):
                if any(map(_written_by, body.graph.nodes)):
                    why = f"node with name: {node.name} is not supported, because it writes in place"
                    return False, utils.SplitReason(utils.SplitReasonType.UNSUPPORTED_NODE, info=why)
                is_supported, reason = utils.is_graphmodule_supported_by_thunder(body, thunder_options)
                if not is_supported:
                    return False, reason
            _pass_as_before(node)
        _in_terms_of_thunder(node)
        return (True, None) if is_written_out(node) else by_thunder(node, thunder_options)

    utils.is_node_supported_by_thunder = splitter.is_node_supported_by_thunder = supported


def _in_terms_of_thunder(node: torch.fx.Node) -> None:
    """Name a function as Thunder knows it, where Dynamo has replaced it by what it calls, or given it more."""
    if "_stacklevel" in node.kwargs and node.kwargs.get("dim", (*node.args, None)[1]) is not None:  # of a warning
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "_stacklevel"}
    elif (known := _KNOWN_AS.get(node.target)) is not None:
        node.target = known
    else:
        return
    node.graph.owning_module.recompile()


def _bodies(node: torch.fx.Node) -> tuple[Any, Any]:
    """The forward and the backward of a `torch.autograd.Function`."""
    forward, backward = (node.graph.owning_module.get_submodule(str(n.target)) for n in node.all_input_nodes[:2])
    return forward, backward


def _written_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The tensors that a node writes in place, as its name and arguments tell."""
    name = str(getattr(node.target, "__name__", node.target))
    ends_in_one_underscore = name.rstrip("_") + "_" == name
    in_place = ends_in_one_underscore or name == "setitem" or name in _IN_PLACE or node.kwargs.get("inplace") is True
    written = [node.args[:1] if in_place else (), node.kwargs.get("out")]
    if node.target is F.batch_norm:
        written += [node.args[1:3], node.kwargs.get("running_mean"), node.kwargs.get("running_var")]
    return [n for n in tree_leaves(written) if isinstance(n, torch.fx.Node)]


def mark_written() -> None:
    """From now on, `tag_written_elsewhere` knows what the parts of ThunderFX's programs write in place."""
    when_imported("mark_written", _mark_first)


def _mark_first() -> None:
    from thunder.dynamo import compiler, splitter

    split = splitter._splitter
    if hasattr(split, "__wrapped__"):
        return

    @wraps(split)
    def marking(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        _mark(gm.graph)
        return split(gm, *args, **kwargs)

    splitter._splitter = compiler._splitter = marking


def _mark(graph: torch.fx.Graph) -> None:
    """Note all that shares memory with what the graph writes. The parts' arguments get copies of the notes."""
    nodes = [n for n in graph.nodes if n.op != "output"]
    written = {s for n in nodes if n.op.startswith("call_") for to in _written_by(n) if (s := _storage(to)) is not None}
    for node in nodes if written else ():
        if _storage(node) in written:
            node.meta[_WRITTEN] = True


def _storage(node: torch.fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def tag_written_elsewhere(arguments: Iterable[Any], module: Any) -> None:
    """Tag the arguments of a part of ThunderFX's that a part of the program writes.

    Such an argument is another one when the backward runs, and PyTorch refuses to give it the backward. So the backward
    repeats nothing from it: `buffer.clone()` is kept, as in eager.

    Args:
        arguments: of the computation; their tags change in place.
        module: the compiled object; nothing happens if it is no part of ThunderFX's.
    """
    graph = getattr(getattr(module, "_model", module), "graph", None)
    nodes = graph.find_nodes(op="placeholder") if isinstance(graph, torch.fx.Graph) else ()
    written = {n.name for n in nodes if _WRITTEN in n.meta}
    for p in arguments:
        if isinstance(p, TensorProxy) and p.name in written:
            p.tags.add(WRITTEN_ELSEWHERE)


def _pass_as_before(node: torch.fx.Node) -> None:
    """Call a `torch.autograd.Function` as before PyTorch 2.11.

    There a body's first argument was the context, and a mask said which arguments were tensors.
    """
    bodies = _bodies(node)
    for body in bodies:
        with body.graph.inserting_before(next(iter(body.graph.nodes))):
            body.graph.placeholder("context")
    _with_two_results(*(body.graph for body in bodies))
    for body in bodies:
        body.recompile()
    mask = [True] * (len(node.args) - len(bodies))
    node.kwargs = {"args_tensor_mask": mask, "non_differentiable_idx": node.kwargs["non_differentiable_idx"]}
    node.graph.owning_module.recompile()


def _with_two_results(forward: torch.fx.Graph, backward: torch.fx.Graph) -> None:
    """Give a forward of one result another one, which nobody reads: of one Thunder returns it, not the tuple."""
    (result,) = forward.find_nodes(op="output")
    outputs, saved = result.args[0]
    if len(outputs) > 1:
        return
    with forward.inserting_before(result):
        unread = forward.call_function(torch.zeros, ((1,),))
    result.args = (((*outputs, unread), saved),)
    _, tangent, *_ = backward.find_nodes(op="placeholder")
    with backward.inserting_after(tangent):
        backward.placeholder("unread")


def _symbol(node: torch.fx.Node) -> Any:
    target: Any = getattr(torch.Tensor, str(node.target), None) if node.op == "call_method" else node.target
    return _torch_to_thunder_function_map.get(target)


def _refusing_none(fn: Callable[..., Any] | None) -> Callable[..., Any] | None:
    if fn is None:
        return None

    @langctx(Languages.TORCH)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        if (result := fn(*args, **kwargs)) is None:
            raise NotImplementedError("not written out for these arguments")
        return result

    return refusing
