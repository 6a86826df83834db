"""The base of this package's transforms: it guards the user's list of transforms.

Users write ``transforms=[MemEfficient()]``. Any other form raises one sentence that names the right one. The user's
list stays unchanged (`frontend/fx_prologue_checks.py`).
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any, ClassVar, NoReturn

from thunder.core.transform_common import Transform

from thunder_mem.frontend.dynamo_tags import run_tags_outside
from thunder_mem.frontend.fx_prologue_checks import take_back_pruning
from thunder_mem.frontend.own_objects import leave_made_modules
from thunder_mem.frontend.own_programs import is_own_program, own_programs_have
from thunder_mem.frontend.second_gradients import warn_of_second_gradients
from thunder_mem.frontend.traced_code import mend_traced_code
from thunder_mem.frontend.user_lines import name_user_lines
from thunder_mem.torch_functions.traced_functions import complete_functions

__all__ = ["ListedTransform"]


class _Class(ABCMeta):
    """Put the remedy before Thunder's message for a class in place of an object: it "had an unexpected type"."""

    def __format__(cls, spec: str) -> str:
        return f"{cls!r} is a class, write transforms=[{cls.__name__}()] with parentheses: it"


class ListedTransform(Transform, metaclass=_Class):
    """A transform that leaves the caller's list unchanged, and raises a clear error where it is misused.

    Attributes:
        plans: whether it plans the whole program, to which it adds the package's executors.
    """

    plans: ClassVar[bool] = False

    def __init__(self) -> None:
        own_programs_have(ListedTransform)
        name_user_lines()
        mend_traced_code()
        leave_made_modules()
        complete_functions(is_own_program)
        warn_of_second_gradients()
        run_tags_outside()

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
        """An attribute that Thunder reads from plugins."""
        raise AttributeError(
            f"{type(self).__name__} is a transform, plugins= takes a plugin: "
            'write plugins="mem-efficient" or plugins=thunder_mem.MemEfficientPlugin(...)'
        )
