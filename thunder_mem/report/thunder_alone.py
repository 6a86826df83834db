"""The peak of a program as Thunder alone compiles it, to compare a planned one with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import thunder

from thunder_mem.kernels.registered import mem_kernels_ex
from thunder_mem.planning.executor import user_executors
from thunder_mem.prediction.predict import predict
from thunder_mem.regions.fusion_executors import fuses_generally
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.runtime.cpu_attention import mem_attention_ex
from thunder_mem.transforms import ChunkLossHead, MemEfficient

__all__ = ["thunder_peak_bytes"]

_OURS = (mem_attention_ex, mem_kernels_ex, mem_pointwise_ex)


def thunder_peak_bytes(jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The predicted peak of a call without this package, for which Thunder traces the program once more.

    None where other transforms are involved, or regions would have to be compiled, or Thunder alone fails.

    Args:
        jitted: compiled with `MemEfficient`.
        args, kwargs: of the call.
    """
    data: Any = thunder.compile_data(jitted)
    executors = [e for e in user_executors(data.executors_list) if e not in _OURS]
    others = [t for t in data.transforms if not isinstance(t, MemEfficient | ChunkLossHead)]
    if others or any(map(fuses_generally, executors)):
        return None
    with suppress(Exception):  # the comparison is optional
        alone = thunder.jit(data.fn, executors=executors)
        return predict(alone, *args, kwargs=kwargs, keep_outputs=True).peak_bytes
    return None
