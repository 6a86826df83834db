"""The scratch of an operation: bytes that it holds only while it runs, beyond its inputs and outputs.

There are two sources:

- `ProbingRunner`, for this machine's CPU: the operation runs once for real, alone, on zeros with its inputs' layout,
  while the allocator is watched. The result is exact, and kept for each operation, layout of inputs and number of
  threads. A region compiled by Inductor is such an operation too. Running it needs none of Inductor's internals,
  counts the scratch of matmuls inside, and shows the real layout of its results.
- `SimulatedRunner`, for a simulated device: the operation runs on fake tensors. That shows the allocations of its own
  Python and of composite operators in it, but not those inside kernels, except for the operators of
  `OPERATOR_SCRATCH`. For a region of `mem_pointwise`, the code that Inductor writes shows the bytes kept between its
  kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import FutureTensorProxy
from thunder.core.symbol import BoundSymbol, has_tags
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import _disable_current_modes

from thunder_mem.attention.head_groups import runs_in_groups
from thunder_mem.chunk_loop.price import host_calls
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.fake_execution.operator_scratch import OPERATOR_SCRATCH, zeros_like
from thunder_mem.fake_execution.probe_keys import lasting_key, operation_key
from thunder_mem.fake_execution.replay import Ran, proxies, tensor_proxies
from thunder_mem.fake_execution.whole_functions import run_whole_on_cpu, runs_whole_on_cpu
from thunder_mem.fusers.fake_regions import run_region
from thunder_mem.optimizer.update import is_update, rehearsal_now, rehearsed, update_of
from thunder_mem.regions.region_kernels import kernel_figures, region_function_of
from thunder_mem.runtime import scratch_cache
from thunder_mem.runtime.allocation_watch import AllocationWatch
from thunder_mem.runtime.collector import collector_off
from thunder_mem.runtime.measure import record_curve
from thunder_mem.runtime.output_layout import describe, lay_out
from thunder_mem.runtime.scratch_cache import Probe
from thunder_mem.semantics.kernel_figures import KernelFigures
from thunder_mem.semantics.kernel_scratch import estimated_scratch_bytes
from thunder_mem.semantics.op_traits import region_function, traits_of

__all__ = ["ProbingRunner", "SimulatedRunner"]

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
    return _PROBES_OF.setdefault(region_function(bsym), {})


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
        probes, key = _known_probes(bsym), operation_key(bsym, inputs)
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
            with suppress(DataDependentOutputException, DynamicOutputShapeException):  # the probe knows
                run(env)
            if _new_bytes(bsym, env, inputs) != probe.end_bytes:
                _lay_out(bsym, probe, env, inputs)
        if is_update(bsym) and rehearsal_now().kind == "first":
            return Ran(probe.peak_bytes - probe.end_bytes)  # the ledger has the states that it made
        return Ran(probe.peak_bytes - _new_bytes(bsym, env, inputs))

    def _recalled(
        self, bsym: BoundSymbol, run: Run, env: dict[str, Any], inputs: dict[str, torch.Tensor], key: Hashable
    ) -> Probe | _Failed:
        """The probe of an operation, from this machine's table if it was measured before."""
        text = lasting_key(bsym, key)
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
        alone = rehearsed(rehearsal_now().trial(update_of(bsym))) if is_update(bsym) else nullcontext()
        with _disable_current_modes(), torch.random.fork_rng(devices=[]), collector_off(), alone:
            try:
                valid = traits_of(bsym).valid_values
                run({**env, **valid(bsym, zeros_like(inputs))})  # what a first call does once does not count
                real = valid(bsym, zeros_like(inputs))
                probe_env = {**env, **real}
                curve = record_curve(lambda: run(probe_env))
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                return _Failed(f"{bsym.sym.name}: its scratch is unknown, it does not run on zeros ({cause})")
            outputs = [probe_env.get(p.name) for p in tensor_proxies(bsym.flat_outs)]
            return Probe(curve.peak_bytes, curve.end_bytes, describe(outputs, list(real.values())))


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
WHOLE = (
    "functions that PyTorch differentiates whole, and recurrent layers, are followed as a CPU runs them, not as CUDA's "
    "libraries do"
)
PRODUCTS = "some fused regions have matrix products or attention inside, whose operands and results are not counted"


class SimulatedRunner:
    """Runs operations on fake tensors of a simulated device; fused regions count by their outputs and kernels.

    Attributes:
        assumptions: that it makes, in order.
    """

    def __init__(self) -> None:
        self.assumptions: list[str] = ["scratch inside the device's own kernels is counted for attention only"]

    def __call__(self, bsym: BoundSymbol, run: Run, env: dict[str, Any]) -> Ran:
        if bsym.sym.is_fusion:
            return self._region(bsym, env)
        if is_update(bsym):
            run(env)
            figures, kind = update_of(bsym).figures, rehearsal_now().kind
            if kind.startswith("look"):
                return Ran(update_of(bsym).parameter.nbytes if kind == "look at sum" else 0, 1)
            if not figures.launches and update_of(bsym).parameter.numel():
                self._assume(NOT_ON_META)
            return Ran(update_of(bsym).temporaries(kind).at_start, figures.launches)
        if runs_whole_on_cpu(bsym):
            self._assume(WHOLE)
            return run_whole_on_cpu(bsym, run, env)
        ran = _run_tracked(bsym, run, env, device_types=("cuda",), inside=OPERATOR_SCRATCH)
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


def _run_tracked(bsym: BoundSymbol, run: Run, env: dict[str, Any], **watched: Any) -> Ran:
    """Its scratch as `AllocationWatch` shows it, with that class's arguments."""
    with AllocationWatch(**watched) as watch:
        run(env)
    kernel_bytes = 0
    if runs_in_groups(bsym):  # its largest group may not be the first
        kernel_bytes = estimated_scratch_bytes(bsym)
    return Ran(max(watch.peak_bytes - watch.live_bytes(), kernel_bytes), watch.launches)


def _communicates(bsym: BoundSymbol) -> bool:
    """Whether it communicates with other processes: its probe, alone, would wait forever."""
    if any(isinstance(p, FutureTensorProxy) for p in proxies((*bsym.flat_args, *bsym.flat_outs))):
        return True
    return (
        any(isinstance(a, torch.distributed.ProcessGroup) for a in bsym.flat_args)
        if (torch.distributed.is_available())
        else False
    )


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
