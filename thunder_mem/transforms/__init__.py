"""The transforms that users pass to `thunder.jit(fn, transforms=[...])`."""

from thunder_mem.transforms.chunk_loss_head import ChunkLossHead
from thunder_mem.transforms.mem_efficient import MemEfficient

__all__ = ["ChunkLossHead", "MemEfficient"]
