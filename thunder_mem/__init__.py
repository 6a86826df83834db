"""thunder_mem: make programs compiled by lightning-thunder use less memory."""

from thunder_mem import policies
from thunder_mem.budget import BudgetError
from thunder_mem.choices import RecomputeError
from thunder_mem.chunk_mark import chunked
from thunder_mem.delegate import last_plan
from thunder_mem.fits import fits, largest_batch, largest_sequence
from thunder_mem.frontier import memory_time_frontier
from thunder_mem.graph import Graph, GraphError, Op, Storage
from thunder_mem.measure import measure_peak
from thunder_mem.plugin import MemEfficientPlugin
from thunder_mem.predict import predict
from thunder_mem.recompute_table import recompute_table
from thunder_mem.report import explain
from thunder_mem.simulate import simulate
from thunder_mem.sort_trace import sort_bound_symbols
from thunder_mem.sorting import SORTS, register_sort
from thunder_mem.training_step import predict_step
from thunder_mem.transforms import ChunkLossHead, MemEfficient
from thunder_mem.what_if import WhatIf

__version__ = "0.1.0"
__all__ = [
    "SORTS",
    "BudgetError",
    "ChunkLossHead",
    "Graph",
    "GraphError",
    "MemEfficient",
    "MemEfficientPlugin",
    "Op",
    "RecomputeError",
    "Storage",
    "WhatIf",
    "chunked",
    "explain",
    "fits",
    "largest_batch",
    "largest_sequence",
    "last_plan",
    "measure_peak",
    "memory_time_frontier",
    "policies",
    "predict",
    "predict_step",
    "recompute_table",
    "register_sort",
    "simulate",
    "sort_bound_symbols",
]
