"""Communication on trace level, in process groups that are not there."""

from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx

__all__ = ["tensor", "two_groups"]


def tensor(name, *shape):
    return TensorProxy(name, shape=shape, dtype=dtypes.float32, device=devices.cpu, requires_grad=False)


def two_groups(groups):
    """Gathers and reductions of two groups, in flight at the same time, with work in between."""
    from thunder.distributed import prims as dist

    one, other = groups
    trace = TraceCtx(None)
    with tracectx(trace):
        x, y = tensor("x", 4, 4), tensor("y", 4, 4)
        trace.args = (x, y)
        busy = prims.sin(x)
        first = dist.all_gather(busy, one, True)  # 1
        second = dist.all_reduce(y, dist.DistributedReduceOps.SUM, other, True)  # 2
        work = prims.cos(x)
        third = dist.reduce_scatter(work, dist.DistributedReduceOps.SUM, one, True)  # 4
        b = dist.wait(second)  # 5
        a = dist.wait(first)  # 6
        more = prims.exp(y)
        c = dist.wait(third)  # 8
        prims.python_return((a, b, c, more))
    return trace
