"""The transforms that users pass to `thunder.jit(fn, transforms=[...])`."""

from thunder_mem.transforms.mem_efficient import MemEfficient

__all__ = ["MemEfficient"]
