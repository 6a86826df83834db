"""Run in a process of its own with TRITON_INTERPRET=1: the kernels of regions on CPU tensors, against float64.

``python -m tests.with_triton.interpreter`` prints one line of JSON for each region: its name, whether it writes over
its inputs, its kernels, and the largest error of a result, relative to the largest number in it. Each runs twice, with
the programs of each kernel's grid in order and in reverse, as a GPU gives no order to them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import scipy.special
import torch

from tests.inductor.test_reuse import REGIONS, one_region, values
from thunder_mem import simulate
from thunder_mem.regions.kernel_module import IN_PLACE_OF, load_call
from thunder_mem.regions.pointwise_executor import region_function
from thunder_mem.regions.region_kernels import kernel_module

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": scipy.special.erf,
    "pow": np.power,
}


class _Libdevice:
    """CUDA's mathematical functions, which the interpreter does not have, on the arrays that it holds."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        function = _FUNCTIONS.get(name) or getattr(np, name)

        def of_tensors(*xs: Any) -> Any:
            first = next(x for x in xs if isinstance(x, tl.tensor))
            data = function(*(x.handle.data if isinstance(x, tl.tensor) else x for x in xs))
            return tl.tensor(TensorHandle(data.astype(first.handle.data.dtype), first.handle.dtype), first.type)

        return of_tensors


def interpreted(text: str, args: list[torch.Tensor], *, reverse: bool) -> list[torch.Tensor]:
    """What a module returns for CPU tensors."""
    from torch._inductor.codecache import PyCodeCache
    from triton.runtime.interpreter import interpreter_builder

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    def kernel(name: str, source: str) -> Any:
        return getattr(PyCodeCache.load(source), name)

    at = interpreter_builder.set_grid_idx

    def set_grid_idx(*index: int) -> None:
        ends = interpreter_builder.grid_dim
        at(*(end - 1 - i if reverse else i for i, end in zip(index, ends, strict=True)))

    with mock.patch.object(interpreter_builder, "set_grid_idx", set_grid_idx):
        return list(load_call(text, kernel, {**IN_PLACE_OF, "empty_strided_cuda": empty})(args))


def error_of(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest, of all that lies in the memory of both, relative to the largest number."""
    mine, theirs = (torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).double() for t in (got, exact))
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))


def errors(names: list[str]) -> Iterator[dict[str, Any]]:
    """For each of `REGIONS` of these names that has kernels, without and with results over its inputs."""
    for name in names:
        bsyms, inputs, outputs, reuse, _ = one_region(name)
        for over in [None] if reuse is None else [None, reuse]:
            function, given = region_function(bsyms, inputs, outputs, over), values(inputs)
            with simulate("H100-80GB"):
                module = kernel_module(function, tuple(given))
            if module is None:
                continue
            exact = (function._unfused or function._build_unfused())([t.double() for t in given])
            flag = [torch.tensor(False)] if over else []
            runs = [interpreted(module.text, [*(t.clone() for t in given), *flag], reverse=r) for r in (False, True)]
            yield {
                "region": name,
                "over": over is not None,
                "kernels": len(module.launches),
                "error": max(error_of(g, e) for g, e in zip(runs[0], exact, strict=True)),
                "same in reverse": all(torch.equal(a, b) for a, b in zip(*runs, strict=True)),
            }


def main() -> None:
    import torch._inductor.runtime.triton_helpers as helpers

    with (
        mock.patch.object(helpers, "set_driver_to_gpu", lambda: None),
        mock.patch.object(helpers, "libdevice", _Libdevice()),
    ):
        for found in errors(sys.argv[1:] or list(REGIONS)):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
