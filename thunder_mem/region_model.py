"""A fused region that is not there to run: what it returns, and nothing of what happens inside.

While such a region runs its inputs and outputs are alive together and its internals are free. An
output is a view of an input, or of another output, when the region makes it by views alone; every
other output is a dense tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from thunder.core.devices import to_torch_device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.symbol import BoundSymbol

from thunder_mem.takeover import taken_over
from thunder_mem.views import VIEWS

__all__ = ["empty_like_proxy", "modelled_region", "run_region"]


def empty_like_proxy(proxy: TensorProxy) -> torch.Tensor:
    """A dense tensor of the proxy's shape, dtype and device, uninitialised."""
    return torch.empty(
        tuple(map(int, proxy.shape)), dtype=to_torch_dtype(proxy.dtype), device=to_torch_device(proxy.device)
    )


def run_region(bsym: BoundSymbol, env: dict[str, Any]) -> None:
    """Give `env` the outputs of the fused region `bsym`, laid out but not computed.

    Args:
        bsym: a bound symbol with `sym.is_fusion`, whose subsymbols say what it does.
        env: tensors (fake ones, under their mode) by name; holds the region's inputs.
    """
    local = {p.name: env[p.name] for p in bsym.flat_proxy_args if p.name in env}
    outputs = _outputs(bsym.subsymbols, local, bsym.flat_proxy_outs)
    for name, arg in taken_over(bsym).items():
        if env[arg.name].is_contiguous():
            outputs[name] = env[arg.name].view(outputs[name].shape)
    env.update(outputs)


def _follow_views(bsyms: Iterable[BoundSymbol], local: dict[str, Any], wanted: dict[str, TensorProxy]) -> None:
    for bsym in bsyms:
        if bsym.sym.id in VIEWS:
            flat, spec = tree_flatten((bsym.args, bsym.kwargs))
            args, kwargs = tree_unflatten([_value(x, local) for x in flat], spec)
            if isinstance(args[0], torch.Tensor):
                local.setdefault(bsym.output.name, VIEWS[bsym.sym.id](*args, **kwargs))
        elif bsym.subsymbols:
            _follow_views(bsym.subsymbols, local, wanted)
        for p in bsym.flat_proxy_outs:
            if p.name in wanted and p.name not in local:
                local[p.name] = empty_like_proxy(wanted[p.name])


def _value(x: Any, local: dict[str, Any]) -> Any:
    if isinstance(x, NumberProxy):
        return x.value
    return local.get(x.name, x) if isinstance(x, Proxy) else x


def modelled_region(
    bsyms: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy], *, mode: str | None = None
) -> Callable[..., list[Any]]:
    """A callable with the region's results on fake tensors, in place of one that compiles it.

    Takes what `thunder.executors.torch_compile.make_compiled` takes, for whom it stands in; `mode` is
    how Inductor would compile, which does not matter here.
    """
    names = [p.name for p in inputs]

    def region(*args: Any) -> list[Any]:
        local = dict(zip(names, args, strict=True))
        return list(_outputs(bsyms, local, outputs).values())

    return region


def _outputs(bsyms: Iterable[BoundSymbol], local: dict[str, Any], outputs: Iterable[Proxy]) -> dict[str, Any]:
    wanted = {p.name: p for p in outputs if isinstance(p, TensorProxy)}
    _follow_views(bsyms, local, wanted)
    return {name: local[name] if name in local else empty_like_proxy(proxy) for name, proxy in wanted.items()}
