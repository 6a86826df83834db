"""thunder_mem: make programs compiled by lightning-thunder use less memory."""

import thunder_mem.versions  # noqa: F401 - first: it says what to do where the rest cannot be imported

# isort: split
from thunder_mem import fx, policies
from thunder_mem.budget import BudgetError
from thunder_mem.choices import RecomputeError
from thunder_mem.chunk_mark import chunked
from thunder_mem.delegate import last_plan
from thunder_mem.eager import estimate
from thunder_mem.fits import fits, largest_batch, largest_sequence
from thunder_mem.frontier import memory_time_frontier
from thunder_mem.graph import Graph, GraphError, Op, Storage
from thunder_mem.measure import measure_peak
from thunder_mem.mistakes import answer_mistakes
from thunder_mem.plan_file import PlanFileError, save_plan
from thunder_mem.plugin import MemEfficientPlugin
from thunder_mem.predict import predict
from thunder_mem.ranks import RanksDifferError
from thunder_mem.recompute_table import recompute_table
from thunder_mem.report import explain
from thunder_mem.report.circumstances import why_no_plan
from thunder_mem.simulate import simulate
from thunder_mem.sort_trace import sort_bound_symbols
from thunder_mem.sorting import SORTS, register_sort
from thunder_mem.training_step import predict_step
from thunder_mem.transforms import ChunkLossHead, MemEfficient
from thunder_mem.what_if import WhatIf

answer_mistakes()

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
    "PlanFileError",
    "RanksDifferError",
    "RecomputeError",
    "Storage",
    "WhatIf",
    "chunked",
    "estimate",
    "explain",
    "fits",
    "fx",
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
    "save_plan",
    "simulate",
    "sort_bound_symbols",
    "why_no_plan",
]
