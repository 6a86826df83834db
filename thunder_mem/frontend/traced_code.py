"""What code means while Thunder traces it, where Thunder 0.2.6 takes it otherwise than PyTorch.

- `x.dtype` is PyTorch's. Thunder shows a dtype of its own, which equals none of PyTorch's: ``mask.dtype == torch.bool``
  takes the wrong branch, silently.
- The layers of `nn.Transformer` look whether a mask without ``is_causal=`` is causal, which needs its values: tracing
  fails. It is only a hint beside the mask, and so it is not given. In evaluation they ask for a fast path that Thunder
  has not, and get none.
- `nn.LogSoftmax` and `nn.Softmin` pass on ``_stacklevel=``, which Thunder's functions do not take.
- `nn.LSTM`, `nn.GRU` and `nn.RNN` keep weak references to their weights, which Thunder cannot trace, and pass on a list
  of them. Here the list is made of the module's parameters.
- `torch.distributions` take their arguments for no tensors, and look whether all values are valid, which tracing cannot
  tell: that is taken for granted.
- Results of several tensors have no names: ``x.max(1).values``, ``torch.linalg.svd(x).S``.
- Ranges are no indices: ``log_p[range(n), labels]``. Where a mask chooses rows, all of them may be given one tensor:
  ``h[is_padding] = self.padding``.
- ``x % n``, ``+x``, ``x.H``, ``x.mH`` and `torch.promote_types` are missing.
- ``f(*(x for x in xs))`` is refused, by which `nn.utils.parametrizations` make weights of several tensors.
- Checkpoints may be reentrant, have keywords, and be inside of each other: see `traced_checkpoint`.
- A named tuple is no result. ``x.data`` is unknown, and here is ``x.detach()``.
- ``with sdpa_kernel(...)`` is unknown. Here it does nothing, because executors choose the kernel of attention.
- ``with record_function(...)`` is unknown. Here it does nothing: the compiled program is another one.
- A weight with a parametrization is made anew at each use, as `spectral_norm` needs it. Thunder makes it once.
- Dropouts in place (`nn.Dropout(inplace=True)`) are refused, or do not write. They draw, and the result is copied.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import FunctionType
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core import jit_ext
from thunder.core.dtypes import bool8, dtype, to_torch_dtype
from thunder.core.interpreter import INTERPRETER_SIGNALS, _interpret_call, unwrap, wrap, wrap_const
from thunder.core.jit_ext import _general_jit_lookaside_map
from thunder.core.proxies import AnyProxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.extend import OperatorExecutor
from thunder.torch.langctx import register_method
from torch import nn
from torch.autograd.profiler import record_function
from torch.backends.mha import get_fastpath_enabled
from torch.distributions.kl import _dispatch_kl
from torch.nn.attention import sdpa_kernel
from torch.nn.modules.transformer import _detect_is_causal_mask
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.overrides import is_tensor_like
from torch.utils.checkpoint import checkpoint

from thunder_mem.frontend.checkpoint_tags import traced_checkpoint
from thunder_mem.frontend.own_programs import is_own_program

__all__ = ["mend_traced_code"]

_THUNDERS = _general_jit_lookaside_map[getattr]
_BUILT_BY_THUNDER = jit_ext.build_value_from_wrapped
_GETITEM = _general_jit_lookaside_map[TensorProxy.__getitem__]
_SETITEM = _general_jit_lookaside_map[TensorProxy.__setitem__]


def mend_traced_code() -> None:
    """From now on, code of this package's programs means that while it is traced."""
    _general_jit_lookaside_map[getattr] = _getattr
    _general_jit_lookaside_map[TensorProxy.__getitem__] = _getitem
    _general_jit_lookaside_map[TensorProxy.__setitem__] = _setitem
    _general_jit_lookaside_map[_detect_is_causal_mask] = _is_causal
    _general_jit_lookaside_map[get_fastpath_enabled] = _has_fast_path
    _general_jit_lookaside_map[nn.RNNBase._update_flat_weights] = _without_weak_references
    _general_jit_lookaside_map[ParametrizationList.forward] = _parametrized
    _general_jit_lookaside_map[checkpoint] = traced_checkpoint
    _general_jit_lookaside_map[sdpa_kernel] = _without_choice
    _general_jit_lookaside_map[record_function] = lambda *_, **__: _interpret_call(nullcontext)
    jit_ext.build_value_from_wrapped = _built
    _general_jit_lookaside_map[is_tensor_like] = _is_like_a_tensor
    _general_jit_lookaside_map[torch._is_all_true] = _is_valid
    _general_jit_lookaside_map[_dispatch_kl] = lambda *types: wrap_const(_dispatch_kl(*map(unwrap, types)))
    _general_jit_lookaside_map[torch.promote_types] = lambda *ds: wrap_const(torch.promote_types(*map(unwrap, ds)))
    _general_jit_lookaside_map.update(_WRAPPED)
    register_method("mod", ltorch.remainder)
    register_method("pos", lambda a: a)


@wraps(_THUNDERS)
def _getattr(obj: Any, name: Any, *default: Any) -> Any:
    if (place := _PLACES.get(unwrap(name))) is not None and _is_result(unwrap(obj)) and is_own_program():
        return _interpret_call(operator.getitem, obj, wrap_const(place))
    if unwrap(name) == "_flat_weights" and isinstance(unwrap(obj), nn.RNNBase) and is_own_program():
        return _interpret_call(lambda rnn: [getattr(rnn, weight) for weight in rnn._flat_weights_names], obj)
    if unwrap(name) == "data" and isinstance(unwrap(obj), TensorProxy) and is_own_program():
        return _interpret_call(torch.Tensor.detach, obj)
    if unwrap(name) in ("H", "mH") and isinstance(unwrap(obj), TensorProxy) and is_own_program():
        return _interpret_call(_adjoint, obj)
    if _is_parametrized(unwrap(obj), unwrap(name)) and is_own_program():
        obj.attribute_wrappers.pop(unwrap(name), None)  # in which Thunder would find the weight of its first use
    value = _THUNDERS(obj, name, *default)
    if value is INTERPRETER_SIGNALS.EXCEPTION_RAISED or unwrap(name) != "dtype" or not is_own_program():
        return value
    if not isinstance(unwrap(obj), TensorProxy) or not isinstance(unwrap(value), dtype):
        return value
    return wrap(to_torch_dtype(unwrap(value)), provenance=value.provenance)


def _is_parametrized(obj: Any, name: Any) -> bool:
    """Whether the attribute is a weight that a parametrization makes, as a property of the module's own class."""
    # The class is asked first: most attributes are no properties, and a module without the attribute takes a while.
    return (
        isinstance(obj, nn.Module)
        and isinstance(getattr(type(obj), name, None), property)
        and is_parametrized(obj, name)
    )


@wraps(_GETITEM)
def _getitem(a: Any, key: Any) -> Any:
    return _GETITEM(a, _plain_key(key))


@wraps(_SETITEM)
def _setitem(a: Any, key: Any, value: Any) -> Any:
    tensor, mask, given = unwrap(a), unwrap(key), unwrap(value)
    is_mask = isinstance(mask, TensorProxy) and mask.dtype == bool8 and mask.ndim
    chooses = is_mask and tuple(mask.shape) == tuple(tensor.shape[: mask.ndim])
    if chooses and isinstance(given, TensorProxy) and given.ndim <= tensor.ndim - mask.ndim and is_own_program():
        return _interpret_call(_masked, a, key, value)
    return _SETITEM(a, _plain_key(key), value)


def _masked(a: Any, mask: Any, value: Any) -> None:
    chosen = mask.reshape(mask.shape + (1,) * (a.ndim - mask.ndim))
    a.copy_(torch.where(chosen, value.to(a.dtype), a))


def _built(wrapped: Any) -> Any:
    """A part of a program's result, for the trace that assembles it: named tuples as calls of their classes."""
    if not is_own_program():
        return _BUILT_BY_THUNDER(wrapped)
    value = wrapped.value
    if not _is_named_tuple(value):
        return _with_calls(_BUILT_BY_THUNDER(wrapped))
    parts = zip(wrapped.item_wrappers, value, strict=True)
    return _made_of(type(value))(*(_with_calls(item) if part is None else _built(part) for part, item in parts))


def _with_calls(value: Any) -> Any:
    """A part that Thunder's interpreter has not looked into, with a call for each named tuple inside."""
    if _is_named_tuple(value):
        return _made_of(type(value))(*map(_with_calls, value))
    if type(value) in (tuple, list):
        return type(value)(map(_with_calls, value))
    return {key: _with_calls(item) for key, item in value.items()} if type(value) is dict else value


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _made_of(kind: type) -> Symbol:
    """The operation that makes a named tuple of that class."""
    if kind not in _MAKERS:
        name = f"{re.sub(r'[^0-9a-zA-Z]', '_', kind.__qualname__)}_{len(_MAKERS)}"
        _MAKERS[kind] = _results_ex.register_operator(
            name, meta=lambda *_: AnyProxy(None), fn=lambda *items: kind(*items)
        )
    return _MAKERS[kind]


_MAKERS: dict[type, Symbol] = {}
_results_ex = OperatorExecutor("mem_results", version="0.1")


def _without_choice(*args: Any, **kwargs: Any) -> Any:
    if not is_own_program():
        return _interpret_call(_CHOICE, *args, **kwargs)
    warnings.warn(
        "sdpa_kernel(...) inside of a compiled function does nothing: executors choose the kernel of attention",
        stacklevel=2,
    )
    return _interpret_call(nullcontext)


def _plain_key(key: Any) -> Any:
    keys = unwrap(key) if isinstance(unwrap(key), tuple) else (unwrap(key),)
    if any(isinstance(k, range) for k in keys) and is_own_program():
        return _interpret_call(_without_ranges, key)
    return key


def _without_ranges(key: Any) -> Any:
    if isinstance(key, range):
        return list(key)
    return tuple([list(k) if isinstance(k, range) else k for k in key])


def _adjoint(a: Any) -> Any:
    return a.mT.conj() if a.is_complex() else a.mT


_NAMES = (
    ("values", "indices"),
    ("sign", "logabsdet"),
    ("eigenvalues", "eigenvectors"),
    ("Q", "R"),
    ("U", "S", "V"),
    ("U", "S", "Vh"),
)
_PLACES = {name: place for names in _NAMES for place, name in enumerate(names)}


def _is_result(obj: Any) -> bool:
    """Whether it is Thunder's result of a function such as `max` along a dim, a tuple without PyTorch's names."""
    return type(obj) is tuple and all(isinstance(x, TensorProxy) for x in obj)


def _same(function: Any) -> FunctionType:
    """The same function, for which no other is called."""
    return FunctionType(function.__code__, function.__globals__, argdefs=function.__defaults__)


_CHOICE = contextmanager(_same(sdpa_kernel.__wrapped__))  # type: ignore[attr-defined]
_CAUSAL, _FAST_PATH, _UPDATE = map(
    _same, (_detect_is_causal_mask, get_fastpath_enabled, nn.RNNBase._update_flat_weights)
)


def _is_causal(mask: Any, is_causal: Any = None, size: Any = None) -> Any:
    if not is_own_program():
        named = {"is_causal": is_causal, "size": size}
        return _interpret_call(_CAUSAL, mask, **{name: x for name, x in named.items() if x is not None})
    return wrap_const(is_causal is not None and unwrap(is_causal) is True)


def _has_fast_path() -> Any:
    return wrap_const(False) if is_own_program() else _interpret_call(_FAST_PATH)


def _without_weak_references(rnn: Any) -> Any:
    return wrap_const(None) if is_own_program() else _interpret_call(_UPDATE, rnn)


def _of_originals(self: Any) -> Any:
    """PyTorch's `ParametrizationList.forward`, which passes on a generator."""
    originals = [self.original] if self.is_tensor else [getattr(self, f"original{i}") for i in range(self.ntensors)]
    value = self[0](*originals)
    for i in range(1, len(self)):
        value = self[i](value)
    return value


_PARAMETRIZED = _same(ParametrizationList.forward)


def _parametrized(parametrizations: Any) -> Any:
    return _interpret_call(_of_originals if is_own_program() else _PARAMETRIZED, parametrizations)


_IS_TENSOR_LIKE = _same(is_tensor_like)


def _is_like_a_tensor(a: Any) -> Any:
    if isinstance(unwrap(a), TensorProxy) and is_own_program():
        return wrap_const(True)
    return _interpret_call(_IS_TENSOR_LIKE, a)


def _is_valid(are_valid: Any) -> Any:
    """What `torch.distributions` ask of their arguments; the answer is in values, which tracing has not."""
    return wrap_const(True) if is_own_program() else _interpret_call(torch.Tensor.all, are_valid)


def _without_stacklevel(thunders: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(thunders)
    def softmax(a: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        if is_own_program():
            kwargs.pop("_stacklevel", None)
            if dim is None or unwrap(dim) is None:
                dim = wrap_const(0 if unwrap(a).ndim in (0, 1, 3) else 1)  # PyTorch's own choice
        return thunders(a, dim, *args, **kwargs)

    return softmax


def _with_a_write(thunders: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(thunders)
    def dropout(a: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("p", "training", "inplace"), args, strict=False)) | kwargs
        if not is_own_program() or "inplace" not in given or not unwrap(given["inplace"]):
            return thunders(a, *args, **kwargs)
        del given["inplace"]
        drawn = thunders(a, **given)
        if drawn is INTERPRETER_SIGNALS.EXCEPTION_RAISED or unwrap(drawn) is unwrap(a):
            return drawn
        return _interpret_call(torch.Tensor.copy_, a, drawn)

    return dropout


_WRAPPED = {
    function: wrapper(_general_jit_lookaside_map[function])
    for wrapper, functions in (
        (_without_stacklevel, (F.log_softmax, F.softmin)),
        (
            _with_a_write,
            (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        ),
    )
    for function in functions
    if function in _general_jit_lookaside_map
}
