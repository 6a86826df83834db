"""Run Dynamo's bookkeeping of new modules outside of Thunder's interpreter.

After the first `torch.compile` in a process, `torch.nn.Module.__init__` also records each new module in a dictionary
with weak keys. Where a `forward` makes a module, as litgpt's does, Thunder traces that record and iterates over the
whole dictionary, from which other modules may disappear meanwhile: "dictionary changed size during iteration".
"""

from __future__ import annotations

from thunder.core.interpreter import interpreter_needs_wrap
from thunder.core.jit_ext import _general_jit_lookaside_map
from torch._dynamo.mutation_guard import GenerationTracker

__all__ = ["run_tags_outside"]


def run_tags_outside() -> None:
    """From now on Thunder calls the record of a module, and does not trace it; no value of a program depends on it."""
    tag = GenerationTracker.tag.__func__  # type: ignore[attr-defined]  # of a class method
    _general_jit_lookaside_map.setdefault(tag, interpreter_needs_wrap(tag))
