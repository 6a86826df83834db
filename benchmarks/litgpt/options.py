"""What `benchmarks.litgpt` adds to the options of Thunder's benchmark, and what they mean together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thunder_mem.fusers.fusion_executors import fuser_of
from thunder_mem.fusers.nvfuser import installed_nvfuser
from thunder_mem.fusers.nvfuser_model import modelled_nvfuser
from thunder_mem.memory.device_specs import device_spec
from thunder_mem.optimizer.step_in_backward import StepInBackward
from thunder_mem.transforms import ChunkLossHead, MemEfficient

__all__ = ["Options"]

_FUSIONS = ("consecutive", "dataflow")


@dataclass(frozen=True)
class Options:
    """The options beside Thunder's own.

    Args:
        mem_efficient: compile with `thunder_mem.MemEfficient`.
        mem_budget: its `budget`: bytes, a size such as "40GiB" or "80%", or "min" for the smallest peak found.
        mem_sort: its `sort`: the name of an algorithm.
        mem_chunk: its `chunk`: whether loss heads run chunk by chunk, or in how many chunks.
        mem_recompute: its `recompute`: a configuration, "layerwise", or a file's path.
        mem_reuse: its `reuse`: whether results may be written over values that nobody reads any more.
        mem_tile: its `tile`: whether token-wise stretches run in tiles.
        optimizer_in_backward: the backward updates each parameter, see `thunder_mem.StepInBackward`.
        fusion: who fuses what Thunder compiles: "mem_pointwise", "nvfuser" or "torchcompile"; if not given, Thunder's
            default executors where they fuse, else mem_pointwise.
        cudnn_attention: what Thunder compiles runs attention by cuDNN, where eager PyTorch does.
        fusion_type: Thunder's own way to group operations, "consecutive" or "dataflow"; Thunder's default if not given.
        loss_inside: compile the loss together with the model.
        device: "cuda", "cpu", or "simulate:NAME" for a GPU that is not there, such as simulate:H100-80GB.
        scale: multiply the model's sequence, width, MLP and vocabulary by this, see `models.scaled`.
    """

    mem_efficient: bool = False
    mem_budget: int | str | None = None
    mem_sort: str | None = None
    mem_chunk: bool | int = True
    mem_recompute: str | None = None
    mem_reuse: bool = True
    mem_tile: bool = True
    optimizer_in_backward: bool = False
    fusion: str | None = None
    cudnn_attention: bool = False
    fusion_type: str | None = None
    loss_inside: bool = False
    device: str = "cuda"
    scale: float = 1.0

    def check(self, compile: str, distributed_mode: str) -> None:
        """Refuse what has no meaning together.

        Raises:
            ValueError: says which option, what was given and what is possible.
        """
        name, _, simulated = self.device.partition(":")
        if name == "simulate":
            device_spec(simulated)
            if "dynamo" in compile:
                raise ValueError("a simulated device takes --compile eager, inductor or thunder, not ThunderFX's")
            if distributed_mode != "none":
                raise ValueError(f"a simulated device is one device: --distributed_mode {distributed_mode} needs more")
        elif self.device not in ("cpu", "cuda"):
            raise ValueError(f"--device is cpu, cuda or simulate:NAME, not {self.device!r}")
        given = [
            option
            for option in ("mem_budget", "mem_sort", "mem_recompute")
            if getattr(self, option) is not None and not self.mem_efficient
        ]
        if self.optimizer_in_backward and not self.mem_efficient:
            given.append("optimizer_in_backward")
        if self.optimizer_in_backward and distributed_mode != "none":
            raise ValueError(
                f"--optimizer_in_backward is for one device, not for --distributed_mode {distributed_mode}"
            )
        if not self.mem_efficient:
            given += [option for option in ("mem_chunk", "mem_reuse", "mem_tile") if getattr(self, option) is not True]
        if given:
            raise ValueError(f"--{given[0]} is an option of MemEfficient: give --mem_efficient True too")
        if self.mem_efficient and "thunder" not in compile:
            raise ValueError(f"MemEfficient is a transform of Thunder: --compile {compile} has nowhere to put it")
        if self.cudnn_attention and "thunder" not in compile:
            raise ValueError(f"--cudnn_attention is for what Thunder compiles: --compile {compile} chooses for itself")
        if self.fusion_type is not None and (self.fusion_type not in _FUSIONS or "thunder" not in compile):
            raise ValueError(f"--fusion_type is {' or '.join(_FUSIONS)}, with --compile thunder")
        if self.fusion is not None:
            if "thunder" not in compile:
                raise ValueError(f"--fusion is for what Thunder compiles: --compile {compile} fuses in its own way")
            if (self.fusion, self.device) == ("nvfuser", "cpu"):
                raise ValueError("nvFuser knows no CPU: --fusion mem_pointwise fuses there what it would")
            there = self.device == "cuda" and torch.cuda.is_available()
            fuser_of(self.fusion, installed_nvfuser if there else modelled_nvfuser)
        if self.scale != 1 and self.device == "cuda":
            raise ValueError("--scale is for CPUs; on a GPU choose --block_size and --n_layers")

    @property
    def simulated(self) -> str | None:
        """The name of the device that is simulated, if one is."""
        name, _, simulated = self.device.partition(":")
        return simulated if name == "simulate" else None

    def transforms(self, optimizer: StepInBackward | None = None) -> list[MemEfficient]:
        """What joins the list of transforms; strict, so that no figure is Thunder's own in our name.

        Args:
            optimizer: with `optimizer_in_backward`, the one that the backward uses.
        """
        if not self.mem_efficient:
            return []
        smallest = self.mem_budget == "min"
        return [
            MemEfficient(
                sort=self.mem_sort or "auto",
                # bool first: True is an int too.
                chunk=self.mem_chunk if isinstance(self.mem_chunk, bool) else ChunkLossHead(chunks=self.mem_chunk),
                budget=1 if smallest else self.mem_budget,
                on_infeasible="warn" if smallest else "error",
                recompute=self.mem_recompute,
                reuse=self.mem_reuse,
                tile=self.mem_tile,
                optimizer=optimizer,
                strict=True,
            )
        ]
