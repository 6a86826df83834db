"""The fusion executors by name, for a simulated GPU and for this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thunder.executors.torch_compile import torch_compile_ex
from thunder.extend import Executor, FusionExecutor

from thunder_mem.fusers.nvfuser import installed_nvfuser
from thunder_mem.memory.outside_input import quoted
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex

__all__ = ["FUSIONS", "fuser_of", "fuses_generally", "with_fuser"]

FUSIONS = ("mem_pointwise", "nvfuser", "torchcompile", None)
"""`mem_pointwise`, which is Triton by Inductor on a GPU; nvFuser; Thunder's `torchcompile`; and nobody."""


def fuser_of(fusion: str | None, nvfuser: Callable[[], FusionExecutor] = installed_nvfuser) -> FusionExecutor | None:
    """The executor of a name.

    Args:
        fusion: one of `FUSIONS`.
        nvfuser: returns the nvFuser executor.

    Raises:
        ValueError: an unknown name, or nvFuser does not work here.
    """
    if fusion not in FUSIONS:
        raise ValueError(f"unknown fusion {quoted(fusion)}: the known ones are {', '.join(map(repr, FUSIONS))}")
    if fusion == "nvfuser":
        return nvfuser()
    return {"mem_pointwise": mem_pointwise_ex, "torchcompile": torch_compile_ex, None: None}[fusion]


def with_fuser(executors: Sequence[Executor], fuser: FusionExecutor | None) -> list[Executor]:
    """The executors with `fuser` at their end, in place of each general fusion executor; with None nothing fuses.

    Thunder's executors for one kind of operation (`torchcompile_xentropy`) stay beside a fuser.
    """
    if fuser is None:
        return [e for e in executors if not isinstance(e, FusionExecutor)]
    return [*(e for e in executors if not fuses_generally(e)), fuser]


def fuses_generally(executor: Executor) -> bool:
    """Whether it fuses all it can, and not only regions around certain operations."""
    return isinstance(executor, FusionExecutor) and not getattr(executor, "required_ops", None)
