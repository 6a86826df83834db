"""Memory that libraries hold on a GPU: cuBLAS's workspaces, and notes about other libraries.

PyTorch's caching allocator gives cuBLAS one workspace for each handle and stream that runs a product, for the life of
the process: `getNewWorkspace` and `parseChosenWorkspaceSize` in `aten/src/ATen/cuda/CublasHandlePool.cpp` of PyTorch
2.11. A handle belongs to a thread, and autograd runs CUDA's backward in a thread of its own. So an eager training step
holds two workspaces. The backward of a program that Thunder compiles hangs on a meta tensor (`ThunderFunction` in
`thunder/executors/torch_autograd.py`), which autograd runs in the calling thread: such a step holds one, as an H200
showed. ThunderFX leaves that tensor out. cuBLASLt shares the workspaces (`unified_cublas_and_lt_workspaces` in the same
file). They are part of `torch.cuda.max_memory_allocated`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from thunder.core.symbol import BoundSymbol

from thunder_mem.fake_execution.replay import Event
from thunder_mem.semantics.collectives import starts
from thunder_mem.semantics.effects import with_subsymbols
from thunder_mem.semantics.op_traits import traits_of

__all__ = ["LibraryMemory", "cublas_workspace_bytes", "library_memory", "unknown_library_memory"]

_KIB = 1024
# Operations that run in cuBLAS, and those that may run in cuDNN, by the last part of their name.
_PRODUCTS = {
    "linear", "matmul", "mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "mv", "addmv", "dot", "vdot",
    "einsum", "tensordot", "_addmm_activation", "_scaled_mm", "_grouped_mm", "_int_mm",
}  # fmt: skip
_CONVOLUTIONS = {"convolution", "convolution_backward", "conv1d", "conv2d", "conv3d"}

CUDNN = "the workspaces of cuDNN's convolutions are not counted"
NCCL = (
    "NCCL's buffers are not counted: 9.2 MiB for each of its channels and peers, outside of PyTorch's allocator "
    "(4096 KiB of NCCL_BUFFSIZE, 4800 and 512 KiB for its protocols LL128 and LL)"
)
"""`computeBuffSizes` in NCCL's `src/init.cc`; how many channels there are depends on how the GPUs are linked."""


@dataclass(frozen=True)
class LibraryMemory:
    """Memory that a library keeps on the device from its first use on.

    Attributes:
        library: the library's name.
        purpose: of the memory, in words.
        nbytes: its bytes.
    """

    library: str
    purpose: str
    nbytes: int


def cublas_workspace_bytes(capability: tuple[int, int], config: str | None = None) -> int:
    """Bytes of one workspace of cuBLAS, by the device's compute capability.

    Args:
        capability: (major, minor). Hopper and Blackwell take 32 MiB, all others 2 x 4096 KiB + 8 x 16 KiB.
        config: the value of ``CUBLAS_WORKSPACE_CONFIG``, pairs ":KIB:COUNT", which takes precedence; None if not set.

    Example:
        >>> cublas_workspace_bytes((8, 0)), cublas_workspace_bytes((9, 0)), cublas_workspace_bytes((9, 0), ":4096:8")
        (8519680, 33554432, 33554432)
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", config or "")
    if pairs:
        return sum(int(kib) * int(count) for kib, count in pairs) * _KIB
    if capability[0] in (9, 10, 12):
        return 8 * 4096 * _KIB
    return (2 * 4096 + 8 * 16) * _KIB


def library_memory(
    events: Iterable[Event],
    capability: tuple[int, int],
    environment: Mapping[str, str] = os.environ,
    *,
    split_autograd: bool = True,
) -> tuple[LibraryMemory, ...]:
    """The memory that libraries keep on a device of that capability once these operations have run.

    It counts throughout, because a later training step finds it there.

    Args:
        events: of a prediction.
        capability: of the device.
        environment: its variables.
        split_autograd: whether the backward that Thunder compiled runs in the calling thread.
    """
    threads = dict.fromkeys(_thread(e, split_autograd) for e in events if _is_product(e))
    workspace_bytes = cublas_workspace_bytes(capability, environment.get("CUBLAS_WORKSPACE_CONFIG"))
    return tuple(
        LibraryMemory("cuBLAS", f"workspace of the {thread} thread's handle", workspace_bytes)
        for thread in threads
        if workspace_bytes
    )


def _thread(event: Event, split_autograd: bool) -> str:
    in_calling = event.bsym is not None and split_autograd
    return "backward" if event.phase == "backward" and not in_calling else "calling"


def unknown_library_memory(events: Sequence[Event]) -> tuple[str, ...]:
    """Sentences about libraries whose memory for these operations is unknown without the device."""
    found = []
    if any(_short(e.name) in _CONVOLUTIONS or _inside(e.bsym, _CONVOLUTIONS) for e in events):
        found.append(CUDNN)
    if any(e.bsym is not None and starts(e.bsym) for e in events):
        found.append(NCCL)
    return tuple(found)


def _is_product(event: Event) -> bool:
    if event.bsym is None:
        return _short(event.name) in _PRODUCTS
    return traits_of(event.bsym).products or _inside(event.bsym, _PRODUCTS)


def _inside(bsym: BoundSymbol | None, names: set[str]) -> bool:
    """Whether the bound symbol or one of its parts is among `names`."""
    return bsym is not None and any(_short(b.sym.name) in names for b in with_subsymbols(bsym))


def _short(name: str) -> str:
    """The last part of "aten::addmm.out" or "torch.nn.functional.linear".

    Example:
        >>> _short("aten::addmm.out"), _short("torch.nn.functional.linear"), _short("torch.matmul")
        ('addmm', 'linear', 'matmul')
    """
    return name.partition("::")[2].partition(".")[0] if "::" in name else name.rpartition(".")[2]
