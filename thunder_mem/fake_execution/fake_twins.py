"""Fake CPU tensors that stand for the caller's, and the mode that records their operators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from thunder_mem.fake_execution.autograd_scatters import plain_form
from thunder_mem.fake_execution.autograd_sums import EngineSums
from thunder_mem.fake_execution.operator_scratch import OPERATOR_SCRATCH, probe_operator
from thunder_mem.fake_execution.replay import Ledger
from thunder_mem.runtime.fake_numbers import FRACTION, number_in
from thunder_mem.runtime.host_transfers import is_host_memory_now

__all__ = ["Leaves", "Twins", "Watch"]


class Twins:
    """Fake CPU tensors that stand for the caller's tensors, real or fake CUDA ones, and the way back."""

    def __init__(self, mode: FakeTensorMode, ledger: Ledger) -> None:
        self.mode = mode
        self.ledger = ledger
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def hold(self, t: torch.Tensor, kind: str, *, with_grad: bool = True) -> None:
        """Make the twin of a tensor that the caller holds throughout, and of its gradient, if it has one now."""
        if id(t) in self._twins:
            return
        twin: torch.Tensor
        if t.device.type == "cpu" and not isinstance(t, FakeTensor):
            twin = self.mode.from_tensor(t, static_shapes=True)
        elif isinstance(t, FakeTensor) and t.device.type == "cpu" and t.fake_mode is self.mode:
            twin = t
        else:
            self.ledger.add(f"{kind}{len(self._twins)}", t, kind, held=True)
            twin = self.to_cpu(t)
        self.ledger.add(f"{kind}{len(self._twins)}", twin, kind, held=True)
        self._twins[id(t)] = (t, twin)
        if twin.is_leaf and twin.grad is not None:
            if with_grad:
                self.ledger.add(f"gradient{len(self._twins)}", twin.grad, "gradient", held=True)
            else:
                twin.grad = None

    def name(self, t: torch.Tensor, name: str) -> None:
        """Let the block behind `t` be known by `name`."""
        block = self.ledger.block_of(t)
        if block is not None and name not in block.names:
            block.names.insert(0, name)

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """The twin of a tensor that is held, or a new one."""
        known = self._twins.get(id(t))
        return self.to_cpu(t) if known is None else known[1]

    def leaf(self, t: torch.Tensor) -> torch.Tensor:
        """The twin of a held tensor or a leaf of gradients; any other tensor is returned unchanged."""
        known = self._twins.get(id(t))
        if known is not None:
            return known[1]
        if isinstance(t, FakeTensor) or not (t.requires_grad and t.is_leaf):
            return t
        twin = self.mode.from_tensor(t, static_shapes=True)
        self.ledger.ignore(twin)  # a tensor of the loss: it lives throughout, and was never counted
        if twin.grad is not None:
            self.ledger.ignore(twin.grad)
        self._twins[id(t)] = (t, twin)
        return twin

    def met(self, t: torch.Tensor) -> torch.Tensor:
        """The twin of a tensor that code refers to, held from now on; a fake tensor of this mode is unchanged."""
        if id(t) not in self._twins:
            if isinstance(t, FakeTensor) and t.fake_mode is self.mode and t.device.type == "cpu":
                return t
            self.hold(t, "tensor")
        return self._twins[id(t)][1]

    def to_cpu(self, t: torch.Tensor) -> torch.Tensor:
        """A CPU tensor laid out like a fake CUDA one and standing for the same block; a leaf of autograd."""
        if t.device.type == "cpu" and (not isinstance(t, FakeTensor) or t.fake_mode is self.mode):
            return t
        return self._mirror(t, "cpu")

    def to_cuda(self, t: torch.Tensor) -> torch.Tensor:
        """The way back, for values that autograd passes to a compiled backward."""
        return self._mirror(t, "cuda")

    @contextlib.contextmanager
    def gradients_within(self) -> Iterator[None]:
        """Drop gradients at the end of the context."""
        try:
            yield
        finally:
            for _, twin in self._twins.values():
                if twin.is_leaf:
                    twin.grad = None

    def _mirror(self, t: torch.Tensor, device: str) -> torch.Tensor:
        with torch.no_grad(), self.mode, self.paused():
            count = t.untyped_storage().nbytes() // t.dtype.itemsize
            other = torch.empty(count, dtype=t.dtype, device=device).as_strided(t.shape, t.stride(), t.storage_offset())
            other = other.detach()
        block = self.ledger.block_of(t)
        if block is not None:
            self.ledger.link(other, block)
        return other.requires_grad_(t.requires_grad) if t.is_leaf and t.requires_grad else other

    watch: Watch | None = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude operations in this context from the step."""
        if self.watch is None:
            yield
            return
        before, self.watch.active = self.watch.active, False
        try:
            yield
        finally:
            self.watch.active = before


class Watch(TorchDispatchMode):
    """Writes every operator that runs outside of the traces into the ledger."""

    supports_higher_order_operators = True

    def __init__(self, ledger: Ledger, *, probe: bool, twins: Twins) -> None:
        super().__init__()
        self.ledger = ledger
        self.probe = probe
        self.phase = "loss"
        self.active = True
        self.twins = twins
        self.scalars: dict[int, float] = {}
        self.fraction = FRACTION
        self._copies: dict[int, tuple[StorageWeakRef, float]] = {}  # clones of these scalars, by storage
        self.sums = EngineSums(ledger)
        twins.watch = self

    def __enter__(self) -> Watch:
        super().__enter__()
        self.sums.learn()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        in_place = self.active and self.sums.in_place(func, args)
        if self.sums.learning or not self.active or func.namespace in ("profiler", "prim"):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            known = self._known(args[0])
            return number_in(args[0], self.fraction) if known is None else known
        if not self.probe:
            # Tensors that the loss closes over, such as targets, live on the simulated device.
            args, kwargs = tree_map_only(torch.Tensor, self._on_cpu, (args, kwargs))
        self.ledger.sweep()
        if in_place:
            self.ledger.record(self._phase(), "aten::add_")
            return args[0]
        func = plain_form(func, args, self.sums)
        out = _random(func, args) if func.name() in _RANDOM else func(*args, **kwargs)
        if is_host_memory_now():
            self.ledger.add_host(out, "cpu" if self.probe else "cuda")
            return out
        if func is torch.ops.aten.detach.default:  # autograd's own, by which it keeps a gradient as it is
            return out
        if func is torch.ops.aten.clone.default and (known := self._known(args[0])) is not None:
            self._copies[out.untyped_storage()._cdata] = StorageWeakRef(out.untyped_storage()), known
        outside = self._is_view_of_outside(func, args)
        new = [] if outside else [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        name = func.name()
        allocated_bytes = sum(self.ledger.add(f"{name}:{i}", t, "computed") for i, t in enumerate(new))
        if self.probe:
            probed = probe_operator(func, args, kwargs)
            scratch_bytes = 0 if probed is None else max(0, probed[0] - allocated_bytes)
        else:
            scratch_bytes = OPERATOR_SCRATCH[func](*args) if func in OPERATOR_SCRATCH else 0
        self.ledger.record(self._phase(), name, allocated_bytes=allocated_bytes, scratch_bytes=scratch_bytes)
        return out

    def _is_view_of_outside(self, func: Any, args: tuple) -> bool:
        """Whether it makes a view of what the caller's code holds and what does not count; `torch.tensor(0.0)` does."""
        if func.name() in _RANDOM or func is torch.ops.aten.lift_fresh.default:
            return False
        return func.is_view and not self.ledger.block_of(args[0])

    def _known(self, t: torch.Tensor) -> float | None:
        """The number in one of the known scalars, or in a clone of one; None for any other tensor."""
        key = t.untyped_storage()._cdata
        storage, number = self._copies.get(key, (None, None))
        return self.scalars.get(key) if storage is None or storage.expired() else number

    def _phase(self) -> str:
        """The present phase, or the backward, for code that does not report its phases."""
        in_backward = self.phase == "forward" and torch._C._current_graph_task_id() != -1
        return "backward" if in_backward else self.phase

    def _on_cpu(self, t: torch.Tensor) -> torch.Tensor:
        return t if t.device.type == "cpu" else self.twins.to_cpu(t)


_RANDOM = ("run_and_save_rng_state", "run_with_rng_state")
"""Inductor runs what may draw random numbers through these, so that a checkpoint draws the same again."""


def _random(func: Any, args: tuple[Any, ...]) -> Any:
    if func.name() == "run_with_rng_state":
        return args[1](*args[2:])
    return torch.empty(16, dtype=torch.uint8), args[0](*args[1:])  # the state of CUDA's generator


class Leaves(TorchFunctionMode):
    """Replaces the caller's parameters by twins in code that refers to them, such as a loss with a head."""

    def __init__(self, twins: Twins) -> None:
        super().__init__()
        self.twins = twins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self.twins.leaf, (args, kwargs or {}))
        return func(*args, **kwargs)
