"""Which parameters Thunder's tensor parallelism will shard, as far as planning before autograd has to know."""

from __future__ import annotations

import torch
from thunder.core.compile_data import get_compile_data

__all__ = ["parameters_to_shard"]


def parameters_to_shard() -> frozenset[str]:
    """The names of proxies whose parameters `column_parallel` or `row_parallel` shards in what is compiled.

    Thunder applies those to a module that is compiled already, so their transforms run after all others: what runs
    before sees whole parameters.
    """
    if not torch.distributed.is_available():
        return frozenset()
    from thunder.distributed.tensor_parallel.common import TransformForTensorParallel

    compile_data = get_compile_data()
    modules = getattr(compile_data, "_thunder_module_map", {})
    module = modules.get(id(getattr(compile_data, "fn", None)))
    return frozenset(
        name
        for transform in getattr(module, "_lc_transforms", ())
        if isinstance(transform, TransformForTensorParallel)
        for name in transform.chunked_param_name_to_layer_type
    )
