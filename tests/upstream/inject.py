"""Put `MemEfficient` into every `thunder.jit`, whoever calls it and by whatever name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import thunder
from thunder.extend import FusionExecutor, get_always_executors, resolve_executors

from tests.upstream.records import SIDES
from thunder_mem import MemEfficient
from thunder_mem.regions import compiled_region
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex

__all__ = ["Injection", "injected", "uncompiled"]


@dataclass
class Injection:
    """What is injected now, one of `SIDES`, and how many programs the injected transform has seen."""

    side: str = SIDES[0]
    programs: int = 0


class _Counting(MemEfficient):
    """Fails loudly, checks every plan, and counts the programs."""

    def __init__(self, injection: Injection) -> None:
        super().__init__(strict=True, verify=True)
        self._injection = injection

    def transform_traces_pre_prologue(self, *traces: Any, **kwargs: Any) -> Any:
        self._injection.programs += 1
        return super().transform_traces_pre_prologue(*traces, **kwargs)


def _with_pointwise(executors: Any) -> Any:
    """The list with `mem_pointwise` before PyTorch's own, and behind those that are somebody's own."""
    if executors is None or any(isinstance(e, FusionExecutor) for e in resolve_executors(executors)):
        return executors
    given = list(resolve_executors(executors))
    always = get_always_executors()
    place = next((i for i, e in enumerate(given) if e in always), len(given))
    return [*given[:place], mem_pointwise_ex, *given[place:]]


@contextmanager
def injected() -> Iterator[Injection]:
    """Within, `thunder.jit` adds `MemEfficient` behind the transforms that it is given, on the sides that say so.

    It is replaced by object, not by name, in all that is imported: also where a module has imported `jit`.
    ThunderFX, recipes, `thunder.functional` and the like compile through it too.
    """
    injection = Injection()
    plain = thunder.jit

    @functools.wraps(plain)
    def jit(fn: Callable, /, *, executors: Any = None, transforms: Any = None, **options: Any) -> Callable:
        if injection.side == SIDES[0]:
            return plain(fn, executors=executors, transforms=transforms, **options)
        others = [t for t in transforms or () if not isinstance(t, _Counting)]
        if injection.side == "pointwise":
            executors = _with_pointwise(executors)
        return plain(fn, executors=executors, transforms=[*others, _Counting(injection)], **options)

    _replace(plain, jit)
    try:
        yield injection
    finally:
        _replace(jit, plain)


def _replace(old: object, new: object) -> None:
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, name, new)


def uncompiled() -> Any:
    """A context in which fused regions run one operation at a time."""
    return mock.patch.object(compiled_region, "_compile", lambda unfused, args: unfused)
