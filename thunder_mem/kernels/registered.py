"""The executors `mem_kernels` and `mem_gradients` with all their operations."""

from __future__ import annotations

from thunder_mem.kernels import (
    activation_kernels,
    convolution_kernel,
    elementwise_losses,
    loss_kernels,
    norm_kernels,
    scatter_kernels,
)
from thunder_mem.kernels.kernel_executor import mem_gradients_ex, mem_kernels_ex, without_unread_gradients
from thunder_mem.kernels.running_statistics import with_statistics_apart

__all__ = [
    "activation_kernels",
    "convolution_kernel",
    "elementwise_losses",
    "loss_kernels",
    "mem_gradients_ex",
    "mem_kernels_ex",
    "norm_kernels",
    "scatter_kernels",
    "with_statistics_apart",
    "without_unread_gradients",
]
