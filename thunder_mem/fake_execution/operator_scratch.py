"""The scratch of single kernels and of PyTorch's operators: formulas for a GPU, and probes on this machine's CPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from thunder_mem.attention.kernels import eager_prefers_cudnn
from thunder_mem.fake_execution.probe_keys import layouts, settings, stable_text
from thunder_mem.runtime import scratch_cache
from thunder_mem.runtime.collector import collector_off
from thunder_mem.runtime.measure import record_curve
from thunder_mem.runtime.scratch_cache import Probe
from thunder_mem.semantics.kernel_scratch import (
    CUDNN_FORWARD_BYTES,
    cudnn_backward_bytes,
    efficient_backward_bytes,
    flash_backward_bytes,
    flash_forward_bytes,
)

__all__ = ["OPERATOR_SCRATCH", "probe_operator", "zeros_like"]


def _flash_forward_bytes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float = 0.0, *_: object
) -> int:
    return 0 if dropout else sum(flash_forward_bytes(query.shape, key.shape))


def _stand_in_forward_bytes(query: torch.Tensor, *args: Any) -> int:
    """Of the CPU's kernel where it stands for the one that a GPU's torch.compile takes."""
    return 0 if eager_prefers_cudnn(torch.device("cuda"), query.shape[-1]) else _flash_forward_bytes(query, *args)


def _stand_in_backward_bytes(grad: torch.Tensor, query: torch.Tensor, *args: Any) -> int:
    by_cudnn = eager_prefers_cudnn(torch.device("cuda"), query.shape[-1])
    return (_cudnn_backward_bytes if by_cudnn else _flash_backward_bytes)(grad, query, *args)


def _cudnn_backward_bytes(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: object) -> int:
    return cudnn_backward_bytes(query.shape, key.shape, key.element_size())


def _flash_backward_bytes(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    *_: object,
) -> int:
    """Also copies of the output and of its gradient, unless they lie as (B, T, H, D)."""
    copies_bytes = sum(t.nbytes for t in (grad, out) if not t.transpose(1, 2).is_contiguous())
    return flash_backward_bytes(query.shape, key.shape, key.element_size()) + copies_bytes


def _efficient_backward_bytes(grad: torch.Tensor, query: torch.Tensor, *_: object) -> int:
    return efficient_backward_bytes(query.shape)


OPERATOR_SCRATCH: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention.default: _flash_forward_bytes,
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: _flash_backward_bytes,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: lambda *_: CUDNN_FORWARD_BYTES,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward_bytes,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward_bytes,
    # Inductor compiles for a CPU the code that stands for CUDA here.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _stand_in_forward_bytes,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _stand_in_backward_bytes,
}
"""Bytes a CUDA kernel holds inside itself, as a function of the operator's arguments."""


def probe_operator(func: Any, args: Any, kwargs: Any) -> tuple[int, int] | None:
    """Run one aten operator for real on zeros laid out like its fake CPU arguments.

    Returns:
        The bytes above the start at its peak and at its end, or None if it cannot run. The result is kept like
        the probes of bound symbols.
    """
    flat, spec = tree_flatten((args, kwargs))
    fakes = {str(i): t for i, t in enumerate(flat) if isinstance(t, torch.Tensor)}
    constants = tuple(repr(x) for x in flat if not isinstance(x, torch.Tensor))
    key = (func, constants, str(spec), layouts(fakes), settings())
    if key not in _OPERATOR_PROBES:
        text = stable_text((str(func), *key[1:])) if getattr(func, "namespace", "") == "aten" else None
        known = None if text is None else scratch_cache.table().find(text)
        found = _probe_operator(func, flat, spec, fakes) if known is None else (known.peak_bytes, known.end_bytes)
        _OPERATOR_PROBES[key] = found
        if text is not None and found is not None and known is None:
            scratch_cache.table().add(text, Probe(*found))
    return _OPERATOR_PROBES[key]


_OPERATOR_PROBES: dict[Hashable, tuple[int, int] | None] = {}


def _probe_operator(func: Any, flat: list[Any], spec: Any, fakes: dict[str, torch.Tensor]) -> tuple[int, int] | None:
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]), collector_off():
        try:
            for attempt in range(2):  # what a first call does once does not count
                real = zeros_like(fakes)
                args, kwargs = tree_unflatten([real.get(str(i), x) for i, x in enumerate(flat)], spec)
                if attempt:
                    kept: list[Any] = []
                    curve = record_curve(lambda: kept.append(func(*args, **kwargs)))  # noqa: B023 - called at once
                    return curve.peak_bytes, curve.end_bytes
                func(*args, **kwargs)
        except Exception:
            return None
    return None


def zeros_like(fakes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Zeros laid out like the given fake tensors, which share storages as those do."""
    storages: dict[int, torch.UntypedStorage] = {}
    real = {}
    for name, fake in fakes.items():
        key = fake.untyped_storage()._cdata
        if key not in storages:
            storages[key] = torch.zeros(fake.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
        t = torch.empty(0, dtype=fake.dtype).set_(storages[key], fake.storage_offset(), fake.shape, fake.stride())
        if isinstance(fake, torch.nn.Parameter):
            t = torch.nn.Parameter(t, requires_grad=fake.requires_grad)
        elif fake.requires_grad:
            t.requires_grad_()
        real[name] = t
    return real
