"""Watch what code allocates through PyTorch's operators, also on fake and meta tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thunder_mem.runtime.host_transfers import is_host_memory_now

__all__ = ["DEATHS_ARE_TOLD", "AllocationWatch"]


def _deaths_are_told() -> bool:
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    beside, notice = StorageWeakRef(storage), weakref.ref(storage)
    del storage, tensor
    return beside.expired() and notice() is None


DEATHS_ARE_TOLD = _deaths_are_told()
"""Whether a weak reference to a storage dies with it; in PyTorch 2.8 it waits for the `StorageWeakRef` beside it."""

_ALLOCATIONS = ("aten::empty", "aten::new_empty")


class AllocationWatch(TorchDispatchMode):
    """Records the largest sum of live new storages, and the operators that start a kernel; without the host's memory.

    Args:
        device_types: count storages of these devices alone; by default of all.
        inside: by operator, the bytes that its kernel holds while it runs, as a function of the arguments.

    Attributes:
        peak_bytes: that sum.
        launches: operators that write memory.
        moved_bytes: of all tensors that these read or write, each counted once for an operator.
    """

    def __init__(
        self, device_types: Collection[str] | None = None, inside: Mapping[Any, Callable[..., int]] | None = None
    ) -> None:
        super().__init__()
        self.inside = inside or {}
        self.device_types = device_types
        self.peak_bytes = 0
        self.launches = 0
        self.moved_bytes = 0
        self._seen: dict[int, tuple[StorageWeakRef, int, weakref.ref[torch.UntypedStorage]]] = {}
        self._seen_bytes = 0
        self._died: set[int] = set()
        self._before: dict[int, StorageWeakRef] = {}  # by weak reference: a new storage may get the address of a dead

    def live_bytes(self) -> int:
        """The sum at present."""
        # Looking at the dead alone keeps functions of thousands of operators linear.
        for key in [*(self._died if DEATHS_ARE_TOLD else self._seen)]:
            if key in self._seen and self._seen[key][0].expired():
                self._seen_bytes -= self._seen.pop(key)[1]
                self._died.discard(key)
        return self._seen_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_host_memory_now():
            return func(*args, **(kwargs or {}))
        for t in tree_leaves((args, kwargs or {})):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self._seen:
                self._before.setdefault(t.untyped_storage()._cdata, StorageWeakRef(t.untyped_storage()))
        out = func(*args, **(kwargs or {}))
        works = func._schema.is_mutable
        for t in tree_leaves(out):
            if not isinstance(t, torch.Tensor) or not self._counts(t):
                continue
            storage = t.untyped_storage()
            if storage._cdata not in self._seen and not self._was_before(storage._cdata):
                self._see(storage)
                works = works or not func.name().startswith(_ALLOCATIONS)
        if works:
            self.launches += 1
            self.moved_bytes += _bytes_of((args, kwargs, out))
        inside_bytes = self.inside[func](*args) if func in self.inside else 0
        self.peak_bytes = max(self.peak_bytes, self.live_bytes() + inside_bytes)
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, died = storage._cdata, self._died
        notice = weakref.ref(storage, lambda _: died.add(key))
        self._seen[key] = (StorageWeakRef(storage), storage.nbytes(), notice)
        self._seen_bytes += storage.nbytes()

    def _was_before(self, key: int) -> bool:
        if key in self._before and self._before[key].expired():
            del self._before[key]
        return key in self._before

    def _counts(self, t: torch.Tensor) -> bool:
        return self.device_types is None or t.device.type in self.device_types


def _bytes_of(values: Any) -> int:
    tensors = {id(t): t for t in tree_leaves(values) if isinstance(t, torch.Tensor)}
    return sum(t.numel() * t.element_size() for t in tensors.values())
