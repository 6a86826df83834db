"""Functions that draw random numbers and that Thunder passes to PyTorch whole, written out around the draw.

Thunder 0.2.6 differentiates such a function by running it once more, which draws other numbers: silently, the gradient
has another mask than the result. Written out, the function draws once, the numbers that eager PyTorch draws from the
same generator. The formulas are those of `ATen/native/Dropout.cpp` and of `torch/nn/functional.py`. None is in place
here: `frontend/traced_code.py` makes a dropout and a write of such a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core.proxies import TensorProxy, pyval

from thunder_mem.kernels.random_draws import bernoulli, exponential
from thunder_mem.torch_functions.steps import constant

__all__ = ["RANDOM"]

_ALPHA = 1.7580993408473766  # of SELU: `alpha * scale`


def _of_channels(a: TensorProxy, leading: int = 2) -> Sequence[int]:
    """The shape of a mask with one element for each channel, the last of the leading dims."""
    return (*a.shape[:leading], *(1 for _ in a.shape[leading:]))


def _drop(a: TensorProxy, p: Any, training: bool, mask_shape: Sequence[int], formula: _Formula) -> TensorProxy | None:
    """A dropout by the formula of what is kept; None where nothing is drawn and the result is the argument."""
    p = float(pyval(p))
    if not (training and p and a.numel):
        return None
    if p == 1:
        return ltorch.mul(a, 0.0)
    return formula(a, ltorch.to(bernoulli(tuple(mask_shape), 1 - p, a.device), a.dtype), p)


_Formula = Callable[[TensorProxy, TensorProxy, float], TensorProxy]


def _scaled(a: TensorProxy, kept: TensorProxy, p: float) -> TensorProxy:
    return ltorch.mul(a, ltorch.true_divide(kept, 1 - p))


def _shifted(a: TensorProxy, kept: TensorProxy, p: float) -> TensorProxy:
    scale = 1 / sqrt((_ALPHA**2 * p + 1) * (1 - p))
    shift = ltorch.add(ltorch.mul(ltorch.sub(kept, 1), _ALPHA * scale), _ALPHA * scale * p)
    return ltorch.add(ltorch.mul(a, ltorch.mul(kept, scale)), shift)


def _dropout(a: TensorProxy, p: float, train: bool) -> TensorProxy | None:
    return _drop(a, p, train, a.shape, _scaled)


def _feature_dropout(a: TensorProxy, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return _drop(a, p, training, _of_channels(a), _scaled)


def _maybe_of_one_sample(ndim: int) -> Callable[..., Any]:
    """Dropout of channels whose argument has `ndim` dims, or one less without the dimension of samples."""

    def dropout(a: TensorProxy, p: float = 0.5, training: bool = True, inplace: bool = False) -> TensorProxy | None:
        return _drop(a, p, training, _of_channels(a, 2 if a.ndim == ndim else 1), _scaled)

    return dropout


def _alpha_dropout(a: TensorProxy, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    return _drop(a, p, training, a.shape, _shifted)


def _feature_alpha_dropout(a: TensorProxy, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    return _drop(a, p, training, _of_channels(a), _shifted)


def _native_dropout(a: TensorProxy, p: Any, train: bool | None) -> tuple[TensorProxy, TensorProxy] | None:
    """The result and the mask."""
    if not train or not 0 < (p := float(pyval(p))) < 1 or not a.numel:
        return None
    kept = bernoulli(tuple(a.shape), 1 - p, a.device)
    return ltorch.mul(ltorch.mul(a, kept), 1 / (1 - p)), kept


def _gumbel_softmax(
    logits: TensorProxy, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> TensorProxy:
    gumbels = ltorch.neg(ltorch.log(exponential(tuple(logits.shape), logits.device, logits.dtype)))
    soft = ltorch.softmax(ltorch.true_divide(ltorch.add(logits, gumbels), tau), dim)
    if not hard:
        return soft
    largest = ltorch.argmax(soft, dim, keepdim=True)
    length = soft.shape[dim]
    places = ltorch.reshape(
        ltorch.arange(length, device=soft.device), [length if d == dim % soft.ndim else 1 for d in range(soft.ndim)]
    )
    offset = constant(ltorch.sub(ltorch.to(ltorch.eq(places, largest), soft.dtype), soft))
    return ltorch.add(offset, soft)  # the gradient is that of `soft`, straight through


def _fractional_pool(with_indices: Callable[..., Any], dims: int, indices_too: bool) -> Callable[..., Any]:
    """A fractional pool as a choice of elements, so that its gradient has the windows of its result.

    Args:
        with_indices: PyTorch's function that also returns which element of a plane each one is.
        dims: of the windows.
        indices_too: whether the written function returns these, too.
    """

    def pool(
        a: TensorProxy,
        kernel_size: Any,
        output_size: Any = None,
        output_ratio: Any = None,
        return_indices: bool = indices_too,
        _random_samples: TensorProxy | None = None,
    ) -> Any:
        chosen = ltorch._torch_to_thunder_function_map[with_indices](
            a, kernel_size, output_size, output_ratio, True, _random_samples
        )
        _, indices = map(constant, chosen)
        of_plane = ltorch.gather(ltorch.flatten(a, -dims), -1, ltorch.flatten(indices, -dims))
        values = ltorch.reshape(of_plane, indices.shape)
        return (values, indices) if indices_too or return_indices else values

    return pool


RANDOM: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.alpha_dropout: _alpha_dropout,
    torch.dropout: _dropout,
    torch.feature_alpha_dropout: _feature_alpha_dropout,
    torch.feature_dropout: _feature_dropout,
    torch.native_dropout: _native_dropout,
    F.alpha_dropout: _alpha_dropout,
    F.dropout1d: _maybe_of_one_sample(3),
    F.dropout2d: _feature_dropout,
    F.dropout3d: _maybe_of_one_sample(5),
    F.feature_alpha_dropout: _feature_alpha_dropout,
    F.fractional_max_pool2d: _fractional_pool(F.fractional_max_pool2d_with_indices, 2, indices_too=False),
    F.fractional_max_pool2d_with_indices: _fractional_pool(F.fractional_max_pool2d_with_indices, 2, indices_too=True),
    F.fractional_max_pool3d: _fractional_pool(F.fractional_max_pool3d_with_indices, 3, indices_too=False),
    F.fractional_max_pool3d_with_indices: _fractional_pool(F.fractional_max_pool3d_with_indices, 3, indices_too=True),
    F.gumbel_softmax: _gumbel_softmax,
}
"""By PyTorch's function: `fn(*args, **kwargs)`, which means the same, or None where nothing is drawn."""
