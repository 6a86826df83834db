"""Functions that Thunder passes to PyTorch whole, given their tensors one by one instead of in sequences or by name.

Thunder 0.2.6 differentiates such a function by the tensors that are arguments themselves. Those in a list, such as the
weights of `torch.lstm` or all tensors of `torch.block_diag`, silently get no gradient, and one that is given by name is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from zlib import crc32

from thunder.core import dtypes
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.transforms import augmented_forward_impls
from thunder.torch import augmented_forward_adaptor, meta_adaptor

from thunder_mem.kernels.kernel_executor import mem_gradients_ex
from thunder_mem.torch_functions.whole_gradients import give_gradient, like_arguments, mem_whole_ex

__all__ = ["run_whole", "with_plain_arguments"]


def with_plain_arguments(bsym: BoundSymbol) -> BoundSymbol:
    """The call of such a function by an operation that takes its tensors one by one; the same object for others.

    Functions with a gradient of our own stay.
    """
    if OpTags.AUTO_REGISTERED not in (bsym.sym.tags or ()) or mem_gradients_ex.get_grad_transform(bsym.sym):
        return bsym
    leaves, spec = tree_flatten((bsym.args, bsym.kwargs))
    found = {id(x) for x in bsym.args}
    if not any(_has_gradient(x) and id(x) not in found for x in leaves):
        return bsym
    operation = _operation(bsym.sym.meta.__torchfn, spec, str(bsym.sym.id).replace(".", "_"))
    plain = operation.bind(*leaves, output=bsym.output)
    plain.source_filename, plain.source_positions = bsym.source_filename, bsym.source_positions
    plain.tags = bsym.tags.copy()
    return plain


def run_whole(
    function: Callable[..., Any], *args: Any, result_shape: Callable[..., tuple[int, ...]] | None = None, **kwargs: Any
) -> Any:
    """Trace a call of a function as one operation, which PyTorch runs and differentiates.

    Args:
        function: of PyTorch.
        args, kwargs: its arguments.
        result_shape: from the same arguments to the shape of its only result, where PyTorch finds none without their
            values. The dtype is that of the first tensor. A function of a module, by which the operation is known.
    """
    leaves, spec = tree_flatten((args, kwargs))
    return _operation(function, spec, function.__name__, result_shape)(*leaves)


def _has_gradient(x: object) -> bool:
    return isinstance(x, TensorProxy) and dtypes.is_inexact_dtype(x.dtype)


@cache
def _operation(
    function: Callable[..., Any], spec: Any, name: str, result_shape: Callable[..., tuple[int, ...]] | None = None
) -> Symbol:
    """The operation with the arguments that `spec` arranges, and its gradient, which Thunder makes of any function."""

    def plain(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, spec)
        return function(*args, **kwargs)

    def shaped(*leaves: Any) -> TensorProxy:
        assert result_shape is not None
        args, kwargs = tree_unflatten(leaves, spec)
        first = next(x for x in leaves if isinstance(x, TensorProxy))
        return TensorProxy(like=first, shape=result_shape(*args, **kwargs))

    plain.__name__ = function.__name__
    name = f"{name}_{crc32(str(spec).encode()):08x}"  # the same in each process, for plan files
    meta = meta_adaptor(plain) if result_shape is None else shaped
    operation = mem_whole_ex.register_operator(name, meta=meta, fn=plain)
    augmented_forward_impls[operation.id] = augmented_forward_adaptor(operation)
    give_gradient(operation, plain, f"{name}_vjp", None if result_shape is None else like_arguments)
    return operation
