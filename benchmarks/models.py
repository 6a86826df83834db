"""The programs that the benchmarks run: issue #1337's functions, and a small litgpt training step.

Issue #1337 (lightning-thunder): `efficient`, `inefficient` and the variant with a shared tensor compute
the same kind of sum over ten paths of 256 x 256 float32 matrices. Eager peaks above the start: 0.75 MiB
for the order that ends each path before the next begins, 2.75 MiB for the other.

The small step: litgpt's GPT as LLaMA has it (RMSNorm, RoPE, gated MLP), 2 layers, T=1024, D=256, 8 heads,
MLP 688, B=1, all parameters and RoPE tables in bfloat16. Measured with `thunder_mem.measure_peak` over
forward and backward; the parameters' gradients exist before (as from the second step on, when
`zero_grad(set_to_none=False)` keeps them), and so do the inputs and, with the loss outside, the gradient of
the logits. Eager peaks in MiB above the start, with and without checkpointing, the same with 1, 2 and 4
threads (``python -m benchmarks.models`` prints them):

- loss inside, V=8000: 50.39 / 77.21. The loss must not keep the logits alive through the backward: a
  caller that does pays one matrix of logits more, 66.01 / 92.84;
- loss outside, V=256: 20.29 / 33.34 on a CPU without bfloat16 instructions, 18.61 / 33.34 with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from litgpt import GPT, Config
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.checkpoint import checkpoint

from thunder_mem.runtime import measure

__all__ = [
    "Program",
    "efficient",
    "fan",
    "gpt_module",
    "inefficient",
    "llama_step",
    "shared_efficient",
    "shared_inefficient",
    "small_llama",
]


@dataclass(frozen=True)
class Program:
    """Something to compile, what to call it with, and how to run one step of it.

    Attributes:
        name: for tables.
        fn: what is compiled, a function or a module; called as it is, it is the eager peer.
        args: the arguments of `fn`.
        output_grad: the gradient handed to the backward; None if `fn` returns a scalar loss.
        trains: whether a step has a backward.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    output_grad: Tensor | None = None
    trains: bool = False

    def step(self, compiled: Callable[..., Any] | None = None) -> Any:
        """Run `compiled` (default: `fn` itself) once, forward and backward; returns what a forward alone returns."""
        out = (self.fn if compiled is None else compiled)(*self.args)
        if not self.trains:
            return out
        # The output must not outlive its use: a loss outside the function holds it no longer either.
        torch.autograd.backward(out, self.output_grad)
        return None


def efficient(paths: list[Tensor], a: Tensor) -> Tensor:
    """One path after the other: three matrices are alive at a time."""
    for x in paths:
        x = relu(x)
        x = x @ x
        x = relu(x)
        a = x @ a
    return a


def inefficient(paths: list[Tensor], a: Tensor) -> Tensor:
    """The same, with all paths open at once: one matrix each, and one to compute with."""
    return _close([relu(x) for x in paths], a)


def shared_efficient(paths: list[Tensor], a: Tensor, shared: Tensor) -> Tensor:
    """`efficient` where every path also reads `shared`, so that no two paths are independent."""
    for x in paths:
        x = relu(x + shared)
        x = x @ x
        x = relu(x)
        a = x @ a
    return a


def shared_inefficient(paths: list[Tensor], a: Tensor, shared: Tensor) -> Tensor:
    """`inefficient` where every path also reads `shared`."""
    return _close([relu(x + shared) for x in paths], a)


def _close(open_paths: list[Tensor], a: Tensor) -> Tensor:
    for i in range(len(open_paths)):
        open_paths[i] = open_paths[i] @ open_paths[i]
    for i in range(len(open_paths)):
        open_paths[i] = relu(open_paths[i])
    while open_paths:
        a = open_paths.pop(0) @ a
    return a


def fan(fn: Callable[..., Tensor], paths: int = 10, size: int = 256) -> Program:
    """One of #1337's functions with its arguments, `paths` matrices of (size, size) in float32.

    Example:
        >>> fan(inefficient).name
        'inefficient'
    """
    generator = torch.Generator().manual_seed(0)
    count = paths + (2 if fn in (shared_efficient, shared_inefficient) else 1)
    # Divided by sqrt(size), so that ten products stay within range.
    matrices = [torch.randn(size, size, generator=generator) / size**0.5 for _ in range(count)]
    return Program(fn.__name__, fn, (matrices[:paths], *matrices[paths:]))


class _Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False)


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(tokens)
        return cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def small_llama(*, vocab: int, layers: int, tokens: int, width: int, heads: int, mlp_width: int) -> Config:
    """A LLaMA-style litgpt configuration; sizes as in `llama_step`."""
    return Config(
        name="small-llama",
        block_size=tokens,
        vocab_size=vocab,
        padded_vocab_size=vocab,
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=mlp_width,
    )


def llama_step(
    *,
    vocab: int = 256,
    checkpointing: bool = True,
    loss_inside: bool = False,
    layers: int = 2,
    tokens: int = 1024,
    width: int = 256,
    heads: int = 8,
    mlp_width: int = 688,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Program:
    """A litgpt LLaMA-style training step on the CPU; the same weights and data at every call.

    Args:
        vocab: V, the number of tokens in the vocabulary; not padded.
        checkpointing: `torch.utils.checkpoint` around each Block.
        loss_inside: `fn(tokens, targets)` returns the mean cross entropy; else `fn(tokens)` returns the
            logits (B, T, V), and their gradient is given.
        layers: number of Blocks.
        tokens: T, the length of the sequence.
        width: D, the width of the residual stream.
        heads: attention heads; must divide `width`.
        mlp_width: inner width of the gated MLP.
        batch: B.
        dtype: of parameters, RoPE tables and logits.

    Raises:
        ValueError: a size below 1, or a width that the heads do not divide.
    """
    sizes = {"vocab": vocab, "layers": layers, "tokens": tokens, "width": width, "heads": heads}
    for name, value in {**sizes, "mlp_width": mlp_width, "batch": batch}.items():
        if value < 1:
            raise ValueError(f"{name} is a size of at least 1, not {value}")
    if width % heads:
        raise ValueError(f"{heads} heads do not divide a width of {width}")
    config = small_llama(vocab=vocab, layers=layers, tokens=tokens, width=width, heads=heads, mlp_width=mlp_width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        gpt = GPT(config).to(dtype)
        inputs, targets = torch.randint(0, vocab, (2, batch, tokens))
        output_grad = torch.randn(batch, tokens, vocab).to(dtype) / (batch * tokens)
    if checkpointing:
        gpt.transformer.h = nn.ModuleList(_Checkpointed(block) for block in gpt.transformer.h)
    where, switch = ("inside" if loss_inside else "outside"), ("on" if checkpointing else "off")
    name = f"llama V={vocab}, loss {where}, checkpointing {switch}"
    if loss_inside:
        return Program(name, _WithLoss(gpt), (inputs, targets), trains=True)
    return Program(name, gpt, (inputs,), output_grad, trains=True)


def gpt_module(
    config: Config, checkpointing: bool, loss_inside: bool, device: str, dtype: torch.dtype, kind: type[GPT] = GPT
) -> nn.Module:
    """A litgpt model of any configuration and kind, on a device that may be simulated.

    Called with tokens (B, T) it gives logits (B, T, V), or with tokens and targets the mean cross entropy.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            gpt = kind(config)
    finally:
        torch.set_default_dtype(default)
    if checkpointing:
        gpt.transformer.h = nn.ModuleList(_Checkpointed(block) for block in gpt.transformer.h)
    return _WithLoss(gpt) if loss_inside else gpt


def eager_peaks() -> dict[str, int]:
    """Peak bytes above the start of every program here, run eagerly, each measured at its second step."""
    programs = [fan(fn) for fn in (efficient, inefficient, shared_efficient, shared_inefficient)]
    programs += [llama_step(checkpointing=on) for on in (True, False)]
    programs += [llama_step(vocab=8000, loss_inside=True, checkpointing=on) for on in (True, False)]
    peaks = {}
    for program in programs:
        program.step()
        peaks[program.name] = measure.measure_peak(program.step)
    return peaks


if __name__ == "__main__":
    for program_name, peak_bytes in eager_peaks().items():
        print(f"{program_name:45} {peak_bytes / 2**20:8.2f} MiB")
