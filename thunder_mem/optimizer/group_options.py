"""The options of parameter groups as an update has read them, to see whether they have changed since."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

__all__ = ["GroupOptions", "changed_option", "group_options"]

GroupOptions = tuple[Mapping[str, Any], ...]
"""For each parameter group its options by name; of a tensor its identity and version, because to read it may wait."""


def group_options(groups: Sequence[Mapping[str, Any]]) -> GroupOptions:
    return tuple({k: _mark(v) for k, v in group.items() if k != "params"} for group in groups)


def changed_option(groups: Sequence[Mapping[str, Any]], before: GroupOptions, updated: Collection[int]) -> str | None:
    """The name of an option that has changed in a group of updated parameters; None if there is none.

    Args:
        groups: as they are now.
        before: their options at the update.
        updated: the `id` of each updated parameter.
    """
    for group, old, new in zip(groups, before, group_options(groups), strict=False):
        if new != old and any(id(p) in updated for p in group["params"]):
            return next((k for k in new if k not in old or new[k] != old[k]), None)
    return None


def _mark(value: Any) -> Any:
    return (id(value), value._version) if isinstance(value, torch.Tensor) else value
