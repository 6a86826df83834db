"""The scratch of an operation: bytes that it holds only while it runs, beyond its inputs and outputs.

There are two sources:

- `ProbingRunner`, for this machine's CPU: the operation runs once for real, alone, on zeros with its inputs' layout,
  while the allocator is watched. The result is exact, and kept for each operation, layout of inputs and number of
  threads. A region compiled by Inductor is such an operation too. Running it needs none of Inductor's internals,
  counts the scratch of matmuls inside, and shows the real layout of its results.
- `SimulatedRunner`, for a simulated device: the operation runs on fake tensors. That shows the allocations of its own
  Python and of composite operators in it, but not those inside kernels, except for kernels in `KERNEL_SCRATCH`. For a
  region of `mem_pointwise`, the code that Inductor writes shows the bytes kept between its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import FutureTensorProxy, NumberProxy
from thunder.core.symbol import BoundSymbol, has_tags
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from thunder_mem.chunk_loop.price import host_calls
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.memory.collector import collector_off
from thunder_mem.memory.kernel_figures import KernelFigures
from thunder_mem.optimizer.update import Rehearsal, is_update, rehearsal_now, rehearsed, update_of
from thunder_mem.prediction.measure import record_curve
from thunder_mem.prediction.replay import Ran, proxies, tensor_proxies
from thunder_mem.regions.fake_regions import run_region
from thunder_mem.regions.region_kernels import kernel_figures, region_function_of
from thunder_mem.runtime import scratch_cache
from thunder_mem.runtime.allocation_watch import AllocationWatch
from thunder_mem.runtime.head_groups import runs_in_groups
from thunder_mem.runtime.output_layout import describe, lay_out
from thunder_mem.runtime.rng_replay import with_valid_state
from thunder_mem.runtime.scratch_cache import Probe
from thunder_mem.trace.kernel_scratch import FLASH_BACKWARD, estimated_scratch_bytes, flash_backward_bytes

__all__ = ["KERNEL_SCRATCH", "OPERATOR_SCRATCH", "ProbingRunner", "SimulatedRunner"]

Run = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class _Failed:
    """An operation could not be measured; the message says why."""

    sentence: str


_Probes = dict[Hashable, Probe | _Failed]
_PROBES: _Probes = {}
_PROBES_OF: WeakKeyDictionary[Any, _Probes] = WeakKeyDictionary()


def _known_probes(bsym: BoundSymbol) -> _Probes:
    """The cache for probes of `bsym`: on a compiled region's callable or a chunk loop, else global."""
    if is_chunk_loop(bsym):
        return _PROBES_OF.setdefault(loop_of(bsym), {})
    if not bsym.sym.is_fusion:
        return _PROBES
    function = next(iter((bsym._call_ctx or {}).values()))
    return _PROBES_OF.setdefault(function, {})


class ProbingRunner:
    """Runs operations on fake CPU tensors and, once each, on real ones.

    Attributes:
        assumptions: sentences about operations that could not be measured, in order.
    """

    def __init__(self) -> None:
        self.assumptions: list[str] = []

    def __call__(self, bsym: BoundSymbol, run: Run, env: dict[str, Any]) -> Ran:
        inputs = {
            p.name: env[p.name] for p in tensor_proxies(bsym.flat_args) if isinstance(env.get(p.name), torch.Tensor)
        }
        if not inputs and not tensor_proxies(bsym.flat_outs):
            run(env)
            return Ran(0)
        probes, key = _known_probes(bsym), _key(bsym, inputs)
        if key not in probes:
            probes[key] = self._recalled(bsym, run, env, inputs, key)
        probe = probes[key]
        if isinstance(probe, _Failed):
            if probe.sentence not in self.assumptions:
                self.assumptions.append(probe.sentence)
            if bsym.sym.is_fusion:
                run_region(bsym, env)
                return Ran(0)
            return _run_tracked(bsym, run, env)
        if bsym.sym.is_fusion:
            _lay_out(bsym, probe, env, inputs)
        else:
            run(env)
            if _new_bytes(bsym, env, inputs) != probe.end_bytes:
                _lay_out(bsym, probe, env, inputs)
        if is_update(bsym) and _rehearsal().kind == "first":
            return Ran(probe.peak_bytes - probe.end_bytes)  # the ledger has the states that it made
        return Ran(probe.peak_bytes - _new_bytes(bsym, env, inputs))

    def _recalled(
        self, bsym: BoundSymbol, run: Run, env: dict[str, Any], inputs: dict[str, torch.Tensor], key: Hashable
    ) -> Probe | _Failed:
        """The probe of an operation, from this machine's table if it was measured before."""
        text = _text(bsym, key)
        known = None if text is None else scratch_cache.table().find(text)
        if known is not None and _describes(known, bsym):
            return known
        probe = self._probe(bsym, run, env, inputs)
        if text is not None and isinstance(probe, Probe):
            scratch_cache.table().add(text, probe)
        return probe

    def _probe(
        self, bsym: BoundSymbol, run: Run, env: dict[str, Any], inputs: dict[str, torch.Tensor]
    ) -> Probe | _Failed:
        if any(t.device.type != "cpu" for t in inputs.values()) or _communicates(bsym):
            return _Failed(f"{bsym.sym.name}: its tensors are counted, but not its kernels' scratch")
        # A mode left standing, such as the one that watches a training step, would change what is measured.
        alone = rehearsed(_rehearsal().trial(update_of(bsym))) if is_update(bsym) else nullcontext()
        with _disable_current_modes(), torch.random.fork_rng(devices=[]), collector_off(), alone:
            try:
                run({**env, **with_valid_state(bsym, _real_like(inputs))})  # what a first call does once does not count
                real = with_valid_state(bsym, _real_like(inputs))
                probe_env = {**env, **real}
                curve = record_curve(lambda: run(probe_env))
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                return _Failed(f"{bsym.sym.name}: its scratch is unknown, it does not run on zeros ({cause})")
            outputs = [probe_env.get(p.name) for p in tensor_proxies(bsym.flat_outs)]
            return Probe(curve.peak_bytes, curve.end_bytes, describe(outputs, list(real.values())))


def _rehearsal() -> Rehearsal:
    return rehearsal_now() or Rehearsal()


def _describes(probe: Probe, bsym: BoundSymbol) -> bool:
    """Whether a probe from a file has the operation's outputs."""
    outs = tensor_proxies(bsym.flat_outs)
    return len(probe.outputs) == len(outs) and all(
        output is None or output.shape == tuple(map(int, p.shape))
        for output, p in zip(probe.outputs, outs, strict=True)
    )


KERNELS = (
    "regions of mem_pointwise run as the kernels that this version of Inductor writes for the device, and hold the "
    "values between these kernels"
)
REGIONS = (
    "a fused region of another executor holds what goes in and what comes out: what nvFuser or torch.compile would "
    "keep between two kernels of one region is not counted"
)
NOT_ON_META = (
    "the optimizer does not run on meta tensors, so the memory of its updates, and the copies of their states from the "
    "host and back, are not counted"
)
PRODUCTS = "some fused regions have matrix products or attention inside, whose operands and results are not counted"


class SimulatedRunner:
    """Runs operations on fake tensors of a simulated device; fused regions count by their outputs and kernels.

    Attributes:
        assumptions: that it makes, in order.
    """

    def __init__(self) -> None:
        self.assumptions: list[str] = ["scratch inside the device's own kernels is counted for flash attention only"]

    def __call__(self, bsym: BoundSymbol, run: Run, env: dict[str, Any]) -> Ran:
        if bsym.sym.is_fusion:
            return self._region(bsym, env)
        if is_update(bsym):
            run(env)
            figures, kind = update_of(bsym).figures, _rehearsal().kind
            if kind.startswith("look"):
                return Ran(update_of(bsym).parameter.nbytes if kind == "look at sum" else 0, 1)
            if not figures.launches and update_of(bsym).transfers is not None:
                self._assume(NOT_ON_META)
            return Ran(figures.first_bytes if kind == "first" else figures.temporary_bytes, figures.launches)
        ran = _run_tracked(bsym, run, env)
        if is_chunk_loop(bsym) and bsym.sym.name != "chunk_loop_finish":  # which runs a single block on fake tensors
            plan, backward = loop_of(bsym).plan, bsym.sym.name != "chunk_loop"
            return ran._replace(launches=host_calls(plan, backward=backward))
        return ran

    def _region(self, bsym: BoundSymbol, env: dict[str, Any]) -> Ran:
        figures = kernel_figures(bsym, env)
        run_region(bsym, env)
        if isinstance(figures, KernelFigures):
            self._assume(KERNELS)
            return Ran(figures.scratch_bytes, figures.launches)
        if figures is None and region_function_of(bsym) is not None:  # on the host
            return Ran(0)
        self._assume(REGIONS if figures is None else figures.sentence)
        if _has_products(bsym):
            self._assume(PRODUCTS)
        return Ran(0, 1)

    def _assume(self, sentence: str) -> None:
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)


def _has_products(bsym: BoundSymbol) -> bool:
    """Whether a region has operations that no pointwise kernel computes, so that it is certainly several kernels."""
    return any(
        b.sym.id in _PRODUCTS or has_tags(b, {OpTags.MATMUL_OP}) or "attention" in b.sym.name or _has_products(b)
        for b in bsym.subsymbols
    )


_PRODUCTS = (PrimIDs.MATMUL, PrimIDs.LINEAR, PrimIDs.CONVOLUTION)


def _run_tracked(bsym: BoundSymbol, run: Run, env: dict[str, Any]) -> Ran:
    with AllocationWatch() as watch:
        run(env)
    kernel_bytes = 0
    for name, formula in KERNEL_SCRATCH.items():
        if name == bsym.sym.name:
            kernel_bytes = formula(*(env[a.name] for a in tensor_proxies(bsym.flat_args)))
    if runs_in_groups(bsym):  # of which fake kernels show only the results
        kernel_bytes = estimated_scratch_bytes(bsym)
    return Ran(max(watch.peak_bytes - watch.live_bytes(), kernel_bytes), watch.launches)


def _flash_backward_bytes(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None, *_: object) -> int:
    key = query if key is None else key
    return flash_backward_bytes(query.shape, key.shape, key.element_size())


def _efficient_backward_bytes(grad: torch.Tensor, query: torch.Tensor, *_: object) -> int:
    """A float32 accumulator of dQ, or the product of the output and its gradient, and the row sums.

    After PyTorch's `aten/src/ATen/native/transformers/cuda/attention_backward.cu`, which sizes it by the kernel that
    the shapes choose: an estimate.
    """
    batch, heads, rows, size = query.shape
    return 4 * batch * heads * (rows * size + math.ceil(rows / 32) * 32)


KERNEL_SCRATCH: dict[str, Callable[..., int]] = {
    FLASH_BACKWARD: _flash_backward_bytes,
}
"""Bytes a CUDA kernel holds inside itself, as a function of the operation's tensors; by symbol name."""

OPERATOR_SCRATCH: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: _flash_backward_bytes,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward_bytes,
    # Inductor compiles for a CPU the code that stands for CUDA here.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward_bytes,
}
"""The same for PyTorch's operators."""


def _key(bsym: BoundSymbol, inputs: dict[str, torch.Tensor]) -> Hashable:
    """All that determines the memory of an operation, without the names of its tensors."""
    order = {name: i for i, name in enumerate(inputs)}

    def of_argument(x: Any) -> Hashable:
        name = getattr(x, "name", None)
        if name in order:
            return ("tensor", order[name])
        return repr(x.value) if isinstance(x, NumberProxy) else f"{type(x).__name__}:{x!r}"

    # The callable of a compiled region identifies it and holds its probes; the name does not.
    callables = () if bsym.sym.is_fusion else tuple((bsym._call_ctx or {}).values())
    return (
        None if bsym.sym.is_fusion else (bsym.sym.id, bsym.name_with_module()),
        callables,
        tuple(map(of_argument, bsym.flat_args)),
        str(bsym.flat_args_and_spec[1]),
        _layouts(inputs),
        _settings(),
        _rehearsal().kind if is_update(bsym) else "",
    )


def _settings() -> Hashable:
    """The settings that also affect an operation's kernel."""
    return (
        torch.get_num_threads(),
        torch.backends.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
    )


def _text(bsym: BoundSymbol, key: Hashable) -> str | None:
    """`_key` as a text that means the same in every process; None if that is impossible.

    Operations of PyTorch and Thunder only: another package's code may change between two processes.
    """
    callables = tuple((bsym._call_ctx or {}).values())
    names = [f"{getattr(c, '__module__', None)}.{getattr(c, '__qualname__', None)}" for c in callables]
    own = bsym.name_with_module().startswith(("torch.", "Tensor.", "thunder.")) if not callables else True
    if bsym.sym.is_fusion or not own or any(not name.startswith(("torch.", "thunder.")) for name in names):
        return None
    assert isinstance(key, tuple)
    identity, _, *rest = key
    return _stable((identity, names, *rest))


def _stable(parts: Any) -> str | None:
    """The parts as a text, unless that holds an object's address."""
    text = repr(parts)
    return None if " at 0x" in text else text


def _layouts(tensors: dict[str, torch.Tensor]) -> Hashable:
    """The layout of tensors in memory, and which of them share it."""
    storages: dict[int, int] = {}
    return tuple(
        (
            storages.setdefault(t.untyped_storage()._cdata, len(storages)),
            t.untyped_storage().nbytes(),
            tuple(t.shape),
            t.stride(),
            t.storage_offset(),
            t.dtype,
            t.device,
            t.requires_grad,
        )
        for t in tensors.values()
    )


def _communicates(bsym: BoundSymbol) -> bool:
    """Whether it communicates with other processes: its probe, alone, would wait forever."""
    if any(isinstance(p, FutureTensorProxy) for p in proxies((*bsym.flat_args, *bsym.flat_outs))):
        return True
    return (
        any(isinstance(a, torch.distributed.ProcessGroup) for a in bsym.flat_args)
        if (torch.distributed.is_available())
        else False
    )


def _real_like(fakes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Zeros laid out like the given fake tensors, which share storages as those do."""
    storages: dict[int, torch.UntypedStorage] = {}
    real = {}
    for name, fake in fakes.items():
        key = fake.untyped_storage()._cdata
        if key not in storages:
            storages[key] = torch.zeros(fake.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
        t = torch.empty(0, dtype=fake.dtype).set_(storages[key], fake.storage_offset(), fake.shape, fake.stride())
        if isinstance(fake, torch.nn.Parameter):
            t = torch.nn.Parameter(t, requires_grad=fake.requires_grad)
        elif fake.requires_grad:
            t.requires_grad_()
        real[name] = t
    return real


def _lay_out(bsym: BoundSymbol, probe: Probe, env: dict[str, Any], inputs: dict[str, torch.Tensor]) -> None:
    """Give `env` fake outputs with exactly the layout of the real ones."""
    outs = tensor_proxies(bsym.flat_outs)
    made = lay_out(probe.outputs, list(inputs.values()), ["cpu"] * len(outs))
    env.update((p.name, t) for p, t in zip(outs, made, strict=True))


def _new_bytes(bsym: BoundSymbol, env: dict[str, Any], inputs: dict[str, torch.Tensor]) -> int:
    """Bytes of the storages of the outputs that are not storages of the inputs."""
    old = {t.untyped_storage()._cdata for t in inputs.values()}
    new = {}
    for p in tensor_proxies(bsym.flat_outs):
        t = env.get(p.name)
        if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in old:
            new[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
    return sum(new.values())


def probe_operator(func: Any, args: Any, kwargs: Any) -> tuple[int, int] | None:
    """Run one aten operator for real on zeros laid out like its fake CPU arguments.

    Returns:
        The bytes above the start at its peak and at its end, or None if it cannot run. The result is kept like
        the probes of bound symbols.
    """
    flat, spec = tree_flatten((args, kwargs))
    fakes = {str(i): t for i, t in enumerate(flat) if isinstance(t, torch.Tensor)}
    constants = tuple(repr(x) for x in flat if not isinstance(x, torch.Tensor))
    key = (func, constants, str(spec), _layouts(fakes), _settings())
    if key not in _OPERATOR_PROBES:
        text = _stable((str(func), *key[1:])) if getattr(func, "namespace", "") == "aten" else None
        known = None if text is None else scratch_cache.table().find(text)
        found = _probe_operator(func, flat, spec, fakes) if known is None else (known.peak_bytes, known.end_bytes)
        _OPERATOR_PROBES[key] = found
        if text is not None and found is not None and known is None:
            scratch_cache.table().add(text, Probe(*found))
    return _OPERATOR_PROBES[key]


_OPERATOR_PROBES: dict[Hashable, tuple[int, int] | None] = {}


def _probe_operator(func: Any, flat: list[Any], spec: Any, fakes: dict[str, torch.Tensor]) -> tuple[int, int] | None:
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]), collector_off():
        try:
            for attempt in range(2):  # what a first call does once does not count
                real = _real_like(fakes)
                args, kwargs = tree_unflatten([real.get(str(i), x) for i, x in enumerate(flat)], spec)
                if attempt:
                    kept: list[Any] = []
                    curve = record_curve(lambda: kept.append(func(*args, **kwargs)))  # noqa: B023 - called at once
                    return curve.peak_bytes, curve.end_bytes
                func(*args, **kwargs)
        except Exception:
            return None
    return None
