"""Policies: functions that decide for each operation whether its results are kept or recomputed.

A policy is called as `policy(op, graph)` for every operation of the forward that allocates memory. It returns "keep",
"recompute", "offload" (keep in the host's memory) or "auto" (let the minimum cut decide, which recomputes for free).
`op` is an `OpInfo`, `graph` the `Graph` of the whole program. Some values to recompute depend only on values that must
not be recomputed (the mask of a dropout). The backward receives these in their smallest form instead.

As in JAX (`jax.checkpoint_policies`), policies are plain functions or frozen dataclasses with `__call__`,
and compose: the ready ones below are made by `first_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from fnmatch import fnmatchcase

from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, has_tags

from thunder_mem.memory.graph import Graph
from thunder_mem.partition.constraints import Constraints, RecomputeError
from thunder_mem.partition.min_cut_partition import saved_storages
from thunder_mem.rewrites.offload import offload_obstacle
from thunder_mem.runtime.repeatability import recompute_obstacle
from thunder_mem.semantics.effects import leaves
from thunder_mem.trace.origins import origin_of, source_of, symbol_name, word
from thunder_mem.trace.reading import TraceGraph
from thunder_mem.user_choices.layerwise import handed_between_layers

__all__ = [
    "Action",
    "OpInfo",
    "Policy",
    "PolicyChooser",
    "check_policy",
    "every_second_matmul",
    "first_of",
    "infos",
    "keep_everything",
    "offload_everything",
    "recompute_everything",
    "save_between_layers",
    "save_by_name",
    "save_only_attention_outputs",
    "save_only_matmul_outputs",
]


class Action(str, Enum):
    """The answer of a policy; plain strings also work."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    AUTO = "auto"


@dataclass(frozen=True)
class OpInfo:
    """An operation of the forward that allocates memory, as a policy sees it.

    Attributes:
        index: its place in `Graph.ops`.
        word: the name in patterns of its operation in the program: "Linear", "Gelu".
        symbol: its own name in the trace.
        module: path of its module, or "" if unknown.
        layer: number of the model's layer, or None.
        source: "file:line" of the user's call, or "".
        nbytes: bytes that it allocates.
        shapes, dtypes: of its results.
        needed: the backward uses its results.
        refusal: why it must never be recomputed (it draws random numbers, ...), or None.
        offload_refusal: why its largest result can never wait in the host's memory (the caller holds it, ...), or None.
        rank: the number of earlier operations of the same word in the forward; for matrix products, the
            number of earlier products.
        is_matmul: a matrix product or a convolution.
        is_attention: an attention kernel's forward.
        handed_on: it belongs to a layer, and its results are read outside that layer.
    """

    index: int
    word: str
    symbol: str
    module: str
    layer: int | None
    source: str
    nbytes: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    needed: bool
    refusal: str | None
    offload_refusal: str | None
    rank: int
    is_matmul: bool
    is_attention: bool
    handed_on: bool


Policy = Callable[[OpInfo, Graph], "Action | str"]


def infos(source: TraceGraph) -> tuple[OpInfo, ...]:
    """The operations of a joint trace as policies see them, in the order of the forward."""
    graph = source.graph
    saved, handed_on = saved_storages(graph), handed_between_layers(source)
    ranks: dict[object, int] = {}
    found = []
    for op, bsym in zip(graph.ops, source.bsyms, strict=True):
        if op.backward or not op.allocates:
            continue
        origin = origin_of(bsym)
        name = word(symbol_name(bsym.sym)) if origin is None else origin.word
        kind = "matmul" if _is_matmul(bsym) else name
        outs = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)]
        found.append(
            OpInfo(
                index=op.index,
                word=name,
                symbol=symbol_name(bsym.sym),
                module="" if origin is None else origin.module,
                layer=None if origin is None else origin.layer,
                source=source_of(bsym),
                nbytes=sum(graph.storages[s].nbytes for s in op.allocates),
                shapes=tuple(tuple(map(int, p.shape)) for p in outs),
                dtypes=tuple(str(p.dtype).removeprefix("thunder.dtypes.") for p in outs),
                needed=not saved.isdisjoint(op.allocates),
                refusal=recompute_obstacle(source, op.index),
                offload_refusal=offload_obstacle(source, max(op.allocates, key=lambda s: graph.storages[s].nbytes)),
                rank=ranks.get(kind, 0),
                is_matmul=_is_matmul(bsym),
                is_attention=_is_attention(bsym),
                handed_on=not handed_on.isdisjoint(op.allocates),
            )
        )
        ranks[kind] = ranks.get(kind, 0) + 1
    return tuple(found)


def _is_matmul(bsym: BoundSymbol) -> bool:
    return has_tags(bsym, {OpTags.MATMUL_OP}) or any(leaf.sym.name == "convolution" for leaf in (bsym, *leaves(bsym)))


def _is_attention(bsym: BoundSymbol) -> bool:
    name = bsym.sym.name
    return "scaled_dot_product" in name or "sdpa" in name or "attention" in name


@dataclass(frozen=True)
class PolicyChooser:
    """Applies a policy; see `PartitionPolicy`."""

    policy: Policy

    def __str__(self) -> str:
        return getattr(self.policy, "__qualname__", repr(self.policy))

    def choose(self, source: TraceGraph, rebuilt: frozenset[int]) -> Constraints:
        """The policy's answers as storages.

        Raises:
            RecomputeError: the policy fails, returns another answer, names an op that does not exist, or
                requests a value that must not be recomputed or moved to the host.
        """
        graph = source.graph
        ops = infos(source)
        keep: set[int] = set()
        again: set[int] = set()
        away: set[int] = set()
        for op in ops:
            action = self._ask(op, graph)
            if action is Action.KEEP:
                keep.update(graph.ops[op.index].allocates)
            elif action is Action.RECOMPUTE:
                if op.refusal is not None:
                    raise RecomputeError(f"{_label(op)} must not be computed again: {op.refusal}")
                again.update(graph.ops[op.index].allocates)
            elif action is Action.OFFLOAD:
                away.update(_offloaded(source, op))
        for part in _parts(self.policy):
            if isinstance(part, save_by_name):
                part.check(ops)
        drawn = _made_of_refused_alone(source, {op.index for op in ops if op.refusal is not None})
        return Constraints(
            frozenset(keep | away), frozenset(again - drawn), frozenset(again & drawn), offload=frozenset(away)
        )

    def _ask(self, op: OpInfo, graph: Graph) -> Action:
        try:
            answer = self.policy(op, graph)
        except Exception as error:
            raise RecomputeError(f"the policy fails for {_label(op)}: {type(error).__name__}: {error}") from error
        try:
            return Action(answer)
        except ValueError:
            known = ", ".join(repr(a.value) for a in Action)
            raise RecomputeError(f"the policy answers {answer!r} for {_label(op)}; the answers are {known}") from None


def _offloaded(source: TraceGraph, op: OpInfo) -> list[int]:
    """The results of an operation that can wait on the host; small ones, such as seeds, may stay."""
    if op.offload_refusal is not None:
        raise RecomputeError(f"{_label(op)} cannot be offloaded: {op.offload_refusal}")
    return [s for s in source.graph.ops[op.index].allocates if offload_obstacle(source, s) is None]


def _made_of_refused_alone(source: TraceGraph, refused: set[int]) -> set[int]:
    """The storages whose makers only read results of the refused ops, directly or through each other."""
    graph = source.graph
    made = {s for op in refused for s in graph.ops[op].allocates}
    found: set[int] = set()
    for op in graph.ops:
        if not op.backward and op.index not in refused and op.reads and (made | found).issuperset(op.reads):
            found.update(op.allocates)
    return found


def _label(op: OpInfo) -> str:
    where = op.module or op.source
    return f"{op.symbol} ({op.word}{f', {where}' if where else ''})"


def _parts(policy: Policy) -> Iterator[Policy]:
    yield policy
    if isinstance(policy, first_of):
        for part in policy.policies:
            yield from _parts(part)


def keep_everything(op: OpInfo, graph: Graph) -> Action:
    """The backward receives all values that it needs, without even free recomputation."""
    return Action.KEEP


def recompute_everything(op: OpInfo, graph: Graph) -> Action:
    """Recompute all values that may be recomputed; the minimum cut decides about the others."""
    return Action.AUTO if op.refusal is not None else Action.RECOMPUTE


def offload_everything(op: OpInfo, graph: Graph) -> Action:
    """Offload all values that may be offloaded; the minimum cut decides about the others."""
    return Action.AUTO if op.offload_refusal is not None else Action.OFFLOAD


def check_policy(policy: object) -> None:
    """Refuse an object that cannot be called as a policy.

    Raises:
        TypeError: it is a class (its parentheses were forgotten), or not callable.
    """
    if isinstance(policy, type):
        raise TypeError(f"{policy.__name__} is a class: write {policy.__name__}(...)")
    if not callable(policy):
        raise TypeError(
            f"a policy is a function (op, graph) -> 'keep', 'recompute', 'offload' or 'auto', not {policy!r}"
        )


@dataclass(frozen=True, init=False)
class first_of:
    """The answer of the first policy that has one: `first_of(save_by_name("*.attn"), recompute_everything)`.

    Raises:
        TypeError: an argument is no policy; see `check_policy`.
    """

    policies: tuple[Policy, ...]

    def __init__(self, *policies: Policy) -> None:
        for policy in policies:
            check_policy(policy)
        object.__setattr__(self, "policies", policies)

    def __repr__(self) -> str:
        return f"first_of({', '.join(getattr(p, '__qualname__', repr(p)) for p in self.policies)})"

    def __call__(self, op: OpInfo, graph: Graph) -> Action | str:
        for policy in self.policies:
            if (answer := policy(op, graph)) != Action.AUTO:
                return answer
        return Action.AUTO


def _matmul_outputs(op: OpInfo, graph: Graph) -> Action:
    return Action.KEEP if op.is_matmul else Action.AUTO


def _attention_outputs(op: OpInfo, graph: Graph) -> Action:
    return Action.KEEP if op.is_attention else Action.AUTO


def _first_of_two_matmuls(op: OpInfo, graph: Graph) -> Action:
    return Action.KEEP if op.is_matmul and op.rank % 2 == 0 else Action.AUTO


def save_between_layers(op: OpInfo, graph: Graph) -> Action:
    """Keep the values that each layer passes to the next, so that layers are recomputed one at a time."""
    return Action.KEEP if op.handed_on else Action.AUTO


save_only_matmul_outputs: Policy = first_of(_matmul_outputs, recompute_everything)
"""Keep the results of matrix products and convolutions; recompute everything else."""

save_only_attention_outputs: Policy = first_of(_attention_outputs, recompute_everything)
"""Keep what attention kernels make, which is costly; compute everything else again. Everything: without what
layers hand on, the last layer's backward runs the whole forward again, and what earlier layers need of that waits
for them. `first_of(save_between_layers, save_only_attention_outputs)` does one layer at a time."""

every_second_matmul: Policy = first_of(_attention_outputs, _first_of_two_matmuls, recompute_everything)
"""Keep attention and the first of every two products of matrices; compute everything else again, as
torchtitan's selective checkpointing does."""


@dataclass(frozen=True, init=False)
class save_by_name:
    """Keep the results of the named parts of the program, and leave the rest to other policies.

    Args:
        names: each the path of a module ("transformer.h.0.mlp", with * and ? as in file names: "*.attn"), which
            covers all operations inside; or a word of patterns ("Gelu" or "Gelu+"); or, if the trace has no
            modules, a source line ("model.py:120").

    Raises:
        RecomputeError: at compilation: a name has no match.

    Example:
        >>> keeps_mlps = first_of(save_by_name("h.*.mlp"), recompute_everything)
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        if not names or not all(isinstance(name, str) and name for name in names):
            raise TypeError(f"save_by_name takes names of modules or operations, or lines of source, not {names!r}")
        object.__setattr__(self, "names", names)

    def __repr__(self) -> str:
        return f"save_by_name({', '.join(map(repr, self.names))})"

    def __call__(self, op: OpInfo, graph: Graph) -> Action:
        return Action.KEEP if any(_is_named(op, name) for name in self.names) else Action.AUTO

    def check(self, ops: Sequence[OpInfo]) -> None:
        """Raise `RecomputeError`, listing near names, if a name matches none of the operations."""
        for name in self.names:
            if not any(_is_named(op, name) for op in ops):
                known = sorted({n for op in ops for n in (*_enclosing(op.module), op.word, _short(op.source)) if n})
                near = get_close_matches(name, known, n=5, cutoff=0.4) or known[:20]
                raise RecomputeError(f"{name!r} names nothing in this program; near it are {', '.join(near)}")


def _is_named(op: OpInfo, name: str) -> bool:
    if name.removesuffix("+") == op.word or (op.source and op.source.endswith(name) and ":" in name):
        return True
    return any(fnmatchcase(path, name) for path in _enclosing(op.module))


def _enclosing(module: str) -> list[str]:
    """The module's path and those of all modules around it."""
    parts = module.split(".") if module else []
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _short(source: str) -> str:
    return source.rpartition("/")[2]
