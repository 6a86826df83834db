"""PyTorch's modes of a thread, which code that Thunder traces may enter and, where tracing fails, never leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["kept_modes"]


@contextmanager
def kept_modes() -> Iterator[None]:
    """Inside, code may change whether gradients are wanted, and enter function modes; at the end all is as before."""
    wants_gradients, entered = torch.is_grad_enabled(), torch._C._len_torch_function_stack()
    try:
        yield
    finally:
        torch.set_grad_enabled(wants_gradients)
        while torch._C._len_torch_function_stack() > entered:
            torch._C._pop_torch_function_stack()
