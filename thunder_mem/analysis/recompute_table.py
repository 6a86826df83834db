"""`recompute_table`: the values that a backward could recompute, and the gain of each.

ONNX Runtime prints such a table by the bytes of the values (its memory optimizer's probe level). Here each row is
planned with its own configuration, and the exact timeline of that plan gives the peak.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thunder.core.dtypes import to_strong_dtype
from thunder.core.proxies import ProxyTag, TensorProxy

from thunder_mem.analysis.partition_problem import check_program, study_program
from thunder_mem.analysis.recompute_rows import Kept, RecomputeTable, Row
from thunder_mem.analysis.symbolic_sizes import Dims
from thunder_mem.costs.roofline import cost_s, device_model_of, extra_region_cost_s
from thunder_mem.decisions.program import Planned, device_of
from thunder_mem.memory.device_models import DeviceModel
from thunder_mem.partition.budget_search import PartitionProblem
from thunder_mem.partition.constraints import RecomputeError
from thunder_mem.partition.min_cut_partition import min_cut_partition, saved_storages
from thunder_mem.trace.origins import alike, origin_of, source_of
from thunder_mem.trace.reading import TraceGraph
from thunder_mem.user_choices.config import choices_of
from thunder_mem.user_choices.patterns import Occurrence, RecomputeCandidate, Single, candidates, occurrences
from thunder_mem.user_choices.written import Entry

__all__ = ["recompute_table"]


def recompute_table(
    fn: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    dims: Mapping[str, int] | None = None,
    executors: Sequence[Any] | None = None,
    peaks: bool = True,
) -> RecomputeTable:
    """List the values that the backward of a program could recompute instead of receiving them.

    Args:
        fn: a function, a module, or a result of `thunder.jit`, whose executors and `MemEfficient` then count.
            Values that it recomputes already are marked. Nothing runs.
        args: arguments of a call (real, or under `simulate` fake) that asks for a gradient.
        kwargs: keyword arguments of the call.
        dims: names for sizes of this example, such as {"B": 3, "T": 17}, to use in shapes and sizes. Every
            size equal to a dim's size, or to the product of two, is written by name: choose an example with
            distinct sizes. A warning names a tensor that has the same size.
        executors: as for `thunder.jit`, where `fn` is not jitted yet.
        peaks: plan each row to learn its peak; otherwise the table has only bytes and times.

    Raises:
        ValueError: the call needs no gradient, two of `dims` are equal, or no tensor has the size of a dim.
        PredictionError: the program cannot be traced.
        TypeError: `fn` is none of the above.

    Example:
        >>> import torch
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> table = recompute_table(mlp, torch.zeros(5, 8), dims={"B": 5}, executors=[])
        >>> table["Linear"].shapes, table["Linear"].config
        (('(B, 32)',), 'Linear+:recompute:-1')
    """
    check_program(fn, "recompute_table")
    names = Dims(dims)
    study = study_program(fn, args, dict(kwargs or {}), executors)
    _check_dims(names, study.source)
    return _Tabulation(study.source, study.problem, study.plan, names, peaks).table()


def _check_dims(dims: Dims, source: TraceGraph) -> None:
    """Refuse a dim that no tensor has; warn of a tensor that has a dim's size by accident."""
    arguments = [p for b in source.prefix for p in b.flat_proxy_outs if isinstance(p, TensorProxy)]
    made = [p for b in source.bsyms for p in b.flat_proxy_outs if isinstance(p, TensorProxy)]
    dims.check_occur({n for p in (*arguments, *made) for n in map(int, p.shape)})
    for p in arguments:
        shape = tuple(map(int, p.shape))
        fixed = ProxyTag.STATIC_MEMORY_LOCATION in p.tags  # a parameter, which no batch changes
        if clash := dims.clashes(shape) if fixed else dims.repeated(shape):
            warnings.warn(
                f"{clash} has a size that {p.name} {shape} has {'too' if fixed else 'twice'}: the table writes "
                f"{dims.shape(shape)}, and likewise every equal size. Choose an example with other sizes",
                stacklevel=3,
            )
            return


@dataclass(frozen=True)
class _Tabulation:
    source: TraceGraph
    problem: PartitionProblem
    plan: Callable[[frozenset[int]], Planned]
    dims: Dims
    peaks: bool

    def table(self) -> RecomputeTable:
        graph, fuse = self.problem.graph, self.problem.fuse
        base = min_cut_partition(graph, fuse, self.problem.choices)
        found, refused = candidates(self.source, base)
        base_peak = self._peak(base)
        groups: dict[str, list[Occurrence]] = {}
        for occurrence in occurrences(found):
            groups.setdefault(occurrence.pattern, []).append(occurrence)
        rows = [
            row
            for pattern, group in groups.items()
            for strategy in ("recompute", "compromised")
            if (row := self._row(Entry(pattern, strategy), group, base, base_peak)) is not None
        ]
        rows.sort(key=lambda r: (r.now != "received", -r.saved_bytes, -r.values_bytes, r.pattern, r.strategy))
        return RecomputeTable(tuple(rows), _kept(refused), self._received(base), base_peak, self._model.name)

    def _row(self, entry: Entry, group: list[Occurrence], base: frozenset[int], base_peak: int) -> Row | None:
        try:
            choices = self.problem.choices | choices_of(entry, group)
        except RecomputeError:  # no compromise, or the user's own choice contradicts it
            return None
        graph, fuse = self.problem.graph, self.problem.fuse
        rebuilt = min_cut_partition(graph, fuse, choices)
        parts = [c for o in group for c in o.candidates if entry.strategy == "recompute" or c.compromise]
        origins = [o for c in parts if (o := origin_of(self.source.bsyms[c.maker])) is not None]
        shown = {self._shape(c): self._symbolic_bytes(c) for c in parts}
        peak = self._peak(rebuilt) if self.peaks else None
        return Row(
            pattern=entry.pattern,
            strategy=entry.strategy,
            now="rebuilt" if all(c.free for c in parts) else "received",
            shapes=tuple(shown),
            symbolic_bytes=tuple(shown.values()),
            count=len(group),
            each_bytes=max(o.nbytes for o in group),
            values_bytes=sum(c.nbytes for c in parts),
            saved_bytes=self._received(base) - self._received(rebuilt),
            peak_bytes=peak,
            peak_change_bytes=None if peak is None else peak - base_peak,
            ms=self._ms(rebuilt - base),
            modules=tuple(dict.fromkeys(alike(o.module) for o in origins if o.module)),
            layers=tuple(sorted({o.layer for o in origins if o.layer is not None})),
            sources=tuple(dict.fromkeys(s for c in parts if (s := source_of(self.source.bsyms[c.maker])))),
            config=str(entry),
        )

    def _received(self, rebuilt: frozenset[int]) -> int:
        graph = self.problem.graph
        return sum(graph.storages[s].nbytes for s in saved_storages(graph, rebuilt))

    def _peak(self, rebuilt: frozenset[int]) -> int:
        return self.plan(rebuilt).peak_bytes

    @property
    def _model(self) -> DeviceModel:
        return device_model_of(device_of(self.source))

    def _ms(self, storages: frozenset[int]) -> float:
        """Milliseconds of recomputation; elementwise ops inside a region cost their reads from outside it."""
        graph, fuse, model = self.problem.graph, self.problem.fuse, self._model
        ops = sorted({op for s in storages if (op := graph.allocator[s]) is not None})
        made = {p.name for op in ops for p in self.source.bsyms[op].flat_proxy_outs}
        seconds = 0.0
        for op in ops:
            bsym = self.source.bsyms[op]
            if fuse.cheap[op]:
                seconds += extra_region_cost_s([bsym], [p for p in bsym.flat_proxy_args if p.name not in made], model)
            else:
                seconds += cost_s(bsym, model)
        return seconds * 1e3

    def _value(self, c: RecomputeCandidate) -> TensorProxy:
        outs = [p for p in self.source.bsyms[c.maker].flat_proxy_outs if isinstance(p, TensorProxy)]
        return next(p for p in outs if self.source.storage_of[p.name] == c.storage)

    def _shape(self, c: RecomputeCandidate) -> str:
        return self.dims.shape(tuple(map(int, self._value(c).shape)))

    def _symbolic_bytes(self, c: RecomputeCandidate) -> str:
        value = self._value(c)
        return self.dims.nbytes(tuple(map(int, value.shape)), to_strong_dtype(value.dtype).bytes)


def _kept(refused: Sequence[Single]) -> tuple[Kept, ...]:
    groups: dict[tuple[str, str], list[Single]] = {}
    for single in refused:
        # Equal layers differ only in the names of their values.
        groups.setdefault((single.pattern, re.sub(r"\bt\d+\b", "t#", single.reason)), []).append(single)
    found = [Kept(pattern, len(g), sum(s.nbytes for s in g), reason) for (pattern, reason), g in groups.items()]
    return tuple(sorted(found, key=lambda k: -k.nbytes))
