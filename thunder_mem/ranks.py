"""Do all ranks communicate alike? Asked when a program is compiled, and again only for what is new.

Ranks that start different collectives, or the same in another order, hang or mix up their data. Every
rank publishes what its program is about to communicate, as a hash and as words, in the store through which the
process groups were set up, and reads what the others publish: an all-gather that has a timeout, and
that cannot be mistaken for a collective of a rank that does not compile. A function is asked about when
it is compiled for the first time, which is on all ranks at once, and then only if it would communicate in a new
way: a rank that compiles it for a batch of another size communicates as before, and the others need not wait.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from torch import distributed
from torch.distributed import distributed_c10d

from thunder_mem.communication import group_of, starts

__all__ = ["RanksDifferError", "Schedule", "agree", "first_difference", "schedule_of"]


class RanksDifferError(RuntimeError):
    """Ranks would start different collectives; says which step is the first to differ, and between whom."""


@dataclass(frozen=True)
class Schedule:
    """What a program communicates.

    Attributes:
        steps: one line for each collective, in the order in which they start.
        groups: the process groups that they use, in the order of first use.
    """

    steps: tuple[str, ...]
    groups: tuple[torch.distributed.ProcessGroup, ...]

    @property
    def digest(self) -> str:
        """A hash of the steps."""
        return hashlib.sha256("\n".join(self.steps).encode()).hexdigest()


def schedule_of(trace: TraceCtx) -> Schedule:
    """The collectives of a trace (plain, or joint: the forward's before the backward's)."""
    steps: list[str] = []
    groups: dict[int, torch.distributed.ProcessGroup] = {}
    for bsym in trace.bound_symbols:
        if starts(bsym):
            if (group := group_of(bsym)) is not None:
                groups.setdefault(id(group), group)
            steps.append(_in_words(bsym, group))
    return Schedule(tuple(steps), tuple(groups.values()))


def _in_words(bsym: BoundSymbol, group: torch.distributed.ProcessGroup | None) -> str:
    name = bsym.sym.name.removeprefix("torch_").removesuffix("_prim_impl")
    given = ", ".join(
        f"{p.dtype.shortname()}{list(map(int, p.shape))}"
        for p in bsym.flat_proxy_args
        if isinstance(p, TensorProxy | FutureTensorProxy)
    )
    how = "".join(f", {a.name}" for a in bsym.flat_args if type(a).__name__ == "DistributedReduceOps")
    members = f" over ranks {distributed.get_process_group_ranks(group)}" if group is not None else ""
    return f"{name} of {given}{how}{members}"


def first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[int, str, str]:
    """The first step that differs, and what it is here and there; "nothing" where one of them has ended.

    Example:
        >>> first_difference(["all_gather of f32[4]"], ["all_gather of f32[4]", "all_reduce of f32[2]"])
        (1, 'nothing', 'all_reduce of f32[2]')
    """
    for i in range(max(len(mine), len(theirs))):
        here = mine[i] if i < len(mine) else "nothing"
        there = theirs[i] if i < len(theirs) else "nothing"
        if here != there:
            return i, here, there
    raise ValueError("they do not differ")


@dataclass
class _Agreements:
    """What the ranks of one process world agreed on, and how often each group was asked."""

    world: Any
    known: WeakKeyDictionary[Any, set[str]] = field(default_factory=WeakKeyDictionary)  # per compiled function
    asked: dict[str, int] = field(default_factory=dict)


_agreements = _Agreements(None)


def agree(trace: TraceCtx, function: object) -> None:
    """Make sure that all ranks that this program communicates with are about to communicate alike.

    Waits for the other ranks as long as the store does (the `timeout` of `torch.distributed.init_process_group`).

    Args:
        trace: what is about to run, plain or joint.
        function: what is compiled, the same object for all its compilations (Thunder's `CompileData`).

    Raises:
        RanksDifferError: on all ranks of a group, if one of them differs or does not answer.
    """
    global _agreements
    schedule = schedule_of(trace)
    groups = [g for g in schedule.groups if g.size() > 1 and distributed.get_backend(g) != "fake"]
    if not groups:
        return
    world = distributed.group.WORLD
    if _agreements.world is not world:  # groups were set up anew
        _agreements = _Agreements(world)
    known = _agreements.known.setdefault(function, set())
    if schedule.digest in known:
        return
    for group in groups:
        _ask(group, schedule)
    known.add(schedule.digest)


def _ask(group: torch.distributed.ProcessGroup, schedule: Schedule) -> None:
    store = distributed_c10d._get_default_store()
    name, me = group.group_name, distributed.get_rank()
    turn = _agreements.asked.get(name, 0)
    _agreements.asked[name] = turn + 1
    members = distributed.get_process_group_ranks(group)

    def key(rank: int, turn: int = turn) -> str:
        return f"thunder_mem/{name}/{turn}/{rank}"

    store.set(key(me), json.dumps([schedule.digest, schedule.steps]))
    if turn > 1:  # that all are at the last turn says that all have read the one before
        store.delete_key(key(me, turn - 2))
    differs: list[str] = []
    for rank in members:
        if rank == me:
            continue
        try:
            digest, steps = json.loads(store.get(key(rank)))
        except RuntimeError as error:
            raise RanksDifferError(
                f"rank {rank} compiles nothing that communicates as rank {me} is about to ({len(schedule.steps)} "
                f"collectives, first {schedule.steps[0]}): it failed, or runs another program"
            ) from error
        if digest != schedule.digest:
            step, here, there = first_difference(schedule.steps, steps)
            differs.append(f"collective {step} is {here} on rank {me} and {there} on rank {rank}")
    if differs:
        raise RanksDifferError(f"ranks would communicate differently, and hang or mix up their data: {differs[0]}")
