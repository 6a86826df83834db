"""Sort a graph, or register your own sort: imports for developers of sorts.

The guide is `docs/guides/sorting.md`; the algorithms stand in `thunder_mem.schedule`.
"""

from thunder_mem.memory.graph import Graph, GraphError, Op, Storage, make_graph
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.schedule.lower_bounds import lower_bound
from thunder_mem.schedule.registry import SORTS, SortFunction, SortResult, register_sort, sort_graph
from thunder_mem.trace.reordering import sort_bound_symbols

__all__ = [
    "SORTS",
    "Graph",
    "GraphError",
    "Op",
    "SortFunction",
    "SortResult",
    "Storage",
    "lower_bound",
    "make_graph",
    "price_order",
    "register_sort",
    "sort_bound_symbols",
    "sort_graph",
]
