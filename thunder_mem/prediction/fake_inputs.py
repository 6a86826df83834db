"""A program's inputs as fake tensors, and the device that they live on."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["device_type_of", "mode_of", "tensors_of", "to_fake"]


def to_fake(values: Any, mode: FakeTensorMode | None = None) -> tuple[FakeTensorMode, Any]:
    """`values` with fake tensors for all tensors, and their mode: the given one, or that of a fake tensor among them.

    Real tensors that share a storage become fake tensors that share one.
    """
    chosen = mode or mode_of(values)
    return chosen, tree_map_only(
        torch.Tensor, lambda t: t if isinstance(t, FakeTensor) else chosen.from_tensor(t, static_shapes=True), values
    )


def device_type_of(values: Any) -> str:
    """The kind of device whose memory is predicted for a program of these inputs: "cuda" or "cpu".

    Raises:
        ValueError: they live where memory cannot be predicted.
    """
    devices = {t.device for t in tensors_of(values)}
    if any(d.type == "meta" for d in devices):
        raise ValueError(
            "tensors on the meta device take no memory: build the model inside of "
            'simulate("H100-80GB") with torch.device("cuda"), which allocates nothing either'
        )
    other = sorted(d.type for d in devices if d.type not in ("cpu", "cuda"))
    if other:
        raise ValueError(f"memory is predicted for 'cpu' and 'cuda', not for {other[0]!r}")
    gpus = sorted(str(d) for d in devices if d.type == "cuda")
    if len(gpus) > 1:
        raise ValueError(f"the program lives on {' and '.join(gpus)}: its memory is predicted for one GPU only")
    return "cuda" if gpus else "cpu"


def mode_of(values: Any) -> FakeTensorMode:
    fake = next((t for t in tensors_of(values) if isinstance(t, FakeTensor)), None)
    if fake is not None:
        return fake.fake_mode
    return torch._guards.active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
