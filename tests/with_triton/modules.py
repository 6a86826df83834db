"""The modules that Inductor writes for regions on a simulated H100: collected, compiled to cubins, read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import thunder
import torch
from litgpt import GPT, Config
from thunder.core.trace import TraceCtx
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from benchmarks.litgpt.matrix import MODELS
from benchmarks.litgpt.models import CUSTOM, WithLoss, block_class, build_custom, known_models
from thunder_mem import MemEfficient, predict, simulate
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.regions import region_kernels
from thunder_mem.regions.compiled_region import RegionFunction
from thunder_mem.regions.inductor_target import answered
from thunder_mem.regions.kernel_module import KernelModule, Launch
from thunder_mem.regions.region_kernels import region_function_of

DEVICE = "H100-80GB"


@dataclass(frozen=True)
class Written:
    """A region and its module; `args` are laid out as the region's are."""

    function: RegionFunction
    args: tuple
    module: KernelModule


@contextmanager
def collected() -> Iterator[list[Written]]:
    """Every module that is written within; a region of the same content and layout is written once."""
    found: list[Written] = []
    write = region_kernels.kernel_module

    def kept(function: RegionFunction, args: tuple) -> KernelModule | None:
        module = write(function, args)
        if module is not None:
            found.append(Written(function, args, module))
        return module

    with mock.patch.object(region_kernels, "kernel_module", kept):
        yield found


@dataclass(frozen=True)
class Modules:
    """What is written for a compiled function.

    Attributes:
        written: every module.
        in_loops: the regions of its loops' bodies.
        assumptions: of its prediction.
    """

    written: list[Written]
    in_loops: set[RegionFunction]
    assumptions: tuple[str, ...]


def modules_of(
    name: str,
    *,
    checkpointing: bool,
    loss_inside: bool,
    transform: Callable[[nn.Module], MemEfficient] = lambda model: MemEfficient(strict=True),
) -> Modules:
    """The modules of a model of the matrix in its small form.

    Regions are planned before it is known which results go over what dies, and again with that: both are written.
    """
    how = MODELS[name]
    with known_models(how.cpu_scale), simulate(DEVICE), collected() as found:
        with torch.device("cuda"):
            config = Config.from_name(name, n_layer=how.cpu_layers)
            model = (build_custom(name, config) if name in CUSTOM else GPT(config)).to(torch.bfloat16)
            tokens = torch.zeros(how.cpu_batch, config.block_size, dtype=torch.long)
        if checkpointing:
            layer = block_class(name)
            apply_activation_checkpointing(
                model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, layer)
            )
        inputs = (tokens, tokens) if loss_inside else (tokens,)
        jitted = thunder.jit(WithLoss(model) if loss_inside else model, transforms=[transform(model)])
        assumptions = predict(jitted, *inputs).assumptions
    traces = [thunder.last_traces(jitted)[-1], *(thunder.last_backward_traces(jitted) or [])[-1:]]
    return Modules(found, set(_in_loops(traces)), assumptions)


def _in_loops(traces: list[TraceCtx]) -> Iterator[RegionFunction]:
    for loop in (loop_of(b) for trace in traces for b in trace.bound_symbols if is_chunk_loop(b)):
        for body in (*loop.forward.values(), *loop.backward.values()):
            yield from filter(None, map(region_function_of, body.trace.bound_symbols))


@contextmanager
def compiling() -> Iterator[None]:
    """Within, Triton compiles for the simulated device, with a driver that nothing can be launched by."""
    with ExitStack() as stack:
        stack.enter_context(simulate(DEVICE))
        stack.enter_context(answered())
        stack.enter_context(mock.patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", lambda: None))
        yield


def cubin(source: str) -> bytes:
    """What Triton and ptxas make of a kernel's source, for the first of its configurations; within `compiling()`."""
    import triton
    from torch._inductor.codecache import PyCodeCache

    name = re.search(r"^def (\w+)\(", source, re.MULTILINE)
    assert name is not None
    tuner = getattr(PyCodeCache.load(source), name[1])
    config, meta = tuner.configs[0], tuner.triton_meta
    constants = {**meta.get("constants", {}), **config.kwargs}
    signature = {k: "constexpr" if k in constants else kind for k, kind in meta["signature"].items()}
    signature |= {k: "constexpr" for k in constants if k not in signature}
    kernel = triton.compiler.ASTSource(fn=tuner.fn, signature=signature, constexprs=constants)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    target = triton.runtime.driver.active.get_current_target()
    return triton.compile(kernel, target=target, options=options).asm["cubin"]


# --- what a module overwrites -------------------------------------------------------------------------


def misread(module: KernelModule, inputs: int) -> list[str]:
    """Where a module reads an input's old content after it was overwritten, in sentences.

    From one kernel to the next: the module lists with each kernel the operations that it runs, and a content that was
    written has the name of its write there. Within a kernel: whatever it overwrites it reads at the same index, and
    after the write only by the pointer that it wrote with.
    """
    found: list[str] = []
    overwritten: set[int] = set()
    for launch in module.launches:
        reads, writes = _accesses(module, launch)
        for number in sorted(overwritten & set(reads)):
            if _reads_as_given(_operations(module, launch), f"arg{number}_1"):
                found.append(f"{launch.kernel} reads input {number}, which is overwritten by then")
        for number in range(inputs):
            loads, stores = reads.get(number, []), writes.get(number, [])
            if not stores:
                continue
            if not {use.index for use in loads} <= {use.index for use in stores}:
                found.append(f"{launch.kernel} reads input {number} at another index than it writes it")
            first, by = min(use.at for use in stores), {use.pointer for use in stores if use.pointer.startswith("out")}
            if any(use.at > first and use.pointer not in by for use in loads):
                found.append(f"{launch.kernel} reads input {number} after it has written it")
        overwritten |= writes.keys() & set(range(inputs))
    return found


def _reads_as_given(operations: str, name: str) -> bool:
    """Whether an operation takes an argument of the module as it was given, through whatever view."""
    shown = {name}
    for node, target, operands in re.findall(r"%(\w+) : .*call_function\[target=([\w.]+)\]\(args = (.*)", operations):
        taken = shown.intersection(re.findall(r"%(\w+)", operands))
        if target.endswith("copy_.default"):
            taken = shown.intersection(re.findall(r"%(\w+)", operands)[1:])
        elif taken and target.split(".")[-2] in ("view", "reshape", "unsqueeze", "squeeze", "permute", "expand"):
            shown.add(node)
            continue
        if taken:
            return True
    return False


@dataclass(frozen=True)
class Use:
    """A load or a store of a kernel: at which index, by which of its pointers, and where in its source."""

    index: str
    pointer: str
    at: int


Accesses = dict[int, list[Use]]  # by storage


def _accesses(module: KernelModule, launch: Launch) -> tuple[Accesses, Accesses]:
    source = module.kernels.get(launch.kernel, "")
    given = re.search(r"^def \w+\((.*?)\):", source, re.MULTILINE)
    pointers = re.findall(r"\b(?:in_out|in|out)_ptr\d+|\bws_ptr", given[1]) if given else []
    number = dict(zip(pointers, launch.memory, strict=False))
    accesses: dict[str, Accesses] = {"load": {}, "store": {}}
    for kind, use in _uses(source):
        accesses[kind].setdefault(number[use.pointer], []).append(use)
    return accesses["load"], accesses["store"]


def _uses(source: str) -> Iterator[tuple[str, Use]]:
    for use in re.finditer(r"tl\.(load|store|atomic_add)\((\w+_ptr\d*) \+ \(", source):
        depth, end = 1, use.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(source[end], 0)
            end += 1
        yield use[1].replace("atomic_add", "store"), Use(source[use.end() : end - 1], use[2], use.start())


def _operations(module: KernelModule, launch: Launch) -> str:
    """What the module says of a kernel: the operations that it runs."""
    before = module.text.split(f"\n{launch.kernel} = async_compile")[0]
    return before[before.rindex("# Graph fragment:") :]
