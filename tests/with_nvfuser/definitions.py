"""Plans for nvFuser, and nvFuser's own definition of every region in them, on a machine without a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import thunder
import torch
from nvfuser_direct import compute_tensor_descriptor
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from torch.utils._python_dispatch import _disable_current_modes

from thunder_mem import MemEfficient, StepInBackward, last_plan, predict, predict_step, simulate
from thunder_mem.chunk_loop.body import Body
from thunder_mem.chunk_loop.run import ChunkLoop
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.fusers.nvfuser_fallback import GuardedFusion
from thunder_mem.trace.reading import read_trace

__all__ = ["Program", "defined", "defined_in_loops", "planned"]


@dataclass(frozen=True)
class Program:
    """What is compiled: `make()` gives a function or module and its arguments, on the default device.

    Attributes:
        make: called within `simulate`.
        train: a step is predicted, of the sum of what is returned; else the forward alone, without gradients.
        mem: options of `MemEfficient`.
        jit: options of `thunder.jit`.
        step: `MemEfficient` updates the parameters inside the backward by what this makes of AdamW.
        loops: at least so many regions are in the bodies of loops over rows.
    """

    make: Callable[[], tuple[Any, tuple[Any, ...]]]
    train: bool = True
    mem: dict[str, Any] = field(default_factory=dict)
    jit: dict[str, Any] = field(default_factory=dict)
    step: Callable[[torch.optim.Optimizer], StepInBackward] | None = None
    loops: int = 0


def planned(program: Program, *, plain: bool) -> tuple[list[TraceCtx], Any]:
    """The final traces of a program, by Thunder alone or with `MemEfficient`, and its prediction."""
    options = {"strict": True, "verify": True, **program.mem}
    with simulate("H100-80GB", fusion="nvfuser"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("cuda"):
            made, args = program.make()
        optimizer = None if program.step is None else torch.optim.AdamW(made.parameters())
        if program.step is not None and not plain:
            options["optimizer"] = optimizer = program.step(optimizer)
        jitted = thunder.jit(made, transforms=[] if plain else [MemEfficient(**options)], **program.jit)
        if program.train:
            prediction = predict_step(jitted, optimizer, lambda out: out.float().sum(), *args)
        else:
            with torch.no_grad():
                prediction = predict(jitted, *args)
    assert plain or last_plan(jitted) is not None
    traces = thunder.last_traces(jitted)[-1:] + (thunder.last_backward_traces(jitted) or [])[-1:]
    return traces, prediction


def defined(trace: TraceCtx) -> int:
    """Let nvFuser define every region of a final trace and of its loops' bodies; how many there are.

    Raises:
        Exception: whatever nvFuser or Thunder says of a region that it cannot express.
    """
    layout = read_trace(trace).layout
    regions = [b for b in trace.bound_symbols if b.sym.is_fusion and b.sym.executor.name == "nvfuser"]
    for bsym in regions:
        _define(bsym, [layout[p.name] if isinstance(p, TensorProxy) else None for p in bsym.args])
    return len(regions) + defined_in_loops(trace)


def defined_in_loops(trace: TraceCtx) -> int:
    """The same for the bodies of its loops alone, at every size of a block of rows."""
    return sum(defined(body.trace) for loop in _loops(trace) for body in _bodies(loop))


def _loops(trace: TraceCtx) -> list[ChunkLoop]:
    return list({id(loop): loop for loop in map(loop_of, filter(is_chunk_loop, trace.bound_symbols))}.values())


def _bodies(loop: ChunkLoop) -> list[Body]:
    return [*loop.forward.values(), *loop.backward.values()]


def _define(bsym: BoundSymbol, args: list[torch.Tensor | None]) -> None:
    modelled = next(iter(bsym._call_ctx.values()))
    fusion = modelled.definition if isinstance(modelled, GuardedFusion) else modelled
    described = [
        None if a is None else (*map(tuple, compute_tensor_descriptor(tuple(a.shape), a.stride())), ()) for a in args
    ]
    with _disable_current_modes():
        fusion.definition.get_fd(tuple(described))
