"""A fused region at run time: one function for all regions of the same content, compiled by Inductor.

- Nothing compiles until the first call, so planning may fuse as often as it likes. Then the region is
  traced with the real strides of its inputs (a Thunder proxy has none) and passed to Inductor directly.
  There is no Dynamo: a call compares its tensors in C++ with those of calls before it, if these were equal, and
  looks up others' shapes and strides in a dict. One multiply-add of 4 x 4 took 1.6 us in this way, and 21 us as a
  `torch.compile`d region (2 cores, torch 2.11).
- Outputs have the strides and the aliasing that the unfused operations would have.
- Chains in float16 or bfloat16 are computed in float32 and rounded once, at a region's outputs
  (Inductor's `emulate_precision_casts` stays off), so a fused result is at least as exact as an unfused
  one.
- A tensor with PyTorch's negative bit (`z.conj().imag`) runs unfused, because Inductor reads its memory as it is.
- On fake tensors (`torch._subclasses.FakeTensorMode`) the operations run one by one, and only the outputs
  are returned, as on a simulated device.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.executors.torchex import no_autocast
from torch._C._dynamo.guards import TensorGuards
from torch._guards import TracingContext, active_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from thunder_mem.regions.concatenations import concatenate_last
from thunder_mem.regions.inplace_outputs import (
    InplacePlan,
    fits,
    inplace_outputs,
    interleave,
    never,
    own_inputs,
    show_over,
    write_late,
)
from thunder_mem.regions.pairwise_sums import split_long_sums
from thunder_mem.regions.region_inlining import inlining_options
from thunder_mem.regions.region_outputs import return_whole_results
from thunder_mem.rendering.progress import stage
from thunder_mem.semantics.fusible_prims import VIEWS
from thunder_mem.semantics.op_traits import MemoryTraits
from thunder_mem.trace.python_function import python_function

__all__ = ["MAX_VARIANTS", "CompileWarning", "RegionFunction", "literal"]

# The most compilations of a region for shapes, strides and numbers, for sizes that change from call to call: beyond
# these the region runs uncompiled.
MAX_VARIANTS = 16

_INDUCTOR_OPTIONS = {
    "comprehensive_padding": False,  # padded rows would be extra memory
    "emulate_precision_casts": False,
    "size_asserts": False,  # `RegionFunction` has looked at shapes and strides already
    "triton.cudagraphs": False,
}


# The regions of final traces that were not compiled yet, and those in compilation.
_expected: WeakSet[RegionFunction] = WeakSet()
# Recursive, because tracing a region for the first time may call another one.
_lock = threading.RLock()


class CompileWarning(UserWarning):
    """A fusion executor could not compile a region: nvFuser's is compiled by Inductor, Inductor's runs unfused."""


def literal(x: Any) -> Hashable:
    """A number, dtype, device, ... as a part of a region's content."""
    # 1, 1.0 and True are equal but not the same program, and so are 0.0 and -0.0.
    return (type(x).__name__, str(x) if isinstance(x, (devices.Device, dtypes.dtype)) else repr(x))


def _overwritten(bsym: BoundSymbol) -> tuple[TensorProxy, ...]:
    return tuple(inplace_outputs(bsym).values())


class RegionFunction:
    """One region's content as a function: ``function(*inputs) -> outputs``, positional, without state.

    Compiles at the first call of each combination of shapes, strides and numbers, up to `MAX_VARIANTS` of them;
    further ones and negated tensors run one operation at a time. So do all after an error of Inductor, with a
    `CompileWarning` that names the cause. Safe to call from several threads.

    Attributes:
        reuse: the outputs that are written over inputs; the region must own these inputs. A variant that is not
            compiled, or whose strides do not allow it, makes new outputs.
        content: the common content of regions that share this function.
    """

    traits = MemoryTraits(writes=_overwritten, in_place=True, shares=inplace_outputs, takes_apart=True)

    def __init__(
        self,
        leaves: Sequence[BoundSymbol],
        inputs: Sequence[Proxy],
        outputs: Sequence[Proxy],
        reuse: InplacePlan | None = None,
        content: Hashable = None,
    ) -> None:
        self.reuse = reuse
        self.content = content
        self._owns = reuse is None or not any(take.saved for take in reuse.takes)
        self._source: tuple[Sequence[BoundSymbol], Sequence[Proxy], Sequence[Proxy]] | None = (leaves, inputs, outputs)
        self._unfused: Callable[[list[Any]], Sequence[torch.Tensor]] | None = None
        self._writing: Callable[[list[Any]], Sequence[torch.Tensor]] | None = None
        self._variants: dict[Hashable, Callable[[list[Any]], Sequence[torch.Tensor]]] = {}
        # The check of arguments of two equal calls in turn, with their function; and the last call that was looked up.
        self._last: tuple[Callable[..., bool], Callable[[list[Any]], Sequence[torch.Tensor]]] | None = None
        self._called_with: Hashable = None
        self._only_tensors = bool(inputs) and all(isinstance(x, TensorProxy) for x in inputs)
        self._only_views = all(leaf.sym.id in VIEWS for leaf in leaves)

    def expect(self) -> None:
        """Count this region among those left to compile, unless it was compiled already."""
        if not self._variants and not self._only_views:
            _expected.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionFunction:
        return self

    @property
    def variants(self) -> int:
        """The number of compiled combinations of shapes, strides and numbers."""
        return len(self._variants)

    def __call__(self, *args: Any) -> Sequence[torch.Tensor]:
        if not self._owns:
            assert self.reuse is not None
            args = own_inputs(args, self.reuse)
        if (last := self._last) is not None and last[0](*args):
            self._called_with = None
            return last[1](list(args))
        if self._only_tensors:
            key: Hashable = tuple([_tensor_key(a) for a in args])
        else:
            key = (active_fake_mode() is not None, *map(_runtime_key, args))
        variant = self._variants.get(key)
        if variant is None:
            variant = self._specialise(key, args)
        elif self._only_tensors:
            called_with = key, *[(type(a), a.requires_grad) for a in args]
            if called_with == self._called_with:  # a new check costs more than a look-up: none for layouts in turn
                self._last = _same_as(args), variant
            self._called_with = called_with
        return variant(list(args))

    def _specialise(self, key: Hashable, args: tuple[Any, ...]) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
        with _lock:
            unfused = self._unfused or self._build_unfused()
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            fake = any(isinstance(a, FakeTensor) for a in tensors) or (not tensors and active_fake_mode() is not None)
            if key in self._variants:  # another thread was faster
                return self._variants[key]
            if fake and (reuse := self.reuse):
                return lambda boxed: show_over(unfused(boxed), boxed, reuse)
            if fake or len(self._variants) >= MAX_VARIANTS or any(t.is_neg() for t in tensors):
                return unfused
            try:
                variant = self.compile(args)
            except Exception as e:
                cause = str(e).strip().splitlines()
                message = f"{type(e).__name__}: {cause[0] if cause else ''}"
                warnings.warn(f"Inductor could not compile a region ({message}); it runs unfused", CompileWarning, 4)
                variant = unfused
            self._variants[key] = variant
            return variant

    def compile(self, args: tuple[Any, ...], flag: torch.Tensor | None = None) -> Callable[[list[Any]], Any]:
        """Inductor's function for the region and such arguments, compiled anew.

        Args:
            args: of a call; also fake ones, if the result is never called.
            flag: a false boolean tensor to which late writes are tied; by default one on the arguments' device.
        """
        unfused = self._unfused or self._build_unfused()
        if self._only_views:
            return unfused
        _expected.add(self)
        try:
            with stage(f"compiling regions, {len(_expected)} left"):
                return self._compile(unfused, args, flag)
        finally:
            _expected.discard(self)

    def _compile(
        self, unfused: Callable[[list[Any]], Any], args: tuple[Any, ...], flag: torch.Tensor | None
    ) -> Callable[[list[Any]], Any]:
        if self._writing is None or self.reuse is None or not fits(unfused, args, self.reuse):
            return _compile(unfused, args)
        given = flag if flag is not None else never(next(a.device for a in args if isinstance(a, torch.Tensor)))
        try:
            compiled = _compile(self._writing, (*args, given))
        except Exception:
            # On a CPU Inductor 2.11 may lose a buffer's name if rows are reduced, and read after a write
            # (`KeyError: 'buf1'`). A result in memory of its own costs its bytes; an uncompiled region many times more.
            return _compile(unfused, args)

        def writing(boxed: list[Any]) -> Sequence[torch.Tensor]:
            boxed.append(given)
            return compiled(boxed)

        return writing

    def _build_unfused(self) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
        assert self._source is not None
        leaves, inputs, outputs = self._source
        self._unfused, self._source = _boxed(python_function(leaves, inputs, tuple(outputs), "region")), None
        if reuse := self.reuse:
            leaves, outputs = interleave(leaves, inputs, outputs, reuse)
            with_early = _boxed(python_function(leaves, inputs, tuple(outputs), "region"))

            def writing(boxed: list[Any]) -> Sequence[torch.Tensor]:
                *args, flag = boxed
                return write_late(with_early(args), args, reuse, flag)

            self._writing = writing
        return self._unfused


def _same_as(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    """Whether tensors have the types, dtypes, shapes and strides of `tensors`, as Dynamo's guards compare them.

    Faster than a dict, which asks each tensor from Python: 0.4 us instead of 1.7 for four tensors, and more than ten
    times as much of both between large kernels, which fill the caches.
    """
    shapes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    return check


def _boxed(function: Callable[..., Sequence[torch.Tensor]]) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    @torch.no_grad()
    @no_autocast
    def boxed_function(boxed: list[Any]) -> tuple[torch.Tensor, ...]:
        return tuple(function(*boxed))

    return boxed_function


def _runtime_key(x: Any) -> Hashable:
    return _tensor_key(x) if isinstance(x, torch.Tensor) else literal(x)


def _tensor_key(t: torch.Tensor) -> Hashable:
    return (t.shape, t.stride(), t.dtype, type(t) is FakeTensor, t.is_neg())


def _compile(
    unfused: Callable[[list[Any]], Sequence[torch.Tensor]], args: tuple[Any, ...]
) -> Callable[[list[Any]], Any]:
    """Inductor's function for `unfused` at the shapes and strides of `args`; its numbers become constants."""
    # Inductor takes seconds to import, and a plan that never runs does not need it.
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    slots = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]

    def of_tensors(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        boxed = list(args)
        for i, t in zip(slots, tensors, strict=True):
            boxed[i] = t
        return unfused(boxed)

    with ExitStack() as stack:
        stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(inductor_config.patch(_INDUCTOR_OPTIONS))
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(args[i], static_shapes=True) for i in slots]
        with mode:
            graph = make_fx(of_tensors, decomposition_table=select_decomp_table())(*fakes)
        concatenate_last(graph)
        split_long_sums(graph)
        finishes = return_whole_results(graph)
        # Inductor may choose other strides, unless it knows that users see them.
        returned = graph.graph.output_node()
        nodes: Any = returned.args[0]
        returned.meta["user_visible_output_idxs"] = list(range(len(nodes)))
        returned.meta["original_output_strides"] = [node.meta["val"].stride() for node in nodes]
        with tracing(TracingContext(mode)), inductor_config.patch(inlining_options(graph)):
            compiled = compile_fx_inner(graph, fakes)

    if len(slots) == len(args) and not finishes:
        return compiled

    def region(boxed: list[Any]) -> Sequence[torch.Tensor]:
        outputs = list(compiled([boxed[i] for i in slots]))
        for i, finish in finishes.items():
            outputs[i] = finish(outputs[i])
        return outputs

    return region
