"""The ways in which the fuzzer compiles a program: fixed ones, and options of the package drawn at random.

A program costs most where Thunder traces it, and that is the same whatever compiles the trace; see
`traced_once`. So drawn options cost a third of what the first configuration does.
"""

from __future__ import annotations

import functools
import importlib.util
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import thunder
import torch
from thunder.core.trace import TraceCtx, TraceResults
from thunder.dynamo import thunderfx
from thunder.executors import torch_compile
from thunder.extend import FusionExecutor, TemporaryExecutor

from tests.checking.orders import at_random, latest_first
from tests.programs.programs import Program, Step, walk

__all__ = [
    "CONFIGS",
    "Config",
    "Options",
    "available",
    "configured",
    "draw_options",
    "plain",
    "traced_once",
    "uncompiled_regions",
    "with_options",
]

_MEM = "thunder_mem.transforms.mem_efficient"
_POINTWISE = "thunder_mem.regions.pointwise_executor"


@dataclass(frozen=True)
class Options:
    """Options of `MemEfficient` and `thunder.jit`, as data.

    Attributes:
        sort: a name of `thunder_mem.SORTS`, or of `SORT_FUNCTIONS`, the user's own.
        chunk: whether heads are chunked, or arguments of `ChunkLossHead`.
        budget, on_infeasible, offload, reuse: as `MemEfficient` takes them; offloading over a link that costs
            nothing, or it would never pay for values so small.
        recompute: a configuration, or "policy NAME" of `POLICIES`.
        executors: a key of `EXECUTORS`.
        alone: `ChunkLossHead` without `MemEfficient`.
        retain: go backward twice.
        compiled: fusion regions are really compiled.
        fx: by ThunderFX, which leaves to Inductor what Thunder lacks.
        tile: the rows of a tile of every stretch; 0 for the default, which tiles none as small as these.
        groups: beside tiles, each head of attention is a group of its own.
        outside: the budget chooses the tiles, also outside of checkpoints; see `smallest.py`.
        step: the leaves are a module's parameters, which the backward updates; see `stepping.py`.
    """

    sort: str = "auto"
    chunk: bool | tuple[tuple[str, int | str], ...] = True
    budget: int | None = None
    on_infeasible: str = "warn"
    offload: bool = False
    recompute: str | None = None
    reuse: bool = True
    executors: str = "default"
    alone: bool = False
    retain: bool = False
    compiled: bool = False
    fx: bool = False
    tile: int = 0
    groups: bool = False
    outside: bool = False
    step: bool = False

    def __repr__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"Options({', '.join(f'{k}={v!r}' for k, v in changed.items())})"


@dataclass(frozen=True)
class Config:
    """One way to compile a program.

    Attributes:
        name: as `--configs` takes it.
        compile: from a function to a compiled one.
        needs: modules that must exist.
        baseline: the configuration that excuses a failure, or "" for none.
        options: what it was made from, if by drawing.
    """

    name: str
    compile: Callable[[Callable], Callable]
    needs: tuple[str, ...] = ()
    baseline: str = ""
    options: Options = Options()


SORT_FUNCTIONS: dict[str, Callable] = {"latest first": latest_first, "any order": at_random}


def _any_action(op: Any, graph: Any) -> str:
    """An arbitrary choice that depends on the operation alone."""
    choice = zlib.crc32(f"{op.symbol} {op.index} {op.nbytes}".encode()) % 3
    return "auto" if op.refusal is not None and choice == 1 else ("keep", "recompute", "auto")[choice]


def _policies() -> dict[str, Callable]:
    from thunder_mem import policies

    names = ("keep_everything", "recompute_everything", "save_only_matmul_outputs", "every_second_matmul")
    return {**{name: getattr(policies, name) for name in names}, "any": _any_action}


POLICIES = ("keep_everything", "recompute_everything", "save_only_matmul_outputs", "every_second_matmul", "any")

# `thunder.jit(executors=...)` and `fusion_type=...` by name.
EXECUTORS: dict[str, tuple[tuple[str, ...] | None, str | None]] = {
    "default": (None, None),
    "default, dataflow": (None, "dataflow"),
    "none": ((), None),
    "pointwise": (("mem_pointwise",), None),
    "attention and pointwise": (("mem_attention", "mem_pointwise"), None),
    "attention": (("mem_attention",), None),
    "torchcompile": (("torchcompile",), None),
    "sdpa and torchcompile": (("sdpa", "torchcompile"), None),
}

# Patterns of operations that are often there; see `thunder_mem.user_choices.config`.
PATTERNS = {
    "sin": "Sin+", "cos": "Cos+", "tanh": "Tanh+", "gelu": "Gelu+", "silu": "Silu+", "relu": "Relu+", "mish": "Mish+",
    "sigmoid": "Sigmoid+", "erf": "Erf+", "softmax": "Softmax+", "layer_norm": "LayerNorm+", "linear": "Linear+",
    "matmul": "Matmul+", "log_softmax": "LogSoftmax+", "rms_norm": "RmsNorm+",
}  # fmt: skip


def _jit(fn: Callable, options: Options, transforms: list) -> Callable:
    importlib.import_module("thunder_mem.regions.pointwise_executor")  # which are known by name from here on

    names, fusion_type = EXECUTORS[options.executors]
    more: dict[str, Any] = {} if names is None else {"executors": list(names)}
    if fusion_type is not None:
        more["fusion_type"] = fusion_type
    if options.fx:
        return _leaving_gradients_enabled(thunderfx(fn, transforms=transforms, **more))
    return thunder.jit(fn, transforms=transforms, **more)


def _leaving_gradients_enabled(compiled: Callable) -> Callable:
    """The same without a defect of Thunder's: what ThunderFX compiles may leave PyTorch's gradients disabled.

    Where a program enters `torch.no_grad` in a graph of Inductor's and leaves it in one of Thunder's, Thunder enables
    gradients at the first call only. Every later program of the process would run without, eager ones too.
    """

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        with torch.enable_grad():  # which ends with what was before
            return compiled(*args)

    return call


def plain(options: Options) -> Callable[[Callable], Callable]:
    """Thunder alone, with the same executors."""
    return lambda fn: _jit(fn, options, [])


def with_options(fn: Callable, options: Options, optimizer: Any = None) -> Callable:
    """The function, compiled as the options say, with `MemEfficient(optimizer=optimizer)`."""
    from thunder_mem import ChunkLossHead, MemEfficient, Tiles

    chunk = options.chunk if isinstance(options.chunk, bool) else ChunkLossHead(**dict(options.chunk))
    if options.alone:
        return _jit(fn, options, [chunk])
    recompute: Any = options.recompute
    if recompute is not None and recompute.startswith("policy "):
        recompute = _policies()[recompute.removeprefix("policy ")]
    transform = MemEfficient(
        sort=SORT_FUNCTIONS.get(options.sort, options.sort),
        chunk=chunk,
        tile=Tiles(rows=options.tile) if options.tile and not options.outside else True,
        budget=options.budget,
        on_infeasible=options.on_infeasible,
        offload=options.offload,
        recompute=recompute,
        reuse=options.reuse,
        verify=True,
        strict=True,
        optimizer=optimizer,
    )
    return _jit(fn, options, [transform])


def _compile(options: Options) -> Callable[[Callable], Callable]:
    return lambda fn: with_options(fn, options)


def configured(options: Options) -> Config:
    """The configuration of drawn options."""
    return Config(repr(options), _compile(options), (_MEM,), "thunderfx" if options.fx else "thunder", options)


def _pointwise(fusion_type: str | None = None) -> Callable[[Callable], Callable]:
    def compile(fn: Callable) -> Callable:
        from thunder_mem.regions.pointwise_executor import mem_pointwise_ex

        others = thunder.extend.get_default_executors()
        if fusion_type is None:
            return thunder.jit(fn, executors=[mem_pointwise_ex, *others])
        # Thunder's own fusion executors would put writes after the return; see `defects.py`.
        others = [e for e in others if not isinstance(e, FusionExecutor)]
        return thunder.jit(fn, executors=[mem_pointwise_ex, *others], fusion_type=fusion_type)

    return compile


def _named(name: str, options: Options) -> Config:
    return Config(name, _compile(options), (_MEM,), "thunder", options)


def _tiles(options: Options) -> Config:
    return _named(f"tiles-of-{options.tile}" + ("-and-heads" if options.groups else ""), options)


CONFIGS = {
    c.name: c
    for c in (
        Config("thunder", thunder.jit),
        Config("pointwise", _pointwise(), (_POINTWISE,), "thunder"),
        Config("dataflow", _pointwise("dataflow"), (_POINTWISE,), "thunder"),
        Config("mem", _compile(Options()), (_MEM,), "thunder"),
        *(_tiles(Options(tile=n, chunk=n > 3)) for n in (3, 5, 7)),
        _tiles(Options(tile=5, groups=True, executors="attention")),
        _named("tiles-outside-of-checkpoints", Options(tile=1, outside=True, budget=1)),
        _named("step", Options(step=True)),
        _named("step-and-tiles-of-3", Options(step=True, tile=3)),
        Config("mem-no-fusion", _compile(Options(executors="none")), (_MEM,), "thunder"),
        Config("thunderfx", plain(Options(fx=True))),
        Config("fx", _compile(Options(fx=True)), (_MEM,), "thunderfx"),
    )
}


def available() -> tuple[Config, ...]:
    """The fixed configurations whose modules exist here."""

    def exists(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            return False

    return tuple(c for c in CONFIGS.values() if all(map(exists, c.needs)))


def draw_options(rng: Random, program: Program, compiled_share: float = 0.0, fx: bool = False) -> Options:
    """Some options for a program: usually two or three that are not the default; by ThunderFX if `fx`."""
    from thunder_mem import SORTS

    ops = [item.op for item in walk(program.body) if isinstance(item, Step)]
    heads = any(op.startswith(("head", "cross_entropy", "nll")) for op in ops)
    chunks = (("chunks", rng.choice([2, 3, 4])),), (("rows", rng.choice([1, 2, 3])),), (("chunks", "auto"),)
    chunk: bool | tuple = rng.choice(chunks) if rng.random() < (0.8 if heads else 0.15) else rng.random() < 0.8
    if not isinstance(chunk, bool) and rng.random() < 0.4:
        chunk = (*chunk, ("accumulate", rng.choice(["float32", "input"])))
    recompute = None
    if rng.random() < 0.4:
        patterns = sorted({PATTERNS[op] for op in ops if op in PATTERNS})
        recompute = rng.choice(["layerwise", *(f"policy {name}" for name in POLICIES), *patterns])
        if recompute in patterns:
            recompute += rng.choice([":recompute:-1", ":recompute:1", ":compromised:-1", ":none:-1"])
    budgeted = rng.random() < 0.3
    executors = rng.choice(list(EXECUTORS)) if rng.random() < 0.6 else "default"
    drawn = Options(
        sort=rng.choice([*SORTS, *SORT_FUNCTIONS]) if rng.random() < 0.5 else "auto",
        chunk=chunk,
        budget=rng.choice([1, int(2 ** rng.uniform(6, 14)), int(2 ** rng.uniform(6, 14))]) if budgeted else None,
        on_infeasible="error" if budgeted and rng.random() < 0.3 else "warn",
        offload=budgeted and rng.random() < 0.35,
        recompute=recompute,
        reuse=rng.random() < 0.75,
        executors=executors,
        # Alone it plans nothing, and Thunder's torchcompile executor loses the names of what it does not return.
        alone=not isinstance(chunk, bool) and rng.random() < 0.2 and "torchcompile" not in executors,
        retain=rng.random() < 0.3,
        compiled=rng.random() < compiled_share,
        fx=fx,
        tile=rng.choice([3, 5, 7]) if rng.random() < 0.3 else 0,
    )
    drawn = replace(drawn, groups=bool(drawn.tile) and any("attention" in op for op in ops))
    # Every fifth program; the options alone, a second backward and ThunderFX leave nothing for it to do.
    drawn = replace(drawn, step=rng.random() < 0.2 and not (drawn.alone or drawn.retain or fx))
    return replace(drawn, outside=bool(drawn.tile) and drawn.budget is not None and rng.random() < 0.5)


@contextmanager
def uncompiled_regions() -> Iterator[None]:
    """Fusion regions run one operation at a time: a compilation takes seconds, and planning can err without it.

    Those of Thunder's `torchcompile` too, and what ThunderFX gives to Inductor.
    """
    from thunder_mem.regions import compiled_region

    ours, theirs, inductor = compiled_region._compile, torch_compile.torch, torch._inductor.compile

    class Uncompiled:
        """`torch`, but that `torch.compile` gives back the function."""

        def __getattr__(self, name: str) -> Any:
            return (lambda fn, **options: fn) if name == "compile" else getattr(torch, name)

    compiled_region._compile = lambda unfused, args: unfused
    torch_compile.torch = Uncompiled()
    torch._inductor.compile = lambda graph, *args, **options: graph
    try:
        yield
    finally:
        compiled_region._compile, torch_compile.torch, torch._inductor.compile = ours, theirs, inductor


def _copied(trace: TraceCtx) -> TraceCtx:
    copied = copy(trace)
    copied.names = set(trace.names)
    copied._bound_symbols = list(trace.bound_symbols)
    copied.scopes = [copied._bound_symbols]
    copied._object_ctx = dict(trace._object_ctx)
    return copied


@contextmanager
def traced_once() -> Iterator[None]:
    """`thunder.jit` of one and the same function traces it once, and hands out copies of its traces."""
    general_jit = thunder.thunder_general_jit
    last: dict[Callable, tuple[TraceResults, TemporaryExecutor]] = {}

    def once(fn: Callable, *args: Any, ad_hoc_executor: TemporaryExecutor, **options: Any) -> Any:
        if fn not in last:
            last.clear()
            last[fn] = general_jit(fn, *args, ad_hoc_executor=ad_hoc_executor, **options), ad_hoc_executor
        traced, traced_with = last[fn]
        # It alone knows the backward of a `torch.autograd.Function`; without it Thunder differentiates the forward.
        ad_hoc_executor.implmap.update(traced_with.implmap)
        traces = map(_copied, (traced.prologue_trace, traced.computation_trace, traced.epilogue_trace))
        return TraceResults(*traces, traced.interpreter_log)

    thunder.thunder_general_jit = once
    try:
        yield
    finally:
        thunder.thunder_general_jit = general_jit
