"""A joint trace before any decision: its graph, its fusion executors, and the choices that exist."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import torch
from thunder.core.trace import TraceCtx
from thunder.extend import FusionExecutor

from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.costs.measured import costs_of
from thunder_mem.costs.plan_time import overlapped_seconds
from thunder_mem.costs.roofline import device_model_of
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.tile_borders import keeping_borders
from thunder_mem.frontend.checkpoint_tags import checkpointed_storages
from thunder_mem.fusers.fusion_queries import fusibility
from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.plan import Decision, Plan
from thunder_mem.partition.budget import BudgetError
from thunder_mem.partition.budget_search import PartitionProblem
from thunder_mem.partition.constraints import Constraints
from thunder_mem.partition.min_cut_partition import about_recompute, min_cut_partition, saved_storages
from thunder_mem.rewrites.copy_before_write import protect_old_values
from thunder_mem.rewrites.early_updates import early_updates
from thunder_mem.rewrites.gradients_over_operands import overwritable_operands, write_over_operands
from thunder_mem.rewrites.offload import offloading
from thunder_mem.rewrites.recompute import forbid_rng_replay, gathers_of_held, recompute_in_backward
from thunder_mem.rewrites.regathered_values import gathered_twice
from thunder_mem.runtime.repeatability import recompute_obstacle
from thunder_mem.semantics.op_traits import traits_of
from thunder_mem.trace.reading import TraceGraph, read_trace
from thunder_mem.user_choices.partition_policy import PartitionPolicy

__all__ = [
    "Planned",
    "Program",
    "device_of",
    "free_partitions",
    "partition_problem",
    "read_program",
    "with_checkpoints",
]


@dataclass(frozen=True)
class Program:
    """A joint trace, and the choices about it.

    Attributes:
        given: the trace as Thunder has it, before fusion.
        trace: the trace to plan; values that its backward needs are protected from writes.
        source: the trace read as a graph.
        executors: the fusion executors.
        options: of planning.
        fuse: the executors that take each operation.
        constraints: from the user's checkpoints and `MemEfficient(recompute=...)`.
        gathered: storages that are gathered again from the caller's parameters.
        asked: the decision about the user's own choices, if any.
    """

    given: TraceCtx
    trace: TraceCtx
    source: TraceGraph
    executors: tuple[FusionExecutor, ...]
    options: PlanningOptions
    fuse: FusionCapabilities
    constraints: Constraints
    gathered: frozenset[int]
    asked: tuple[Decision, ...]
    _partitions: dict[frozenset[int], tuple[TraceCtx, TraceGraph]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def partitioned(self, rebuilt: frozenset[int]) -> tuple[TraceCtx, TraceGraph]:
        """The trace whose backward recomputes some storages, read anew; kept, for the few choices that are compared."""
        if rebuilt not in self._partitions:
            self._partitions[rebuilt] = with_partition(self.source, self.trace, rebuilt)
        return self._partitions[rebuilt]

    @cached_property
    def offered(self) -> frozenset[int]:
        """The storages that the user's checkpoints and choices make the backward recompute."""
        return _only_offered(self.source, self.fuse, self.constraints)

    def borders_kept(self, chosen: frozenset[int]) -> frozenset[int]:
        """The inputs of stretches in tiles that the backward receives, if that is the chosen partition."""
        if chosen != self.keeping_borders:
            return frozenset()
        return self.offered & saved_storages(self.source.graph, chosen)

    @cached_property
    def keeping_borders(self) -> frozenset[int] | None:
        """Of `offered`, all but inputs of stretches in tiles that the backward had better receive; None if none."""
        choices = self.source, self.fuse, self.constraints, self.offered, self.gathered
        return keeping_borders(self.partitioned, *choices)

    def recomputing(
        self, rebuilt: frozenset[int], offloaded: frozenset[int] = frozenset()
    ) -> tuple[TraceCtx, TraceGraph, FusionCapabilities]:
        """The trace whose backward recomputes some storages and fetches others from the host, read anew.

        Args:
            rebuilt: the storages to recompute.
            offloaded: those that wait in the host's memory, beside the user's own choice.
        """
        new, read = self._partitions.get(rebuilt) or with_partition(self.source, self.trace, rebuilt)
        if away := offloaded | self.constraints.offload:
            new, read = offloading(self.source, read, new, away)
        takes = self.fuse if read is self.source else fusibility(read, self.executors, (self.source, self.fuse))
        allocator = self.source.graph.allocator
        keepers = [op for s in self.constraints.must_save if (op := allocator[s]) is not None]
        names = {p.name for op in keepers for p in self.source.bsyms[op].flat_proxy_outs}
        kept = frozenset(read.producer_of[name] for name in names if name in read.producer_of)
        return new, read, replace(takes, kept=kept) if kept else takes


@dataclass(frozen=True)
class Planned:
    """A plan of a program.

    Attributes:
        program: what was planned; `verify` compares its trace with `arranged`.
        plan: regions and order.
        trace: with the chosen recomputation.
        arranged_seconds: the modelled time of its partition's kernels before refinement, without launches on a GPU.
        source: that trace read as a graph.
        fuse: the executors that take each of its operations.
        arranged: the fused trace in its order.
        lighter: the arranged trace with fewer rows or narrower sums in the loops at its peak; None if they have all.
        final: that trace with fitted chunk loops.
        fused: a reading of an earlier fused trace, from which `final` was made.
        over_budget: says that nothing fits the budget; None if this plan does, or without a budget.
    """

    program: Program
    plan: Plan
    source: TraceGraph
    fuse: FusionCapabilities
    trace: TraceCtx
    arranged_seconds: float | None = None
    arranged: TraceCtx | None = None
    lighter: TraceCtx | None = None
    final: TraceCtx | None = None
    fused: TraceGraph | None = None
    over_budget: Callable[[], BudgetError] | None = None

    @property
    def peak_bytes(self) -> int:
        return self.plan.candidate.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget, if there is one."""
        return self.plan.budget is None or self.peak_bytes <= self.plan.budget.budget_bytes

    @cached_property
    def final_source(self) -> TraceGraph:
        """The final trace, read as a graph."""
        assert self.final is not None
        return read_trace(self.final, earlier=self.fused)

    @cached_property
    def final_seconds(self) -> float:
        """The modelled seconds of a plan that was carried out, with what waits for copies to the host and back."""
        outcome = self.plan.budget
        exposed_s = outcome.exposed_ms / 1e3 if outcome is not None else 0.0
        return overlapped_seconds(self.final_source, device_model_of(device_of(self.source))) + exposed_s


def read_program(
    trace: TraceCtx,
    executors: tuple[FusionExecutor, ...],
    options: PlanningOptions,
    given: TraceCtx | None = None,
) -> Program:
    """Read a joint trace.

    Args:
        trace: to plan.
        executors: the fusion executors.
        options: of planning.
        given: the trace as Thunder has it; None if that is `trace`.

    Raises:
        RecomputeError: `options.recompute` does not fit this program.
    """
    given = trace if given is None else given
    trace, source = _read(trace if options.redraw else forbid_rng_replay(trace))
    fuse = fusibility(source, executors)
    gathered = gathers_of_held(source)
    constraints, asked = _constraints(source, fuse, gathered, options.recompute)
    return Program(given, trace, source, executors, options, fuse, constraints, gathered, asked)


def _constraints(
    source: TraceGraph, fuse: FusionCapabilities, gathered: frozenset[int], recompute: PartitionPolicy | None
) -> tuple[Constraints, tuple[Decision, ...]]:
    """The constraints on the minimum cut: the user's checkpoints and `MemEfficient(recompute=...)`."""
    constraints = Constraints(
        may_recompute=checkpointed_storages(source) | gathered, free_to_save=gathered_twice(source)
    )
    if recompute is None or not any(op.backward for op in source.graph.ops):
        return constraints, ()
    free = min_cut_partition(source.graph, fuse, constraints)
    constraints |= recompute.choose(source, free)
    chosen = min_cut_partition(source.graph, fuse, constraints)
    return constraints, (about_recompute(str(recompute), source.graph, free, chosen),)


def free_partitions(program: Program) -> list[frozenset[int]]:
    """Choices of storages that the backward recomputes at no price beyond the user's checkpoints.

    The first, the minimum cut, ignores where checkpoints begin and end: it may repeat the forward of many checkpoints
    at once, from few bytes, but no stretch in tiles that the checkpoints alone would not repeat. The second keeps the
    values that checkpoints keep, except those that cheap ops make from the others. The third is the user's own. Where
    stretches run in tiles, a fourth also keeps inputs of some.
    """
    source, fuse, constraints = program.source, program.fuse, program.constraints
    graph = source.graph
    if constraints.may_recompute <= program.gathered and not constraints.must_recompute:
        return [min_cut_partition(graph, fuse, constraints)]
    offered = program.offered
    allowed = constraints.may_recompute - (_results_of_tiles(source) - offered)
    cut = min_cut_partition(graph, fuse, replace(constraints, may_recompute=allowed))
    kept = saved_storages(graph, offered)
    cheap = min_cut_partition(graph, fuse, replace(constraints, may_recompute=program.gathered), needed=kept)
    read = {r for s in cheap for r in graph.ops[graph.allocator[s]].reads} - cheap  # type: ignore[index]
    borders = [] if program.keeping_borders is None else [program.keeping_borders]
    return list(dict.fromkeys([cut, offered - read | cheap, offered, *borders]))


def _results_of_tiles(source: TraceGraph) -> frozenset[int]:
    """The storages that stretches in tiles make in the forward."""
    ops = zip(source.graph.ops, source.bsyms, strict=True)
    loops = (op for op, bsym in ops if not op.backward and is_chunk_loop(bsym) and loop_of(bsym).plan.is_stretch)
    return frozenset(s for op in loops for s in op.allocates)


def _only_offered(source: TraceGraph, fuse: FusionCapabilities, choices: Constraints) -> frozenset[int]:
    """The storages that the user's checkpoints and choices make the backward recompute."""
    if not (choices.may_recompute or choices.must_recompute):
        return frozenset()
    return min_cut_partition(source.graph, replace(fuse, cheap=(False,) * len(source.graph)), choices)


def partition_problem(program: Program, keeping: frozenset[int] = frozenset()) -> PartitionProblem:
    """The choices under a budget: the storages that may be recomputed, and the cost.

    Args:
        program: the program.
        keeping: storages that the backward receives, if it needs them.
    """
    source, options = program.source, program.options
    repeat_s = _repeat_seconds(source, program.fuse, options.costs, device_of(source))
    choices = program.constraints | Constraints(must_save=keeping)
    over = overwritable_operands(source)
    return PartitionProblem(source.graph, program.fuse, repeat_s, choices, options.sort, over=over)


def _repeat_seconds(source: TraceGraph, fuse: FusionCapabilities, costs: str, device: torch.device) -> list[float]:
    model = device_model_of(device)
    seconds_of = costs_of(costs, model)
    seconds = []
    for op, bsym in zip(source.graph.ops, source.bsyms, strict=True):
        if fuse.cheap[op.index]:
            seconds.append(0.0)
        elif op.backward or recompute_obstacle(source, op.index) is not None:
            seconds.append(inf)
        else:
            declared = traits_of(bsym).seconds(bsym, model)
            seconds.append(seconds_of(bsym) if declared is None else declared)
    return seconds


def device_of(source: TraceGraph) -> torch.device:
    """The device that the program computes on: the one with most of its allocated bytes."""
    nbytes: dict[str, int] = {}
    for s in source.graph.storages:
        nbytes[s.device] = nbytes.get(s.device, 0) + s.nbytes
    return torch.device(max(nbytes, key=lambda d: (nbytes[d], d)) if nbytes else "cpu")


def _read(trace: TraceCtx) -> tuple[TraceCtx, TraceGraph]:
    """The trace with all values that its backward needs protected from writes, and its graph."""
    source = read_trace(trace)
    safe = protect_old_values(source, trace)
    return safe, source if safe is trace else read_trace(safe, earlier=source)


def with_checkpoints(trace: TraceCtx) -> TraceCtx:
    """The joint trace, with the user's checkpoints carried out and nothing else planned."""
    trace, source = _read(trace)
    choices = Constraints(may_recompute=checkpointed_storages(source), free_to_save=gathered_twice(source))
    rebuilt = _only_offered(source, fusibility(source, ()), choices)
    return recompute_in_backward(source, trace, rebuilt) if rebuilt else trace


def with_partition(source: TraceGraph, trace: TraceCtx, rebuilt: Collection[int]) -> tuple[TraceCtx, TraceGraph]:
    """The trace whose backward recomputes some storages, read anew.

    Args:
        source: the reading of `trace`.
        trace: a joint trace before fusion.
        rebuilt: the storages to recompute.
    """
    new, read = trace, source
    if rebuilt:
        new = recompute_in_backward(source, trace, frozenset(rebuilt))
        read = read_trace(new, earlier=source)
    for rewrite in (write_over_operands, early_updates):
        if (other := rewrite(read, new)) is not new:
            new, read = other, read_trace(other, earlier=read)
    return new, read
