"""`MemEfficient`: the whole package as one Thunder transform."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from inspect import signature
from typing import Any

from thunder.core.compile_data import get_compile_data
from thunder.core.trace import TraceCtx, TraceTag
from thunder.core.transform_common import Transform
from thunder.extend import TemporaryExecutor

from thunder_mem.costs.measured import COSTS, check_measurable
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.frontend.fx_calls import watch_calls
from thunder_mem.frontend.fx_changes import keep_written_out, mark_written, tag_written_elsewhere
from thunder_mem.frontend.fx_prologue_checks import pruned
from thunder_mem.frontend.tensor_parallel import waits_for_shards
from thunder_mem.frontend.unchecked_arguments import with_unchecked_arguments
from thunder_mem.fusers.fusion_executors import fuses_generally
from thunder_mem.kernels.registered import mem_kernels_ex
from thunder_mem.loop_body.equal_blocks import EqualBlocks
from thunder_mem.memory.outside_input import quoted
from thunder_mem.memory.plan import Refusal
from thunder_mem.optimizer.step_in_backward import StepInBackward
from thunder_mem.partition.budget import parse_budget
from thunder_mem.planning.executor import final_trace, install_planner, user_executors
from thunder_mem.planning.fallback import Original
from thunder_mem.planning.plan_file import program_of, read_plan
from thunder_mem.planning.record import current_record, note_program
from thunder_mem.rendering.progress import stage
from thunder_mem.schedule.registry import SortFunction
from thunder_mem.semantics.shared_parameters import tag_shared_parameters
from thunder_mem.tiling.marks import strip_tile_marks
from thunder_mem.tiling.tiles import Tiles
from thunder_mem.torch_functions.missing_gradients import register_missing
from thunder_mem.torch_functions.traced_functions import WITH_MORE_ARGUMENTS
from thunder_mem.torch_functions.whole_functions import FUSED, WRITTEN_OUT
from thunder_mem.trace.missing_tangents import asks_for_none, with_missing_tangents
from thunder_mem.transforms.base import ListedTransform
from thunder_mem.transforms.before_autograd import chunked, detached, prepared, tiled, with_written_arguments
from thunder_mem.transforms.chunk_loss_head import ChunkLossHead
from thunder_mem.transforms.default_executors import with_own_executors
from thunder_mem.transforms.failures import left
from thunder_mem.transforms.grad_mode import with_gradients_recorded
from thunder_mem.transforms.optimizer_step import (
    check_optimizer,
    with_forward_noted,
    with_optimizer,
    with_tangents_seen,
)
from thunder_mem.transforms.other_tiles import OtherTiles, first_results, stretches_of
from thunder_mem.transforms.other_transforms import (
    accepts_missing_tangents,
    behind,
    check_sort,
    composed,
    rewriting_after,
    with_whole_heads,
    with_whole_stretches,
)
from thunder_mem.user_choices.config import from_environment, parse_config
from thunder_mem.user_choices.offload import parse_offload
from thunder_mem.user_choices.partition_policy import PartitionPolicy
from thunder_mem.user_choices.policy import Policy, PolicyChooser, check_policy
from thunder_mem.user_choices.written import Written

__all__ = ["MemEfficient"]

_NOT_IN_PLANS = ("verify", "strict", "plan")


class MemEfficient(ListedTransform):
    """Lower the peak memory of a compiled program, with the same results.

    Plans on the joint trace of forward and backward: which values are saved and which are recomputed in
    fused code, which operations are fused, and the order of all operations. Without `executors` in
    `thunder.jit`, Thunder's default list is used. If that list has no general fusion executor, `mem_pointwise`
    (and `mem_attention` on a CPU) join it. If nothing in your own list fuses, PyTorch's own kernels of
    composite operations join it (`mem_kernels`, `mem_attention`, `mem_masked_attention`). PyTorch's own gradients
    of convolutions and of binary cross entropy (`mem_gradients`) join each list.

    Args:
        sort: the algorithm that orders the program: a name of `thunder_mem.SORTS`, or your own
            function `(Graph) -> Sequence[int]`. An order that breaks a dependency is refused. Without this
            argument, the compile option ``mem_efficient_sort`` counts.
        chunk: run large loss heads in chunks, so that logits never exist whole. Chunks are as large as the
            rest of the program's peak allows. A `thunder_mem.ChunkLossHead` sets the chunks instead:
            ``chunk=ChunkLossHead(rows=1024, accumulate="input")``.
        tile: run stretches whose rows do not see each other, such as an MLP with its norm and its residual sum, a few
            rows at a time, so that their wide values never exist whole. By default where this repeats no work (inside
            checkpoints, or without a gradient), lowers the peak, and takes at most 1 % of the modelled time. With
            ``tile=Tiles(rows=2048)`` every possible stretch runs in tiles.
        budget: the most bytes that may be alive at once in the forward or the backward: an int, a size such
            as "40GiB", or "80%" of the device's memory. It includes arguments and results, but nothing
            outside the compiled function, such as an optimizer's state. If the free decisions do not
            suffice, the plan trades time for memory, cheapest first.
        recompute: values to recompute or to keep, beside the free decisions. Either a configuration
            ("Pattern:strategy:count,..." or "layerwise", a list, a dict, or the path of a JSON file; see
            `thunder_mem.user_choices.config.parse_config`), or a policy `(op, graph) -> "keep" | "recompute" |
            "offload" | "auto"` (see `thunder_mem.policies`). `thunder_mem.recompute_table` lists the patterns of a
            program. The default is the environment variable THUNDER_MEM_RECOMPUTE when this object is made.
        offload: under a budget, let values for the backward wait in the host's memory (pinned, for a GPU),
            where that is cheaper than recomputation, or where nothing else fits. True, or "only:PATTERN" for
            one pattern of `recompute_table`. Copies run beside other work.
        on_infeasible: "error" raises `BudgetError` if nothing fits the budget, "warn" compiles the
            smallest plan found, with the caller's loss counted if the peak is there.
        costs: the source of times for recomputation under a budget. "roofline" models them from shapes and
            dtypes. "measured" runs each operation once on this machine at compilation, and keeps its time in the
            user's cache folder. Copies to the host are modelled in both.
        reuse: let `mem_pointwise` regions write results over values that nobody reads any more.
            Under ``retain_graph=True`` values that autograd keeps are copied first.
        keep: with the loss inside, let the backward receive values of checkpoints instead of repeating them, where
            the program's peak or the budget has room. False where several forwards run before a backward: each adds
            what its backward receives.
        verify: check every plan (True) or none (False): the planned trace must compute the same values, with
            the same effects, as the original. By default all programs of up to 2,000 operations are
            verified, and a share of longer ones. A plan that fails is a failure of planning.
        strict: raise when planning fails. By default a warning names the cause, and the program is
            compiled as by Thunder alone.
        plan: a file of `thunder_mem.save_plan`: compile this plan or raise. Another program, other versions or
            options, and a plan that differs from the file are errors.
        optimizer: the backward updates each parameter of this optimizer when its gradient is complete, and the
            gradient's memory is free again. See `StepInBackward`.

    Raises:
        ValueError: `sort` is an unknown name, or `budget`, `recompute`, `offload`, `on_infeasible` or `costs` is none
            of the above; or `offload` is given without a budget.
        RecomputeError: at compilation: `recompute` names an operation that this program does not have, or one
            that must not be recomputed.
        BudgetError: at compilation: no plan fits the budget.
        MeasuringError: at compilation: `costs` is "measured" on one of several ranks, or under `simulate`.
        PlanFileError: `plan` is no plan file; at compilation: the file is for another program.
        TypeError: an argument of another type than documented.

    Example:
        >>> import torch, thunder
        >>> from thunder_mem import MemEfficient
        >>> f = thunder.jit(lambda x: (x * 2).sin().sum(), executors=[], transforms=[MemEfficient()])
        >>> f(torch.zeros(3)).item()
        0.0
    """

    plans = True

    def __init__(
        self,
        *,
        sort: str | SortFunction = "auto",
        chunk: bool | ChunkLossHead = True,
        tile: bool | Tiles = True,
        budget: int | str | None = None,
        recompute: Written | Policy | None = None,
        offload: bool | str = False,
        on_infeasible: str = "error",
        costs: str = "roofline",
        reuse: bool = True,
        keep: bool = True,
        verify: bool | None = None,
        strict: bool = False,
        plan: str | os.PathLike[str] | None = None,
        optimizer: StepInBackward | None = None,
    ) -> None:
        super().__init__()
        check_sort(sort)
        check_optimizer(optimizer)
        if not isinstance(chunk, bool | ChunkLossHead):
            raise TypeError(f"chunk is True or False, or a ChunkLossHead, not {quoted(chunk)}")
        if not isinstance(tile, bool | Tiles):
            raise TypeError(f"tile is True or False, or a Tiles, not {quoted(tile)}")
        if not isinstance(strict, bool):
            raise TypeError(f"strict is True or False, not {quoted(strict)}")
        if not isinstance(reuse, bool):
            raise TypeError(f"reuse is True or False, not {quoted(reuse)}")
        if not isinstance(keep, bool):
            raise TypeError(f"keep is True or False, not {quoted(keep)}")
        if not isinstance(verify, bool | None):
            raise TypeError(f"verify is True, False or None, not {quoted(verify)}")
        if budget is not None:
            parse_budget(budget)
        moved = parse_offload(offload)
        if moved is not None and budget is None:
            raise ValueError(
                f"offload={quoted(offload)} moves values to the host to fit a budget, and there is none: "
                "give budget=, too"
            )
        if on_infeasible not in ("error", "warn"):
            raise ValueError(f'on_infeasible is "error" or "warn", not {quoted(on_infeasible)}')
        if costs not in COSTS:
            raise ValueError(f"costs is {' or '.join(map(repr, COSTS))}, not {quoted(costs)}")
        self._options = PlanningOptions(
            sort=sort,
            strict=strict,
            budget=budget,
            recompute=from_environment() if recompute is None else _chooser(recompute),
            offload=moved,
            on_infeasible=on_infeasible,
            costs=costs,
            reuse=reuse,
            keep=keep,
            verify=verify,
        )
        self._chunk = chunk
        self._tile = tile
        watch_calls(_is_ours)
        mark_written()
        keep_written_out(_is_ours, WRITTEN_OUT | FUSED | WITH_MORE_ARGUMENTS)
        self._recompute = recompute
        self._plan = None if plan is None else read_plan(plan)
        self._offload = offload
        self._optimizer = optimizer

    @property
    def options(self) -> dict[str, Any]:
        """Every option as it was given, or its default; `plan` is a path."""
        others = {
            "chunk": self._chunk,
            "tile": self._tile,
            "recompute": self._recompute,
            "offload": self._offload,
            "plan": self._plan and self._plan.path,
            "optimizer": self._optimizer,
        }
        names = signature(MemEfficient).parameters
        return {name: others[name] if name in others else getattr(self._options, name) for name in names}

    @property
    def given(self) -> dict[str, Any]:
        """The options that are not the defaults, as they were given; without `plan`, whose file demands the others."""
        defaults = signature(MemEfficient).parameters
        return {k: v for k, v in self.options.items() if k != "plan" and v != defaults[k].default}

    def with_optimizer(self, optimizer: StepInBackward | None) -> MemEfficient:
        """The same transform for another optimizer, for callers that make the optimizer themselves."""
        check_optimizer(optimizer)
        other = copy(self)
        other._optimizer = optimizer
        return other

    @with_gradients_recorded
    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs
    ):
        register_missing()
        compile_data: Any = get_compile_data()
        self._is_alone_in(compile_data.transforms)
        if self._options.costs == "measured":
            check_measurable()
        prologue_trace, computation_trace, epilogue_trace = with_written_arguments(
            (prologue_trace, computation_trace, epilogue_trace), compile_data.compile_options, self._options
        )
        prologue_trace = with_unchecked_arguments(prologue_trace, compile_data)
        tag_shared_parameters(computation_trace.args, prologue_trace, compile_data.fn)
        tag_written_elsewhere(computation_trace.args, compile_data.fn)
        if waits_for_shards(self, compile_data.transforms, computation_trace):
            return (
                prologue_trace,
                prepared(computation_trace, prologue_trace, self._options, named=self._names_operations),
                epilogue_trace,
            )
        executors = with_own_executors(compile_data.executors_list)
        compile_data.executors_list = executors  # loops are differentiated with the gradients of the same kernels
        self._identify(computation_trace, self._asked(user_executors(executors)))
        as_written = computation_trace
        kernels, fused = mem_kernels_ex in executors, any(map(fuses_generally, executors))
        with stage("preparing writes, scalars and checkpoints"):
            computation_trace = ready = prepared(
                computation_trace,
                prologue_trace,
                self._options,
                named=self._names_operations,
                kernels=kernels,
                fused=fused,
            )
        options = self._options
        other = rewriting_after(self, compile_data.transforms)
        if self._chunk and other:
            computation_trace, reason = with_whole_heads(computation_trace, type(self).__name__, other)
            options = replace(options, refused=(Refusal("loss heads", reason),))
        elif self._chunk:
            with stage("cutting loss heads into chunks"):
                asked = self._chunk if isinstance(self._chunk, ChunkLossHead) else ChunkLossHead()
                computation_trace, options = chunked(computation_trace, asked, options, user_executors(executors))
        untiled, marks = strip_tile_marks(computation_trace)
        before_tiles, equal = options, EqualBlocks()
        if self._tile and not other:
            with stage("cutting stretches into tiles"):
                asked_tiles, plain = _tiles_of(self._tile), user_executors(executors)
                computation_trace, options = tiled(computation_trace, asked_tiles, options, plain, equal=equal)
        else:
            computation_trace = with_whole_stretches(computation_trace, type(self).__name__, other)
        options = composed(options, compile_data, computation_trace)
        options = with_optimizer(options, self._optimizer, computation_trace, prologue_trace, compile_data)
        later = behind(self, compile_data.transforms)
        original = whole = others = None
        if computation_trace is not ready:
            original = Original(prologue_trace, ready, epilogue_trace, later)
        loops = stretches_of(computation_trace)
        may_choose = self._tile and not other and not marks and _tiles_of(self._tile).rows == "auto"
        if may_choose and (loops or options.budget is not None or options.studied):
            before = Original(prologue_trace, untiled, epilogue_trace, later)
            whole = before if loops else None
            results = first_results(computation_trace)
            others = OtherTiles(before, _tiles_of(self._tile), before_tiles, executors, loops, results, equal)
        compile_data.executors_list = install_planner(executors, options, original, whole, others)
        prologue_trace = pruned(compile_data, prologue_trace, computation_trace, epilogue_trace)
        if epilogue_trace is not None and accepts_missing_tangents(compile_data.transforms):
            epilogue_trace = asks_for_none(epilogue_trace, computation_trace)
        if epilogue_trace is not None:
            epilogue_trace = detached(epilogue_trace, as_written, options)
        return prologue_trace, computation_trace, epilogue_trace

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs) -> TraceCtx | None:
        if self._plan is not None:
            self._plan.check_plan(*current_record())
        # Checked for traces of any length, because the check is cheap.
        final = computation_trace if self._options.verify is False else final_trace(computation_trace, self)
        if final is None or TraceTag.BACKWARD not in final.tags:
            return final if final is None or self._optimizer is None else with_forward_noted(final)
        if accepts_missing_tangents(get_compile_data().transforms):
            final = with_missing_tangents(final)
        return final if self._optimizer is None else with_tangents_seen(final)

    def _is_alone_in(self, transforms: Sequence[Transform]) -> None:
        """Refuse a second `MemEfficient` with other options: only the last one's options would count."""
        for other in transforms:
            if isinstance(other, MemEfficient) and repr(other) != repr(self):
                raise ValueError(f"one MemEfficient plans a program, with all options: not both {self} and {other}")

    def _identify(self, trace: TraceCtx, asked: dict[str, str]) -> None:
        """Record the program's digest, for plan files and for other ranks."""
        try:
            program = program_of(trace)
        except Exception as error:
            strict = self._options.strict or self._plan is not None
            left("this program without a digest, so it has no plan file", error, strict=strict, stacklevel=4)
            program = {"digest": "", "operations": len(trace.bound_symbols)}
        note_program(program, asked)
        if self._plan is not None:
            self._plan.check_program(program, asked)

    def _asked(self, executors: tuple) -> dict[str, str]:
        """The options that affect a plan, and the executors, as text."""
        options = {name: _as_text(value) for name, value in self.options.items() if name not in _NOT_IN_PLANS}
        if not callable(self._recompute):
            options["recompute"] = str(self._options.recompute)  # the environment's, too, and a file's contents
        if self._optimizer is not None:
            options["optimizer"] = type(self._optimizer.wrapped).__qualname__
        given = [e for e in executors if not isinstance(e, TemporaryExecutor)]
        return options | {"executors": ", ".join(str(e.name) for e in given)}

    @property
    def _names_operations(self) -> bool:
        options = self._options  # under a budget `BudgetError` names operations
        return options.recompute is not None or options.budget is not None or options.studied

    def __repr__(self) -> str:
        return f"thunder_mem.MemEfficient({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


def _as_text(option: Any) -> str:
    """An option as plan files have it: without quotes, and a function by its name, because addresses differ."""
    if isinstance(option, str):
        return option
    return getattr(option, "__qualname__", type(option).__qualname__) if callable(option) else repr(option)


def _tiles_of(asked: bool | Tiles) -> Tiles:
    return asked if isinstance(asked, Tiles) else Tiles()


def _chooser(recompute: Written | Policy) -> PartitionPolicy:
    if isinstance(recompute, str | os.PathLike | Mapping | list | tuple):
        return parse_config(recompute)
    if not callable(recompute):
        raise TypeError(f"recompute is a configuration or a policy (op, graph) -> Action, not {quoted(recompute)}")
    check_policy(recompute)
    return PolicyChooser(recompute)


def _is_ours(transform: Any) -> bool:
    return isinstance(transform, MemEfficient)
