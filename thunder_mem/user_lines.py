"""Lines of the user's code in traces, where Thunder would name PyTorch's.

Thunder gives every bound symbol the innermost line that its interpreter ran. For a module such as
`torch.nn.Linear` that is a line of PyTorch's own, the same for all of a model's layers; the line that
calls the module says more.
"""

from __future__ import annotations

from typing import Any

from thunder.core.interpreter import InterpreterRuntimeCtx, unwrap

__all__ = ["name_user_lines"]

_THUNDERS = InterpreterRuntimeCtx.get_current_user_source_location
_LIBRARIES = {"torch", "thunder"}


def name_user_lines() -> None:
    """From now on, traces name the innermost line outside of PyTorch and Thunder, if there is one."""
    InterpreterRuntimeCtx.get_current_user_source_location = _user_line


def _user_line(self: InterpreterRuntimeCtx) -> tuple[str, Any] | tuple[None, None]:
    for frame in reversed(self.frame_stack):
        if unwrap(frame.globals).get("__name__", "").split(".")[0] not in _LIBRARIES:
            return frame.code.co_filename, frame.positions
    return _THUNDERS(self)
