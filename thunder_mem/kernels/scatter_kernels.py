"""Scatters that write into the tensor that they are given, such as a gradient's zeros.

Thunder's gradient of an indexed tensor makes zeros of its size, and adds the gradient's rows to a copy of them; eager
PyTorch's adds them to the zeros (`index_select_backward` and others in PyTorch's `FunctionsManual.cpp`).
"""

from __future__ import annotations

import torch
from thunder.executors.torchex import index_add, index_copy, index_put, scatter, scatter_add

from thunder_mem.kernels.in_place import register_in_place

__all__: list[str] = []

for _operation in (index_add, index_copy, index_put, scatter, scatter_add):
    _name = _operation.name
    register_in_place(_operation, f"mem_{_name}_in_place", getattr(torch.Tensor, f"{_name}_"))
