"""Lines of the user's code in traces, where Thunder would name PyTorch's.

Thunder gives every bound symbol the innermost line that its interpreter ran. For a module such as
`torch.nn.Linear` that is a line of PyTorch's own, the same for all of a model's layers; the line that
calls the module says more. ThunderFX hands Thunder graphs whose code Dynamo wrote ("<eval_with_key>.4:6"), and notes
for each node which line of the user's it stands for.
"""

from __future__ import annotations

import os
import re
from dis import Positions
from itertools import islice
from typing import Any

import thunder
import torch
from thunder.core.interpreter import InterpreterFrame, InterpreterRuntimeCtx, unwrap

__all__ = ["name_user_lines", "node_line"]

_THUNDERS = InterpreterRuntimeCtx.get_current_user_source_location
_LIBRARIES = {"torch", "thunder"}
_FOLDERS = tuple(path + os.sep for library in (torch, thunder) for path in library.__path__)


def name_user_lines() -> None:
    """From now on, traces name the innermost line outside of PyTorch and Thunder, if there is one."""
    InterpreterRuntimeCtx.get_current_user_source_location = _user_line


def node_line(node: torch.fx.Node) -> tuple[str, int] | None:
    """File and line of the user's innermost call that a node of a graph of Dynamo's stands for; None if not noted."""
    calls = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return next(((file, int(line)) for file, line in reversed(calls) if not file.startswith(_FOLDERS)), None)


def _user_line(self: InterpreterRuntimeCtx) -> tuple[str, Any] | tuple[None, None]:
    for frame in reversed(self.frame_stack):
        if unwrap(frame.globals).get("__name__", "").split(".")[0] not in _LIBRARIES:
            if not frame.code.co_filename.startswith("<eval_with_key>"):
                return frame.code.co_filename, frame.positions
            if (written := _written_line(frame)) is not None:
                return written
    return _THUNDERS(self)


def _written_line(frame: InterpreterFrame) -> tuple[str, Positions] | None:
    """Where the user wrote what a frame in code of Dynamo's does; None where that is not noted."""
    if frame.positions is None:
        return None
    module, line = unwrap(frame.localsplus[0]), frame.positions.lineno
    numbers, start = getattr(module, "_lineno_map", None), getattr(module, "_prologue_start", None)
    if not isinstance(module, torch.fx.GraphModule) or not numbers or start is None or line is None:
        return None
    number = numbers.get(line - start)
    written = None if number is None else node_line(next(islice(module.graph.nodes, number, None)))
    return written and (written[0], Positions(written[1], written[1], None, None))
