"""What a transform of this package has to do with the list that it stands in.

Users write ``transforms=[MemEfficient()]``. Whatever else they write gets one sentence that says so; and the
list, which is theirs, keeps what they put into it (`pruning.py`).

Of a list within the list Thunder calls nothing that is ours: it says "'list' object has no attribute
'transform_module'", or for a function, at its first call, which types it supports. So `thunder.jit` is asked in
front of that; it is the one function of Thunder's that importing this package wraps, and every other call passes
through as it is.
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

    @property
    def policy(self) -> NoReturn:
        """What Thunder asks plugins for."""
        raise AttributeError(
            f"{type(self).__name__} is a transform, plugins= takes a plugin: "
            'write plugins="mem-efficient" or plugins=thunder_mem.MemEfficientPlugin(...)'
        )


def _refuses_nested(jit: _Jit) -> _Jit:
    """`thunder.jit`, for which a list of this package's transforms within ``transforms=`` is a `TypeError`."""

    @wraps(jit)
    def asked_first(*args: Any, **kwargs: Any) -> Any:
        transforms = kwargs.get("transforms")
        for item in transforms if isinstance(transforms, list | tuple) else ():
            for inner in item if isinstance(item, list | tuple) else ():
                if isinstance(inner, ListedTransform):
                    raise TypeError(
                        f"transforms= has a list in its list: write transforms=[{type(inner).__name__}(...)] "
                        "with one pair of brackets, or [*others, ...] to add to a list of yours"
                    )
        return jit(*args, **kwargs)

    return cast(_Jit, asked_first)


thunder.jit = _refuses_nested(thunder.jit)
