"""Liger-Kernel's benchmarks of single layers, the rows of its PyTorch and Hugging Face baselines.

Each script makes its tensors once and then runs forward and backward ten times (`_test_memory`), the graph kept
while the next run begins; the figure is the median, in which gradients of the run before are there already. Until
August 2024 it was the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.published.case import Case, Predicted, of_fit
from thunder_mem import estimate

__all__ = ["CASES"]

_CSV = "https://github.com/linkedin/Liger-Kernel/blob/main/benchmark/data/all_benchmark_data.csv"
_AUGUST = "https://github.com/linkedin/Liger-Kernel/tree/61594612/benchmark"
_A100, _H100, _B200 = "A100-80GB", "H100-80GB", "B200-180GB"
_RUNS = 10

Full = Callable[[], None]
"""One run, forward and backward."""


def _empty(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def _layer(layer: nn.Module, x: Tensor, gradient: Tensor | None = None) -> Full:
    """A layer's run; without `gradient` the script draws the output's gradient in each run."""

    def full() -> None:
        y = layer(x)
        y.backward(torch.randn_like(y) if gradient is None else gradient, retain_graph=True)

    return full


def _gated(batch: int, tokens: int, act: Callable[[Tensor], Tensor]) -> Full:
    class MLP(nn.Module):
        """`LlamaMLP` of transformers."""

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (nn.Linear(4096, 11008, bias=False) for _ in range(2))
            self.down = nn.Linear(11008, 4096, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(act(self.gate(x)) * self.up(x))

    with torch.device("meta"):
        layer = MLP().bfloat16()
    return _layer(layer, _empty(batch, tokens, 4096, dtype=torch.bfloat16, grad=True))


class _LlamaNorm(nn.Module):
    """`LlamaRMSNorm` of transformers; with a residual as Liger's `NaiveAddRMSNorm` has it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_empty(size))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        dtype = x.dtype
        x = x.to(torch.float32)
        if residual is not None:
            x = x + residual.to(torch.float32)
            residual = x
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        y = self.weight * x.to(dtype)
        return y if residual is None else (y, residual.to(dtype))


def _rms_norm(size: int) -> Full:
    x = _empty(2048, size, dtype=torch.bfloat16, grad=True)
    return _layer(_LlamaNorm(size), x, _empty(2048, size, dtype=torch.bfloat16))


def _add_rms_norm(size: int) -> Full:
    x, residual = (_empty(2048, size, grad=True) for _ in range(2))
    gradients = tuple(_empty(2048, size) for _ in range(2))
    layer = _LlamaNorm(size)

    def full() -> None:
        y, sums = layer(x, residual)
        torch.autograd.backward((y, sums), gradients)

    return full


def _norm(layer: nn.Module, *shape: int) -> Full:
    return _layer(layer, _empty(*shape, grad=True), _empty(*shape))


def _cross_entropy(rows: int, vocabulary: int) -> Full:
    logits, targets = _empty(rows, vocabulary, grad=True), _empty(rows, dtype=torch.long)
    return lambda: F.cross_entropy(logits, targets).backward()


def _divergence(rows: int, vocabulary: int, loss: Callable[[Tensor, Tensor], Tensor], squash: str) -> Full:
    """The input is a function of a leaf; it and its graph are made before the first run."""
    leaf, target = _empty(rows, vocabulary, grad=True), _empty(rows, vocabulary)
    made: list[Tensor] = []

    def full() -> None:
        if not made:
            made.append(getattr(leaf, squash)(dim=-1))
        y = loss(made[0], target)
        y.backward(retain_graph=True)

    return full


def _kl(log_q: Tensor, p: Tensor) -> Tensor:
    return F.kl_div(log_q, p, reduction="batchmean")


def _jsd(log_q: Tensor, log_p: Tensor) -> Tensor:
    kl = partial(F.kl_div, reduction="batchmean", log_target=True)
    mean = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
    return 0.5 * kl(torch.log(mean), log_p) + 0.5 * kl(torch.log(mean), log_q)


def _tvd(q: Tensor, p: Tensor) -> Tensor:
    tvd = torch.abs(q - p) / 2.0
    return torch.sum(tvd) / q.size(0)


def _head(rows: int) -> Full:
    weight, beside = (_empty(128256, 4096, dtype=torch.bfloat16, grad=True) for _ in range(2))
    x, targets = _empty(rows, 4096, dtype=torch.bfloat16, grad=True), _empty(rows, dtype=torch.long)

    def full() -> None:
        assert beside is not None  # the script makes Liger's layer too, whichever runs
        F.cross_entropy(F.linear(x, weight), targets).backward()

    return full


def _rope(tokens: int, hidden: int) -> Full:
    size = hidden // 32
    q, k = (_empty(1, tokens, heads, size, dtype=torch.bfloat16, grad=True) for heads in (32, 8))
    dq, dk = (torch.empty_like(t) for t in (q, k))
    frequencies, positions = _empty(1, size // 2, 1), _empty(1, tokens, dtype=torch.long)
    made: list[Tensor] = []

    def tables() -> tuple[Tensor, Tensor]:  # by a product, and so with a workspace of cuBLAS
        angles = (frequencies @ positions[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().bfloat16(), angles.sin().bfloat16()

    def half_turned(x: Tensor) -> Tensor:
        a = x[..., : size // 2]
        b = x[..., size // 2 :]
        return torch.cat((-b, a), dim=-1)

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return (x * cos) + (half_turned(x) * sin)

    def full() -> None:
        if not made:
            made.extend((q.transpose(1, 2), k.transpose(1, 2), *tables()))
        q_turned, k_turned, cos, sin = made
        wide = cos.unsqueeze(1), sin.unsqueeze(1)
        outputs = turned(q_turned, *wide), turned(k_turned, *wide)
        given = tuple(t.transpose(1, 2) for t in (dq, dk))
        torch.autograd.grad(outputs, (q_turned, k_turned), given, allow_unused=True, retain_graph=True)

    return full


def _swiglu_of_halves(width: int) -> Full:
    x = _empty(2048, 4, 2 * width, dtype=torch.bfloat16, grad=True)

    def swiglu(x: Tensor) -> Tensor:
        a, b = torch.chunk(x, 2, -1)
        return F.silu(a) * b

    def full() -> None:
        x.grad = None
        y = swiglu(x)
        y.sum().backward()

    return full


def _median(make: Callable[[], Full], device: str) -> Predicted:
    """A run that finds the gradients of the one before."""
    full = make()

    def runs() -> None:
        full()
        full()

    return of_fit(estimate(runs, None, None, device=device))


def _mean(make: Callable[[], Full], device: str) -> Predicted:
    """The mean of ten runs, of which the first finds no gradients."""
    first, later = of_fit(estimate(make(), None, None, device=device)), _median(make, device)
    tensor_bytes = (first.tensor_bytes + (_RUNS - 1) * later.tensor_bytes) / _RUNS
    return Predicted(math.ceil(tensor_bytes), later.library_bytes)


def _case(day: str, device: str, configuration: str, published: float, make: Callable[[], Full]) -> Case:
    mean = day < "2024-08-30"
    source, url = f"Liger-Kernel, benchmark, {day}", _AUGUST if mean else _CSV
    predict = partial(_mean if mean else _median, make, device)
    return Case(source, url, configuration, device, published, "MiB", predict)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_SEPTEMBER = "2024-09-03"
CASES = (
    _case(_SEPTEMBER, _A100, "swiglu, B=4, T=1024, bf16", 1294.25, partial(_gated, 4, 1024, F.silu)),
    _case(_SEPTEMBER, _A100, "swiglu, B=4, T=8192, bf16", 6372.25, partial(_gated, 4, 8192, F.silu)),
    _case("2024-08-23", _H100, "swiglu, B=4, T=1024, bf16, mean", 1324.8, partial(_gated, 4, 1024, F.silu)),
    _case("2024-08-23", _H100, "swiglu, B=4, T=8192, bf16, mean", 6377.2, partial(_gated, 4, 8192, F.silu)),
    _case(_SEPTEMBER, _A100, "geglu, B=8, T=1024, bf16", 1992.25, partial(_gated, 8, 1024, _gelu)),
    _case(_SEPTEMBER, _A100, "geglu, B=8, T=8192, bf16", 12212.25, partial(_gated, 8, 8192, _gelu)),
    _case(_SEPTEMBER, _A100, "cross_entropy, 16384 x 4096", 1280.126, partial(_cross_entropy, 16384, 4096)),
    _case(_SEPTEMBER, _A100, "cross_entropy, 16384 x 131072", 40960.125, partial(_cross_entropy, 16384, 131072)),
    _case(_SEPTEMBER, _A100, "rms_norm, 2048 x 4096, bf16", 320.055, partial(_rms_norm, 4096)),
    _case(_SEPTEMBER, _A100, "rms_norm, 2048 x 32768, bf16", 2560.383, partial(_rms_norm, 32768)),
    _case(
        _SEPTEMBER, _A100, "rope, T=16384, 32 + 8 heads of 256, bf16", 1816.250, partial(_rope, 16384, 8192)
    ),
    _case(
        "2024-11-22", _A100, "head and loss, 4096 x 4096 x 128256, bf16", 6092.282, partial(_head, 4096)
    ),
    _case(
        "2024-11-22", _A100, "head and loss, 32768 x 4096 x 128256, bf16", 27582.5, partial(_head, 32768)
    ),
    _case(
        "2024-09-04", _H100, "kl_div, 16384 x 131072", 57344.0,
        lambda: _divergence(16384, 131072, _kl, "log_softmax"),
    ),
    _case("2024-10-02", _H100, "jsd, 8192 x 4096", 1664.001, lambda: _divergence(8192, 4096, _jsd, "log_softmax")),
    _case("2026-03-03", _H100, "tvd, 16384 x 32768", 16384.0, lambda: _divergence(16384, 32768, _tvd, "softmax")),
    _case(
        "2025-07-17", _H100, "layer_norm, 4096 x 16384", 1280.531,
        lambda: _norm(nn.LayerNorm(16384, device="meta"), 4096, 16384),
    ),
    _case("2026-04-07", _H100, "add and rms_norm, 2048 x 32768", 3328.625, partial(_add_rms_norm, 32768)),
    _case("2026-07-26", _H100, "swiglu of halves, 8192 x 2 x 16384, bf16", 1792.001, partial(_swiglu_of_halves, 16384)),
    _case(
        "2026-02-28", _B200, "group_norm, 128 x 1024 x 512", 1282.031,
        lambda: _norm(nn.GroupNorm(256, 1024, device="meta"), 128, 1024, 512),
    ),
)  # fmt: skip
