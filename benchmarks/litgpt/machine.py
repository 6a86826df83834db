"""Where a figure was made: versions, and the kind of machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

__all__ = ["machine_kind", "versions"]

_PACKAGES = ("torch", "lightning-thunder", "litgpt", "lightning", "transformers", "thunder-mem", "triton")


def versions() -> dict[str, str]:
    """The versions of the packages that a run depends on; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in (*_PACKAGES, *_nvfuser()):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _nvfuser() -> list[str]:
    """Its wheels are named by CUDA and torch version."""
    names = (d.metadata["Name"] for d in importlib.metadata.distributions())
    return sorted({name for name in names if name and name.lower().startswith("nvfuser")})


def machine_kind(device: str) -> str:
    """In words: the GPU's name, the simulated one's, or the CPU's with its threads."""
    if device.startswith("simulate:"):
        return f"{device.removeprefix('simulate:')}, simulated"
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{_cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
