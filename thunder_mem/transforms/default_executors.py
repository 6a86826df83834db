"""The package's own executors, beside those that the user named."""

from __future__ import annotations

from itertools import takewhile

from thunder.executors.sdpaex import sdpa_ex
from thunder.extend import TemporaryExecutor, get_always_executors, get_default_executors

from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.attention.with_mask import mem_masked_attention_ex
from thunder_mem.fusers.fusion_executors import fuses_generally
from thunder_mem.fusers.nvfuser import without_broken_nvfuser
from thunder_mem.kernels.registered import mem_gradients_ex, mem_kernels_ex
from thunder_mem.planning.executor import user_executors
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.runtime.simulated_device import simulated_device

__all__ = ["JOINING", "with_own_executors"]

_WITHOUT_FUSION = (mem_attention_ex, mem_masked_attention_ex, mem_kernels_ex)

JOINING = (*_WITHOUT_FUSION, mem_gradients_ex)
"""The package's executors that join a list: the last one each, the others one in which none fuses."""


def with_own_executors(executors: tuple) -> tuple:
    """The executors of a program that is planned: the user's or Thunder's, and the package's own where they serve."""
    return _with_kernels(_with_masked_attention(_with_defaults(executors)))


def _with_masked_attention(executors: tuple) -> tuple:
    """Let PyTorch's kernel for masks be called as eager PyTorch calls it, where Thunder would call it otherwise."""
    given = user_executors(executors)
    if mem_masked_attention_ex in given or sdpa_ex not in given:
        return executors
    at = executors.index(sdpa_ex)
    return (*executors[:at], mem_masked_attention_ex, *executors[at:])


def _with_kernels(executors: tuple) -> tuple:
    """Add PyTorch's own gradients, and kernels of composite operations if no executor fuses the operations' parts.

    They come after the user's, so a fusion executor that takes a convolution keeps it.
    """
    given = user_executors(executors)
    left_out = _WITHOUT_FUSION if any(map(fuses_generally, given)) else ()
    own = [e for e in JOINING if e not in (*given, *left_out)]
    always = next((i for i, e in enumerate(executors) if e in get_always_executors()), len(executors))
    return (*executors[:always], *own, *executors[always:])


def _with_defaults(executors: tuple) -> tuple:
    """Add the package's executors to Thunder's default list if it has no working general fusion executor."""
    always = get_always_executors()
    # Thunder puts one executor in front each time it processes the function, also for `ddp`, `fsdp`, `add_transform`.
    own = sum(1 for _ in takewhile(lambda e: isinstance(e, TemporaryExecutor), executors))
    given = executors[own:]
    is_default = tuple(given) == (*get_default_executors(), *always)
    given = without_broken_nvfuser(given)
    if not is_default:
        return (*executors[:own], *given)
    simulated = simulated_device()
    if any(map(fuses_generally, given)) or (simulated is not None and simulated.fusion is None):
        return (*executors[:own], *given)
    return (*executors[:own], mem_attention_ex, *given[: len(given) - len(always)], mem_pointwise_ex, *always)
