"""Real Thunder traces of small functions, and running them one bound symbol at a time.

`unfused` gives the trace that fusion passes get: the joint trace of a function with gradients, else the
plain one, every fusible operation still open. `run` executes any such trace on real tensors and keeps
them all, so that PyTorch itself says who shares memory with whom.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import thunder
import torch
from thunder.core import prims
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten_with_dataclass
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.executors.passes import _transform_for_operator_executor_execution
from thunder.extend import FusionExecutor, get_always_executors

from tests.fuzzing.quick import directly_traced
from tests.programs.generate import Profile, generate, materialise
from tests.programs.programs import function, source
from thunder_mem.memory.graph import Graph
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex

__all__ = [
    "Run",
    "Traced",
    "body",
    "claimed",
    "ordered",
    "replaced",
    "run",
    "traced_programs",
    "unfused",
]


class _Captured(Exception):
    """Carries the trace out of the compilation, which then need not go on."""


class _Capture(FusionExecutor):
    """Takes what `mem_pointwise` takes, so that it stays open; ends the compilation at its fusion pass."""

    def __init__(self) -> None:
        super().__init__("capture", version="0")

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        return mem_pointwise_ex.can_fuse(bsym)

    def fuse(self, region, fusion_counter):
        raise NotImplementedError

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        raise _Captured(trace)


def unfused(fn: Callable, *args: object, executors: Sequence = (), **options: object) -> TraceCtx:
    """The plain or joint trace of `fn(*args)`, as fusion passes get it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            thunder.jit(fn, executors=[*executors, _Capture()], **options)(*args)
        except _Captured as captured:
            return captured.args[0]
    raise AssertionError("Thunder called no fusion pass")


def claimed(trace: TraceCtx, executors: Sequence = ()) -> TraceCtx:
    """The trace in which PyTorch runs every bound symbol that none of `executors` takes."""
    return _transform_for_operator_executor_execution(trace, (*executors, *get_always_executors()))


def body(trace: TraceCtx) -> list[BoundSymbol]:
    """What the trace does, without its `del`s and its return."""
    return [b for b in trace.bound_symbols if b.sym.id not in (PrimIDs.DEL, PrimIDs.RETURN)]


def replaced(trace: TraceCtx, bsyms: Sequence[BoundSymbol]) -> TraceCtx:
    """`trace` with other bound symbols."""
    new = from_trace(trace)
    new.bound_symbols = list(bsyms)
    return new


@dataclass
class Run:
    """What happened as a trace ran.

    Attributes:
        tensors: every tensor by its name in the trace; none of them was freed.
        wrote: per bound symbol of the trace as PyTorch ran it, the storages that it overwrote.
        drew: the same, whether it advanced the random state of the CPU.
        returned: clones of the tensors that the trace returns, taken at its end.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    wrote: list[set[int]] = field(default_factory=list)
    drew: list[bool] = field(default_factory=list)
    returned: list[torch.Tensor] = field(default_factory=list)

    def storage(self, name: str) -> int:
        return self.tensors[name].untyped_storage()._cdata

    def nbytes(self, name: str) -> int:
        return self.tensors[name].untyped_storage().nbytes()


def run(trace: TraceCtx, inputs: Mapping[str, torch.Tensor], seed: int = 0) -> Run:
    """Run a plain or joint trace on clones of `inputs`, claimed or not, tangents drawn by their names.

    For a claimed trace, `wrote` and `drew` have one entry per bound symbol of `body(trace)`.
    """
    known = [p for p in _proxies(trace) if isinstance(p, TensorProxy)]
    returned = [p for p in trace.bound_symbols[-1].flat_proxy_args if isinstance(p, TensorProxy)]
    # Claiming may rename; what the names as they were stand for is returned, in this order.
    asking = replaced(trace, body(trace))
    with tracectx(asking):
        prims.python_return([*known, *returned])
    asking = claimed(asking)
    arguments = [p.name for p in trace.args if isinstance(p, TensorProxy)]
    env: dict = asking.python_ctx() | {"torch": torch}
    env |= zip(arguments, _clones([inputs[name] for name in arguments]), strict=True)
    record = Run()
    torch.manual_seed(seed)
    with torch.no_grad(), tracectx(asking):
        for b in asking.bound_symbols[:-1]:
            state = torch.get_rng_state()
            before = [(t, t._version) for t in env.values() if isinstance(t, torch.Tensor)]
            _step(b, env)
            record.wrote.append({t.untyped_storage()._cdata for t, version in before if t._version != version})
            record.drew.append(not torch.equal(torch.get_rng_state(), state))
    answers = [env[p.name] for p in asking.bound_symbols[-1].flat_args]
    record.tensors = {p.name: t for p, t in zip(known, answers[: len(known)], strict=True)}
    record.returned = [t.clone() for t in answers[len(known) :]]
    return record


def _step(b: BoundSymbol, env: dict) -> None:
    if b.sym == prims.get_grad:
        out = b.output
        generator = torch.Generator().manual_seed(zlib.crc32(out.name.encode()))
        env[out.name] = torch.randn(out.shape, generator=generator).to(to_torch_dtype(out.dtype))
        return
    lines = [line for line in b.python(indent=0, print_depth=1) if not line.lstrip().startswith("#")]
    env.update(b._object_ctx)
    exec("\n".join(lines), env)


def _clones(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the inputs' strides that share memory where the inputs do."""
    copies: dict[int, torch.UntypedStorage] = {}
    result = []
    for t in inputs:
        t = t.detach()
        storage = copies.setdefault(t.untyped_storage()._cdata, t.untyped_storage().clone())
        result.append(torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride()))
    return result


def _proxies(trace: TraceCtx) -> list[Proxy]:
    flat, _ = tree_flatten_with_dataclass((trace.args, trace.kwargs))
    found = [x for x in flat if isinstance(x, Proxy)]
    for b in trace.bound_symbols:
        found += [*b.flat_proxy_args, *b.flat_proxy_outs]
    return list({p.name: p for p in found}.values())


def ordered(graph: Graph) -> list[set[int]]:
    """Per op, every op that must run before it, through however many edges."""
    before: list[set[int]] = []
    for predecessors in graph.predecessors:
        before.append(set(predecessors).union(*(before[p] for p in predecessors)))
    return before


@dataclass(frozen=True)
class Traced:
    """A program, its unfused trace, its inputs by name, and what happened when the trace ran."""

    text: str
    trace: TraceCtx
    inputs: dict[str, torch.Tensor]
    run: Run


def traced_programs(count: int, profile: Profile, seed: int = 0) -> list[Traced]:
    """The first `count` random programs, from `seed` on, that Thunder can trace and run."""
    found: list[Traced] = []
    while len(found) < count:
        program = generate(Random(seed), profile)
        seed += 1
        inputs = materialise(program.inputs)
        try:
            with directly_traced():
                trace = unfused(function(source(program)), *materialise(program.inputs).values())
            found.append(Traced(source(program), trace, inputs, run(trace, inputs)))
        except Exception:  # whatever Thunder cannot trace, or traces into what does not run
            continue
    return found
