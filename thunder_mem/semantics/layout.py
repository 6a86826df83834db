"""The storage of each proxy and its size: shapes and strides followed through a trace.

A reshape copies depending on strides, which Thunder's proxies do not have. So ops that may return a view run on meta
tensors, where PyTorch itself answers without memory or arithmetic; every other op makes fresh storages. The result is
exact as long as operators return the layouts assumed here (dense, elementwise results laid out like their operands).
Inductor's regions return the same strides and aliases as their operations one by one. So a fused region is also
followed operation by operation, and only its outputs count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import FutureTensorProxy, NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from torch._prims_common import compute_elementwise_output_strides

from thunder_mem.semantics.collectives import overwritten_by
from thunder_mem.semantics.effects import leaves
from thunder_mem.semantics.op_traits import traits_of
from thunder_mem.semantics.shared_parameters import memory_name
from thunder_mem.semantics.view_prims import VIEWS, slice_view

__all__ = [
    "Layout",
    "dense_bytes",
    "is_dense_function",
    "is_view",
    "may_stand_in",
    "padded_head",
    "region_steps",
    "torch_view",
]


_VIEWS: dict[PrimIDs, Callable] = {
    **VIEWS,
    PrimIDs.UPDATE_ALIASES: lambda aliases: aliases,
    PrimIDs.REAL: lambda a: a.real,
    PrimIDs.IMAG: lambda a: a.imag,
    PrimIDs.CONVERT_ELEMENT_TYPE: lambda a, dtype: a.to(dtype, copy=True),  # PyTorch's function for it copies
}
# Ops with contiguous results for all strides of the operands.
_DENSE = {
    PrimIDs.CAT,
    PrimIDs.LINEAR,
    PrimIDs.MATMUL,
    PrimIDs.EMBEDDING,
    PrimIDs.TAKE,
    PrimIDs.FULL,
    PrimIDs.STRIDE_ORDER,
}
# PyTorch functions (not their decompositions) with contiguous results for all strides of the operands.
_DENSE_NAMES = frozenset(
    {
        *("softmax", "_softmax", "log_softmax", "logsigmoid", "layer_norm"),
        *("mem_layer_norm", "mem_layer_norm_backward", "mem_softmax_backward"),
        *("mem_attention_groups", "mem_attention_groups_forward", "mem_attention_groups_backward"),
        "mem_attention_groups_backward_over",
        *("cumsum", "cumprod", "roll", "tril", "triu"),
    }
)
_NORMS = frozenset({"batch_norm", "group_norm", "instance_norm"})  # of images they keep the memory format
_IMAGE_DIMS = 4
_FLASH = "sdpafx_"  # as the names of a GPU's flash kernel begin in Thunder
_CPU_ATTENTION = ("mem_attention_forward", "mem_attention_backward")
# Claimed symbols without subsymbols, by the name of the torch function that runs.
_VIEW_NAMES: dict[str, Callable] = {
    "shallow_copy": lambda a: a,
    "update_aliases": lambda aliases: aliases,
    "contiguous": lambda a, *, memory_format=torch.contiguous_format: a.contiguous(memory_format=memory_format),
    "detach": lambda a: a.detach(),
    "repeat": lambda a, *sizes: a.repeat(*sizes),  # a copy, where Thunder's decomposition may show a single row anew
    "prefetch_wait": lambda a: a,
    "wait": lambda a: a,
    "torch_wait_prim_impl": lambda a: a,
    "torch_prims_reshape_impl": VIEWS[PrimIDs.RESHAPE],
    "torch_slice_prim_impl": slice_view,
}


@cache
def torch_view(name: str) -> Callable | None:
    """PyTorch's function of that name if, by its schema, its result may share memory with an argument.

    Thunder registers many operators directly (`swapaxes`, `diagonal`, `view_as_real`, ...). A view mistaken for a
    copy would not be ordered against a write to its base.
    """
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    returns = [r for overload in packet.overloads() for r in getattr(packet, overload)._schema.returns]
    if not any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return None
    return getattr(torch, name, None) or getattr(torch.Tensor, name, None)


def _view_function(bsym: BoundSymbol) -> Callable | None:
    if bsym.sym.executor is not None and bsym.sym.name == "diagonal":
        return torch.diagonal  # a view, where Thunder's decomposition gathers
    known = _VIEWS.get(bsym.sym.id) or _VIEW_NAMES.get(bsym.sym.name)
    return known or (None if bsym.subsymbols or isinstance(bsym.sym.id, PrimIDs) else torch_view(bsym.sym.name))


def is_view(bsym: BoundSymbol) -> bool:
    """Whether it only views its input with another shape or dtype, or copies it because no stride fits."""
    if _view_function(bsym) is not None:
        return True
    return all(_view_function(leaf) is not None or not leaf.flat_proxy_outs for leaf in leaves(bsym))


def region_steps(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    """The operations of a fused region in order: `mem_pointwise` decomposes operations, others do not."""
    apart = traits_of(bsym).takes_apart
    known = {p.name for p in bsym.flat_proxy_args}
    stack = list(reversed(bsym.subsymbols))
    while stack:
        step = stack.pop()
        if apart and step.subsymbols and step.sym.name != "contiguous" and not is_dense_function(step):
            stack += reversed(step.subsymbols)
        elif not (made := {p.name for p in step.flat_proxy_outs}) <= known:  # a name means one value
            known |= made
            yield step


def is_dense_function(bsym: BoundSymbol) -> bool:
    """Whether PyTorch's function of that name makes contiguous results for all strides of its operands.

    `mem_pointwise` decomposes such a function, and the parts' results have the operands' layout. This function says
    which results need the layout of the whole function.
    """
    name = bsym.sym.name
    if name in _NORMS:
        return isinstance(bsym.output, TensorProxy) and bsym.output.ndim < _IMAGE_DIMS
    return name in _DENSE_NAMES


def may_stand_in(value: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether `value` may overwrite `memory`, at their sizes and strides."""
    same = value.dtype == memory.dtype and value.numel() == memory.numel()  # sizes can be symbolic to Thunder
    return same and value.is_contiguous() and memory.is_contiguous()


class Layout:
    """A meta tensor for every tensor proxy seen so far, including those of an `earlier` layout.

    `define` takes proxies that are not computed here, `run` takes bound symbols in trace order.
    Two proxies share a storage when `storage_key` agrees.
    """

    def __init__(self, earlier: Layout | None = None) -> None:
        self._tensors: dict[str, torch.Tensor] = dict(earlier._tensors) if earlier else {}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """A layout that knows these meta tensors."""
        layout = cls()
        layout._tensors.update(tensors)
        return layout

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def define(self, proxies: Iterable[Proxy]) -> None:
        """Give each proxy that is still unknown a fresh, contiguous storage."""
        for p in proxies:
            if isinstance(p, TensorProxy | FutureTensorProxy) and p.name not in self._tensors:
                self._tensors[p.name] = _empty(p)

    def define_arguments(self, proxies: Iterable[TensorProxy]) -> None:
        """The same, but that names of one parameter get one storage."""
        of_memory: dict[str, torch.Tensor] = {}
        for p in proxies:
            memory, own = memory_name(p), self._tensors.get(p.name)
            fresh = _empty(p) if own is None else own
            known = of_memory.setdefault(memory, fresh)
            alike = known.shape == fresh.shape and known.dtype == fresh.dtype
            self._tensors[p.name] = known if alike and own is None else fresh

    def is_plain(self, name: str) -> bool:
        """Whether the proxy covers all of its storage, in the order of its elements."""
        t = self._tensors[name]
        return t.is_contiguous() and t.untyped_storage().nbytes() == t.numel() * t.itemsize

    def is_dense(self, name: str) -> bool:
        """Whether the proxy covers all of its storage, each element once, in any order."""
        t = self._tensors[name]
        filled = t.untyped_storage().nbytes() == t.numel() * t.itemsize
        return filled and torch.empty_like(t).stride() == t.stride()

    def storage_key(self, name: str) -> int:
        return self._tensors[name].untyped_storage()._cdata

    def nbytes(self, name: str) -> int:
        """Bytes of the whole storage behind the proxy."""
        return self._tensors[name].untyped_storage().nbytes()

    def shown_bytes(self, name: str) -> int:
        """Bytes of the proxy's elements, each counted as often as it occurs."""
        return self._tensors[name].nbytes

    def run(self, bsym: BoundSymbol) -> None:
        """Follow one bound symbol: views share, everything else allocates."""
        if bsym.sym.is_fusion:
            self._run_region(bsym)
            return
        if is_view(bsym) and self._run_view(bsym):
            return
        known = {p.name for p in bsym.flat_proxy_args}
        outs = [
            p for p in bsym.flat_proxy_outs if p.name not in known and isinstance(p, TensorProxy | FutureTensorProxy)
        ]
        is_copy = bsym.sym.id is PrimIDs.COPY_ or bsym.sym.name == "copy_"
        written = bsym.args[1] if is_copy else overwritten_by(bsym)
        traits = traits_of(bsym)
        shared, copied = traits.shares(bsym), traits.laid_out_as(bsym)
        self.define((*shared.values(), *copied.values()))
        laid_out = traits.result_layouts(bsym, self._tensors)
        for position, p in enumerate(outs):
            if written is not None and position == 0:
                self._tensors[p.name] = self._tensors[written.name]
            elif p.name in shared:  # another dtype, or a part of the result's storage
                self._tensors[p.name] = self._tensors[shared[p.name].name]
            elif p.name in copied:
                t = self._tensors[copied[p.name].name]
                self._tensors[p.name] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            elif p.name in laid_out:
                self._tensors[p.name] = laid_out[p.name]
            elif p.name not in self._tensors:
                self._tensors[p.name] = self._fresh(bsym, p)

    def _run_region(self, bsym: BoundSymbol) -> None:
        args = [p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)]
        outs = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)]
        self.define(args)
        inside = Layout.of({p.name: self._tensors[p.name] for p in args})
        for step in region_steps(bsym):
            inside.run(step)
        inside.define(outs)
        shown = {p.name: inside[p.name] for p in outs}
        for name, arg in traits_of(bsym).shares(bsym).items():
            if may_stand_in(shown[name], memory := self._tensors[arg.name]):
                shown[name] = memory.view(shown[name].shape)
        self._tensors |= shown

    def _run_view(self, bsym: BoundSymbol) -> bool:
        if not any(isinstance(p, TensorProxy | FutureTensorProxy) for p in bsym.flat_proxy_outs):
            return True  # arithmetic on numbers, under `cache="symbolic values"`
        function = _view_function(bsym)
        if function is None:
            for sub in bsym.subsymbols:
                if not self._run_view(sub):
                    return False
            return all(p.name in self._tensors for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy))
        args, kwargs = self._to_meta(tuple(bsym.args)), self._to_meta(dict(bsym.kwargs))
        try:
            result = function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, KeyError):
            return False
        results = result if isinstance(result, tuple | list) else (result,)
        outs = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy | FutureTensorProxy)]
        for p, tensor in zip(outs, results, strict=True):
            self._tensors[p.name] = tensor
        return True

    def _to_meta(self, value: Any) -> Any:
        if isinstance(value, TensorProxy | FutureTensorProxy):
            self.define((value,))
            return self._tensors[value.name]
        if isinstance(value, NumberProxy):
            return value.value
        if isinstance(value, tuple):  # flattening by a library takes longer than the view itself
            return tuple([self._to_meta(x) for x in value])
        if isinstance(value, list):
            return [self._to_meta(x) for x in value]
        if isinstance(value, dict):
            return {key: self._to_meta(x) for key, x in value.items()}
        if type(value).__module__ == "thunder.core.dtypes":
            return to_torch_dtype(value)
        return value

    def _fresh(self, bsym: BoundSymbol, p: TensorProxy | FutureTensorProxy) -> torch.Tensor:
        shape = tuple(map(int, p.shape))
        operands = [
            self._tensors[a.name]
            for a in bsym.flat_proxy_args
            if isinstance(a, TensorProxy) and a.name in self._tensors and tuple(a.shape) == shape
        ]
        if bsym.sym.name in _CPU_ATTENTION:
            return self._of_cpu_attention(bsym, p)
        if bsym.sym.name.startswith(_FLASH) and len(shape) == 4 and shape[-1] % 8:
            padded = (*shape[:-1], padded_head(shape[-1]))
            return torch.empty(padded, dtype=to_torch_dtype(p.dtype), device="meta")[..., : shape[-1]]
        if bsym.sym.name == "einsum" and bsym.sym.executor is None:  # no executor takes it whole
            for sub in bsym.subsymbols:
                self.run(sub)
            return self._tensors[p.name]
        if all(t.is_contiguous() for t in operands) or is_dense_function(bsym):
            return _empty(p)
        follows = bsym.sym.name.endswith("_like")  # its decomposition does not
        if not follows and any(
            leaf.sym.id in _DENSE or leaf.sym.name in ("cat", "linear", "matmul") for leaf in (bsym, *leaves(bsym))
        ):
            return _empty(p)
        if "scaled_dot_product" in bsym.sym.name:
            # On a GPU the fused kernels follow the layout of the query; Thunder copies it if its last dim is not dense.
            operands = [t if t.stride(-1) == 1 else t.contiguous() for t in operands[:1]]
        if all(t.is_contiguous() for t in operands):
            return _empty(p)
        strides = _elementwise_strides(shape, tuple([t.stride() for t in operands]))
        return torch.empty_strided(shape, strides, dtype=to_torch_dtype(p.dtype), device="meta")

    def _of_cpu_attention(self, bsym: BoundSymbol, p: TensorProxy) -> torch.Tensor:
        """What the CPU's flash kernels return, as `aten/src/ATen/native/transformers/attention.cpp` makes it.

        The output lies as the query does. The log-sum-exp, shown as (B, H, T), lies as (B, T, H), and gradients,
        shown as (B, H, T, D), lie as (B, T, H, D).
        """
        if bsym.sym.name == _CPU_ATTENTION[0] and p.name == bsym.output[0].name:
            query = self._tensors[bsym.args[0].name]
            return torch.empty_like(query if query.stride(-1) == 1 else query.contiguous())
        batch, heads, rows, *size = map(int, p.shape)
        of_kernel = torch.empty((batch, rows, heads, *size), dtype=to_torch_dtype(p.dtype), device="meta")
        return of_kernel.transpose(1, 2)


def padded_head(size: int) -> int:
    """The size of a head as Thunder pads it for the flash kernel of a GPU, which makes results of that size."""
    return -(-size // 8) * 8


@lru_cache(10_000)
def _elementwise_strides(shape: tuple[int, ...], operands: tuple[tuple[int, ...], ...]) -> Sequence[int]:
    """The strides of an elementwise result, by those of its operands; PyTorch's own answer takes a while."""
    return compute_elementwise_output_strides(*[torch.empty_strided(shape, s, device="meta") for s in operands])


def dense_bytes(p: TensorProxy | FutureTensorProxy) -> int:
    """Bytes of a proxy's own elements, each once."""
    return _empty(p).untyped_storage().nbytes()


def _empty(p: TensorProxy | FutureTensorProxy) -> torch.Tensor:
    return torch.empty(tuple(map(int, p.shape)), dtype=to_torch_dtype(p.dtype), device="meta")
