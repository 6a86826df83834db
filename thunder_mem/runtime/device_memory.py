"""The memory of a device, and a share of it in words."""

from __future__ import annotations

import os

import torch

from thunder_mem.memory.units import size

__all__ = ["device_memory_bytes", "share_in_words"]


def share_in_words(budget: int | str, device: torch.device) -> str:
    """The meaning of a percentage: "80% of the cpu's 23.50 GiB"; "" for a budget in bytes.

    Args:
        budget: as for `parse_budget`.
        device: the device of the plan.
    """
    if not isinstance(budget, str) or not budget.strip().endswith("%"):
        return ""
    name = "cpu" if device.type != "cuda" else torch.cuda.get_device_name(device)
    return f"{budget.strip()} of the {name}'s {size(device_memory_bytes(device))}"


def device_memory_bytes(device: torch.device) -> int:
    """The whole memory of a device: of the GPU (the simulated one inside `simulate`), or of the machine for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
