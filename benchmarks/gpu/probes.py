"""Single questions to a GPU, each in a minute: a loss head, a workspace, copies beside work, two backwards."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import thunder
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.loss_head import Head, eager, make_inputs, planned, step
from thunder_mem import MemEfficient, StepInBackward, estimate, last_plan, measure_peak, predict, predict_step, simulate
from thunder_mem.chunk_loop.matmul import gemm
from thunder_mem.fusers.fusion_executors import fuser_of, with_fuser
from thunder_mem.memory.device_specs import DEVICES, device_spec
from thunder_mem.prediction.library_memory import cublas_workspace_bytes
from thunder_mem.prediction.training_step import training_step

__all__ = [
    "HEADS",
    "executors_with",
    "head",
    "hidden_share",
    "layers",
    "mean_square",
    "median_ms",
    "model_name",
    "offload",
    "predicted_head",
    "predicted_workspace",
    "products",
    "retain_graph",
    "states_on_host",
    "workspace",
    "workspaces_of_a_step",
]

_SHAPE = (16384, 4096, 32000)  # rows, width, vocabulary: longchat's head
HEADS: dict[str, Callable[[], Head]] = {
    "eager": lambda: eager,
    "torch.compile": lambda: torch.compile(eager),
    "chosen": planned,
    **{f"rows={rows}": lambda rows=rows: planned(rows=rows) for rows in (256, 512, 1024, 2048, 4096, 8192)},
    "rows=4096, input": lambda: planned(rows=4096, accumulate="input"),
}
_ROUNDS = 5
_TOLERANCE = 2e-3  # of float32, whose products run in TF32 where that is allowed


def model_name() -> str:
    """The name, for `simulate`, of the GPU that stands here.

    Raises:
        ValueError: none of those that can be simulated.
    """
    marketing_name = torch.cuda.get_device_name()
    for spec in DEVICES.values():
        if spec.marketing_name == marketing_name:
            return spec.name
    raise ValueError(f"{marketing_name} cannot be simulated: the known ones are {', '.join(DEVICES)}")


def head(name: str) -> dict[str, Any]:
    """A head's peak above the start, and the median of its times, forward and backward, on the GPU."""
    run, inputs = HEADS[name](), make_inputs(_SHAPE, torch.bfloat16, "cuda")
    took_ms = median_ms(lambda: step(run, *inputs))
    return {"peak_bytes": measure_peak(step, run, *inputs, device="cuda"), "median_ms": took_ms}


def median_ms(run: Callable[[], object]) -> float:
    """The median time of some calls on the GPU, after one that warms up."""
    run()
    times_ms = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times_ms.append(begin.elapsed_time(end))
    return statistics.median(times_ms)


def products(depth: int, width: int) -> dict[str, Any]:
    """Times of the products of a weight (width, depth) with 256 to 16,384 rows, in milliseconds.

    The gradient of the weight is also added to a sum of 16 bits, to one of float32, and to half of one.
    """
    on_gpu = {"dtype": torch.bfloat16, "device": "cuda"}
    w, total = (torch.randn(width, depth, **on_gpu) for _ in range(2))
    wide, half = (torch.randn(n, depth, device="cuda") for n in (width, width // 2))
    found = {}
    for rows in (256 << i for i in range(7)):
        x, out, dx = (torch.randn(rows, n, **on_gpu) for n in (depth, width, depth))
        runs: dict[str, Callable[[], object]] = {
            "out": partial(torch.mm, x, w.t(), out=out),
            "dx": partial(torch.mm, out, w, out=dx),
            "dw": partial(torch.mm, out.t(), x, out=total),
            "dw += bfloat16": partial(total.addmm_, out.t(), x),
            "dw += float32": partial(gemm, wide, out.t(), x, add=True, scratch_bytes=0),
            "half of dw += float32": partial(gemm, half, out.t()[: width // 2], x, add=True, scratch_bytes=0),
        }
        found[f"{rows} rows"] = {name: round(median_ms(run), 4) for name, run in runs.items()}
    return found


def predicted_head(device: str, name: str) -> dict[str, Any]:
    """The same peak for a GPU that is not there."""
    if name == "eager":
        inputs = _shapes("meta")

        def whole() -> None:
            step(eager, *inputs)

        found = estimate(whole, None, None, device=device).prediction
    else:
        with simulate(device):
            found = predict(HEADS[name](), *_shapes("cuda"))
    return {"peak_bytes": found.peak_bytes - found.held_bytes}


def _shapes(device: str) -> tuple[torch.Tensor, ...]:
    """Inputs of which only shapes matter."""
    n, d, v = _SHAPE
    x, w = (torch.zeros(rows, d, dtype=torch.bfloat16, device=device, requires_grad=True) for rows in (n, v))
    return x, w, torch.zeros(n, dtype=torch.long, device=device)


def workspace() -> dict[str, Any]:
    """What the first product of this process adds beside its result, and what is predicted."""
    x = torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16)
    before_bytes = torch.cuda.memory_allocated()
    y = x @ x
    torch.cuda.synchronize()
    added_bytes = torch.cuda.memory_allocated() - before_bytes - y.nbytes
    said_bytes = cublas_workspace_bytes(torch.cuda.get_device_capability())
    return {"workspace_bytes": added_bytes, "predicted_bytes": said_bytes, "right": added_bytes == said_bytes}


def workspaces_of_a_step(compiled: bool) -> dict[str, Any]:
    """How many workspaces there are after some steps with products in the forward and the backward.

    One for the calling thread and one for autograd's were expected; an H200 had one after compiled steps.
    """
    x, w = (torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for grad in (False, True))
    run = torch.compile(_product_sum) if compiled else _product_sum
    torch._C._cuda_clearCublasWorkspaces()
    before_bytes = torch.cuda.memory_allocated()
    for _ in range(3):
        run(x, w).backward()
        w.grad = None
    torch.cuda.synchronize()
    added_bytes = torch.cuda.memory_allocated() - before_bytes
    return {"workspaces": added_bytes / cublas_workspace_bytes(torch.cuda.get_device_capability())}


def _product_sum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).float().square().sum()


def predicted_workspace(device: str) -> dict[str, Any]:
    """What is predicted for a GPU that is not there."""
    return {"predicted_bytes": cublas_workspace_bytes(device_spec(device).capability)}


def offload() -> dict[str, Any]:
    """A stack under a budget that only offloading meets: its peak beside the plan's, and what hides its copies."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.Softmax(-1))]
    model, x = nn.Sequential(*layers).cuda(), torch.randn(16384, 2048, device="cuda")

    def compiled(budget: int, **options: Any) -> Any:
        transform = MemEfficient(strict=True, budget=budget, **options)
        return thunder.jit(model, executors=executors_with("mem_pointwise"), transforms=[transform])

    def run(jitted: Any) -> None:
        jitted(x).square().mean().backward()
        model.zero_grad()

    smallest = compiled(1, on_infeasible="warn")
    run(smallest)
    tight = compiled(last_plan(smallest).candidate.peak_bytes - 1, offload=True)
    run(tight)
    budget = last_plan(tight).budget
    copies, kernels = _timed(lambda: run(tight))
    return {
        "budget_bytes": last_plan(tight).budget.peak_bytes,
        "without_offload_bytes": last_plan(smallest).candidate.peak_bytes,
        "peak_above_start_bytes": measure_peak(run, tight, device="cuda"),
        "host_bytes": budget.host_bytes,
        "pinned_bytes": torch.cuda.host_memory_stats()["active_bytes.peak"],
        "copies": len(copies),
        "copies_us": sum(end - begin for begin, end in copies),
        "hidden_share": hidden_share(copies, kernels),
        "right": len(copies) == 2 * len(budget.offloaded) > 0,
    }


def _timed(run: Callable[[], object]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """When each copy between device and host, and each kernel, begins and ends, in microseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [(e.name, e.time_range.start, e.time_range.end) for e in profiler.events() or ()]
    copies = [(a, b) for name, a, b in events if name.startswith(("Memcpy DtoH", "Memcpy HtoD"))]
    kernels = [(a, b) for name, a, b in events if not name.startswith(("Memcpy", "Memset"))]
    return copies, kernels


def states_on_host(device: str) -> dict[str, Any]:
    """AdamW's states on the host and updates beside the backward, compared bit for bit with states on the device.

    On a GPU the share of copies that other work hides is measured, and the peak of a step beside the predicted one.
    """
    on_gpu = device == "cuda"
    width, rows = (4096, 16384) if on_gpu else (64, 256)
    x = torch.randn(rows, width, device=device, generator=torch.Generator(device).manual_seed(1))
    found: dict[str, list[torch.Tensor]] = {}
    for states in ("device", "host"):
        model = layers(8, width, device)
        optimizer = StepInBackward(torch.optim.AdamW(model.parameters()), states=states)
        transform = MemEfficient(strict=True, verify=True, optimizer=optimizer)
        step = thunder.jit(model, executors=executors_with("mem_pointwise"), transforms=[transform])
        run = partial(training_step, step, optimizer, mean_square, x)
        for _ in range(5):
            run()
        found[states] = [p.detach().clone() for p in model.parameters()]
    same = all(map(torch.equal, found["device"], found["host"]))
    predicted = predict_step(step, optimizer, mean_square, x)
    result = {"same": same, "predicted_bytes": predicted.measured_bytes, "right": same}
    if on_gpu:
        copies, kernels = _timed(run)
        result |= {
            "peak_above_start_bytes": measure_peak(run, device="cuda"),
            "copies_us": sum(end - begin for begin, end in copies),
            "hidden_share": hidden_share(copies, kernels),
            "predicted_hidden_share": 1 - predicted.state_transfers.exposed_s / predicted.state_transfers.link_s,
        }
    return result


def layers(count: int, width: int, device: str) -> nn.Sequential:
    """Linear layers of one width, each with a GELU, the same at each call."""
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU()))).to(device)


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def hidden_share(copies: Sequence[tuple[float, float]], work: Sequence[tuple[float, float]]) -> float:
    """Which part of the time of copies lies beside work.

    Args:
        copies: when each begins and ends.
        work: the same of kernels; those that overlap count once.

    Example:
        >>> hidden_share([(0, 4), (6, 10)], [(2, 5), (3, 7)])
        0.375
    """
    merged: list[list[float]] = []
    for begin, end in sorted(work):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    total = sum(end - begin for begin, end in copies)
    hidden = sum(max(0, min(end, b) - max(begin, a)) for begin, end in copies for a, b in merged)
    return hidden / total if total else 0.0


def retain_graph(device: str) -> dict[str, Any]:
    """Two backwards of one graph, the second of which finds all that it needs, as the first did."""
    model = layers(4, 256, device)
    x = torch.randn(512, 256, device=device)
    transform = MemEfficient(strict=True, verify=True, reuse=True)
    jitted = thunder.jit(model, executors=executors_with("mem_pointwise"), transforms=[transform])
    loss = jitted(x).square().sum()
    gradients = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2)]
    exact_model = nn.Sequential(*model).double()
    exact = torch.autograd.grad(exact_model(x.double()).square().sum(), list(exact_model.parameters()))
    same = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    pairs = zip(gradients[0], exact, strict=True)
    error = max(float((ours.double() - theirs).norm() / theirs.norm()) for ours, theirs in pairs)
    return {"same": same, "relative_error": error, "right": same and error < _TOLERANCE}


def executors_with(fusion: str) -> list[Any]:
    return with_fuser(thunder.extend.get_default_executors(), fuser_of(fusion))
