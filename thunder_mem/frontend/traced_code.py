"""What code means while Thunder traces it, where Thunder 0.2.6 takes it otherwise than PyTorch.

- `x.dtype` is PyTorch's. Thunder shows a dtype of its own, which equals none of PyTorch's: ``mask.dtype == torch.bool``
  takes the wrong branch, silently.
- The layers of `nn.Transformer` look whether a mask without ``is_causal=`` is causal, which needs its values: tracing
  fails. It is only a hint beside the mask, and so it is not given.
"""

from __future__ import annotations

from functools import wraps
from types import FunctionType
from typing import Any

from thunder.core.dtypes import dtype, to_torch_dtype
from thunder.core.interpreter import INTERPRETER_SIGNALS, _interpret_call, unwrap, wrap, wrap_const
from thunder.core.jit_ext import _general_jit_lookaside_map
from thunder.core.proxies import TensorProxy
from torch.nn.modules.transformer import _detect_is_causal_mask

from thunder_mem.frontend.own_programs import is_own_program

__all__ = ["mend_traced_code"]

_THUNDERS = _general_jit_lookaside_map[getattr]


def mend_traced_code() -> None:
    """From now on, code of this package's programs means that while it is traced."""
    _general_jit_lookaside_map[getattr] = _getattr
    _general_jit_lookaside_map[_detect_is_causal_mask] = _is_causal


@wraps(_THUNDERS)
def _getattr(obj: Any, name: Any, *default: Any) -> Any:
    value = _THUNDERS(obj, name, *default)
    if value is INTERPRETER_SIGNALS.EXCEPTION_RAISED or unwrap(name) != "dtype" or not is_own_program():
        return value
    if not isinstance(unwrap(obj), TensorProxy) or not isinstance(unwrap(value), dtype):
        return value
    return wrap(to_torch_dtype(unwrap(value)), provenance=value.provenance)


# The same function, for which no other is called.
_PYTORCHS = FunctionType(
    _detect_is_causal_mask.__code__,
    _detect_is_causal_mask.__globals__,
    argdefs=_detect_is_causal_mask.__defaults__,
)


def _is_causal(mask: Any, is_causal: Any = None, size: Any = None) -> Any:
    if not is_own_program():
        return _interpret_call(_PYTORCHS, *(x for x in (mask, is_causal, size) if x is not None))
    return wrap_const(is_causal is not None and unwrap(is_causal) is True)
