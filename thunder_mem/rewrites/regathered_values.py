"""Parameters that the backward gathers again: recomputed ops can read these, so that the first gathers may die.

The second gathers are already in the joint trace when its plan is made (`zero3.py`). So their order does not depend on
the plan's recomputation.
"""

from __future__ import annotations

from collections.abc import Hashable

from thunder.core.proxies import Proxy

from thunder_mem.distributed.collective_order import made_of_shards
from thunder_mem.semantics.collectives import is_gather
from thunder_mem.trace.reading import TraceGraph

__all__ = ["gathered_twice", "second_gathers"]


def second_gathers(source: TraceGraph) -> dict[str, tuple[int, Proxy]]:
    """By the name of a gathered value of the forward, the op of the backward that makes it again, and the result.

    It includes waits, views and casts of gathered values, each by the first op that does the same.
    """
    graph = source.graph
    if not any(op.backward and is_gather(source.bsyms[op.index]) for op in graph.ops):
        return {}
    known: dict[Hashable, list[Proxy]] = {}  # the forward's values, by how they are made
    first: dict[str, str] = {}  # the forward's name of a value of the backward
    found: dict[str, tuple[int, Proxy]] = {}
    for op in sorted(made_of_shards(source)):
        bsym = source.bsyms[op]
        given = tuple(first.get(a.name, a.name) if isinstance(a, Proxy) else repr(a) for a in bsym.flat_args)
        how = (bsym.sym.name, given)
        if not graph.ops[op].backward:
            known.setdefault(how, list(bsym.flat_proxy_outs))
            continue
        for once, again in zip(known.get(how, ()), bsym.flat_proxy_outs, strict=False):
            first[again.name] = once.name
            found.setdefault(once.name, (op, again))
    return found


def gathered_twice(source: TraceGraph) -> frozenset[int]:
    """The forward's storages whose content the backward has anyway, so that saving them gains nothing."""
    return frozenset(source.storage_of[name] for name in second_gathers(source) if name in source.storage_of)
