"""A fused region without code: its results on fake tensors, without its internal values.

While such a region runs, its inputs and outputs are alive together and its internal values take no memory. Its outputs
have the strides and the aliasing of operations that run one by one (`semantics/layout.py`), as in Inductor's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from thunder.core.devices import to_torch_device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from torch.utils._python_dispatch import _disable_current_modes

from thunder_mem.runtime.output_layout import describe, lay_out, meta_like
from thunder_mem.semantics.layout import Layout

__all__ = ["empty_like_proxy", "modelled_region", "run_region"]


def empty_like_proxy(proxy: TensorProxy) -> torch.Tensor:
    """A dense tensor of the proxy's shape, dtype and device, uninitialised."""
    return torch.empty(
        tuple(map(int, proxy.shape)), dtype=to_torch_dtype(proxy.dtype), device=to_torch_device(proxy.device)
    )


def run_region(bsym: BoundSymbol, env: dict[str, Any]) -> None:
    """Give `env` the outputs of the fused region `bsym`, laid out but not computed.

    Args:
        bsym: a bound symbol with `sym.is_fusion`; its subsymbols define it.
        env: tensors (fake ones, under their mode) by name; holds the region's inputs.
    """
    inputs = {p.name: env[p.name] for p in bsym.flat_proxy_args if isinstance(env.get(p.name), torch.Tensor)}
    env.update(_outputs([bsym], inputs, bsym.flat_proxy_outs))


def modelled_region(
    bsyms: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy], *, mode: str | None = None
) -> Callable[..., list[Any]]:
    """A callable with the region's results on fake tensors, in place of one that compiles it.

    It replaces `thunder.executors.torch_compile.make_compiled` and takes the same arguments; `mode` does not
    matter here.
    """
    names = [p.name for p in inputs]

    def region(*args: Any) -> list[Any]:
        given = {name: x for name, x in zip(names, args, strict=True) if isinstance(x, torch.Tensor)}
        return list(_outputs(bsyms, given, outputs).values())

    return region


def _outputs(
    bsyms: Iterable[BoundSymbol], inputs: Mapping[str, torch.Tensor], outputs: Iterable[Proxy]
) -> dict[str, torch.Tensor | None]:
    """The tensors that the bound symbols make of the inputs, by name."""
    wanted = [p for p in outputs if isinstance(p, TensorProxy)]
    given = list(inputs.values())
    with _disable_current_modes():  # meta tensors answer alone
        metas = meta_like(given)
        layout = Layout.of(dict(zip(inputs, metas, strict=True)))
        for bsym in bsyms:
            layout.run(bsym)
        layout.define(wanted)
        found = describe([layout[p.name] for p in wanted], metas)
    made = lay_out(found, given, [to_torch_device(p.device) for p in wanted])
    return dict(zip([p.name for p in wanted], made, strict=True))
