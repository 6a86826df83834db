"""The executors of this package, for lists such as ``executors=[mem_pointwise_ex, ...]``.

`MemEfficient` adds them if no list is given, except for `mem_cudnn_attention_ex`.
"""

from thunder_mem.attention.by_cudnn import mem_cudnn_attention_ex
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.attention.with_mask import mem_masked_attention_ex
from thunder_mem.regions.pointwise_executor import MemPointwiseExecutor, mem_pointwise_ex

__all__ = [
    "MemPointwiseExecutor",
    "mem_attention_ex",
    "mem_cudnn_attention_ex",
    "mem_masked_attention_ex",
    "mem_pointwise_ex",
]
