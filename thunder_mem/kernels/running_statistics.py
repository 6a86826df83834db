"""Batch norm in training in functional form: the normalisation by its kernel, and separate writes.

Thunder's `batch_norm` writes to the running statistics inside. Its kernel is a function of its argument alone, so it
may run again. The running averages are small operations beside it, and the writes keep their places.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import thunder.torch as ltorch
from thunder.core.proxies import ProxyTag, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_mem.kernels.kernel_executor import has_dtype_of, is_float, is_number, mem_kernels_ex
from thunder_mem.kernels.norm_kernels import batch_norm_training
from thunder_mem.semantics.effects import is_copy, leaves
from thunder_mem.trace.rebuilding import rebuilt, recorded

__all__ = ["with_statistics_apart"]


def _average_meta(running: TensorProxy, batch: TensorProxy, momentum: float) -> TensorProxy:
    # As in eager, no gradient passes through the written values.
    return TensorProxy(like=running, requires_grad=False, tags={ProxyTag.DETACHED_AUTOGRAD_GRAPH})


_running_average = mem_kernels_ex.register_operator(
    "mem_running_average",
    meta=_average_meta,
    fn=lambda running, batch, momentum: (1 - momentum) * running + momentum * batch.to(running.dtype),
)


def with_statistics_apart(trace: TraceCtx) -> TraceCtx:
    """The computation trace, before autograd, with the training of batch norms in `mem_kernels`' form."""
    if not any(map(_is_training, trace.bound_symbols)):
        return trace
    return rebuilt(
        trace,
        lambda: [b for bsym in trace.bound_symbols for b in (_apart(bsym) if _is_training(bsym) else [bsym])],
        "Running statistics are written beside batch norms",
    )


def _arguments(bsym: BoundSymbol) -> dict[str, Any]:
    call = _SIGNATURE.bind(*bsym.args, **bsym.kwargs)
    call.apply_defaults()
    return call.arguments


_SIGNATURE = signature(ltorch.batch_norm.meta)


def _is_training(bsym: BoundSymbol) -> bool:
    """Whether it is a batch norm that the kernel takes, and writes running statistics."""
    if bsym.sym.id != ltorch.batch_norm.id:
        return False
    given = _arguments(bsym)
    a, momentum, eps = (given[name] for name in ("a", "momentum", "eps"))
    others = [given[name] for name in ("weight", "bias", "running_mean", "running_var")]
    numbers = is_number(momentum) and is_number(eps)
    return bool(given["training"] and numbers and is_float(a) and has_dtype_of(a, *others) and _writes(bsym))


def _writes(bsym: BoundSymbol) -> list[BoundSymbol]:
    return [leaf for leaf in leaves(bsym) if is_copy(leaf)]


def _apart(bsym: BoundSymbol) -> list[BoundSymbol]:
    """The normalisation, the averages, and the writes of the given bound symbol, with their results."""
    given = _arguments(bsym)
    with recorded() as done:
        out, mean, _, variance = batch_norm_training(given["a"], given["weight"], given["bias"], given["eps"])
        batch = {"running_mean": mean, "running_var": variance}
        sources = {
            running.name: _running_average(running, batch[name], given["momentum"])
            for name in batch
            if (running := given[name]) is not None
        }
    done += [w.from_bsym(args=(sources[w.args[1].name], *w.args[1:])) for w in _writes(bsym)]
    swap = {variableify(out): bsym.output}
    place = {"source_filename": bsym.source_filename, "source_positions": bsym.source_positions}
    return [b.from_bsym_swap_proxies(swap).from_bsym(tags=b.tags | bsym.tags, **place) for b in done]
