"""What kernels hold while they run, beyond their inputs and outputs: estimates for planning.

The planner needs to know only where the large ones are, so that it runs them when little else is
alive. `scratch.py` measures (on a CPU) or states what a prediction reports.
"""

from __future__ import annotations

from functools import cache
from math import prod

import torch
from thunder.core.dtypes import bfloat16, float16
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, has_tags

from thunder_mem.chunk_loop import is_chunk_loop, scratch_bytes

__all__ = ["estimated_scratch_bytes"]

_GEMMS = {PrimIDs.MATMUL, PrimIDs.LINEAR, PrimIDs.CONVOLUTION}
_FLOAT32_BYTES = 4


def estimated_scratch_bytes(bsym: BoundSymbol) -> int:
    """Bytes that the kernel of `bsym` holds for itself, to the accuracy that planning needs.

    - a chunk loop states its own;
    - a 16-bit matrix product on a CPU adds up in a float32 copy of its result, unless the CPU
      multiplies bfloat16 itself;
    - the backward of fused attention adds up in float32: the gradients of query, key and value on a
      CPU, that of the query alone on a GPU.
    """
    if is_chunk_loop(bsym):
        return scratch_bytes(bsym)
    outs = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)]
    if not outs or outs[0].dtype not in (bfloat16, float16):
        return 0
    on_cpu = outs[0].device.type == "cpu"
    if "attention" in bsym.sym.name and "backward" in bsym.sym.name:
        return sum(_float32_bytes(p) for p in (outs[:3] if on_cpu else outs[:1]))
    if on_cpu and _is_gemm(bsym) and not (outs[0].dtype is bfloat16 and _multiplies_bfloat16()):
        return _float32_bytes(outs[0])
    return 0


@cache
def _multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it, and so oneDNN kernels that need no wider copy."""
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in asked)


def _is_gemm(bsym: BoundSymbol) -> bool:
    return any(b.sym.id in _GEMMS for b in (bsym, *bsym.subsymbols)) or has_tags(bsym, {OpTags.MATMUL_OP})


def _float32_bytes(p: TensorProxy) -> int:
    return prod(map(int, p.shape)) * _FLOAT32_BYTES
