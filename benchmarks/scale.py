"""Planning of very long programs: ``python -m benchmarks.scale``.

Joint traces made operation by operation (Thunder itself takes minutes to trace so many): how long
planning takes and how much memory, at 20,000 and 100,000 operations, per shape of program. Every plan is
verified. Times are of this process' CPU; memory is what the process grew by at its highest, each case in a
process of its own. Writes ``benchmarks/results/scale.json``, of which ``docs/scale.md`` speaks.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import thunder.torch as ltorch
import torch
from rich.console import Console
from thunder.core import devices, dtypes, prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx

from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.planning.executor import install_planner
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex

__all__ = ["SHAPES", "count", "joint_trace", "planned"]

RESULTS = Path(__file__).parent / "results"
OPS = (20_000, 100_000)


class _Builder:
    """A joint trace, operation by operation; those between `backward` and the end are of the backward."""

    def __init__(self, rows: int = 64) -> None:
        self.shape = (rows, rows)
        self.trace = TraceCtx(None)
        self.args: list[TensorProxy] = []

    def arg(self, name: str) -> TensorProxy:
        p = TensorProxy(name, shape=self.shape, device=devices.cpu, dtype=dtypes.float32, requires_grad=True)
        self.args.append(p)
        return p

    def finish(self, outputs: tuple[TensorProxy, ...], grads: tuple[TensorProxy, ...] | None) -> TraceCtx:
        trace = self.trace
        trace.args, trace.kwargs = tuple(self.args), {}
        if grads is None:
            prims.python_return(outputs)
        else:
            prims.python_return({"output": grads, "flat_args": self.args, "fw_flat_out": outputs})
        body = trace.bound_symbols
        given = next((i for i, b in enumerate(body) if b.sym == prims.get_grad), len(body))
        for b in body[given:-1]:
            b.tags.add(BoundSymbolTag.BACKWARD)
        trace.bound_symbols = [*(prims.unpack_trivial.bind(a, output=a, name=a.name) for a in self.args), *body]
        trace._siginfo = SigInfo("scale")
        trace._siginfo.args = [(a.name, None) for a in self.args]
        return trace


def _layers(b: _Builder, ops: int) -> TraceCtx:
    """A residual network: per layer a product, tanh and a sum, with its backward: 12 operations."""
    h, layers = b.arg("x"), []
    for i in range(ops // 12):
        w = b.arg(f"w{i}")
        t = ltorch.tanh(ltorch.matmul(h, w))
        layers.append((h, w, t))
        h = ltorch.add(h, t)
    g, grads = prims.get_grad(h), []
    for h_in, w, t in reversed(layers):
        d = ltorch.mul(g, ltorch.add(ltorch.neg(ltorch.mul(t, t)), 1.0))
        grads.append(ltorch.matmul(prims.transpose(h_in, (1, 0)), d))
        g = ltorch.add(g, ltorch.matmul(d, prims.transpose(w, (1, 0))))
    return b.finish((h,), (g, *grads))


def _chain(b: _Builder, ops: int) -> TraceCtx:
    """A chain of sines with its backward: all of it may fuse, and nothing may run beside anything."""
    h, links = b.arg("x"), []
    for _ in range(ops // 3):
        links.append(h)
        h = ltorch.sin(h)
    g = prims.get_grad(h)
    for h_in in reversed(links):
        g = ltorch.mul(g, ltorch.cos(h_in))
    return b.finish((h,), (g,))


def _products(b: _Builder, ops: int) -> TraceCtx:
    """A chain in which nothing fuses."""
    h, w = b.arg("x"), b.arg("w")
    for _ in range(ops):
        h = ltorch.matmul(h, w)
    return b.finish((h,), None)


def _fan(b: _Builder, ops: int) -> TraceCtx:
    """Paths from one value, all open at once in the source, closed one by one: issue #1337's function."""
    x, w = b.arg("x"), b.arg("w")
    paths = [ltorch.matmul(ltorch.relu(x), w) for _ in range(ops // 3)]
    for path in paths:
        x = ltorch.add(x, path)
    return b.finish((x,), None)


def _outputs(b: _Builder, ops: int) -> TraceCtx:
    """As many results as a half of the operations, none of which needs another."""
    x, w = b.arg("x"), b.arg("w")
    return b.finish(tuple(ltorch.matmul(ltorch.sin(x), w) for _ in range(ops // 2)), None)


def _writes(b: _Builder, ops: int) -> TraceCtx:
    """A buffer that is overwritten and read in turn."""
    x, buffer = b.arg("x"), b.arg("buffer")
    for _ in range(ops // 3):
        x = ltorch.mul(x, prims.copy_(ltorch.sin(x), buffer, grad_enabled=False))
    return b.finish((x,), None)


def _views(b: _Builder, ops: int) -> TraceCtx:
    """Views of views, every one of which is read."""
    x, view = b.arg("x"), None
    for _ in range(ops // 2):
        view = prims.transpose(x if view is None else view, (1, 0))
        x = ltorch.add(x, view)
    return b.finish((x,), None)


SHAPES: dict[str, Callable[[_Builder, int], TraceCtx]] = {
    "layers": _layers,
    "chain": _chain,
    "products": _products,
    "fan": _fan,
    "outputs": _outputs,
    "writes": _writes,
    "views": _views,
}


def joint_trace(shape: str, ops: int) -> TraceCtx:
    """A trace of about `ops` operations, forward and backward in one as fusion passes get it; see `SHAPES`."""
    builder = _Builder()
    with tracectx(builder.trace):
        return SHAPES[shape](builder, ops)


def planned(trace: TraceCtx) -> TraceCtx:
    """The trace as `MemEfficient` plans it for `mem_pointwise`, verified."""
    (seated,) = install_planner([mem_pointwise_ex], PlanningOptions(strict=True, verify=True))
    return seated.fusion_pass(trace)  # type: ignore[attr-defined]


def count(trace: TraceCtx) -> int:
    """What the trace does, without the unpacking of its arguments and its return."""
    return len(trace.bound_symbols) - len(trace.args) - 1


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(shape: str, ops: int) -> dict[str, object]:
    """Plan one program; meant for a process of its own."""
    torch.set_num_threads(1)
    planned(joint_trace(shape, 100))  # imports and caches
    trace = joint_trace(shape, ops)
    before, start = _peak_bytes(), time.process_time()
    result = planned(trace)
    return {
        "shape": shape,
        "ops": count(trace),
        "steps": count(result),
        "planning_s": round(time.process_time() - start, 2),
        "grown_mib": round((_peak_bytes() - before) / 2**20, 1),
    }


def main(names: list[str]) -> None:
    rows: list[dict[str, object]] = []
    record = {"command": "python -m benchmarks.scale", "torch": torch.__version__, "rows": rows}
    spawn = multiprocessing.get_context("spawn")
    for ops in OPS:
        for shape in names or SHAPES:
            with spawn.Pool(1) as pool:
                rows.append(pool.apply(measure, (shape, ops)))
            Console().print(rows[-1])
            (RESULTS / "scale.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
