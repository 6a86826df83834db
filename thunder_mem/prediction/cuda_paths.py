"""CUDA's code paths in PyTorch for CPU tensors.

Autograd's engine does not run on fake CUDA tensors, so eager code runs on fake CPU tensors (`analysis/estimate.py`).
Most operators save and hold the same on both devices. Inside `cuda_paths`, kernels in PyTorch's own dispatcher replace
the others:

- dropout, which keeps a mask of bytes on CUDA and a tensor of floats on a CPU;
- `rms_norm`, which is one kernel there and six operators here;
- softmax of float16 into float32, which needs no wider copy there;
- attention, by the kernel that CUDA would choose for shapes, mask and device;
- autocast, whose lists of operators differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from thunder.executors.utils import SpdaBackend
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_map_only

from thunder_mem.attention.kernels import eager_prefers_cudnn

__all__ = ["ChooseAttention", "cuda_paths"]

ChooseAttention = Callable[..., SpdaBackend]
"""From query, key, value, mask, dropout, causal and scale to the kernel that a device takes."""

_16_BITS = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


@contextmanager
def cuda_paths(choose_attention: ChooseAttention) -> Iterator[None]:
    """Compute with fake CPU tensors as with CUDA tensors.

    Args:
        choose_attention: see `simulate.attention_backend_for`.
    """
    library = Library("aten", "IMPL")
    with ExitStack() as stack:
        stack.callback(library._destroy)
        for name, kernel in _kernels(choose_attention).items():
            library.impl(name, kernel, "AutogradCPU", allow_override=True)
        # With a kernel of the backend's own, autograd differentiates the operator as one.
        library.impl("_fused_rms_norm", _never_runs, "CPU", allow_override=True)
        for name, kernel in _autocast_kernels():
            library.impl(name, kernel, "AutocastCPU", allow_override=True)
        for name in ("set_autocast_enabled", "set_autocast_dtype"):
            stack.enter_context(mock.patch.object(torch, name, _on_both(getattr(torch, name))))
        yield


def _never_runs(*args: Any) -> Any:
    raise RuntimeError("this kernel is for fake tensors, which never run one")


def _kernels(choose_attention: ChooseAttention) -> dict[str, Callable[..., Any]]:
    return {
        "dropout": lambda x, p, train: _aten.native_dropout(x, p, train)[0] if train and p and x.numel() else x,
        "softmax.int": _softmax(_aten._softmax),
        "log_softmax.int": _softmax(_aten._log_softmax),
        "scaled_dot_product_attention": _attention(choose_attention),
    }


def _softmax(kernel: Any) -> Callable[..., Tensor]:
    def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if dtype is torch.float32 and x.dtype is torch.float16:
            return kernel(x, dim, True)
        return kernel(x if dtype is None else x.to(dtype), dim, False)

    return softmax


# --- attention: `scaled_dot_product_attention` in PyTorch's `aten/src/ATen/native/transformers/attention.cpp`


def _attention(choose: ChooseAttention) -> Callable[..., Tensor]:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        mask, dropout, causal = attn_mask, dropout_p, is_causal
        if mask is not None and mask.dtype is torch.bool:
            mask = _to_add(mask, query)
        heads = query.shape[-3] if enable_gqa else None
        kernel = choose(query, _looks(key, heads), _looks(value, heads), mask, dropout, causal, scale)
        if enable_gqa and kernel is not SpdaBackend.FLASH_ATTENTION:
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        if kernel is SpdaBackend.FLASH_ATTENTION:
            size = query.shape[-1]
            padded = [_padded(t, 8) for t in (query, key, value)]
            scale = 1 / math.sqrt(size) if scale is None else scale
            if not dropout and eager_prefers_cudnn(torch.device("cuda"), size, key.shape[-2]) and size % 8 == 0:
                cudnn = _aten._scaled_dot_product_cudnn_attention
                return cudnn(*padded, None, True, 0.0, causal, False, scale=scale)[0]
            out = _aten._scaled_dot_product_flash_attention(*padded, dropout, causal, False, scale=scale)[0]
            return out if out.shape[-1] == size else out[..., :size]
        if kernel is SpdaBackend.MEMORY_EFFICIENT:
            needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
            if mask is not None:
                mask = _padded(mask, 16)[..., : mask.shape[-1]]
                mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
            given = (query, key, value, mask, needs_grad, dropout, causal)
            return _aten._scaled_dot_product_efficient_attention(*given, scale=scale)[0]
        return _aten._scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, scale=scale)[0]

    return attention


def _looks(t: Tensor, heads: int | None) -> SimpleNamespace:
    """What the choice of a kernel asks about keys or values: with as many heads as the query, if any are given."""
    shape = tuple(t.shape if heads is None else (*t.shape[:-3], heads, *t.shape[-2:]))
    return SimpleNamespace(shape=shape, ndim=len(shape), dtype=t.dtype, requires_grad=t.requires_grad)


def _to_add(mask: Tensor, query: Tensor) -> Tensor:
    """A mask of booleans as numbers to add to the scores."""
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)


def _padded(t: Tensor, of: int) -> Tensor:
    rest = t.shape[-1] % of
    return t if rest == 0 else torch.nn.functional.pad(t, (0, of - rest))


# --- autocast: the lists of `AT_FORALL_...` in PyTorch's `aten/src/ATen/autocast_mode.h`

_IN_FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
    "native_layer_norm group_norm frobenius_norm nuclear_norm cosine_similarity dist pdist renorm logsumexp norm "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
    "upsample_trilinear3d upsample_bicubic2d"
)
_INTO_FLOAT32 = "softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum"  # they read 16 bits
_IN_16_BITS = "addmv addr chain_matmul convolution einsum linalg_multi_dot mv"


def _on_both(setter: Callable[..., None]) -> Callable[..., None]:
    """Apply the settings of CUDA's autocast to CPU tensors."""

    def set_both(device: Any, *args: Any) -> None:
        setter(device, *args)
        if device == "cuda":
            setter("cpu", *args)

    return set_both


def _autocast_kernels() -> Iterator[tuple[str, Any]]:
    """Autocast kernels with CUDA's behaviour, for each operator that only one of the two devices treats."""
    makers = {
        **dict.fromkeys(_IN_FLOAT32.split(), _in_float32),
        **dict.fromkeys(_INTO_FLOAT32.split(), _into_float32),
        **dict.fromkeys(_IN_16_BITS.split(), _in_16_bits),
    }
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        on_cpu, on_cuda = (
            torch._C._dispatch_has_kernel_for_dispatch_key(full, key) for key in ("AutocastCPU", "AutocastCUDA")
        )
        if namespace != "aten" or on_cpu == on_cuda or "imname" in name or "names" in name:
            continue
        packet, _, overload = name.partition(".")
        if on_cpu:
            yield name, fallthrough_kernel
        elif packet in makers:
            yield name, makers[packet](getattr(getattr(_aten, packet), overload or "default"))


def _in_float32(operator: Any) -> Callable[..., Any]:
    return _casting(operator, lambda t: t.to(torch.float32) if t.dtype in _16_BITS else t)


def _in_16_bits(operator: Any) -> Callable[..., Any]:
    def cast(t: Tensor) -> Tensor:
        return t.to(torch.get_autocast_dtype("cpu")) if t.dtype in (*_16_BITS, torch.float32) else t

    return _casting(operator, cast)


def _casting(operator: Any, cast: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
            return operator(*args, **kwargs)

    return run


def _into_float32(operator: Any) -> Callable[..., Any]:
    """Compute in float32, unless the caller gives a dtype."""
    place = next(i for i, a in enumerate(operator._schema.arguments) if a.name == "dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get("dtype")
        if given is None and args[0].dtype in (*_16_BITS, torch.float32):
            args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        with _without_autocast():
            return operator(*args, **kwargs)

    return run


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))
