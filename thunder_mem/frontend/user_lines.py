"""Name lines of the user's code in traces, instead of PyTorch's.

Thunder gives every bound symbol the innermost line that its interpreter ran. For a module such as `torch.nn.Linear`
that is a line of PyTorch, the same for all layers of a model; the line that calls the module is more informative. If
only PyTorch calls the module, as in an `nn.Sequential`, the module's name replaces the file: "module 2.0 (GELU)".
ThunderFX gives Thunder graphs whose code Dynamo wrote ("<eval_with_key>.4:6"), and records the user's line of each
node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from thunder.core.codeutils import Positions
from thunder.core.interpreter import InterpreterFrame, InterpreterRuntimeCtx, unwrap

from thunder_mem.frontend.own_programs import is_own_program
from thunder_mem.trace.source_lines import MODULE, node_line

__all__ = ["name_user_lines"]

_THUNDERS = InterpreterRuntimeCtx.get_current_user_source_location
_LIBRARIES = {"torch", "thunder"}


def name_user_lines() -> None:
    """From now on, traces of this package's programs name the innermost line outside PyTorch and Thunder, if any."""
    InterpreterRuntimeCtx.get_current_user_source_location = _user_line


def _user_line(self: InterpreterRuntimeCtx) -> tuple[str, Any] | tuple[None, None]:
    if not is_own_program():
        return _THUNDERS(self)
    for frame in reversed(self.frame_stack):
        if unwrap(frame.globals).get("__name__", "").split(".")[0] not in _LIBRARIES:
            if not frame.code.co_filename.startswith("<eval_with_key>"):
                return frame.code.co_filename, frame.positions
            if (written := _written_line(frame)) is not None:
                return written
    return _module_place(self.frame_stack) or _THUNDERS(self)


def _module_place(frames: Sequence[InterpreterFrame]) -> tuple[str, Any] | None:
    """The innermost running module, by its name in the outermost, in place of a file; None without one."""
    running = [(frame, module) for frame in frames if (module := _module_of(frame)) is not None]
    if not running:
        return None
    root, (frame, module) = running[0][1], running[-1]
    names = _NAMES.get(root)
    if names is None or id(module) not in names:  # a new one, or a module that was added since
        names = _NAMES[root] = {id(part): name for name, part in root.named_modules()}
    name = names.get(id(module))
    return None if not name else (f"{MODULE}{name} ({type(module).__name__})", frame.positions)


_NAMES: WeakKeyDictionary[torch.nn.Module, dict[int, str]] = WeakKeyDictionary()


def _module_of(frame: InterpreterFrame) -> torch.nn.Module | None:
    """The module of a frame's method."""
    names = frame.code.co_varnames
    if not names or names[0] != "self" or not frame.localsplus:
        return None
    module = unwrap(frame.localsplus[0])
    return module if isinstance(module, torch.nn.Module) else None


def _written_line(frame: InterpreterFrame) -> tuple[str, Positions] | None:
    """The user's line for a frame in Dynamo's code; None if it is not recorded."""
    if frame.positions is None:
        return None
    module, line = unwrap(frame.localsplus[0]), frame.positions.lineno
    numbers, start = getattr(module, "_lineno_map", None), getattr(module, "_prologue_start", None)
    if not isinstance(module, torch.fx.GraphModule) or not numbers or start is None or line is None:
        return None
    if (number := numbers.get(line - start)) is None:
        return None
    node = next(islice(module.graph.nodes, number, None))
    if (written := node_line(node)) is not None:
        return written[0], Positions(written[1], written[1], None, None)
    # By Dynamo's path from a local variable: "L['self'].2.0".
    path, kind = next(reversed((node.meta.get("nn_module_stack") or {"": ("", None)}).values()))
    name = re.sub(r"^L\[[^]]*\]\.?", "", path)
    return (f"{MODULE}{name} ({kind.__name__})", frame.positions) if name and isinstance(kind, type) else None
