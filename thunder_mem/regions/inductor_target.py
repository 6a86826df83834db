"""Let Inductor write code for a simulated GPU: its queries are answered, and nothing is compiled.

Inductor queries a device's properties, caches the answers, and passes the Python code that it wrote to its loader,
which compiles the kernels. Inside `written` the properties are those of the simulated device, and the loader only keeps
the text. The caches are emptied at both ends. A real device answers for itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from thunder_mem.runtime.simulated_device import simulated_device

__all__ = ["answered", "can_write", "written"]


def can_write() -> bool:
    """Whether Inductor can write code for CUDA here: a GPU is there or simulated, and Triton is installed."""
    from torch.utils._triton import has_triton_package

    return torch.cuda.is_available() and has_triton_package()


class _Written(BaseException):
    """Ends a compilation once the code exists; error handlers do not catch it."""


def written(write: Callable[[], object]) -> tuple[str, int] | None:
    """The module that Inductor writes during `write`, which then ends; None if it writes none.

    Returns:
        its text, and its number of arguments.
    """
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    found: list[tuple[str, int]] = []

    def keep(lowering: Any) -> Any:
        found.append((lowering.codegen()[0].value, len(lowering.graph_input_names)))
        raise _Written

    with contextlib.ExitStack() as stack:
        if simulated_device() is not None:
            stack.enter_context(answered())
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", keep))
        # Inductor's caches must neither give a compiled module nor take one that is not compiled.
        stack.enter_context(config.patch({"fx_graph_cache": False, "fx_graph_remote_cache": False}))
        stack.enter_context(contextlib.suppress(_Written))
        write()
    return found[0] if found else None


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """Answer Inductor's queries about CUDA for the simulated device."""
    import torch._dynamo.utils
    import torch._inductor.compile_fx  # which asks for some of the modules below
    import torch._inductor.runtime.hints
    import torch._inductor.scheduler
    import torch._inductor.utils
    import torch.utils._triton
    import triton.runtime
    from torch._dynamo.device_interface import CudaInterface

    properties = torch.cuda.get_device_properties(0)
    major, minor = torch.cuda.get_device_capability(0)

    class Worker(CudaInterface.Worker):
        @staticmethod
        def current_device() -> int:
            return 0

        @staticmethod
        def get_device_properties(device: Any = None) -> Any:
            return properties

    answers = {
        "Worker": Worker,
        "current_device": staticmethod(lambda: 0),
        "device_count": staticmethod(lambda: 1),
        "get_device_properties": staticmethod(lambda device=None: properties),
        "get_compute_capability": staticmethod(lambda device=None: major * 10 + minor),
        "is_bf16_supported": staticmethod(lambda including_emulation=False: including_emulation or major >= 8),
    }
    remembering = (torch.utils._triton, torch._inductor.utils, torch._inductor.runtime.hints.DeviceProperties)
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, answer))
        stack.enter_context(mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()))
        driver = _Driver(major * 10 + minor)
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        # No generator exists whose state could be preserved.
        stack.enter_context(mock.patch.object(torch._dynamo.utils, "preserve_rng_state", contextlib.nullcontext))
        for module in remembering:
            stack.callback(_forget, module)
            _forget(module)
        yield


class _Driver:
    """The part of a Triton driver that writing code needs."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def _forget(owner: ModuleType | type) -> None:
    """Empty the caches of its functions, because one device's answers are wrong for another."""
    for function in list(vars(owner).values()):
        clear = getattr(getattr(function, "__func__", function), "cache_clear", None)
        if clear is not None:
            clear()
