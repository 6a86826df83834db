"""The options that the user gave, as code that advice keeps."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from typing import Any

from thunder.extend import TemporaryExecutor, get_always_executors

from thunder_mem.optimizer.step_in_backward import StepInBackward
from thunder_mem.planning.executor import user_executors
from thunder_mem.tiling.tiles import Tiles
from thunder_mem.transforms import MemEfficient
from thunder_mem.transforms.default_executors import JOINING

__all__ = ["given_options"]


def given_options(data: Any, *, with_executors: bool) -> dict[str, str]:
    """The options of a compilation's `MemEfficient` that are not its defaults, by name, as code.

    Args:
        data: Thunder's `compile_data`.
        with_executors: name an empty list of executors, too, as an option of `memory_efficient`.
    """
    transform = next((t for t in data.transforms if isinstance(t, MemEfficient)), None)
    if transform is None:
        return {}
    options = {name: _code(value) for name, value in transform.given.items()}
    listed = (e for e in user_executors(data.executors_list) if not isinstance(e, TemporaryExecutor))
    if with_executors and not [e for e in listed if e not in (*get_always_executors(), *JOINING)]:
        return {"executors": "[]", **options}
    return options


def _code(value: Any) -> str:
    """An option's value as code; functions and optimizers by a name."""
    if isinstance(value, str | os.PathLike):
        return json.dumps(os.fspath(value), ensure_ascii=False)
    if isinstance(value, StepInBackward):
        return "StepInBackward(optimizer)"
    if isinstance(value, Tiles):
        written = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}
        return f"Tiles({', '.join(f'{name}={_code(part)}' for name, part in written.items())})"
    return getattr(value, "__name__", None) or repr(value)
