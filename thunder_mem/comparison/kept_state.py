"""The caller's state during runs that must leave no trace: contents of tensors, attributes, gradients, generators.

Contents are kept per storage, so that views and expanded tensors come back as they were. The copies are on the host,
because a GPU may have no room for them. Version counters come back, too, so that a graph of the caller's stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thunder_mem.runtime.generators import kept_generators

__all__ = ["kept", "storage_bytes", "tensors_inside"]


@contextmanager
def kept(
    modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], tensors: Iterable[Tensor]
) -> Iterator[Callable[[], None]]:
    """Keep everything that a training step may change, and put it back at the end.

    Args:
        modules: with their parameters, buffers and attributes.
        optimizers: with their state and groups.
        tensors: others, such as arguments.

    Yields:
        A function that puts all of it back at once, but leaves every gradient None, as a step finds it.
    """
    modules, optimizers = list(modules), list(optimizers)
    held = tensors_inside(modules, optimizers, tensors)
    contents = [(view, view.to("cpu", copy=True)) for view in _storages(held)]
    attributes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (d, dict(d)) for m in modules for part in m.modules() for d in (part._parameters, part._buffers, vars(part))
    ]
    groups = [(group, dict(group)) for o in optimizers for group in o.param_groups]
    states = [(o.state, {p: dict(state) for p, state in o.state.items()}) for o in optimizers]
    gradients = [(t, t.grad) for t in held if t.is_leaf]
    put_back_generators = kept_generators({t.device for t in held})

    def put_back() -> None:
        for found, before in (*attributes, *groups):
            found.clear()
            found.update(before)
        for state_of, first in states:
            state_of.clear()
            state_of.update({p: dict(state) for p, state in first.items()})
        for t, _ in gradients:
            t.grad = None
        for view, content in contents:
            view.copy_(content)
        put_back_generators()

    # Safe here, as the contents come back first.
    with _unsafe_preserve_version_counter(tuple(t for t in held if not t.is_inference())):
        try:
            yield put_back
        finally:
            put_back()
            for t, gradient in gradients:
                t.grad = gradient


def tensors_inside(
    modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], tensors: Iterable[Tensor]
) -> list[Tensor]:
    """The tensors of modules, of optimizers and their present state, and further ones, each once."""
    found: list[Any] = list(tensors)
    for part in (part for m in modules for part in m.modules()):
        found += [*part._parameters.values(), *part._buffers.values(), *vars(part).values()]
    for optimizer in optimizers:
        found += [p for group in optimizer.param_groups for p in group["params"]]
        found += [value for state in optimizer.state.values() for value in state.values()]
    return list({id(t): t for t in found if isinstance(t, Tensor)}.values())


def storage_bytes(tensors: Iterable[Tensor], device_type: str) -> int:
    """The bytes of the tensors' storages on devices of one type, each storage once."""
    return sum(view.numel() for view in _storages(tensors) if view.device.type == device_type)


def _storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each storage once, as a tensor of bytes."""
    found: dict[tuple[torch.device, int], Tensor] = {}
    for t in tensors:
        for plain in _plain(t):
            storage = plain.untyped_storage()
            if storage.nbytes():
                view = torch.empty(0, dtype=torch.uint8, device=plain.device).set_(storage)
                found.setdefault((plain.device, storage.data_ptr()), view)
    return list(found.values())


def _plain(t: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the data of a tensor subclass, or the tensor itself."""
    if not is_traceable_wrapper_subclass(t):
        yield t
        return
    for name in t.__tensor_flatten__()[0]:
        yield from _plain(getattr(t, name))
