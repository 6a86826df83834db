"""Check that all ranks plan and communicate alike, when a program is compiled.

Ranks that start different collectives, or the same ones in another order, hang or mix up their data. Every rank
publishes hashes of its collectives, its program and its plan in the store of the process groups, and reads the others'
hashes. This all-gather has a timeout, and cannot be mistaken for a collective of a rank that does not compile. Ranks
that differ then publish the texts behind the hashes, so that all of them name the same first difference.

Plans are compared only between equal programs: a rank with another batch size may have another plan, but communicates
like the others. A function is checked at its first compilation, which happens on all ranks at once. Later it is checked
only if it would communicate in a new way. A rank that compiles it for another batch size communicates as before, so the
others need not wait.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import combinations
from typing import Any
from weakref import WeakKeyDictionary

import torch
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from torch import distributed
from torch.distributed import distributed_c10d

from thunder_mem.memory.plan import Plan, differing_part, plan_json
from thunder_mem.semantics.collectives import group_inside, group_of, starts

__all__ = ["RanksDifferError", "Schedule", "agree", "first_difference", "schedule_of"]


class RanksDifferError(RuntimeError):
    """Ranks would start different collectives, or plan one program differently; the first difference is named."""


@dataclass(frozen=True)
class Schedule:
    """The collectives of a program.

    Attributes:
        steps: one line for each collective, in the order in which they start.
        groups: the process groups that they use, in the order of first use.
    """

    steps: tuple[str, ...]
    groups: tuple[torch.distributed.ProcessGroup, ...]

    @property
    def digest(self) -> str:
        """A hash of the steps."""
        return _digest("\n".join(self.steps))


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
    if group_inside(bsym) is not None:
        plan = bsym.args[0].plan
        how += f", in {plan.chunks} chunks of {plan.chunk_rows} rows, {plan.block_rows} at once"
    members = f" over ranks {distributed.get_process_group_ranks(group)}" if group is not None else ""
    return f"{name} of {given}{how}{members}"


def first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[int, str, str]:
    """The first step that differs, and its text here and there; "nothing" if one of them has ended.

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
    """The agreements between the ranks of one process world, and the number of checks of each group."""

    world: Any
    known: WeakKeyDictionary[Any, set[str]] = field(default_factory=WeakKeyDictionary)  # per compiled function
    asked: dict[str, int] = field(default_factory=dict)


_agreements = _Agreements(None)


def agree(trace: TraceCtx, function: object, plan: Plan | None = None, program: str = "") -> None:
    """Check that all ranks that this program communicates with communicate and plan alike.

    The check waits for other ranks up to the store's timeout (`torch.distributed.init_process_group(timeout=...)`).

    Args:
        trace: the trace to run, plain or joint.
        function: the compiled function, the same object for all its compilations (Thunder's `CompileData`).
        plan: the plan of `trace`; None if planning failed.
        program: the digest of the program; "" if it has none.

    Raises:
        RanksDifferError: on all ranks of a group, if one of them differs or does not answer.
    """
    global _agreements
    schedule = schedule_of(trace)
    groups = [g for g in schedule.groups if g.size() > 1 and distributed.get_backend(g) != "fake"]
    if not groups:
        return
    world = distributed.group.WORLD
    if _agreements.world is not world:  # the process groups are new
        _agreements = _Agreements(world)
    known = _agreements.known.setdefault(function, set())
    if schedule.digest in known:
        return
    words = {"steps": schedule.steps, "plan": {} if plan is None else plan_json(plan)}
    hashes = _Hashes(schedule.digest, program, _digest(json.dumps(words["plan"], sort_keys=True)))
    for group in groups:
        _ask(group, hashes, words)
    known.add(schedule.digest)


@dataclass(frozen=True)
class _Hashes:
    """The hashes that a rank publishes before it runs."""

    communication: str
    program: str
    plan: str

    def contradicts(self, other: _Hashes) -> bool:
        """Whether ranks with these two must not run together."""
        return self.communication != other.communication or (self.program == other.program and self.plan != other.plan)


def _ask(group: torch.distributed.ProcessGroup, mine: _Hashes, words: Mapping[str, Any]) -> None:
    store = distributed_c10d._get_default_store()
    name, me = group.group_name, distributed.get_rank()
    turn = _agreements.asked.get(name, 0)
    _agreements.asked[name] = turn + 1
    members = distributed.get_process_group_ranks(group)

    def key(rank: int, turn: int = turn) -> str:
        return f"thunder_mem/{name}/{turn}/{rank}"

    def read(key: str, rank: int) -> Any:
        try:
            return json.loads(store.get(key))
        except RuntimeError as error:
            steps = words["steps"]
            raise RanksDifferError(
                f"rank {rank} compiles nothing that communicates as rank {me} is about to ({len(steps)} "
                f"collectives, first {steps[0]}): it failed, or runs another program"
            ) from error

    store.set(key(me), json.dumps(astuple(mine)))
    if turn > 1:  # all ranks are at the last turn, so all have read the turn before
        store.delete_key(key(me, turn - 2))
    hashes = {rank: mine if rank == me else _Hashes(*read(key(rank), rank)) for rank in members}
    pairs = ((a, b) for a, b in combinations(members, 2) if hashes[a].contradicts(hashes[b]))
    if (pair := next(pairs, None)) is None:
        return
    store.set(f"{key(me)}/words", json.dumps(words))
    a, b = pair
    said = [words if rank == me else read(f"{key(rank)}/words", rank) for rank in pair]
    if hashes[a].communication != hashes[b].communication:
        step, here, there = first_difference(said[0]["steps"], said[1]["steps"])
        raise RanksDifferError(
            "ranks would communicate differently, and hang or mix up their data: "
            f"collective {step} is {here} on rank {a} and {there} on rank {b}"
        )
    difference = differing_part(said[0]["plan"], said[1]["plan"])
    assert difference is not None  # as the hashes differ
    what, here, there = difference
    raise RanksDifferError(
        f"ranks have other plans for the same program: {what} is {here} on rank {a} and {there} on rank {b}; "
        "give all ranks the same options, and devices with the same memory"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
