"""What each decision that changes rounding does to the error: ``python -m benchmarks.numerics``.

Outputs and gradients of small programs against the same program in float64, for eager PyTorch and for
`MemEfficient` in the same dtype. Inputs and parameters are rounded to the dtype first, so that the error is
that of the computation alone. Writes ``benchmarks/results/numerics.json`` and prints the tables of
``docs/numerics.md``.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import thunder
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.models import llama_step
from thunder_mem import ChunkLossHead, MemEfficient, last_plan, policies
from thunder_mem.planning.record import last_failure

__all__ = ["CASES", "DTYPES", "Case", "Row", "measure"]

RESULTS = Path(__file__).parent / "results"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LEAST_ELEMENTS = 64  # an RMS of fewer says little


@dataclass(frozen=True)
class Case:
    """A decision, and a program in which it is made.

    Attributes:
        name: of the program.
        decision: what is decided.
        build: (dtype) -> module, arguments; the same at every call.
        transform: makes what compiles it.
        made: whether the plan of the compilation shows the decision.
        dtypes: in which it is asked.
    """

    name: str
    decision: str
    build: Callable[[torch.dtype], tuple[nn.Module, tuple[Tensor, ...]]]
    transform: Callable[[], MemEfficient]
    made: Callable[[Any], bool]
    executors: Sequence[str] = ("mem_attention", "mem_pointwise")
    dtypes: tuple[torch.dtype, ...] = DTYPES


@dataclass(frozen=True)
class Row:
    """Errors relative to the RMS of the exact tensor: of the worst tensor, over outputs and gradients.

    Attributes:
        eager_rms, rms: root mean square, of the tensor for which they differ most.
        eager_max, max: the largest error of any element of any tensor.
        rms_ratio: rms / eager_rms, the largest over all tensors of at least 64 elements.
        max_ratio: max / eager_max.
    """

    name: str
    decision: str
    dtype: str
    eager_rms: float
    rms: float
    rms_ratio: float
    eager_max: float
    max: float
    max_ratio: float


class _Fused(nn.Module):
    """RMSNorm, a gated GELU and a softmax: chains of roundings, upcasts and reductions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.rand(96) + 0.5), nn.Parameter(torch.randn(96) / 4)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        h = x.float()
        h = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.scale
        h = F.gelu(h + self.bias) * torch.sigmoid(gate) + x
        return torch.softmax(h * 2, -1) * h


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _Blocks(nn.Module):
    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.blocks, self.checkpointing = nn.ModuleList(_Block() for _ in range(2)), checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, 64) / 8)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, self.weight), targets)


def _seeded(dtype: torch.dtype, module: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> tuple[nn.Module, tuple]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        made = module().to(dtype)
        return made, tuple(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)


def _fused(dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _seeded(dtype, _Fused, (128, 96), (128, 96))


def _blocks(dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _seeded(dtype, _Blocks, (128, 64))


def _checkpointed(dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _seeded(dtype, lambda: _Blocks(checkpointing=True), (128, 64))


def _head(dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    module, (x,) = _seeded(dtype, _Head, (512, 64))
    return module, (x, torch.randint(0, 1024, (512,), generator=torch.Generator().manual_seed(6)))


def _llama(dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    program = llama_step(
        vocab=512, layers=2, tokens=64, width=64, heads=4, mlp_width=172, loss_inside=True, dtype=dtype
    )
    return program.fn, program.args  # type: ignore[return-value]


def _decided(plan: Any, what: str) -> bool:
    return any(d.what == what and d.before_bytes != d.after_bytes for d in plan.decisions)


def _rebuilds(plan: Any) -> bool:
    return any("rebuilt" in d.how and "none rebuilt" not in d.how for d in plan.decisions) or _decided(
        plan, "recompute"
    )


def _fuses(plan: Any) -> bool:
    return any(r.executor for r in plan.regions)


def _chunks(plan: Any) -> bool:
    return _decided(plan, "loss head")


def _everything(plan: Any) -> bool:
    return _fuses(plan) and _chunks(plan)


def _with_head(accumulate: str, chunks: int) -> MemEfficient:
    return MemEfficient(chunk=ChunkLossHead(chunks=chunks, accumulate=accumulate), strict=True)


CASES = (
    Case("norm, gated GELU, softmax", "regions", _fused, lambda: MemEfficient(strict=True), _fuses),
    Case(
        "two MLP blocks",
        "recompute all",
        _blocks,
        lambda: MemEfficient(recompute=policies.recompute_everything, strict=True),
        _rebuilds,
    ),
    Case(
        "two MLP blocks",
        "recompute all, nothing fused",
        _blocks,
        lambda: MemEfficient(recompute=policies.recompute_everything, strict=True),
        _rebuilds,
        executors=(),
    ),
    Case("two checkpointed blocks", "checkpoints", _checkpointed, lambda: MemEfficient(strict=True), _fuses),
    Case("loss head", "16 chunks", _head, lambda: _with_head("float32", 16), _chunks),
    Case("loss head", "128 chunks", _head, lambda: _with_head("float32", 128), _chunks),
    *(
        Case(
            "loss head",
            f'{chunks} chunks, accumulate="input"',
            _head,
            partial(_with_head, "input", chunks),
            _chunks,
            dtypes=(torch.float16, torch.bfloat16),
        )
        for chunks in (16, 128)
    ),
    Case(
        "small llama, loss inside",
        "all",
        _llama,
        lambda: MemEfficient(chunk=ChunkLossHead(chunks=4), strict=True),
        _everything,
        dtypes=(torch.float32, torch.bfloat16),
    ),
)


def measure(case: Case, dtype: torch.dtype) -> Row:
    """The errors of eager and of `MemEfficient`.

    Raises:
        RuntimeError: the decision was not made, so there is nothing to measure.
    """
    module, args = case.build(dtype)
    double = copy.deepcopy(module).double()
    exact = _results(double, double, tuple(_double(a) for a in args))
    eager = _results(module, module, args)
    compiled = thunder.jit(copy.deepcopy(module), executors=list(case.executors), transforms=[case.transform()])
    ours = _results(compiled, compiled, args)
    plan = last_plan(compiled)
    if plan is None or not case.made(plan):
        raise RuntimeError(f"{case.name}: {case.decision} was not decided {last_failure(compiled)}")

    def errors(found: Sequence[Tensor]) -> list[Tensor]:
        return [(f.double() - e) / e.square().mean().sqrt() for f, e in zip(found, exact, strict=True)]

    eager_errors, our_errors = errors(eager), errors(ours)
    pairs = [
        (_rms(theirs), _rms(own))
        for theirs, own in zip(eager_errors, our_errors, strict=True)
        if own.numel() >= _LEAST_ELEMENTS
    ]
    eager_rms, rms = max(pairs, key=lambda pair: _ratio(*pair))
    eager_max, largest = (max(e.abs().max().item() for e in es) for es in (eager_errors, our_errors))
    return Row(
        case.name,
        case.decision,
        str(dtype).removeprefix("torch."),
        eager_rms,
        rms,
        _ratio(eager_rms, rms),
        eager_max,
        largest,
        _ratio(eager_max, largest),
    )


def _rms(errors: Tensor) -> float:
    return errors.square().mean().sqrt().item()


def _ratio(eager: float, ours: float) -> float:
    return ours / eager if eager else float(ours > 0) and float("inf")


def _double(a: Tensor) -> Tensor:
    return a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a


def _results(fn: Callable[..., Any], module: nn.Module, args: tuple[Tensor, ...]) -> list[Tensor]:
    """The output and the gradients of all arguments and parameters."""
    out = fn(*args)
    wanted = [*(a for a in args if a.requires_grad), *module.parameters()]
    tangent = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape) if out.ndim else out * 0 + 1
    return [out.detach(), *torch.autograd.grad(out, wanted, tangent.to(out.dtype))]


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line per program, decision and dtype."""
    lines = [
        "| program | decision | dtype | eager RMS | RMS | ratio | eager max | max | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        figures = f"{r.eager_rms:.1e} | {r.rms:.1e} | {r.rms_ratio:.2f} | {r.eager_max:.1e} | {r.max:.1e}"
        lines.append(f"| {r.name} | {r.decision} | {r.dtype} | {figures} | {r.max_ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    rows = [measure(case, dtype) for case in CASES for dtype in case.dtypes]
    record = {"command": "python -m benchmarks.numerics", "torch": torch.__version__, "rows": [vars(r) for r in rows]}
    (RESULTS / "numerics.json").write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main()
