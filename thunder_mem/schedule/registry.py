"""The registry of sorts, and `sort_graph`, which runs one and checks its order.

A sort is any function `(Graph) -> Sequence[int]` that returns every op's index once, each after its predecessors. The
built-in sorts are registered by name below. Add one with `register_sort`, or pass the function itself as `sort=`.
Every returned order is checked, and the exact simulation gives its peak.

| name | what it does |
|---|---|
| `source` | the order of the program |
| `lpmf`, `backward_lpmf`, `dfs`, `bfs` | greedy, `greedy.py` |
| `sift` | the source order, sifted, `sift.py` |
| `window` | `sift`, then exact windows at the peak, `window.py` |
| `exact` | optimal, for up to about 60 ops, `exact.py` |
| `auto` | the best of all but `exact`, never above `source`, `portfolio.py` |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from thunder_mem.memory.graph import Graph
from thunder_mem.memory.running_set import Liveness, liveness, profile
from thunder_mem.schedule.greedy import breadth_first, depth_first, least_peak_first
from thunder_mem.schedule.portfolio import exact, portfolio
from thunder_mem.schedule.sift import sift
from thunder_mem.schedule.window import lower_peak

__all__ = ["SORTS", "SortFunction", "SortResult", "register_sort", "sort_graph"]

SortFunction = Callable[[Graph], Sequence[int]]


@dataclass(frozen=True)
class SortResult:
    """An order and its cost.

    Attributes:
        order: op indices, in execution order.
        peak_bytes: the order's peak by the exact simulation.
        source_peak_bytes: the source order's peak.
        algorithm: the sort's registered name, or the `__name__` of a user's function; for "auto" and
            "exact" the seed and the step that won, as "lpmf+window".
        optimal: "auto" or "exact" proved that no order has a lower peak. `bounds.lower_bound` may
            prove it for other orders.
    """

    order: tuple[int, ...]
    peak_bytes: int
    source_peak_bytes: int
    algorithm: str
    optimal: bool = False


def _peak(live: Liveness, order: Sequence[int]) -> int:
    return max(profile(live, order), default=live.start_bytes)


def _source(graph: Graph) -> Sequence[int]:
    return range(len(graph))


def _lpmf(graph: Graph) -> Sequence[int]:
    return least_peak_first(liveness(graph))


def _backward_lpmf(graph: Graph) -> Sequence[int]:
    return least_peak_first(liveness(graph), reverse=True)


def _dfs(graph: Graph) -> Sequence[int]:
    return depth_first(liveness(graph))


def _bfs(graph: Graph) -> Sequence[int]:
    return breadth_first(liveness(graph))


def _sift(graph: Graph) -> Sequence[int]:
    return sift(liveness(graph), range(len(graph)))[0]


def _window(graph: Graph) -> Sequence[int]:
    live = liveness(graph)
    return lower_peak(live, sift(live, range(len(graph)))[0]).order


def _exact(graph: Graph) -> Sequence[int]:
    return exact(liveness(graph)).order


def _auto(graph: Graph) -> Sequence[int]:
    return portfolio(liveness(graph)).order


_REGISTRY: dict[str, SortFunction] = {
    "source": _source,
    "lpmf": _lpmf,
    "backward_lpmf": _backward_lpmf,
    "dfs": _dfs,
    "bfs": _bfs,
    "sift": _sift,
    "window": _window,
    "exact": _exact,
    "auto": _auto,
}

SORTS = MappingProxyType(_REGISTRY)
"""The registered algorithms by name, read-only; add one with `register_sort`."""


def register_sort(name: str, function: SortFunction) -> None:
    """Make `function` available as `sort=name`.

    Raises:
        TypeError: `name` is not a string or `function` cannot be called.
        ValueError: the name is empty or taken.
    """
    if not isinstance(name, str):
        raise TypeError(f"a sort's name is a string, not {name!r}")
    if not callable(function):
        raise TypeError(f"the sort {name!r} is a function (Graph) -> Sequence[int], not {function!r}")
    if not name or name in _REGISTRY:
        raise ValueError(f"the name {name!r} is empty or taken; taken are {', '.join(_REGISTRY)}")
    _REGISTRY[name] = function


def sort_graph(graph: Graph, sort: str | SortFunction = "auto") -> SortResult:
    """Order a graph's ops by a registered algorithm or by the caller's own function.

    Args:
        graph: the graph to order.
        sort: a name in `SORTS` or a function `(Graph) -> Sequence[int]`. "auto" never has a higher
            peak than the source order; other sorts may, and the result says so.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
        TypeError: `sort` is neither a name nor callable, or the function returned no sequence.
        GraphError: the function's order is not legal; the message names the first broken edge.

    Example:
        >>> from thunder_mem.memory.graph import Op, Storage, make_graph
        >>> x, y, z = Storage(0, 8, held=True), Storage(1, 16), Storage(2, 4)
        >>> ops = [Op(0, "exp", reads=(0,), allocates=(1,)), Op(1, "sum", reads=(1,), allocates=(2,))]
        >>> sort_graph(make_graph(ops, [x, y, z], outputs=[2]), sort=lambda graph: [0, 1]).peak_bytes
        28
    """
    if isinstance(sort, str):
        if sort not in _REGISTRY:
            raise ValueError(
                f"unknown sort {sort!r}; known are {', '.join(_REGISTRY)}, or pass a function of the graph"
            )
        function, algorithm = _REGISTRY[sort], sort
    elif callable(sort):
        function, algorithm = sort, getattr(sort, "__name__", type(sort).__name__)
    else:
        raise TypeError(f"sort is a name ({', '.join(_REGISTRY)}) or a function (Graph) -> Sequence[int], not {sort!r}")
    live = liveness(graph)
    source_peak_bytes = _peak(live, range(len(graph)))
    if sort in ("auto", "exact"):
        found = portfolio(live) if sort == "auto" else exact(live)
        graph.check_order(found.order)
        return SortResult(
            tuple(found.order), _peak(live, found.order), source_peak_bytes, found.algorithm, found.optimal
        )
    returned = function(graph)
    try:
        order = tuple(returned)
    except TypeError:
        raise TypeError(f"the sort {algorithm!r} returned {returned!r}, not a sequence of op indices") from None
    graph.check_order(order)
    order = tuple(map(int, order))
    return SortResult(order, _peak(live, order), source_peak_bytes, algorithm)
