"""Run a final trace on fake tensors, one bound symbol at a time, and record its storages.

Fake tensors have shapes, strides and storages but no data. So views, copies, in-place updates and `del`s have exactly
their real effect on memory, at no cost in memory. The ledger follows a storage by weak reference: it is alive as long
as any tensor of the trace uses it.

Fake tensors do not show the memory that a kernel allocates and frees inside one call. A `Runner` (see `scratch.py`)
supplies it separately.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import CollectionProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.torchex import no_autocast
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from thunder_mem.memory.device_bytes import host_bytes
from thunder_mem.optimizer.update import finishes_update, is_update, rehearsal_now, rehearsed
from thunder_mem.runtime.allocation_watch import DEATHS_ARE_TOLD
from thunder_mem.runtime.host_transfers import is_transfer
from thunder_mem.semantics.op_traits import traits_of
from thunder_mem.trace.source_lines import place_of

__all__ = ["Block", "Event", "Ledger", "PredictionError", "Ran", "Runner", "replay"]

_LOG = logging.getLogger(FakeTensorMode.__module__)
_BOOKKEEPING = (
    PrimIDs.UNPACK_TRIVIAL,
    PrimIDs.UNPACK_SEQUENCE,
    PrimIDs.UNPACK_KEY,
    "clear_mutable_collection",
    PrimIDs.COMMENT,
    PrimIDs.DEL,
    PrimIDs.RETURN,
)


class PredictionError(RuntimeError):
    """A program's memory cannot be predicted; the message names the bound symbol and the reason."""


@dataclass(frozen=True, slots=True)
class Event:
    """One operation and the bytes alive while it runs.

    Attributes:
        index: position in the timeline, over all phases.
        phase: "forward", "backward", or a stage of a training step ("loss", "optimizer", ...).
        name: of the operation, as the trace prints it.
        outputs: names of the tensors it makes.
        source: "file:line" of the user's code, a module's name if only PyTorch calls it, or "".
        live_bytes: all storages alive while it runs, including its outputs and the caller's tensors.
        allocated_bytes: new storages that outlive it.
        scratch_bytes: further bytes that it holds only while it runs.
        host_bytes: offloaded values and optimizer states in the host's memory; no other figure includes them.
        launches: kernels that it starts on a GPU; 0 on a CPU, where they are not counted.
        bsym: the bound symbol, or None without a trace (an eager loss, an optimizer).
    """

    index: int
    phase: str
    name: str
    outputs: tuple[str, ...] = ()
    source: str = ""
    live_bytes: int = 0
    allocated_bytes: int = 0
    scratch_bytes: int = 0
    host_bytes: int = 0
    launches: int = 0
    bsym: BoundSymbol | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True)
class Block:
    """One storage: its size, its tensors, and its lifetime.

    Attributes:
        nbytes: bytes of the whole storage.
        names: every tensor on it, in order.
        shape, dtype, device: of that first tensor.
        kind: "argument", "tangent" or "computed"; in a training step also "parameter",
            "optimizer state" and "gradient".
        held: the caller holds it throughout, from before the first event.
        born: index of the event that made it; -1 if it existed before the first.
        last: index of the last event in which it was alive; None while alive.
    """

    nbytes: int
    names: list[str]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kind: str
    born: int
    last: int | None = None
    held: bool = False


class Ran(NamedTuple):
    """Facts about an operation that fake tensors do not show: its scratch, and the kernels that it starts on a GPU."""

    scratch_bytes: int
    launches: int = 0


class _Followed(NamedTuple):
    """A storage that is alive, or was at the last sweep.

    The weak reference to it keeps its key from being used again. The notice is a second one: PyTorch keeps one Python
    object for each storage, whose death is the storage's.
    """

    storage: StorageWeakRef
    block: Block
    notice: weakref.ref[torch.UntypedStorage] | None


class Runner(Protocol):
    """Runs one operation on fake tensors and returns its scratch, see `scratch.py`."""

    def __call__(self, bsym: BoundSymbol, run: Callable[[dict[str, Any]], Any], env: dict[str, Any]) -> Ran:
        """Give `env` the outputs of `bsym`, as `run(env)` does."""
        ...


class Ledger:
    """Storages that are alive, by weak reference, and the events so far.

    Attributes:
        device_types: "cpu", "cuda": storages elsewhere are not counted.
        live_bytes: the sum of all that are alive.
    """

    def __init__(self, *device_types: str) -> None:
        self.device_types = device_types
        self.events: list[Event] = []
        self.blocks: list[Block] = []
        self.live_bytes = 0
        self._ignored: dict[int, StorageWeakRef] = {}
        self._on_host: dict[int, tuple[StorageWeakRef, int]] = {}
        self._alive: dict[int, _Followed] = {}
        self._died: set[int] = set()
        self._refs: dict[int, int] = {}

    def add(self, name: str, tensor: torch.Tensor, kind: str, *, held: bool = False) -> int:
        """Record that `name` is `tensor`; return the new bytes."""
        if tensor.device.type not in self.device_types or tensor.layout is not torch.strided:
            return 0
        storage = tensor.untyped_storage()
        if storage._cdata in self._ignored:
            return 0
        known = self._alive.get(storage._cdata)
        if known is not None:
            if name not in known.block.names:
                known.block.names.append(name)
            return 0
        born = -1 if held else len(self.events)
        block = Block(storage.nbytes(), [name], tuple(tensor.shape), tensor.dtype, tensor.device, kind, born, held=held)
        self._follow(storage, block)
        self.blocks.append(block)
        self.live_bytes += block.nbytes
        return block.nbytes

    def link(self, tensor: torch.Tensor, block: Block) -> None:
        """Let `tensor` also stand for `block`: the block lives as long as any tensor that stands for it."""
        if tensor.untyped_storage()._cdata not in self._alive:
            self._follow(tensor.untyped_storage(), block)

    def ignore(self, tensor: torch.Tensor) -> None:
        """Never count the storage of `tensor`."""
        storage = tensor.untyped_storage()
        self._ignored[storage._cdata] = StorageWeakRef(storage)

    def add_host(self, tensor: torch.Tensor, device: str) -> None:
        """Record host memory for a device's value, which is counted separately."""
        self.ignore(tensor)
        storage = tensor.untyped_storage()
        self._on_host[storage._cdata] = (StorageWeakRef(storage), host_bytes(storage.nbytes(), device))

    def host_bytes(self) -> int:
        """The offloaded bytes that are still on the host."""
        self._on_host = {key: entry for key, entry in self._on_host.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self._on_host.values())

    def _follow(self, storage: torch.UntypedStorage, block: Block) -> None:
        key, died = storage._cdata, self._died
        # The caller's storages cannot die.
        notice = None if block.held else weakref.ref(storage, lambda _: died.add(key))
        self._alive[key] = _Followed(StorageWeakRef(storage), block, notice)
        self._refs[id(block)] = self._refs.get(id(block), 0) + 1

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The live block of `tensor`, if this ledger has it."""
        known = self._alive.get(tensor.untyped_storage()._cdata)
        return None if known is None else known.block

    def keys(self, values: Iterable[Any]) -> list[int]:
        """The argument of `sweep` if only the tensors among `values` may have died."""
        return [v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided]

    def sweep(self, keys: Iterable[int] | None = None) -> int:
        """Drop the storages (of `keys`, by default all) without live tensors; return the bytes freed.

        It looks only at `keys`, or at the storages that died since they were last looked at; where PyTorch does not
        tell, at all.
        """
        if keys is None:
            candidates = set(self._died if DEATHS_ARE_TOLD else self._alive)
        else:
            candidates = set(keys)
        dead = [key for key in candidates if key in self._alive and self._alive[key].storage.expired()]
        self._died.difference_update(dead)
        freed_bytes = 0
        for key in dead:
            block = self._alive.pop(key).block
            self._refs[id(block)] -= 1
            if not self._refs[id(block)]:
                block.last = len(self.events) - 1
                freed_bytes += block.nbytes
        self.live_bytes -= freed_bytes
        return freed_bytes

    def record(self, phase: str, name: str, **details: Any) -> Event:
        """Append an event at the present number of live bytes."""
        host_bytes = self.host_bytes() if self._on_host else 0
        event = Event(len(self.events), phase, name, live_bytes=self.live_bytes, host_bytes=host_bytes, **details)
        self.events.append(event)
        return event


def replay(
    trace: TraceCtx, inputs: Sequence[Any], mode: FakeTensorMode, ledger: Ledger, phase: str, runner: Runner
) -> Any:
    """Run `trace` on fake `inputs` under `mode`, and record every operation in `ledger`.

    Args:
        trace: a final trace, with its `del`s.
        inputs: one value for each of the trace's arguments, in order. This function drops them as the trace
            does, so the caller must keep other references to values that it holds.
        mode: the mode the fake tensors belong to.
        ledger: has the inputs' storages already (`Ledger.add`).
        phase: the phase's name in the events.
        runner: runs each operation.

    Returns:
        The trace's result.

    Raises:
        PredictionError: an operation that does not run on fake tensors.
    """
    names = [name for name, _ in trace.siginfo().args]
    if len(names) != len(inputs):
        raise PredictionError(f"the {phase} trace takes {len(names)} arguments, but {len(inputs)} were given")
    env = trace.python_ctx()
    env["torch"] = torch
    env.update(zip(names, inputs, strict=True))
    del inputs

    @torch.no_grad()
    @no_autocast
    def run_all() -> Any:
        result = None
        with mode, _without_logs(), tracectx(trace), rehearsed(rehearsal_now()):
            for bsym in cast(list[BoundSymbol], trace.bound_symbols):
                result = _step(bsym, env, ledger, phase, runner)
        return result

    return run_all()


@contextmanager
def _without_logs() -> Iterator[None]:
    """Without PyTorch's log of an operation that fails on fake tensors: the error says the same in one line."""
    before, _LOG.disabled = _LOG.disabled, True
    try:
        yield
    finally:
        _LOG.disabled = before


def _step(bsym: BoundSymbol, env: dict[str, Any], ledger: Ledger, phase: str, runner: Runner) -> Any:
    run = _executable(bsym)
    env.update(bsym._object_ctx)  # printing names the objects that the line refers to, anew each time
    if run is None:
        return None
    unnamed = ledger.keys(
        (env.get("_"),)
    )  # a cotangent that nothing uses lives until the next line that assigns to "_"
    if bsym.sym.id in _BOOKKEEPING:
        # A storage dies only where a name is dropped; looking at those names alone keeps long traces linear.
        dropped = ledger.keys(env.get(p.name) for p in bsym.flat_proxy_args) if bsym.sym.id is PrimIDs.DEL else None
        result = run(env)
        if bsym.sym.id in (PrimIDs.DEL, "clear_mutable_collection"):
            ledger.sweep(dropped)
        elif unnamed:
            ledger.sweep(unnamed)
        return result
    try:
        ran = runner(bsym, run, env) if not is_transfer(bsym) else _transfer(bsym, run, env, ledger)
    except Exception as error:
        raise PredictionError(
            f"cannot follow the memory of {bsym.sym.name} ({place_of(bsym) or 'no source line'}): "
            f"{type(error).__name__}: {error}"
        ) from error
    if is_update(bsym) and rehearsal_now().waits:
        ran = Ran(0)
    outputs = _tensor_outputs(bsym, env)
    allocated_bytes = sum(ledger.add(name, tensor, "computed") for name, tensor in outputs)
    ledger.record(
        phase,
        _name(bsym),
        outputs=tuple(name for name, _ in outputs),
        source=place_of(bsym),
        allocated_bytes=allocated_bytes,
        scratch_bytes=ran.scratch_bytes,
        launches=ran.launches,
        bsym=bsym,
    )
    if finishes_update(bsym):
        rehearsal_now().finish()
    if unnamed:
        ledger.sweep(unnamed)
    return None


def _transfer(bsym: BoundSymbol, run: Callable[[dict[str, Any]], Any], env: dict[str, Any], ledger: Ledger) -> Ran:
    """Run a copy to the host or back, which needs only its two ends; bytes on the host are counted separately."""
    run(env)
    for name, device in traits_of(bsym).on_host(bsym).items():
        ledger.add_host(env[name], device)
    return Ran(0)


def _name(bsym: BoundSymbol) -> str:
    """As the trace prints it; Thunder puts "torch." also before the names of `torch.ops`, which have it."""
    return bsym.name_with_module().replace("torch.torch.", "torch.", 1)


def _executable(bsym: BoundSymbol) -> Callable[[dict[str, Any]], Any] | None:
    """The trace's own Python code for this bound symbol, as a function of its names."""
    if bsym.sym.name == "get_and_update_rng_state_impl":  # it uses the generator, which numbers replace
        return lambda env: env.update((p.name, 0) for p in bsym.flat_proxy_outs)
    lines = [line for line in bsym.python(indent=0, print_depth=1) if not line.lstrip().startswith("#")]
    source = "\n".join(lines).strip()
    if not source:
        return None
    if bsym.sym.id is PrimIDs.RETURN:
        expression = compile(source.removeprefix("return").strip() or "None", "<trace>", "eval")
        return lambda env: eval(expression, env)
    code = compile(source, "<trace>", "exec")
    return lambda env: exec(code, env)


def _tensor_outputs(bsym: BoundSymbol, env: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    found: dict[str, torch.Tensor] = {}
    for proxy in proxies(bsym.flat_outs):
        value = env.get(proxy.name)
        if isinstance(value, torch.Tensor):
            found[proxy.name] = value
    return list(found.items())


def proxies(values: Iterable[Any]) -> list[Proxy]:
    """The proxies among `values`, those inside collections included."""
    found: list[Proxy] = []
    for value in values:
        if isinstance(value, CollectionProxy):
            found += proxies(tree_leaves(value.collection(), is_leaf=lambda x: isinstance(x, Proxy)))
        elif isinstance(value, Proxy):
            found.append(value)
    return found


def tensor_proxies(values: Iterable[Any]) -> list[TensorProxy]:
    return [p for p in proxies(values) if isinstance(p, TensorProxy)]
