"""Modules that a program makes while it runs, as in `nn.CrossEntropyLoss()(logits, labels)`.

Thunder 0.2.6 repeats what a program writes into a module's dicts (`_buffers`, `_parameters`, `_modules`) after each
run, and fails for dicts that are no argument's. A module that the program made is nobody else's: nothing is to repeat.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from thunder.core import jit_ext
from thunder.core.interpreter import PseudoInst

from thunder_mem.frontend.own_programs import is_own_program

__all__ = ["leave_made_modules"]

_THUNDERS = jit_ext.process_recorded_modifications


def leave_made_modules() -> None:
    """From now on, writes into such modules are left out."""
    jit_ext.process_recorded_modifications = _process


@wraps(_THUNDERS)
def _process(ctx: Any, epilogue_trace: Any) -> None:
    written = ctx._additional_outputs
    if is_own_program():
        for made in [x for x in written if _is_made(x.provenance)]:
            del written[made]
    _THUNDERS(ctx, epilogue_trace)


def _is_made(provenance: Any) -> bool:
    """Whether it is part of an object that an `object.__new__` of the program returned."""
    while provenance.inst in (PseudoInst.LOAD_ATTR, PseudoInst.BINARY_SUBSCR):
        provenance = provenance.inputs[0]
    if provenance.inst is not PseudoInst.OPAQUE:
        return False
    called = provenance.inputs[0]
    return called.inst is PseudoInst.CONSTANT and getattr(called.value, "__name__", "") == "__new__"
