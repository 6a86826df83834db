"""The benchmark's training loop under torch.compile, for a GPU that is not there.

Dynamo, AOTAutograd with its partitioner, and Inductor run for real on fake CPU tensors; only the kernels are not
compiled. The Python that Inductor wrote around them, which allocates, reuses and frees every buffer, is run on fake
tensors instead, so who is alive is exact. Inductor fuses here as it does for a CPU: on a GPU regions can differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.litgpt.fake_loop import LoopPeak, fake_peak

__all__ = ["inductor_peak"]


def inductor_peak(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    *,
    loss_inside: bool,
    microbatches: int = 1,
    device: str = "H100-80GB",
) -> LoopPeak:
    """`fake_peak` of `torch.compile(module)`; arguments as there, to be called within `fake_cpu`.

    Raises:
        RuntimeError: the module does not compile as one graph with one output.
    """
    arguments = batch if loss_inside else batch[:1]
    with _kernels_left_out():
        compiled = _compiled(module, arguments)
        how: dict[str, Any] = {"loss_inside": loss_inside, "microbatches": microbatches, "device": device}
        return fake_peak(module, optimizer, batch, call=compiled, **how)


def _compiled(module: nn.Module, arguments: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    """What torch.compile runs for a call with these arguments, without Dynamo's guards in front.

    Dynamo leaves a call alone while a dispatch mode watches, so the compiled graph is called itself, with the
    parameters that Dynamo handed to it.
    """
    from torch._inductor.compile_fx import compile_fx

    graphs: list[tuple[Callable[..., Any], list[Any]]] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        compiled: Any = compile_fx(graph, examples)

        def call(*args: Any) -> Any:
            graphs.append((compiled, list(args)))
            return compiled(*args)

        return call

    torch._dynamo.reset()
    with _attention_without_dropout():
        torch._dynamo.optimize(backend)(module)(*arguments)
    if len(graphs) != 1:
        raise RuntimeError(f"torch.compile makes {len(graphs)} graphs of it, not one: its peak is not simulated")
    compiled, given = graphs[0]

    def call(*args: Tensor) -> Tensor:
        now = {id(old): new for old, new in zip(arguments, args, strict=True)}
        (output,) = compiled(*(now.get(id(t), t) for t in given))
        return output

    return call


@contextmanager
def _attention_without_dropout() -> Iterator[None]:
    """CUDA's fused attention takes dropout, which the CPU's does not: it costs no memory, so it is left out."""
    attention = functional.scaled_dot_product_attention

    def without_dropout(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) > 1:
            args = (args[0], 0.0, *args[2:])
        return attention(query, key, value, *args, **{**kwargs, **({} if len(args) > 1 else {"dropout_p": 0.0})})

    with mock.patch.object(functional, "scaled_dot_product_attention", without_dropout):
        yield


@contextmanager
def _kernels_left_out() -> Iterator[None]:
    """Inductor writes its code, but compiles no kernel, and the code allocates by operators that a mode sees."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    load = PyCodeCache.load_by_key_path.__func__  # type: ignore[attr-defined]

    def load_traceable(cls: Any, *args: Any, **kwargs: Any) -> Any:
        module = load(cls, *args, **kwargs)
        for name, stand_in in _STAND_INS.items():
            if hasattr(module, name):
                setattr(module, name, stand_in)
        return module

    with (
        # vec_isa_ok: otherwise a C++ compiler is asked, for a minute, what vectors this CPU has.
        config.patch({"force_disable_caches": True, "compile_threads": 1, "cpp.vec_isa_ok": True}),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *args, **kwargs: lambda *tensors: None),
        mock.patch.object(PyCodeCache, "load_by_key_path", classmethod(load_traceable)),
    ):
        yield


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _reinterpret(t: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Tensor:
    return torch.as_strided(t, size, stride, t.storage_offset() + offset)


_STAND_INS: dict[str, Callable[..., Any]] = {
    "empty_strided_cpu": _empty_strided,
    "reinterpret_tensor": _reinterpret,
    "assert_size_stride": lambda *args: None,
    "assert_alignment": lambda *args: None,
}
"""In place of the C++ functions of the same names, which no dispatch mode sees."""
