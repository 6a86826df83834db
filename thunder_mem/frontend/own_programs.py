"""The programs that are compiled with a transform of this package.

No hook of a transform runs before Thunder's interpreter. So functions of the interpreter are replaced when a transform
is made. They ask here, and do as before for all other programs.
"""

from __future__ import annotations

from typing import Any

from thunder.core.compile_data import get_compile_data

__all__ = ["is_own_program", "own_programs_have"]

_KINDS: tuple[type, ...] = ()


def own_programs_have(transform: type) -> None:
    """From now on, programs with a transform of that class are this package's."""
    global _KINDS
    _KINDS = tuple({*_KINDS, transform})


def is_own_program() -> bool:
    """Whether the program that is being traced is one of them."""
    data: Any = get_compile_data()
    return data is not None and any(isinstance(transform, _KINDS) for transform in data.transforms)
