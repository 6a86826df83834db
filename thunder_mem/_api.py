"""The public names of `thunder_mem`."""

from importlib.metadata import version

import thunder_mem._versions  # noqa: F401 - first: it says what to do where the rest cannot be imported

# isort: split
from thunder_mem import fx, policies
from thunder_mem.analysis.capacity import fits, largest_batch, largest_sequence
from thunder_mem.analysis.estimate import estimate
from thunder_mem.analysis.frontier import memory_time_frontier
from thunder_mem.analysis.recompute_table import recompute_table
from thunder_mem.comparison.compare import compare
from thunder_mem.costs.measured import MeasuringError
from thunder_mem.distributed.agreement import RanksDifferError
from thunder_mem.fake_execution.replay import PredictionError
from thunder_mem.memory.graph import Graph, GraphError, Op, Storage
from thunder_mem.memory.what_if import WhatIf
from thunder_mem.optimizer.step_in_backward import StepInBackward
from thunder_mem.partition.budget import BudgetError
from thunder_mem.partition.constraints import RecomputeError
from thunder_mem.planning.plan_file import PlanFileError
from thunder_mem.planning.record import last_plan
from thunder_mem.prediction.predict import predict
from thunder_mem.prediction.simulate import simulate
from thunder_mem.prediction.training_step import predict_step
from thunder_mem.report import explain
from thunder_mem.runtime.measure import measure_peak
from thunder_mem.sorting import SORTS, register_sort
from thunder_mem.tiling.find import ChunkingError
from thunder_mem.tiling.marks import chunked, tiled
from thunder_mem.tiling.tiles import Tiles, TilingError
from thunder_mem.trace.reordering import sort_bound_symbols
from thunder_mem.trace.verification import VerificationError
from thunder_mem.transforms import ChunkLossHead, MemEfficient
from thunder_mem.transforms.last_compilation import save_plan, why_no_plan
from thunder_mem.transforms.plugin import MemEfficientPlugin

__version__ = version("thunder-mem")
__all__ = [
    "SORTS",
    "BudgetError",
    "ChunkLossHead",
    "ChunkingError",
    "Graph",
    "GraphError",
    "MeasuringError",
    "MemEfficient",
    "MemEfficientPlugin",
    "Op",
    "PlanFileError",
    "PredictionError",
    "RanksDifferError",
    "RecomputeError",
    "StepInBackward",
    "Storage",
    "Tiles",
    "TilingError",
    "VerificationError",
    "WhatIf",
    "chunked",
    "compare",
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
    "tiled",
    "why_no_plan",
]
