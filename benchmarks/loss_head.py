"""Loss heads side by side: ``python -m benchmarks.loss_head [--device cpu|cuda|simulated] [--rounds 5]``.

`cpu` measures linear + cross entropy, forward and backward, at N=2048, D=512, V=16384 in float32 and
bfloat16: peak bytes above the start by the profiler, wall-clock and CPU seconds as the least and the
median of `--rounds` rounds, the contenders taking turns so that they share whatever else the machine
does; then the peak over the lower bound at two published shapes with N and V divided by eight.
`cuda` times the published shapes beside eager, torch.compile, Liger and CCE where they are installed.
`simulated` needs no GPU: the peak over the lower bound s(N+V)D at two published shapes, and a whole
training step of GPT-2 small over chunk counts, beside the figures of PyTorch PR 136702. Results go to
``benchmarks/results/loss_head_<device>.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import thunder
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.loss_head_gpt2 import gpt2
from thunder_mem.prediction.predict import predict
from thunder_mem.prediction.simulate import simulate
from thunder_mem.runtime.measure import measure_peak
from thunder_mem.transforms.chunk_loss_head import ChunkLossHead
from thunder_mem.transforms.mem_efficient import MemEfficient

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
PUBLISHED = {
    "gemma2-2b": (8192, 2304, 256000),
    "llama3-8b": (8192, 4096, 128256),
    "wide-batch": (32768, 768, 128256),
}
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One contender at one shape: bytes above the start, seconds of the best round; None where it failed."""

    shape: str
    dtype: str
    peer: str
    peak_bytes: int | None
    bound_bytes: int
    wall_s: float | None = None
    cpu_s: float | None = None
    median_wall_s: float | None = None
    median_cpu_s: float | None = None
    dw_error: float | None = None
    note: str = ""


# --- contenders -------------------------------------------------------------------------------------


def eager(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), t)


def litgpt_style(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """As litgpt's training scripts write it: `lm_head_chunk_size=128`, then its chunked loss."""
    from litgpt.utils import chunked_cross_entropy

    logits = [F.linear(part, w) for part in x[None].split(128, dim=1)]
    return chunked_cross_entropy(logits, t[None], chunk_size=0)


def torchtune_style(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """As torchtune writes it: 8 chunks of hidden states, projected and upcast one by one, sums divided at the end."""
    total = x.new_zeros((), dtype=torch.float32)
    for part, target in zip(x.chunk(8), t.chunk(8), strict=True):
        total = total + F.cross_entropy(F.linear(part, w).float(), target, reduction="sum", ignore_index=-100)
    return total / (t != -100).sum()


def inductor_chunked() -> Head:
    """torch.compile with torch 2.11's own chunker of loss heads."""
    import torch._inductor.config as config

    compiled = torch.compile(eager)

    def run(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        # Its own threshold, a result 8 times as large as the inputs, leaves this head (3.6 times) alone.
        with config.patch({"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": 2}):
            return compiled(x, w, t)

    return run


def ours(**options: Any) -> tuple[Head, ChunkLossHead]:
    transform = ChunkLossHead(**options)
    return thunder.jit(eager, transforms=[transform]), transform


def planned(**options: Any) -> Head:
    """As a user of the whole package writes it; without options the chunks come from the program's timeline."""
    chunk = ChunkLossHead(**options) if options else True
    return thunder.jit(eager, transforms=[MemEfficient(chunk=chunk)])


def cpu_contenders() -> dict[str, Callable[[], Head]]:
    return {
        "eager": lambda: eager,
        "torch.compile": lambda: torch.compile(eager),
        "torch.compile + auto-chunker": inductor_chunked,
        "litgpt": lambda: litgpt_style,
        "torchtune": lambda: torchtune_style,
        "thunder_mem": planned,
        "thunder_mem, accumulate=input": lambda: planned(rows="auto", accumulate="input"),
        "thunder_mem, ChunkLossHead alone": lambda: ours(rows="auto")[0],
    }


def cuda_contenders() -> dict[str, Callable[[], Head]]:
    found: dict[str, Callable[[], Head]] = {"eager": lambda: eager, "torch.compile": lambda: torch.compile(eager)}
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

        found["Liger"] = lambda: lambda x, w, t: liger(x, w, t)
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy as cce

        found["CCE"] = lambda: lambda x, w, t: cce(x, w, t)
    except ImportError:
        pass
    for rows in (256, 2048, 4096):
        found[f"thunder_mem rows={rows}"] = lambda rows=rows: ours(rows=rows)[0]
        found[f"thunder_mem rows={rows}, accumulate=input"] = lambda rows=rows: ours(rows=rows, accumulate="input")[0]
    return found


# --- measuring --------------------------------------------------------------------------------------


def make_inputs(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    n, d, v = shape
    g = torch.Generator(device=device).manual_seed(0)
    x = torch.randn(n, d, generator=g, device=device).to(dtype).requires_grad_()
    w = (torch.randn(v, d, generator=g, device=device) / math.sqrt(d)).to(dtype).requires_grad_()
    return x, w, torch.randint(0, v, (n,), generator=g, device=device)


def step(head: Head, x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(head(x, w, t), (x, w))


def exact_dw(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """dW in float64, in row blocks."""
    xd, wd = x.detach().double(), w.detach().double()
    dw = torch.zeros_like(wd)
    for lo in range(0, x.shape[0], 256):
        p = torch.softmax(xd[lo : lo + 256] @ wd.T, -1)
        p[torch.arange(p.shape[0]), t[lo : lo + 256]] -= 1
        dw.addmm_(p.T, xd[lo : lo + 256])
    return dw / x.shape[0]


def run_cpu(rounds: int, shape: tuple[int, int, int], console: Console) -> list[Row]:
    rows = []
    n, d, v = shape
    for dtype in (torch.float32, torch.bfloat16):
        x, w, t = make_inputs(shape, dtype, "cpu")
        reference = exact_dw(x, w, t)
        heads: dict[str, Head] = {}
        notes: dict[str, str] = {}
        results: dict[str, dict[str, Any]] = {}
        for name, make in cpu_contenders().items():
            torch._dynamo.reset()
            try:
                heads[name] = head = make()
                _, dw = step(head, x, w, t)
                error = ((dw.double() - reference).norm() / reference.norm()).item()
                del dw
                results[name] = {"peak_bytes": measure_peak(step, head, x, w, t), "dw_error": error}
            except Exception as e:
                heads.pop(name, None)
                notes[name] = f"{type(e).__name__}: {str(e).splitlines()[0][:160] if str(e) else ''}"
            console.print(f"{dtype} {name}: {results.get(name, notes.get(name))}")
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in heads}
        for _ in range(rounds):
            for name, head in heads.items():
                wall, cpu = time.perf_counter(), time.process_time()
                step(head, x, w, t)
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        for name in cpu_contenders():
            made = results.get(name, {})
            walls = times.get(name) or [(None, None)]
            rows.append(
                Row(
                    shape=f"{n}x{d}x{v}",
                    dtype=str(dtype).removeprefix("torch."),
                    peer=name,
                    peak_bytes=made.get("peak_bytes"),
                    bound_bytes=dtype.itemsize * (n + v) * d,
                    wall_s=min(a for a, _ in walls) if name in times else None,
                    cpu_s=min(b for _, b in walls) if name in times else None,
                    median_wall_s=median(a for a, _ in walls) if name in times else None,
                    median_cpu_s=median(b for _, b in walls) if name in times else None,
                    dw_error=made.get("dw_error"),
                    note=notes.get(name, ""),
                )
            )
    return rows


def run_bound() -> list[Row]:
    """Measured peaks over the lower bound at the published shapes, N and V divided by eight, in bfloat16."""
    rows = []
    for shape_name in ("gemma2-2b", "llama3-8b"):
        n, d, v = PUBLISHED[shape_name]
        n, v = n // 8, v // 8
        x, w, t = make_inputs((n, d, v), torch.bfloat16, "cpu")
        for chunks, accumulate in ((8, "input"), (8, "float32"), (64, "input"), (64, "float32")):
            head = planned(chunks=chunks, accumulate=accumulate)
            step(head, x, w, t)
            peak = measure_peak(step, head, x, w, t)
            rows.append(over_bound(f"{shape_name} N/8 V/8", (n, d, v), chunks, accumulate, peak))
    return rows


def over_bound(name: str, shape: tuple[int, int, int], chunks: int, accumulate: str, peak_bytes: int) -> Row:
    """How many chunks' logits a bfloat16 head takes over what it cannot do without."""
    n, d, v = shape
    bound_bytes, extra_bytes = 2 * (n + v) * d, 2 * v * d if accumulate == "float32" else 0
    over = (peak_bytes - bound_bytes - extra_bytes) / (-(-n // chunks) * v * 2)
    note = f"bound + {extra_bytes / MIB:.0f} MiB of float32 + {over:.3f} chunks"
    return Row(name, "bfloat16", f"{chunks} chunks, {accumulate}", peak_bytes, bound_bytes, note=note)


def run_cuda(rounds: int, console: Console) -> list[Row]:
    rows = []
    for shape_name, shape in PUBLISHED.items():
        n, d, v = shape
        x, w, t = make_inputs(shape, torch.bfloat16, "cuda")
        for name, make in cuda_contenders().items():
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            best = peak = None
            note = ""
            try:
                head = make()
                step(head, x, w, t)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                start = torch.cuda.memory_stats()["requested_bytes.all.current"]
                step(head, x, w, t)
                torch.cuda.synchronize()
                peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - start
                for _ in range(rounds):
                    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                    events[0].record()
                    step(head, x, w, t)
                    events[1].record()
                    torch.cuda.synchronize()
                    took = events[0].elapsed_time(events[1]) / 1e3
                    best = took if best is None else min(best, took)
            except Exception as e:
                note = f"{type(e).__name__}: {str(e)[:160]}"
            row = Row(shape_name, "bfloat16", name, peak, 2 * (n + v) * d, best, note=note)
            console.print(row)
            rows.append(row)
        del x, w, t
    return rows


# --- simulated --------------------------------------------------------------------------------------


def run_simulated() -> list[Row]:
    """Predicted peaks on an H100 that is not there: the head alone, 64 chunks; then GPT-2 small."""
    rows = []
    for shape_name in ("gemma2-2b", "llama3-8b"):
        n, d, v = PUBLISHED[shape_name]
        for accumulate in ("input", "float32"):
            with simulate("H100-80GB"):
                x = torch.empty(n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                w = torch.empty(v, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                t = torch.empty(n, device="cuda", dtype=torch.int64)
                made = predict(ours(chunks=64, accumulate=accumulate)[0], x, w, t)
            rows.append(over_bound(shape_name, (n, d, v), 64, accumulate, made.measured_bytes))
    return rows + [
        Row("gpt2-small B=32 T=1024", "bfloat16", name, peak_bytes, 0, note=note) for name, peak_bytes, note in gpt2()
    ]


# --- output -----------------------------------------------------------------------------------------


def show(rows: list[Row], console: Console) -> None:
    table = Table(
        "shape", "dtype", "contender", "peak MiB", "over the bound", "wall s", "CPU s", "median", "dW error", "note"
    )
    for r in rows:
        ratio = f"{r.peak_bytes / r.bound_bytes:.3f}" if r.peak_bytes and r.bound_bytes else ""
        cells = (r.peak_bytes and f"{r.peak_bytes / MIB:.1f}", ratio, r.wall_s and f"{r.wall_s:.3f}")
        rest = (
            r.cpu_s and f"{r.cpu_s:.3f}",
            r.median_cpu_s and f"{r.median_cpu_s:.3f}",
            r.dw_error and f"{r.dw_error:.2e}",
            r.note,
        )
        table.add_row(r.shape, r.dtype, r.peer, *(str(c or "") for c in (*cells, *rest)))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda", "simulated"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", type=int, nargs=3, default=(2048, 512, 16384), metavar=("N", "D", "V"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console(width=170)
    if options.device == "cpu":
        rows = run_cpu(options.rounds, tuple(options.shape), console) + run_bound()
    elif options.device == "cuda":
        rows = run_cuda(options.rounds, console)
    else:
        rows = run_simulated()
    show(rows, console)
    about = {"torch": torch.__version__, "thunder": thunder.__version__, "python": platform.python_version()}
    about |= {"machine": platform.processor() or platform.machine(), "threads": options.threads}
    if options.device == "cuda":
        about["machine"] = torch.cuda.get_device_name()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"loss_head_{options.device}.json"
    path.write_text(json.dumps({"about": about, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
