"""What a transform of this package has to do with the list that it stands in.

Users write ``transforms=[MemEfficient()]``. Whatever else they write gets one sentence that says so; and the
list, which is theirs, keeps what they put into it (`pruning.py`).

Of a list within the list, or a plugin's name, Thunder calls nothing that is ours: it says "'list' object has no
attribute 'transform_module'", or for a function, at its first call, which types it supports. So the arguments of
`thunder.jit` are looked at before it is called; every call without such a mistake passes through as it is.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

import thunder
from thunder.core.transform_common import Transform

from thunder_mem.pruning import take_back_pruning

__all__ = ["ListedTransform"]

_Jit = TypeVar("_Jit", bound=Callable[..., Any])


class _Class(ABCMeta):
    """Of a class in place of an object Thunder says that it "had an unexpected type"; this puts the remedy in front."""

    def __format__(cls, spec: str) -> str:
        return f"{cls!r} is a class, write transforms=[{cls.__name__}()] with parentheses: it"


class ListedTransform(Transform, metaclass=_Class):
    """A transform that keeps the caller's list clean, and answers where it is taken for a list or a plugin."""

    def transform_module(self, model: Any = None) -> None:
        """Thunder's hook for modules."""
        if not isinstance(self, ListedTransform):  # called on the class, with the module as `self`
            raise TypeError(
                "transforms= takes objects: write transforms=[MemEfficient()] with parentheses, not the class"
            )
        take_back_pruning(model)

    def _is_no_list(self, *_: Any) -> NoReturn:
        raise TypeError(f"transforms= takes a list: write transforms=[{type(self).__name__}(...)] with brackets")

    __iter__ = __getitem__ = append = _is_no_list

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} compiles nothing itself: write thunder.jit(fn, transforms=[...])")

    @property
    def policy(self) -> NoReturn:
        """What Thunder asks plugins for."""
        raise AttributeError(
            f"{type(self).__name__} is a transform, plugins= takes a plugin: "
            'write plugins="mem-efficient" or plugins=thunder_mem.MemEfficientPlugin(...)'
        )


def _mistake(item: Any) -> str:
    """What to do about something in ``transforms=`` that is ours and no transform; "" of anything else."""
    if isinstance(item, list | tuple):
        mine = (type(inner).__name__ for inner in item if isinstance(inner, ListedTransform))
        name = next(mine, "")
        return name and (
            f"transforms= has a list in its list: write transforms=[{name}(...)] with one pair of brackets, "
            "or [*others, ...] to add to a list of yours"
        )
    if item == "mem-efficient" or getattr(type(item), "__name__", "") == "MemEfficientPlugin":
        return (
            f"transforms= takes transforms, and {item!r} is a plugin: write transforms=[MemEfficient(...)], "
            "or thunder.compile(model, plugins=...)"
        )
    return ""


def _asks_first(jit: _Jit) -> _Jit:
    """`thunder.jit`, which answers such a mistake with a `TypeError`."""

    @wraps(jit)
    def asked_first(*args: Any, **kwargs: Any) -> Any:
        transforms = kwargs.get("transforms")
        for item in transforms if isinstance(transforms, list | tuple) else [transforms]:
            if mistake := _mistake(item):
                raise TypeError(mistake)
        return jit(*args, **kwargs)

    return cast(_Jit, asked_first)


thunder.jit = _asks_first(thunder.jit)
