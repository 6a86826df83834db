"""The keys of operations whose scratch is measured once: all that determines it, in this process and in any other."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from thunder.core.proxies import NumberProxy
from thunder.core.symbol import BoundSymbol

from thunder_mem.optimizer.update import clip_scale, is_update, rehearsal_now, update_of

__all__ = ["lasting_key", "layouts", "operation_key", "settings", "stable_text"]


def operation_key(bsym: BoundSymbol, inputs: dict[str, torch.Tensor]) -> Hashable:
    """All that determines the memory of an operation, without the names of its tensors."""
    order = {name: i for i, name in enumerate(inputs)}

    def of_argument(x: Any) -> Hashable:
        name = getattr(x, "name", None)
        if name in order:
            return ("tensor", order[name])
        return repr(x.value) if isinstance(x, NumberProxy) else f"{type(x).__name__}:{x!r}"

    # The callable of a compiled region identifies it and holds its probes; the name does not.
    callables = () if bsym.sym.is_fusion else tuple((bsym._call_ctx or {}).values())
    return (
        None if bsym.sym.is_fusion else (bsym.sym.id, bsym.name_with_module()),
        callables,
        tuple(map(of_argument, bsym.flat_args)),
        str(bsym.flat_args_and_spec[1]),
        layouts(inputs),
        settings(),
        _step_of(bsym),
    )


def _step_of(bsym: BoundSymbol) -> Hashable:
    """What determines the memory of an update, or of the number that clips gradients, beside its text."""
    rehearsal = rehearsal_now()
    if bsym.sym is clip_scale:
        return rehearsal.waits
    if not is_update(bsym):
        return ""
    return rehearsal.kind, tuple(update_of(bsym).numbers().items()) if rehearsal.kind == "step" else ()


def settings() -> Hashable:
    """The settings that also affect an operation's kernel."""
    return (
        torch.get_num_threads(),
        torch.backends.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
    )


def lasting_key(bsym: BoundSymbol, key: Hashable) -> str | None:
    """`operation_key` as a text that means the same in every process; None if that is impossible.

    Operations of PyTorch and Thunder only: another package's code may change between two processes.
    """
    callables = tuple((bsym._call_ctx or {}).values())
    names = [f"{getattr(c, '__module__', None)}.{getattr(c, '__qualname__', None)}" for c in callables]
    own = bsym.name_with_module().startswith(("torch.", "Tensor.", "thunder.")) if not callables else True
    if bsym.sym.is_fusion or not own or any(not name.startswith(("torch.", "thunder.")) for name in names):
        return None
    assert isinstance(key, tuple)
    identity, _, *rest = key
    return stable_text((identity, names, *rest))


def stable_text(parts: Any) -> str | None:
    """The parts as a text, unless that holds an object's address."""
    text = repr(parts)
    return None if " at 0x" in text else text


def layouts(tensors: dict[str, torch.Tensor]) -> Hashable:
    """The layout of tensors in memory, and which of them share it."""
    storages: dict[int, int] = {}
    return tuple(
        (
            storages.setdefault(t.untyped_storage()._cdata, len(storages)),
            t.untyped_storage().nbytes(),
            tuple(t.shape),
            t.stride(),
            t.storage_offset(),
            t.dtype,
            t.device,
            t.requires_grad,
        )
        for t in tensors.values()
    )
