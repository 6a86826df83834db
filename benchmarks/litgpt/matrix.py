"""The matrix of `benchmarks.litgpt.table`: which models, how compiled, and the command of each run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import product

__all__ = ["COMPILERS", "FUSERS", "MODELS", "OURS", "Case", "Model", "cases", "runs_on"]

OURS = "MemEfficient"


@dataclass(frozen=True)
class Model:
    """How a model is run.

    Attributes:
        layers: of the full-size run; the five of lightning-thunder's issue #1337 have two, as there.
        batch: sequences in a step of the full-size run, 16,384 tokens.
        cpu_scale: of the run on a CPU, see `models.scaled`.
        cpu_layers: of the run on a CPU.
        cpu_batch: sequences on a CPU: 1,024 tokens a step or more, see `MODELS`.
    """

    layers: int = 2
    batch: int = 1
    cpu_scale: float = 1 / 16
    cpu_layers: int = 2
    cpu_batch: int = 1


MODELS: dict[str, Model] = {
    "longchat-7b-16k": Model(),
    "vicuna-33b-v1.3": Model(batch=8, cpu_batch=32),
    "falcon-40b": Model(batch=8, cpu_batch=32),
    "Gemma-7b": Model(batch=4, cpu_batch=8),
    "pythia-12b": Model(batch=8, cpu_batch=32),
    "Llama-3-8B": Model(batch=2, cpu_batch=4),
    "gpt2-124m": Model(layers=12, batch=16, cpu_scale=1 / 4, cpu_batch=4),
    "bert-base-mlm": Model(layers=12, batch=32, cpu_scale=1 / 4, cpu_batch=8),
}
"""All take 16,384 tokens a step, as one sequence of longchat has. With one sequence of 2,048 tokens, vicuna and
falcon of two layers peak where all gradients are there, at what no compiler can lower. For the same reason five take
2,048 or 4,096 tokens on a CPU: of 1,024, two thirds to five sixths of the peak are parameters, gradients and state."""

FUSERS = {"nvFuser": "nvfuser", "mem_pointwise": "mem_pointwise"}
"""Who fuses what Thunder compiles, as columns name it, and its `--fusion`."""

_CONSECUTIVE = ("--compile", "thunder", "--fusion_type", "consecutive")
_DATAFLOW = ("--compile", "thunder", "--fusion_type", "dataflow")
_MEM = ("--compile", "thunder", "--mem_efficient", "True")

COMPILERS: dict[str, tuple[str, ...]] = {
    "eager": ("--compile", "eager"),
    "torch.compile": ("--compile", "inductor"),
    **{
        f"{name}, {fuser}": (*options, "--fusion", fusion)
        for fuser, fusion in FUSERS.items()
        for name, options in (("Thunder consecutive", _CONSECUTIVE), ("Thunder dataflow", _DATAFLOW), (OURS, _MEM))
    },
    f"{OURS} smallest, mem_pointwise": (*_MEM, "--mem_budget", "min", "--fusion", "mem_pointwise"),
}
"""What compiles, and the options that say so; the last one buys all the memory that time can buy."""


def runs_on(compiler: str, device: str) -> bool:
    """Whether a column has rows on a device: nvFuser knows no CPU."""
    return device != "cpu" or not compiler.endswith("nvFuser")


@dataclass(frozen=True)
class Case:
    """One run.

    Example:
        >>> case = Case("longchat-7b-16k", True, False, "MemEfficient, nvFuser")
        >>> case.command("simulate:H100-80GB").startswith("python -m benchmarks.litgpt --model_name long")
        True
    """

    model: str
    checkpointing: bool
    loss_inside: bool
    compiler: str

    def arguments(self, device: str, iterations: int = 12) -> list[str]:
        """The arguments of `benchmarks.litgpt`, without where the JSON goes."""
        how = MODELS[self.model]
        small = device == "cpu"
        arguments = {
            "--model_name": self.model,
            "--n_layers": how.cpu_layers if small else how.layers,
            "--micro_batch_size": how.cpu_batch if small else how.batch,
            "--checkpoint_activations": self.checkpointing,
            "--loss_inside": self.loss_inside,
            "--device": device,
            **({"--scale": how.cpu_scale} if small else {}),
            **({} if device.startswith("simulate:") else {"--max_iters": iterations, "--warmup_iters": 2}),
        }
        return [*(str(x) for pair in arguments.items() for x in pair), *COMPILERS[self.compiler]]

    def command(self, device: str, iterations: int = 12) -> str:
        """What reproduces the run, in a shell."""
        return shlex.join(["python", "-m", "benchmarks.litgpt", *self.arguments(device, iterations)])


def cases(
    models: list[str] | None = None,
    compilers: list[str] | None = None,
    checkpointing: tuple[bool, ...] = (True, False),
    loss_inside: tuple[bool, ...] = (False, True),
) -> list[Case]:
    """The runs of the matrix, or of a part of it, those of one model together.

    Raises:
        ValueError: an unknown model or compiler.
    """
    for given, known in ((models, MODELS), (compilers, COMPILERS)):
        unknown = [name for name in given or () if name not in known]
        if unknown:
            raise ValueError(f"unknown {', '.join(unknown)}: known are {', '.join(known)}")
    wanted = product(models or MODELS, checkpointing, loss_inside, compilers or COMPILERS)
    return [Case(*case) for case in wanted]
