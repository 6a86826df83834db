"""What updates inside the backward save on a simulated H100: ``python -m benchmarks.step_in_backward``.

A whole training step with AdamW: bfloat16, checkpoints, the loss inside. Each program runs with `optimizer.step()`
after the backward, and with `StepInBackward`; with tiles and without.

Then both steps with tiles within budgets, and what that costs.

Then longchat-7b-16k at its full 32 layers, with the optimizer's states on the host, and with its checkpoints there too,
also within the budget of a 24 GB card. All layers are planned, in half an hour: few layers do not tell, as tiles in all
32 would take more than 1 % of the modelled time, and so only the last ones have any.

Then the small llama's step on this CPU: measured peaks, and times in turn. Writes
``benchmarks/results/step_in_backward.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import thunder
import torch
from litgpt import Config
from rich.console import Console
from rich.table import Table

from benchmarks import longchat
from benchmarks.models import gpt_module, llama_step
from benchmarks.scaled import EXECUTORS
from thunder_mem import MemEfficient, StepInBackward, last_plan, measure_peak, predict_step, simulate
from thunder_mem.costs.plan_time import overlapped_seconds, trace_seconds
from thunder_mem.memory.device_models import device_model
from thunder_mem.policies import OpInfo
from thunder_mem.prediction.training_step import training_step
from thunder_mem.sorting import Graph
from thunder_mem.trace.reading import read_trace

RESULTS = Path(__file__).parent / "results" / "step_in_backward.json"
PROGRAMS = (("longchat-7b-16k", 2, 16384), ("Llama-3-8B", 2, 16384))
BUDGETS = {"longchat-7b-16k": 5_100_000_000, "Llama-3-8B": 11_400_000_000}  # of a whole step, as in PROGRAMS
LAYERS = 32  # of longchat-7b-16k
PLACES = (("device", "device", None), ("host", "device", None), ("host", "host", None), ("host", "host", 22 << 30))


@dataclass(frozen=True)
class Row:
    """One step; all sizes are bytes. `floor_bytes` are its parameters and the optimizer's states.

    `kernels_s` are the seconds of the forward and the backward.
    """

    model: str
    layers: int
    tokens: int
    tile: bool
    in_backward: bool
    peak_bytes: int
    phase: str
    operation: str
    floor_bytes: int
    kernels_s: float


@dataclass(frozen=True)
class OnHost:
    """One step with `StepInBackward`; sizes are bytes, times seconds.

    `link_s` is the time of the states' copies both ways, and `exposed_s` the part of it that no other work hides;
    `kernels_s` is the time of the forward and the backward. `budget_bytes` is that of `MemEfficient`, if there is one.
    """

    layers: int
    states: str
    checkpoints: str
    budget_bytes: int | None
    peak_bytes: int
    host_bytes: int
    link_s: float
    exposed_s: float
    kernels_s: float
    offload: str


def checkpoints_away(op: OpInfo, graph: Graph) -> str:
    """The policy that keeps the residual sums on the host, which tiles may make, and the embedding."""
    is_sum = len(op.shapes) == 1 and len(op.shapes[0]) == 3
    is_input = (op.word == "Add" and op.handed_on) or op.word in ("Embedding", "ChunkLoop")
    return "offload" if is_sum and is_input and op.offload_refusal is None else "auto"


def on_host(layers: int, states: str, checkpoints: str, budget_bytes: int | None = None, tokens: int = 16384) -> OnHost:
    """A step of longchat-7b-16k, where its states and checkpoints are ("device" or "host"), and its budget."""
    with simulate("H100-80GB"):
        model = gpt_module(longchat.config(layers), True, True, "cuda", torch.bfloat16)
        optimizer = StepInBackward(torch.optim.AdamW(model.parameters()), states=states)
        policy = {"recompute": checkpoints_away} if checkpoints == "host" else {}
        transform = MemEfficient(strict=True, tile=True, optimizer=optimizer, budget=budget_bytes, **policy)
        step = thunder.jit(model, transforms=[transform])
        ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
        prediction = predict_step(step, optimizer, None, ids, ids)
        traces = thunder.last_traces(step)[-1], thunder.last_backward_traces(step)[-1]
        kernels_s = sum(trace_seconds(trace, device_model("H100-80GB")) for trace in traces)
    moved = prediction.state_transfers
    about = next((d.how for d in last_plan(step).decisions if d.what == "offload"), "")
    sizes = prediction.peak_bytes, prediction.host_bytes
    return OnHost(layers, states, checkpoints, budget_bytes, *sizes, moved.link_s, moved.exposed_s, kernels_s, about)


@dataclass(frozen=True)
class Within:
    """One step with tiles and `StepInBackward` within a budget of bytes for all; seconds of its halves' kernels."""

    model: str
    step_bytes: int
    peak_bytes: int
    kernels_s: float
    default_kernels_s: float


def within(name: str, layers: int, tokens: int) -> Within:
    """The step within its budget beside the default. `MemEfficient(budget=...)` counts all but the states."""
    default, step_bytes = measure(name, layers, tokens, True, True), BUDGETS[name]
    found = measure(name, layers, tokens, True, True, step_bytes - default.floor_bytes * 2 // 3)
    return Within(name, step_bytes, found.peak_bytes, found.kernels_s, default.kernels_s)


def measure(name: str, layers: int, tokens: int, tile: bool, in_backward: bool, budget_bytes: int | None = None) -> Row:
    """The predicted peak of one step."""
    own = name == "longchat-7b-16k"
    config = longchat.config(layers) if own else Config.from_name(name, n_layer=layers, block_size=tokens)
    with simulate("H100-80GB"):
        model = gpt_module(config, True, True, "cuda", torch.bfloat16)
        adamw = torch.optim.AdamW(model.parameters())
        optimizer = StepInBackward(adamw) if in_backward else adamw
        ours = MemEfficient(strict=True, tile=tile, optimizer=optimizer if in_backward else None, budget=budget_bytes)
        step = thunder.jit(model, transforms=[ours])
        ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
        prediction = predict_step(step, optimizer, None, ids, ids)
        kernels_s = halves_seconds(step)
    floor_bytes = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    event = prediction.peak_event
    at = event.phase, event.name
    return Row(name, layers, tokens, tile, in_backward, prediction.peak_bytes, *at, floor_bytes, kernels_s)


def halves_seconds(step: Callable[..., torch.Tensor]) -> float:
    """The modelled seconds of a compiled step's forward and backward; the host starts kernels ahead of the device."""
    traces = thunder.last_traces(step)[-1], thunder.last_backward_traces(step)[-1]
    return sum(overlapped_seconds(read_trace(trace), device_model("H100-80GB")) for trace in traces)


@dataclass(frozen=True)
class Measured:
    """A whole step of the small llama on this CPU: bytes above the start, and seconds by alternating steps.

    `ratio` is its median time over that of `BASELINE`, which step in turn; both are None without rounds.
    """

    dtype: str
    compiler: str
    peak_bytes: int
    predicted_bytes: int | None
    median_s: float | None
    ratio: float | None


BASELINE = "MemEfficient, foreach"
CONTENDERS = (
    "eager",
    "eager, hooks",
    "torch.compile",
    "Thunder",
    "MemEfficient",
    BASELINE,
    "StepInBackward",
    "StepInBackward, fused",
    "StepInBackward, compiled",
)


def hooked(model: torch.nn.Module) -> None:
    """Eager PyTorch's own way: an optimizer for each parameter, stepped by a hook (PyTorch's tutorial)."""
    optimizers = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)


def contenders(dtype: torch.dtype) -> dict[str, tuple[Callable[[], None], Callable[[], int] | None]]:
    """By name, a whole step and its prediction. Without "foreach" or "fused", tensors are stepped one by one."""
    found: dict[str, tuple[Callable[[], None], Callable[[], int] | None]] = {}
    for name in CONTENDERS:
        program = llama_step(loss_inside=True, vocab=2048, dtype=dtype)
        how = {"foreach": name == BASELINE, "fused": name.endswith("fused")}
        adamw = None if name == "eager, hooks" else torch.optim.AdamW(program.fn.parameters(), lr=1e-3, **how)
        in_backward = name.startswith("StepInBackward")
        optimizer = StepInBackward(adamw, compiled=name.endswith("compiled")) if in_backward else adamw
        fn: Callable[..., torch.Tensor] = program.fn
        if name == "eager, hooks":
            hooked(program.fn)
        elif name == "torch.compile":
            fn = torch.compile(program.fn)
        elif name == "Thunder":
            fn = thunder.jit(program.fn, executors=EXECUTORS)
        elif name != "eager":
            ours = MemEfficient(strict=True, optimizer=optimizer if in_backward else None)
            fn = thunder.jit(program.fn, executors=EXECUTORS, transforms=[ours])
        predicted = None
        if in_backward or name.startswith("MemEfficient"):

            def predicted(fn=fn, o=optimizer, p=program) -> int:
                return predict_step(fn, o, None, *p.args).measured_bytes

        found[name] = partial(training_step, fn, optimizer, None, *program.args), predicted
    return found


def measured(console: Console, rounds: int) -> list[Measured]:
    """All contenders, in turn: the compilations take five minutes of an idle processor, 15 rounds two."""
    torch.set_num_threads(1)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        rows += measured_in(dtype, console, rounds)
    return rows


def measured_in(dtype: torch.dtype, console: Console, rounds: int) -> list[Measured]:
    """All contenders with parameters of one dtype."""
    rows = []
    runs = contenders(dtype)
    for name, (run, _) in runs.items():
        with console.status(f"{dtype}: {name} compiles"):
            run(), run(), run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (run, _) in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    for name, (run, predicted) in runs.items():
        seconds = statistics.median(times[name]) if rounds else None
        pairs = [own / base for own, base in zip(times[name], times[BASELINE], strict=True)]  # the same load
        ratio = statistics.median(pairs) if rounds else None
        known = predicted and predicted()
        rows.append(Measured(str(dtype).removeprefix("torch."), name, measure_peak(run), known, seconds, ratio))
    return rows


def show_measured(console: Console, rows: Sequence[Measured]) -> None:
    view = Table(title=f"Small llama, checkpoints, loss inside, AdamW step on this CPU; time by that of {BASELINE}")
    for column in ("dtype", "compiler", "peak, MiB", "predicted, bytes", "measured, bytes", "time"):
        view.add_column(column)
    for r in rows:
        known = "" if r.predicted_bytes is None else f"{r.predicted_bytes:,}"
        sizes = f"{r.peak_bytes / 2**20:.2f}", known, f"{r.peak_bytes:,}"
        view.add_row(r.dtype, r.compiler, *sizes, "" if r.ratio is None else f"{r.ratio:.3f}")
    console.print(view)


def simulated(console: Console, layers: int | None, models: Sequence[str] | None) -> list[Row]:
    """The rows of all programs, or of some, with another number of layers."""
    rows = []
    for name, own_layers, tokens in PROGRAMS:
        for tile, in_backward in product((False, True), (False, True)):
            if not models or name in models:
                with console.status(f"{name}, {tokens} tokens, tile={tile}, in backward={in_backward}"):
                    rows.append(measure(name, layers or own_layers, tokens, tile, in_backward))
    return rows


def show_simulated(console: Console, rows: Sequence[Row]) -> None:
    view = Table(title="AdamW step, checkpoints, loss inside: GB (simulated H100)")
    for column in ("model", "layers", "tokens", "tile", "update", "peak", "at", "parameters and states"):
        view.add_column(column)
    for r in rows:
        update = "in the backward" if r.in_backward else "step()"
        sizes = f"{r.peak_bytes / 1e9:.2f}", f"{r.phase}: {r.operation}", f"{r.floor_bytes / 1e9:.2f}"
        view.add_row(r.model, str(r.layers), f"{r.tokens:,}", str(r.tile), update, *sizes)
    console.print(view)


def show_within(console: Console, rows: Sequence[Within]) -> None:
    view = Table(title="The step with tiles and updates in the backward within a budget (simulated H100)")
    for column in ("model", "budget, GB", "peak, GB", "kernels, ms", "by the default's"):
        view.add_column(column)
    for r in rows:
        times = f"{r.kernels_s * 1e3:.1f}", f"{r.kernels_s / r.default_kernels_s:.2f}"
        view.add_row(r.model, f"{r.step_bytes / 1e9:.2f}", f"{r.peak_bytes / 1e9:.3f}", *times)
    console.print(view)


def show_on_host(console: Console, rows: Sequence[OnHost]) -> None:
    view = Table(title="longchat-7b-16k, 16,384 tokens, updates in the backward (simulated H100)")
    columns = "layers", "states", "checkpoints", "budget, GiB", "peak, GiB", "host, GiB", "kernels, s"
    for column in (*columns, "states' copies, s", "of these not hidden, s", "checkpoints' copies"):
        view.add_column(column)
    for r in rows:
        times = (f"{s:.2f}" for s in (r.kernels_s, r.link_s, r.exposed_s))
        sizes = f"{r.peak_bytes / 2**30:.2f}", f"{r.host_bytes / 2**30:.1f}"
        budget = "" if r.budget_bytes is None else f"{r.budget_bytes / 2**30:.0f}"
        view.add_row(str(r.layers), r.states, r.checkpoints, budget, *sizes, *times, r.offload)
    console.print(view)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, help="of all models, in place of their own number; writes no results")
    parser.add_argument("--models", nargs="*", help="names; writes no results")
    parser.add_argument("--cpu", action="store_true", help="only what is measured on this CPU")
    parser.add_argument("--rounds", type=int, default=15, help="of steps on this CPU; 0 measures no times")
    parser.add_argument("--simulated", action="store_true", help="only what is simulated")
    parser.add_argument("--within", action="store_true", help="only the steps within a budget")
    parser.add_argument("--host", action="store_true", help="only states on the host, in half an hour")
    given = parser.parse_args()
    console = Console()
    one_part = given.cpu or given.simulated or given.within or given.host
    all_parts = not (one_part or given.layers or given.models)
    found: dict[str, Sequence[Row | Within | OnHost | Measured]] = {}
    if all_parts or given.cpu:
        found["measured"] = on_cpu = measured(console, given.rounds)
        show_measured(console, on_cpu)
    if given.simulated or not one_part:
        found["rows"] = rows = simulated(console, given.layers, given.models)
        show_simulated(console, rows)
    if all_parts or given.simulated or given.within:
        found["within"] = tight = [within(*program) for program in PROGRAMS if program[0] in BUDGETS]
        show_within(console, tight)
    if all_parts or given.simulated or given.host:
        away = []
        for states, checkpoints, budget_bytes in PLACES:
            with console.status(f"states on the {states}, checkpoints on the {checkpoints}"):
                away.append(on_host(given.layers or LAYERS, states, checkpoints, budget_bytes))
        show_on_host(console, away)
        found["on_host"] = away
    if not (given.layers or given.models):
        before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        about: dict[str, object] = {"command": "python -m benchmarks.step_in_backward", "torch": torch.__version__}
        new = {name: [asdict(r) for r in rows] for name, rows in found.items()}
        RESULTS.write_text(json.dumps(before | about | new, indent=1) + "\n")


if __name__ == "__main__":
    main()
