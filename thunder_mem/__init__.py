"""thunder_mem: make programs compiled by lightning-thunder use less memory."""

from thunder_mem.chunk_mark import chunked
from thunder_mem.delegate import last_plan
from thunder_mem.graph import Graph, GraphError, Op, Storage
from thunder_mem.measure import measure_peak
from thunder_mem.report import explain
from thunder_mem.sort_trace import sort_bound_symbols
from thunder_mem.sorting import SORTS, register_sort
from thunder_mem.transforms import ChunkLossHead, MemEfficient

__version__ = "0.1.0"
__all__ = [
    "SORTS",
    "ChunkLossHead",
    "Graph",
    "GraphError",
    "MemEfficient",
    "Op",
    "Storage",
    "chunked",
    "explain",
    "last_plan",
    "measure_peak",
    "register_sort",
    "sort_bound_symbols",
]
