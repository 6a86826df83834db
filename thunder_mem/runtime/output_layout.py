"""The memory layout of an operation's outputs, as data: described once, and applied to other inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Output", "describe", "lay_out", "meta_like"]


@dataclass(frozen=True)
class Output:
    """The layout of an output: its storage, ("input", i) or ("new", i), and its view of it."""

    where: tuple[str, int]
    storage_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


def describe(outputs: Iterable[Any], inputs: Sequence[torch.Tensor]) -> tuple[Output | None, ...]:
    """The layout of each output, by the input or the other output on the same storage; None if it is no tensor."""
    known: dict[int, tuple[str, int]] = {}
    for i, t in enumerate(inputs):
        known.setdefault(t.untyped_storage()._cdata, ("input", i))
    found: list[Output | None] = []
    for out in outputs:
        if not isinstance(out, torch.Tensor):
            found.append(None)
            continue
        storage, offset = out.untyped_storage(), int(out.storage_offset())
        where = known.setdefault(storage._cdata, ("new", len(known)))
        found.append(Output(where, storage.nbytes(), tuple(out.shape), out.stride(), offset, out.dtype))
    return tuple(found)


def lay_out(
    outputs: Iterable[Output | None], inputs: Sequence[torch.Tensor], devices: Iterable[torch.device | str]
) -> list[torch.Tensor | None]:
    """Uninitialised tensors with the described layouts, on these devices unless they are on an input's storage."""
    made: dict[tuple[str, int], torch.Tensor] = {}
    tensors: list[torch.Tensor | None] = []
    for output, device in zip(outputs, devices, strict=True):
        if output is None:
            tensors.append(None)
            continue
        if output.where[0] == "input":
            base = inputs[output.where[1]]
        elif output.where in made:
            base = made[output.where]
        else:
            count = output.storage_bytes // output.dtype.itemsize
            base = made[output.where] = torch.empty(count, dtype=output.dtype, device=device)
        # Not `set_`: on a fake tensor it leaves a reference to the storage behind.
        base = base if base.dtype == output.dtype else base.view(output.dtype)
        # Detached: a view would hold its base, and autograd adds in place only to tensors that nobody else holds.
        tensors.append(base.as_strided(output.shape, output.stride, output.offset).detach())
    return tensors


def meta_like(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Meta tensors with the layouts and shared storages of the given ones."""
    storages: dict[int, torch.UntypedStorage] = {}
    found = []
    for t in tensors:
        storage = t.untyped_storage()
        if storage._cdata not in storages:
            empty = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            storages[storage._cdata] = empty.untyped_storage()
        new = torch.empty(0, dtype=t.dtype, device="meta")
        found.append(new.set_(storages[storage._cdata], t.storage_offset(), t.shape, t.stride()))
    return found
