"""Thunder's compilation for a call: its traces and its inputs."""

from __future__ import annotations

import os
import re
import textwrap
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import thunder
import torch
from thunder.core.proxies import NumberProxy, TensorProxy

from thunder_mem.fake_execution.replay import PredictionError
from thunder_mem.frontend.thunderfx import is_fx, only_subgraph
from thunder_mem.fusers.fake_regions import empty_like_proxy
from thunder_mem.prediction.fake_inputs import mode_of, tensors_of
from thunder_mem.prediction.quick_interpreter import interpreted_quickly
from thunder_mem.rendering.progress import stage
from thunder_mem.runtime.simulated_device import simulated_device
from thunder_mem.runtime.torch_modes import kept_modes

__all__ = ["compiled_entry", "splits_autograd"]


def compiled_entry(
    jitted: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, call: bool
) -> tuple[Any, list[Any], list[str]]:
    """Thunder's cache entry for a call, the computation's inputs, and assumptions about them.

    With `call` false it is the last compilation's, for any arguments.
    """
    if is_fx(jitted):
        if call:
            raise ValueError(
                "ThunderFX compiles when it runs: call the program once, then predict it without arguments"
            )
        jitted = only_subgraph(jitted)
    data: Any = thunder.compile_data(jitted)
    stats = thunder.compile_stats(jitted)
    if data is None or stats is None:
        way = "; programs(model)[-1].compiled is what was compiled of it" if hasattr(jitted, "_thunder_mem") else ""
        raise TypeError(f"predict takes what thunder.jit returned, not {type(jitted).__name__}{way}")
    if not call:
        if not stats.interpreter_cache:
            raise ValueError(
                "the jitted function has never been called, so there is nothing to predict: "
                "call it once, or give predict the arguments of a call"
            )
        entry = stats.interpreter_cache[-1]
        with mode_of(()):
            inputs = [_from_proxy(p) for p in entry.computation_traces[-1].args]
        _check_simulated(inputs)
        return entry, inputs, ["inputs are dense and share no memory"]
    try:
        with kept_modes(), stage("tracing by Thunder"), interpreted_quickly():
            entry, inputs, _ = data.get_computation_and_inputs(*args, **kwargs)
    except Exception as error:
        if type(error).__module__.startswith("thunder_mem."):
            raise  # errors of this package explain themselves
        cause = re.sub(r"<function (\S+) at 0x[0-9a-f]+>", r"\1", str(error))
        cause = textwrap.shorten(cause, 300, placeholder=" …")  # Thunder's messages can go on for pages
        what = f"{type(error).__name__}: {cause}" if cause else type(error).__name__
        said = f"the function cannot be traced{_users_line(error)}: {what}{_way_for(jitted)}"
        raise PredictionError(said) from error
    _check_simulated(inputs)
    return entry, list(inputs), []


def _way_for(jitted: Callable[..., Any]) -> str:
    """What compiles a Hugging Face model, which Thunder alone often cannot trace; "" for other functions."""
    model = getattr(jitted, "_model", None)
    if hasattr(model, "is_hugging_face"):
        return "; memory_efficient traces this model: predict its last program without arguments"
    classes = type(model).__mro__
    if not any(base.__module__.startswith("transformers.") for base in classes):
        return ""
    return "; if it runs without Thunder, memory_efficient(model) of thunder_mem.integrations.transformers compiles it"


def splits_autograd(jitted: Callable[..., Any]) -> bool:
    """Whether the backward hangs on a meta tensor of its own, as Thunder has it unless ThunderFX compiles."""
    data: Any = None if is_fx(jitted) else thunder.compile_data(jitted)
    return data is not None and not data.compile_options.get("thunderfx_disable_split_autograd", False)


def _check_simulated(inputs: Sequence[Any]) -> None:
    """Refuse a program on the CPU while a GPU is simulated: the answer would be about the CPU."""
    simulated, devices = simulated_device(), {t.device.type for t in tensors_of(inputs)}
    if simulated is not None and devices == {"cpu"}:
        raise ValueError(
            f"the program lives on the CPU while the {simulated.name} is simulated: make the model and its arguments "
            'inside of `with torch.device("cuda"):`, or move them there by .to("cuda")'
        )


def _users_line(error: BaseException | None) -> str:
    """ " at file:line" of the user's innermost line that Thunder was tracing, or ""."""
    while error is not None:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if os.path.isfile(frame.filename)]
        own = [frame.filename.startswith(_THIS) for frame in frames]
        traced = own.index(False) if False in own else len(own)  # earlier frames called Thunder
        ends = own.index(True, traced) if True in own[traced:] else len(own)  # later frames belong to a transform
        users = [frame for frame in frames[traced:ends] if not frame.filename.startswith(_LIBRARIES)]
        if users:
            return f" at {users[-1].filename}:{users[-1].lineno}"
        error = error.__cause__
    return ""


_THIS = os.path.dirname(os.path.dirname(__file__)) + os.sep


_LIBRARIES = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (torch, thunder))


def _from_proxy(proxy: Any) -> Any:
    if isinstance(proxy, TensorProxy):
        t = empty_like_proxy(proxy)
        return t.requires_grad_() if proxy.requires_grad else t
    if isinstance(proxy, NumberProxy):
        return proxy.value
    raise PredictionError(
        f"the argument {proxy.name} is neither a tensor nor a number: give predict the call's arguments"
    )
