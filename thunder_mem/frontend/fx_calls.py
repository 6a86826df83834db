"""Detect calls of ThunderFX programs that compile nothing.

If Dynamo cannot trace a program at all (an `nn.LSTM`), eager PyTorch runs it, and no transform is called. Without this
module the user would get no plan and no warning.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

from thunder_mem.frontend.fx_changes import when_imported
from thunder_mem.memory.outside_input import shortened

__all__ = ["left_whole", "watch_calls"]

_NOTE = "_thunder_mem_left_whole"


def watch_calls(is_ours: Callable[[Any], bool]) -> None:
    """From now on, results of `thunderfx` record a call that compiles nothing, and warn of the first one.

    Args:
        is_ours: whether a transform is one of this package.
    """
    when_imported("watch_calls", lambda: _watch(is_ours))


def _watch(is_ours: Callable[[Any], bool]) -> None:
    kind = sys.modules["thunder.dynamo.compiler"].ThunderFXCompiledObject
    if not hasattr(kind.__call__, "__wrapped__"):
        kind.__call__ = _noting(kind.__call__, is_ours)


def left_whole(compiled: Any) -> str | None:
    """Dynamo's reason for leaving all of a program to eager PyTorch; None if that is not known to have happened."""
    return vars(compiled).get(_NOTE) if hasattr(compiled, "__dict__") else None


def _noting(call: Callable[..., Any], is_ours: Callable[[Any], bool]) -> Callable[..., Any]:
    @wraps(call)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._backend.subgraph_infos or _NOTE in vars(self):
            return call(self, *args, **kwargs)
        before = _reasons()
        result = call(self, *args, **kwargs)
        if not self._backend.subgraph_infos:
            why = next(iter(_reasons() - before), "it calls nothing that PyTorch can compile")
            vars(self)[_NOTE] = _in_words(why)
            if any(map(is_ours, self._backend.thunder_options.get("transforms", ()))):
                warnings.warn(
                    f"ThunderFX compiled nothing of this program, so MemEfficient changes nothing: {_in_words(why)}",
                    stacklevel=2,
                )
        return result

    return noting


def _reasons() -> Counter[str]:
    """Dynamo's own words for code that it could not trace so far."""
    counters = sys.modules["torch._dynamo.utils"].counters
    return Counter(counters["unimplemented"]) + Counter(counters["graph_break"])


def _in_words(reason: str) -> str:
    """The first line of a reason of Dynamo's, and its first hint."""
    lines = [line.strip() for line in reason.strip().splitlines()]
    hint = next((line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")), "")
    return shortened(f"{lines[0]}{f' ({hint})' if hint else ''}", 300)
