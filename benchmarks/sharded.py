"""Predicted peaks and exposed communication of one rank under `fsdp`, on GPUs that are not there.

python -m benchmarks.sharded --model Llama-2-7b-hf --layers 2 --tokens 4096 --ranks 8

Forward and backward with the loss inside, in bfloat16; parameters (the rank's shards) and what operations hold
inside themselves, such as a chunk of logits, are included, an optimizer is not.
Thunder alone runs with this package's executors; its `ZERO3` is its `ZERO2`.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import litgpt
import thunder
import torch
from thunder.distributed import FSDPType, fsdp

import thunder_mem
from thunder_mem import MemEfficient, last_plan
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex


class Step(torch.nn.Module):
    """A model and its loss."""

    def __init__(self, config: litgpt.Config) -> None:
        super().__init__()
        self.model = litgpt.GPT(config)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def row(title: str, jit: Callable, strategy: FSDPType, config: litgpt.Config, tokens: int) -> str:
    """One line of the table."""
    with torch.device("cuda"):
        step = Step(config).bfloat16()
        batch = torch.zeros(1, tokens, dtype=torch.long)
    jitted = fsdp(jit(step), device=torch.device("cuda", 0), sharding_strategy=strategy)
    prediction = thunder_mem.predict(jitted, batch, batch)
    peaks = (f"{prediction.phase(half).peak_bytes / 2**30:.2f}" for half in ("forward", "backward"))
    plan = last_plan(jitted)
    how = next((d.how for d in plan.decisions if d.what == "communication"), "") if plan else ""
    return f"| {title} | {' | '.join(peaks)} | {how} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Llama-2-7b-hf")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--device", default="H100-80GB")
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=options.ranks, store=FakeStore())
    config = litgpt.Config.from_name(options.model, n_layer=options.layers)

    def alone(step: torch.nn.Module) -> Callable:
        return thunder.jit(step, executors=[mem_pointwise_ex, *thunder.get_default_executors()])

    def planned(step: torch.nn.Module) -> Callable:
        return thunder.jit(step, transforms=[MemEfficient(strict=True)])

    print("| | forward GiB | backward GiB | communication |\n|---|---|---|---|")
    with thunder_mem.simulate(options.device):
        for title, jit, strategy in (
            ("Thunder, ZeRO-2 or ZeRO-3", alone, FSDPType.ZERO3),
            ("MemEfficient, ZeRO-2", planned, FSDPType.ZERO2),
            ("MemEfficient, ZeRO-3", planned, FSDPType.ZERO3),
        ):
            print(row(title, jit, strategy, config, options.tokens), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
