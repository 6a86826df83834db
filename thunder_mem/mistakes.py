"""What is answered before `thunder.jit` is called: something of this package's in ``transforms=`` that is no transform.

Of a list within the list, or a plugin, Thunder calls nothing that is ours: it says "'list' object has no attribute
'transform_module'", or for a function, at its first call, which types it supports. So the arguments of `thunder.jit`
are looked at first; every call without such a mistake passes through as it is. What a transform can answer itself is
in `transforms/listed.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import thunder

from thunder_mem.plugin import MemEfficientPlugin
from thunder_mem.transforms.listed import ListedTransform

__all__ = ["answer_mistakes"]

_Jit = TypeVar("_Jit", bound=Callable[..., Any])


def answer_mistakes() -> None:
    """From now on, `thunder.jit` answers such a mistake with a `TypeError`."""
    thunder.jit = _asks_first(thunder.jit)


def _asks_first(jit: _Jit) -> _Jit:
    @wraps(jit)
    def asked_first(*args: Any, **kwargs: Any) -> Any:
        transforms = kwargs.get("transforms")
        for item in transforms if isinstance(transforms, list | tuple) else [transforms]:
            if mistake := _mistake(item):
                raise TypeError(mistake)
        return jit(*args, **kwargs)

    return cast(_Jit, asked_first)


def _mistake(item: Any) -> str:
    """What to do about it; "" of anything that is a transform, or nothing of ours."""
    if isinstance(item, list | tuple):
        name = next((type(inner).__name__ for inner in item if isinstance(inner, ListedTransform)), "")
        return name and (
            f"transforms= has a list in its list: write transforms=[{name}(...)] with one pair of brackets, "
            "or [*others, ...] to add to a list of yours"
        )
    if isinstance(item, MemEfficientPlugin) or (isinstance(item, str) and item == "mem-efficient"):
        return (
            f"transforms= takes transforms, and {item!r} is a plugin: write transforms=[MemEfficient(...)], "
            "or thunder.compile(model, plugins=...)"
        )
    return ""
