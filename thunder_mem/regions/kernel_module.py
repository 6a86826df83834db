"""The module that Inductor writes for a region on CUDA, run without its kernels: launches, traffic and kept bytes.

The Python code around the kernels allocates, passes on and frees every buffer. It runs on meta tensors, which only
allocate and free. So the module's own execution shows the live buffers between two kernels; its text is not parsed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thunder_mem.memory.device_bytes import rounded

__all__ = ["IN_PLACE_OF", "KernelModule", "Launch", "load_call", "read_module"]


@dataclass(frozen=True)
class Launch:
    """One kernel that a module starts.

    Attributes:
        kernel: its name in the module, or that of a PyTorch operator.
        memory: for each of its tensors, the number of its storage: the position of the first input on it, or
            else a number after the inputs, in the order of birth.
        nbytes: of these tensors, each storage once.
    """

    kernel: str
    memory: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class KernelModule:
    """The memory of a module.

    Attributes:
        text: the module.
        launches: its kernels in launch order.
        scratch_bytes: the most bytes held beyond its inputs and results.
        new_bytes: of the returned storages that are not inputs.
    """

    text: str
    launches: tuple[Launch, ...]
    scratch_bytes: int
    new_bytes: int

    @property
    def moved_bytes(self) -> int:
        """The bytes that its kernels read and write, each tensor once a kernel."""
        return sum(launch.nbytes for launch in self.launches)

    @property
    def kernels(self) -> dict[str, str]:
        """The source of each Triton kernel, by its name in the module."""
        return dict(re.findall(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)''',", self.text, re.DOTALL | re.M))


def read_module(text: str, inputs: Sequence[torch.Tensor]) -> KernelModule:
    """Run a module on meta tensors.

    Args:
        text: as Inductor wrote it.
        inputs: meta tensors with the layout that it was written for.
    """
    storages = {t.untyped_storage()._cdata for t in inputs}
    watch = _Watch(inputs)
    with watch:
        outputs = load_call(text, watch.kernel, IN_PLACE_OF)(list(inputs))
    new = {s._cdata: s.nbytes() for t in outputs if (s := t.untyped_storage())._cdata not in storages}
    scratch_bytes = max(0, watch.peak_bytes - sum(map(rounded, new.values())))
    return KernelModule(text, tuple(watch.launches), scratch_bytes, sum(new.values()))


def load_call(
    text: str, kernel: Callable[[str, str], Any], stand_ins: dict[str, Any]
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """The function of a module, with kernels made by `kernel(name, source)` and other names replaced."""
    made = SimpleCompiler(kernel)
    namespace: dict[str, Any] = {"__name__": "thunder_mem_kernels", "__file__": "<kernels>"}
    with mock.patch("torch._inductor.async_compile.AsyncCompile", lambda: made):
        exec(compile(text, "<kernels>", "exec"), namespace)
    namespace.update(stand_ins)

    def call(boxed: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        with (
            mock.patch.object(torch.cuda, "_DeviceGuard", lambda index: contextlib.nullcontext()),
            mock.patch.object(torch.cuda, "set_device", lambda device: None),
        ):
            return namespace["call"](boxed)

    return call


class SimpleCompiler:
    """Replaces Inductor's `AsyncCompile`, and passes every kernel's source on."""

    def __init__(self, kernel: Callable[[str, str], Any]) -> None:
        self._kernel = kernel

    def triton(self, name: str, source: str, device_str: str = "cuda") -> Any:
        return self._kernel(name, source)

    def wait(self, scope: dict[str, Any]) -> None:
        """Do nothing: there is nothing to wait for."""


class _Watch(TorchDispatchMode):
    """Follows storages from their birth, and records operators that start a kernel."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.peak_bytes = 0
        self._alive: dict[int, tuple[int, int, StorageWeakRef | None]] = {}  # number, bytes, reference; by address
        self._born = 0
        for self._born, t in enumerate(inputs):
            self._see(t, given=True)
        self._born = len(inputs)

    def kernel(self, name: str, source: str) -> SimpleNamespace:
        return SimpleNamespace(run=lambda *args, **_: self.launched(name, args))

    def launched(self, name: str, args: Sequence[Any]) -> None:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        numbers = tuple(self._see(t) for t in tensors)
        shown = {
            n: min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for n, t in zip(numbers, tensors, strict=True)
        }
        self.launches.append(Launch(name, numbers, sum(shown.values())))

    def _see(self, t: torch.Tensor, given: bool = False) -> int:
        """The number of the tensor's storage; an unknown storage gets a new number."""
        storage = t.untyped_storage()
        self._alive = {k: e for k, e in self._alive.items() if e[2] is None or not e[2].expired()}
        if storage._cdata not in self._alive:
            nbytes = 0 if given else rounded(storage.nbytes())
            self._alive[storage._cdata] = (self._born, nbytes, None if given else StorageWeakRef(storage))
            self._born += 1
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes, _ in self._alive.values()))
        return self._alive[storage._cdata][0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = set(self._alive)
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        for t in made:
            self._see(t)
        is_view = all(t.untyped_storage()._cdata in before for t in made) and not func._schema.is_mutable
        if not is_view and func not in _ALLOCATIONS:
            self.launched(func.name(), [*tree_leaves((args, kwargs or {})), *made])
        return out


_ALLOCATIONS = {torch.ops.aten.empty_strided.default, torch.ops.aten.empty.memory_format}


IN_PLACE_OF: dict[str, Callable[..., Any]] = {
    "empty_strided_cuda": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="meta"),
    "reinterpret_tensor": lambda t, size, stride, offset=0: t.as_strided(size, stride, t.storage_offset() + offset),
    "assert_size_stride": lambda *args: None,
    "assert_alignment": lambda *args: None,
    "get_raw_stream": lambda device: 0,
}
