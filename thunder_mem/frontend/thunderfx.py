"""Programs compiled by ThunderFX: their subgraphs, the compiler of each, and the reasons for the splits.

Dynamo breaks a program into graphs where it cannot trace it. `ThunderCompiler` splits each graph into subgraphs: some
are compiled by Thunder, each separately, the others by Inductor. `MemEfficient` plans each of Thunder's subgraphs.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import thunder
import torch

from thunder_mem.frontend.fx_calls import left_whole
from thunder_mem.frontend.fx_changes import replace_waiting
from thunder_mem.trace.source_lines import node_line

__all__ = [
    "Break",
    "Subgraph",
    "by_thunderfx",
    "graph_breaks",
    "highest_peak",
    "is_fx",
    "left_to_others",
    "only_subgraph",
    "subgraphs",
    "why_no_subgraphs",
]


def by_thunderfx(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`thunder.dynamo.thunderfx`, after which `torch.compile` is what it was.

    Thunder 0.2.6 takes off what lightning has wrapped around `torch.compile` (`get_torch_compile_kwargs` in
    `thunder/dynamo/utils.py`), and `Fabric.setup` refuses what is compiled afterwards.
    """
    from thunder.dynamo import thunderfx  # imports Dynamo, which takes a while

    replace_waiting()
    before = torch.compile
    try:
        return thunderfx(fn, **options)
    finally:
        torch.compile = before


@dataclass(frozen=True)
class Subgraph:
    """A part of a program that one compiler compiles.

    Attributes:
        name: as in Thunder, with the number of its graph: "graph 0, thunder_1".
        compiler: "thunder", "inductor", or "eager" if Inductor cannot compile it either.
        jitted: the result of `thunder.jit`, for `explain`, `predict` and `last_plan`; None for the others.
        operations: the operations that it calls, in order, each once.
        source: "file:line" of the first operation that Thunder does not compile, or "".
        reason: why Thunder does not compile it; "" if it does.
        graph: number of its graph.
    """

    name: str
    compiler: str
    jitted: Callable[..., Any] | None
    operations: tuple[str, ...]
    source: str = ""
    reason: str = ""
    graph: int = 0


@dataclass(frozen=True)
class Break:
    """A place where Dynamo ended a graph.

    Attributes:
        graph: number of the graph that ends here.
        reason: Dynamo's, in a line.
        source: "file:line".
    """

    graph: int
    reason: str
    source: str


def is_fx(compiled: Any) -> bool:
    """Whether an object is a program of ThunderFX: a result of `thunderfx`, `thunder.compile` or
    ``torch.compile(..., backend=ThunderCompiler(...))``, or that `ThunderCompiler`."""
    return _backend(compiled) is not None


def subgraphs(compiled: Any) -> tuple[Subgraph, ...]:
    """The parts of a program of ThunderFX, in the order in which they were compiled.

    Args:
        compiled: see `is_fx`.

    Raises:
        TypeError: `compiled` is no program of ThunderFX.

    Example:
        >>> import torch
        >>> from thunder.dynamo import thunderfx
        >>> from thunder_mem import MemEfficient, fx
        >>> f = thunderfx(lambda x: torch.sinc(x.sin()) * 2, executors=[], transforms=[MemEfficient()])
        >>> y = f(torch.ones(3))
        >>> [(part.name, part.compiler, part.operations) for part in fx.subgraphs(f)]  # doctest: +NORMALIZE_WHITESPACE
        [('graph 0, thunder_0', 'thunder', ('sin',)),
         ('graph 0, inductor_1', 'inductor', ('sinc',)),
         ('graph 0, thunder_2', 'thunder', ('mul',))]
    """
    found = []
    for number, info in enumerate(_infos(compiled)):
        for at, (module, made) in enumerate(info.submodule_to_compiled_functions.items()):
            calls = [n for n in module.graph.nodes if n.op in ("call_function", "call_method", "call_module")]
            operations = tuple(dict.fromkeys(map(_operation, calls)))
            if made.compiler.name == "THUNDER":
                name = f"graph {number}, thunder_{at}"
                found.append(Subgraph(name, "thunder", made.compiled_fn, operations, graph=number))
                continue
            kind = "eager" if isinstance(made.compiled_fn, torch.fx.GraphModule) else "inductor"
            reasons = {node: r for r in info.split_reasons or () if (node := _node_of(r.info))}
            culprit = next((n for n in calls if n.name in reasons), None)
            source = reason = ""
            if culprit is not None:
                source, reason = _place(culprit), f"{_operation(culprit)} {_phrase(reasons[culprit.name].info)}"
            found.append(Subgraph(f"graph {number}, inductor_{at}", kind, None, operations, source, reason, number))
    return tuple(found)


def left_to_others(compiled: Any) -> tuple[str, ...]:
    """The parts of a program of ThunderFX that Thunder does not compile, with reasons."""
    notes = []
    for part in subgraphs(compiled):
        if part.jitted is None:
            by = "runs as it is" if part.compiler == "eager" else "is compiled by Inductor"
            what = ", ".join(part.operations[:4]) + (", …" if len(part.operations) > 4 else "")
            why = f": {part.reason}" if part.reason else ""
            at = f", at {part.source}" if part.source else ""
            notes.append(f"{part.name} ({what}) {by}, and MemEfficient does not see it{why}{at}")
    return tuple(notes)


def graph_breaks(compiled: Any) -> tuple[Break, ...]:
    """The places where Dynamo ended a graph of a program of ThunderFX before its return.

    Raises:
        TypeError: `compiled` is no program of ThunderFX.
    """
    found = []
    for number, info in enumerate(_infos(compiled)):
        why = getattr(info.original_graph_module, "compile_subgraph_reason", None)
        if why is not None and why.graph_break:
            frame = why.user_stack[-1] if why.user_stack else None
            place = f"{frame.filename}:{frame.lineno}" if frame else ""
            found.append(Break(number, _in_a_line(why.reason), place))
    return tuple(found)


def highest_peak(compiled: Any) -> Callable[..., Any] | None:
    """The jitted subgraph whose plan peaks highest (without plans: the first one); None if Thunder has compiled
    nothing of a program of ThunderFX yet."""
    stats = [(part.jitted, thunder.compile_stats(part.jitted)) for part in subgraphs(compiled) if part.jitted]
    compiled_ones = [(jitted, cs) for jitted, cs in stats if cs is not None and cs.interpreter_cache]

    def peak_bytes(pair: tuple[Any, Any]) -> int:
        plan = getattr(pair[1], "thunder_mem_plan", None)
        return plan.candidate.peak_bytes if plan else 0

    return max(compiled_ones, key=peak_bytes)[0] if compiled_ones else None


def why_no_subgraphs(compiled: Any) -> str:
    """Say in a sentence why a program of ThunderFX has no subgraphs, and what to do."""
    if (why := left_whole(compiled)) is not None:
        return f"Dynamo leaves all of this program to eager PyTorch, so nothing of it is compiled: {why}"
    if hasattr(compiled, "_backend"):  # which records its calls
        return "the program of ThunderFX has never been called: call it once, then ask without arguments"
    return (
        "nothing of this program is compiled: it has never been called (call it once, then ask without arguments), "
        "or Dynamo leaves all of it to eager PyTorch (TORCH_LOGS=graph_breaks says why)"
    )


def only_subgraph(compiled: Any) -> Callable[..., Any]:
    """The jitted subgraph of a program of ThunderFX that has only one.

    Raises:
        ValueError: it has none: it has not been called yet, or nothing of it is compiled.
        TypeError: it has several subgraphs; no trace says how they share the memory.
    """
    parts = subgraphs(compiled)
    if not parts:
        raise ValueError(why_no_subgraphs(compiled))
    if len(parts) > 1 or parts[0].jitted is None:
        raise TypeError(
            f"ThunderFX made {len(parts)} subgraphs of this program, and none of them is all of it: measure it by "
            "thunder_mem.measure_peak, or take .jitted of one of thunder_mem.frontend.thunderfx.subgraphs(...)"
        )
    return parts[0].jitted


def _backend(compiled: Any) -> Any:
    """The `ThunderCompiler` of a program, or None."""
    if (module := sys.modules.get("thunder.dynamo.compiler")) is None:  # nobody can have made one
        return None
    if isinstance(compiled, module.ThunderFXCompiledObject):
        return compiled._backend
    config = getattr(compiled, "get_compiler_config", None)  # PyTorch gives it to all that torch.compile returns
    if inspect.isfunction(config):
        callback: Any = getattr(inspect.getclosurevars(config).nonlocals.get("self"), "callback", None)
        while hasattr(callback, "_torchdynamo_orig_backend"):
            callback = callback._torchdynamo_orig_backend
        compiled = getattr(callback, "compiler_fn", callback)
    return compiled if isinstance(compiled, module.ThunderCompiler) else None


def _infos(compiled: Any) -> list[Any]:
    backend = _backend(compiled)
    if backend is None:
        raise TypeError(
            f"{type(compiled).__name__} is no program of ThunderFX: give what thunderfx(...) returned, "
            "or the ThunderCompiler that torch.compile got as backend"
        )
    return backend.subgraph_infos


def _operation(node: torch.fx.Node) -> str:
    target = node.target
    return target.rpartition(".")[2] if isinstance(target, str) else getattr(target, "__name__", str(target))


def _node_of(info: str | None) -> str:
    """The node to which a reason of Thunder's splitter refers."""
    match = re.search(r"node with name: (\S+)", info or "")
    return match[1] if match else ""


def _phrase(info: str | None) -> str:
    """A splitter's reason without the node's name, and its target as printed: "only has an automatic fallback"."""
    line = _in_a_line(info)
    match = re.search(r"\b(?:is not supported|only has|has been|didn't have)\b.*", line)
    return match[0] if match else line


def _in_a_line(text: str | None) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", (text or "").strip().partition("\n")[0])


def _place(node: torch.fx.Node) -> str:
    written = node_line(node)
    return f"{written[0]}:{written[1]}" if written else ""
