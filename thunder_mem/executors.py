"""The executors of this package, for whoever lists executors by hand: ``executors=[mem_pointwise_ex, ...]``.

`MemEfficient` brings them along where nothing else is listed.
"""

from thunder_mem.regions.pointwise_executor import MemPointwiseExecutor, mem_pointwise_ex
from thunder_mem.runtime.cpu_attention import mem_attention_ex

__all__ = ["MemPointwiseExecutor", "mem_attention_ex", "mem_pointwise_ex"]
