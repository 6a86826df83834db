"""Draw the same random numbers a second time.

`torch.utils.checkpoint` does this for a whole region (``preserve_rng_state``); this module does it for one operation.
Where the forward draws, it also saves the generator's state, 16 bytes on CUDA and 5,056 on a CPU. In the backward the
same operation runs from that state and leaves the generator unchanged. So a dropout inside a checkpoint saves no mask.

`save_rng_state` and `run_with_rng_state` make the two bound symbols of an operation. The first draws like the operation
alone, so later draws do not change. The second only computes, and may be moved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from thunder.core.devices import DeviceType, cpu, to_device, to_torch_device
from thunder.core.dtypes import uint8
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.extend import OperatorExecutor

from thunder_mem.semantics.op_traits import PLAIN, MemoryTraits, declare

__all__ = [
    "original",
    "replays_rng_state",
    "rng_replay_obstacle",
    "run_with_rng_state",
    "save_rng_state",
    "saves_rng_state",
]

mem_redraw_ex = OperatorExecutor("mem_redraw", version="0.1")
"""Owns the symbols. It need not stand in the user's list: a symbol with an owner is claimed already."""

_STATE_BYTES = {DeviceType.CPU: torch.default_generator.get_state().numel(), DeviceType.CUDA: 16}


def rng_replay_obstacle(bsym: BoundSymbol) -> str | None:
    """The reason why a random operation must not be repeated, in words; None if it may be.

    Args:
        bsym: a bound symbol, claimed by an executor, whose only effect is a random draw.
    """
    if not any(isinstance(p, TensorProxy) for p in bsym.flat_proxy_outs):  # as nvFuser's draws are prepared
        return "it advances a generator and draws no tensor"
    state_bytes = _STATE_BYTES.get(_device(bsym).devicetype)
    if _function(bsym) is None or state_bytes is None or bsym.sym.executor is mem_redraw_ex:
        return "it draws random numbers"
    if sum(p.numel for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)) <= state_bytes:
        return "it draws random numbers, fewer than its generator's state has bytes"
    return None


def save_rng_state(bsym: BoundSymbol) -> BoundSymbol:
    """The operation, with the generator's state as an additional first result. Needs a trace's context."""
    state = TensorProxy(shape=(_STATE_BYTES[_device(bsym).devicetype],), device=cpu, dtype=uint8, requires_grad=False)
    outputs = bsym.output if isinstance(bsym.output, tuple) else (bsym.output,)
    return _around(bsym, "noted", _noting, bsym.args, (state, *outputs))


def run_with_rng_state(bsym: BoundSymbol, state: TensorProxy) -> BoundSymbol:
    """The operation, drawing from `state` instead of its device's generator."""
    return _around(bsym, "redrawn", _redrawing, (state, *bsym.args), bsym.output)


def saves_rng_state(bsym: BoundSymbol) -> bool:
    """Whether `save_rng_state` made it."""
    return bsym.sym.executor is mem_redraw_ex and bsym.sym.name.startswith("noted_")


def replays_rng_state(bsym: BoundSymbol) -> bool:
    """Whether `run_with_rng_state` made it."""
    return bsym.sym.executor is mem_redraw_ex and bsym.sym.name.startswith("redrawn_")


def original(bsym: BoundSymbol) -> BoundSymbol:
    """The original of a saving or replaying operation; any other operation is itself."""
    return bsym.subsymbols[0] if bsym.sym.executor is mem_redraw_ex else bsym


_SAVES = MemoryTraits(random="saves", runs=original)
_REPLAYS = MemoryTraits(
    random="replays",
    runs=original,
    valid_values=lambda bsym, values: values | {bsym.args[0].name: torch.get_rng_state()},
)


def _traits(name: str) -> MemoryTraits:
    return _SAVES if name.startswith("noted_") else _REPLAYS if name.startswith("redrawn_") else PLAIN


declare(mem_redraw_ex, _traits)


def _around(bsym: BoundSymbol, kind: str, wrap: Callable, args: tuple, output: Any) -> BoundSymbol:
    device = to_torch_device(_device(bsym))
    # In the trace's Python a name stands for one function, and so for one device.
    name = f"{kind}_{bsym.sym.name}" + ("" if device.type == "cpu" else f"_{device.type}{device.index or 0}")
    function = wrap(_function(bsym), device)
    symbol = Symbol(name, meta=None, id=name, executor=mem_redraw_ex, tags=bsym.sym.tags)
    return bsym.from_bsym(sym=symbol, args=args, output=output, subsymbols=(bsym,), _call_ctx={name: function})


def _function(bsym: BoundSymbol) -> Callable | None:
    """The function of a claimed operation: the executor's own, or one of PyTorch's."""
    if bsym.sym.executor is None:
        return None
    return (bsym._call_ctx or {}).get(bsym.sym.name) or getattr(bsym.sym.module, bsym.sym.name, None)


def _device(bsym: BoundSymbol) -> Any:
    """The device whose generator the operation draws from."""
    return next(p.device for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy))


# ---- what runs ----


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]


def _is_fake() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@cache
def _noting(function: Callable, device: torch.device) -> Callable:
    @wraps(function)
    def note(*args: Any, **kwargs: Any) -> tuple:
        if _is_fake():
            state = torch.empty(_STATE_BYTES[to_device(device).devicetype], dtype=torch.uint8)
        else:
            state = _generator(device).get_state()
        drawn = function(*args, **kwargs)
        return (state, *drawn) if isinstance(drawn, tuple) else (state, drawn)

    return note


@cache
def _redrawing(function: Callable, device: torch.device) -> Callable:
    @wraps(function)
    def redraw(state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_fake():
            before = torch.empty_like(state)
            drawn = function(*args, **kwargs)
            del before
            return drawn
        generator = _generator(device)
        before = generator.get_state()
        generator.set_state(state)
        try:
            return function(*args, **kwargs)
        finally:
            generator.set_state(before)

    return redraw
