"""The installed nvFuser: whether Thunder can run its regions, and the message if it cannot."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

import torch
from thunder.extend import Executor, FusionExecutor, get_executor

__all__ = ["installed_nvfuser", "without_broken_nvfuser"]

_INSTALL = "pip install torch==2.10.0 nvfuser-cu128-torch210, for Python 3.10 or 3.12"


def installed_nvfuser() -> FusionExecutor:
    """Thunder's nvFuser executor.

    Raises:
        ValueError: nvFuser does not work here; the message says why, and what to do.
    """
    executor = get_executor("nvfuser")
    if executor is None and not torch.cuda.is_available():
        raise ValueError(
            'nvFuser needs a GPU, and there is none: plan for one by simulate("H100-80GB", fusion="nvfuser")'
        )
    if executor is None:
        raise ValueError(f"nvFuser is not installed: {_INSTALL}")
    if (cause := _why_broken(executor)) is not None:
        raise ValueError(f"nvFuser {executor.version} does not work with this Thunder ({cause}): {_INSTALL}")
    assert isinstance(executor, FusionExecutor)
    return executor


def without_broken_nvfuser(executors: Sequence[Executor]) -> tuple[Executor, ...]:
    """The executors; an nvFuser whose regions would all fail is removed, with a warning."""
    kept = []
    for executor in executors:
        if (cause := _why_broken(executor)) is None:
            kept.append(executor)
        else:
            warnings.warn(
                f"nvFuser {executor.version} counts as not installed, as Thunder cannot run its regions: {cause}",
                stacklevel=2,
            )
    return tuple(kept)


def _why_broken(executor: Executor) -> str | None:
    """The reason why no region of an executor can run; None for all but an installed nvFuser that does not work.

    A region describes its tensors to nvFuser at its first call. Thunder 0.2.6 imports the function for that from the
    module `nvfuser`, which wheels since 0.2.36 lack. Their `nvfuser_direct` has it, and replaces the module.
    """
    module = sys.modules.get("thunder.executors.nvfuserex_impl")
    if module is None or executor is not getattr(module, "ex", None):
        return None
    missing, cause = _describe(module)
    direct = sys.modules.get("nvfuser_direct")
    if missing and direct is not None:
        sys.modules["nvfuser"] = direct
        _, cause = _describe(module)
        if cause is not None:
            del sys.modules["nvfuser"]
    return cause


def _describe(module: ModuleType) -> tuple[bool, str | None]:
    """Try to describe a tensor: whether the module `nvfuser` is missing, and the error; (False, None) if it works."""
    try:
        module.compute_contiguity((2, 3), (3, 1))
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "nvfuser"
        return missing, f"{type(error).__name__}: {error}"
    return False, None
