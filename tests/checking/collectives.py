"""Communication on trace level, in process groups that are not there, and in graphs."""

import random
from dataclasses import replace

from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx

from tests.checking.graphs import SIZES, Builder
from thunder_mem.distributed.link_model import Collective

__all__ = ["in_place", "sharded_layers", "tensor", "two_groups"]


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


def in_place(group):
    """A sum that is read, and then reduced over ranks in its own memory."""
    from thunder.distributed import prims as dist

    trace = TraceCtx(None)
    with tracectx(trace):
        x = tensor("x", 4, 4)
        trace.args = (x,)
        busy = prims.sin(x)
        seen = prims.cos(busy)
        reduced = dist.wait(dist.all_reduce(busy, dist.DistributedReduceOps.SUM, group, True, True))
        prims.python_return((seen, reduced))
    return trace


def sharded_layers(seed, layers, backward=False):
    """A graph of layers whose weights are gathered, and in a backward whose gradients are reduced.

    Returns:
        The graph, its collectives in the order of their starts, and the seconds of each op.
    """
    rng = random.Random(seed)
    b = Builder()
    seconds, collectives, last_start = [], [], None
    shards = [b.storage(rng.choice(SIZES), held=True) for _ in range(layers)]
    value = b.storage(rng.choice(SIZES), held=True)

    def op(reads, nbytes=None, took=0.0, after=()):
        made = b.op(reads, nbytes, backward=backward)
        b.edges.extend((a, len(b.ops) - 1) for a in after)
        seconds.append(took)
        return made

    def start(reads, nbytes, gather):
        nonlocal last_start
        made = op(reads, nbytes, after=() if last_start is None else (last_start,))
        last_start = len(b.ops) - 1
        collectives.append(Collective(last_start, None, rng.choice((0.5, 1.0, 2.0)), gather))
        return made

    def wait(k, reads):
        op(reads, after=(collectives[k].start,))
        collectives[k] = replace(collectives[k], wait=len(b.ops) - 1)
        return len(b.ops) - 1

    pending, outputs = [], []
    for shard in shards:
        weight = start((shard,), 4 * b.storages[shard].nbytes, True)
        arrived = wait(len(collectives) - 1, (weight, shard))
        for _ in range(rng.randint(0, 2)):
            op((value,), rng.choice(SIZES), rng.choice((0.0, 0.5, 1.0)))
        old = value
        value = op((value, weight), rng.choice(SIZES), rng.choice((0.5, 1.0, 3.0)), after=(arrived,))
        if backward:
            gradient = op((old, value), 4 * b.storages[shard].nbytes, 1.0)
            reduced = start((gradient,), b.storages[shard].nbytes, False)
            outputs.append(reduced)
            pending.append((len(collectives) - 1, (reduced, gradient)))
            if rng.random() < 0.5:
                wait(*pending.pop(0))
    for reduction in pending:
        wait(*reduction)
    outputs.append(value)
    return b.build(outputs), collectives, seconds
