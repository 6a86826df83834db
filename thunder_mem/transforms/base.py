"""What a transform of this package has to do with the list that it stands in.

Users write ``transforms=[MemEfficient()]``. Whatever else they write gets one sentence that says so; and the
list, which is theirs, keeps what they put into it (`frontend/fx_prologue_checks.py`).
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any, NoReturn

from thunder.core.transform_common import Transform

from thunder_mem.frontend.fx_prologue_checks import take_back_pruning
from thunder_mem.frontend.user_lines import name_user_lines

__all__ = ["ListedTransform"]


class _Class(ABCMeta):
    """Of a class in place of an object Thunder says that it "had an unexpected type"; this puts the remedy in front."""

    def __format__(cls, spec: str) -> str:
        return f"{cls!r} is a class, write transforms=[{cls.__name__}()] with parentheses: it"


class ListedTransform(Transform, metaclass=_Class):
    """A transform that keeps the caller's list clean, and answers where it is taken for a list or a plugin."""

    def __init__(self) -> None:
        name_user_lines(ListedTransform)

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
