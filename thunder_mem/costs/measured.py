"""Measured times instead of modelled ones, on request, kept in a JSON file in the user's cache.

Only `MemEfficient(costs="measured")` uses them. Two ranks that measure would plan differently, so several ranks are
refused.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from thunder.core.devices import to_torch_device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, pyval
from thunder.core.symbol import BoundSymbol
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from thunder_mem.costs.roofline import cost_s, is_free
from thunder_mem.memory.device_models import DeviceModel
from thunder_mem.memory.outside_input import quoted, read_json, replace_file
from thunder_mem.trace.python_function import python_function

__all__ = [
    "COSTS",
    "MeasuredCosts",
    "MeasuringError",
    "cache_directory",
    "check_measurable",
    "costs_of",
]

COSTS = ("roofline", "measured")
"""What `MemEfficient(costs=...)` takes."""

VERSION = 1
MAX_BYTES = 2**26
_REPEATS = 7
_MOST_S = 86_400  # a day: no operation takes longer

Timer = Callable[[Callable[..., Any], Sequence[Any]], float]


class MeasuringError(ValueError):
    """Times cannot be measured here; the message says why."""


def check_measurable() -> None:
    """Refuse to measure if nothing runs, or if every rank would plan by its own times.

    Raises:
        MeasuringError: tensors are fake here, or this process is one of several ranks.
    """
    if any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()):
        raise MeasuringError('costs="measured" runs operations, and here tensors are fake: use costs="roofline"')
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise MeasuringError(
            f'costs="measured" would give each of the {distributed.get_world_size()} ranks other times, and so other '
            'plans: use costs="roofline"'
        )


def costs_of(costs: str, device: DeviceModel) -> Callable[[BoundSymbol], float]:
    """Seconds of bound symbols, in one of the ways of `COSTS`; `device` is for the roofline."""
    return MeasuredCosts().cost_s if costs == "measured" else partial(cost_s, device=device)


def cache_directory() -> Path:
    """The folder of measurements: ``$XDG_CACHE_HOME/thunder_mem``, by default ``~/.cache/thunder_mem``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thunder_mem"


class MeasuredCosts:
    """Seconds of bound symbols, measured at their first use and remembered in a file.

    Two symbols share a measurement when their name, executor, shapes, dtypes, literal arguments and
    device, and the torch version, are the same. The file is replaced as a whole at each measurement.

    Args:
        path: the file; by default ``times.json`` in `cache_directory()`.
        timer: ``(function, arguments) -> seconds``; by default the median of a few runs.

    Raises:
        ValueError: the file exists but is not such a file.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, timer: Timer | None = None) -> None:
        self.path = Path(path) if path is not None else cache_directory() / "times.json"
        self._timer = timer or (lambda fn, args: _time(fn, args))
        self._seconds = _load(self.path)

    def cost_s(self, bsym: BoundSymbol) -> float:
        """Seconds that `bsym` takes on its own device, without those of its host; 0 for a view.

        Raises:
            MeasuringError: the operation fails on made-up arguments, or its device does not exist.
        """
        if is_free(bsym):
            return 0.0
        key = _key(bsym)
        if key not in self._seconds:
            devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
            try:
                with torch.random.fork_rng(devices):  # the program's own draws stay as they are
                    inputs = _inputs(bsym)
                    function = python_function([bsym], inputs, bsym.output, "measured")
                    self._seconds[key] = self._timer(function, [_sample(p) for p in inputs])
            except Exception as error:
                raise MeasuringError(f"{bsym.sym.name} cannot be measured: {type(error).__name__}: {error}") from error
            _save(self.path, self._seconds)
        return self._seconds[key]


def _time(fn: Callable[..., Any], args: Sequence[Any]) -> float:
    """Median seconds of a few runs after a warm-up, device included."""
    cuda = any(isinstance(a, torch.Tensor) and a.is_cuda for a in args)
    samples = []
    for _ in range(_REPEATS + 2):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        fn(*args)
        if cuda:
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - start)
    return median(samples[2:])


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(torch.device(device))} torch {torch.__version__}"
    return f"{device} {platform.processor() or platform.machine()} x{torch.get_num_threads()} torch {torch.__version__}"


def _key(bsym: BoundSymbol) -> str:
    def text(x: Any) -> str:
        if isinstance(x, TensorProxy):
            return f"{to_torch_dtype(x.dtype)}{list(map(int, x.shape))}".removeprefix("torch.")
        if isinstance(x, NumberProxy):
            return repr(pyval(x))
        if isinstance(x, (tuple, list)):
            return f"({','.join(map(text, x))})"
        return repr(x) if not isinstance(x, Proxy) else type(x).__name__

    executor = getattr(bsym.sym.executor, "name", "unclaimed")
    content = text((bsym.args, tuple((k, bsym.kwargs[k]) for k in sorted(bsym.kwargs))))
    inside = "+".join(b.sym.name for b in bsym.subsymbols) if bsym.sym.is_fusion else ""
    device = next(
        (
            str(to_torch_device(t.device))
            for t in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)
            if isinstance(t, TensorProxy)
        ),
        "",
    )
    # A fusion's own name ends in a meaningless number.
    name = bsym.sym.name.rstrip("0123456789") if bsym.sym.is_fusion else bsym.sym.name
    return f"{name}[{inside}] {content} {executor} {_machine(device)}"


def _inputs(bsym: BoundSymbol) -> list[Proxy]:
    """Its proxy arguments, each name once."""
    return list({p.name: p for p in bsym.flat_proxy_args}.values())


def _sample(proxy: Proxy) -> Any:
    """An argument made up: values near one, index 0."""
    if isinstance(proxy, TensorProxy):
        dtype, shape = to_torch_dtype(proxy.dtype), tuple(map(int, proxy.shape))
        assert dtype is not None
        make = torch.rand if dtype.is_floating_point else torch.zeros
        return make(shape, dtype=dtype, device=to_torch_device(proxy.device))
    return pyval(proxy) if isinstance(proxy, NumberProxy) else proxy


def _load(path: Path) -> dict[str, float]:
    if not path.exists():
        return {}
    try:
        content = read_json(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a file of measured times: {error}") from error
    seconds = content.get("seconds") if isinstance(content, dict) and content.get("version") == VERSION else None
    if not isinstance(seconds, dict):
        raise ValueError(f"{path} is not a file of measured times of version {VERSION}; remove it to measure again")
    for key, value in seconds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _MOST_S:
            raise ValueError(
                f"{path} holds {quoted(value, 100)} for {quoted(key, 100)}, where a number of seconds belongs"
            )
    return {key: float(value) for key, value in seconds.items()}


def _save(path: Path, seconds: dict[str, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps({"version": VERSION, "seconds": dict(sorted(seconds.items()))}, indent=1))
