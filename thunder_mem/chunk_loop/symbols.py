"""The chunk loop as Thunder sees it: bound symbols, their printing, and their gradient.

Before autograd a head is one `chunk_loop`. Its grad transform has two modes. Either the forward has
`chunk_loop_with_grads` and the backward `chunk_loop_finish`. Or the forward has `chunk_loop` again, and the backward
`chunk_loop_backward`, which recomputes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from thunder.core import devices, dtypes, prims
from thunder.core.prims import OpTags
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol, default_python_printer
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transforms import register_grad
from thunder.extend import OperatorExecutor
from thunder.transforms.autodiff import grad_transform_on_trace

from thunder_mem.chunk_loop.body import Body
from thunder_mem.chunk_loop.gradient_sums import finish, part_bounds
from thunder_mem.chunk_loop.plan import LoopPlan, Spec
from thunder_mem.chunk_loop.price import loop_seconds
from thunder_mem.chunk_loop.run import ChunkLoop, run
from thunder_mem.memory.device_models import DeviceModel
from thunder_mem.semantics.op_traits import PLAIN, MemoryTraits, declare
from thunder_mem.trace.renaming import under

__all__ = [
    "bind_loop",
    "check_autograd",
    "chunk_loop",
    "executor",
    "is_chunk_loop",
    "loop_of",
    "makes_gradients",
    "overwritten",
    "rebind",
    "rows_with_gradients",
    "runs_rows",
    "saved_proxies",
    "scratch_bytes",
    "scratch_bytes_under",
    "shared_memory",
    "writing_over_rows",
]

executor = OperatorExecutor("thunder_mem_chunk", version="0.1")
"""Owns the symbols. It need not stand in the user's list: a symbol with an owner is claimed already."""


def _proxy(
    spec: Spec, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> TensorProxy:
    return TensorProxy(
        shape=tuple(spec.shape if shape is None else shape),
        device=devices.to_device(spec.device),
        dtype=dtypes.to_dtype(dtype or spec.dtype),
        requires_grad=requires_grad,
    )


def _output_proxies(plan: LoopPlan) -> list[TensorProxy]:
    return [_proxy(s) for s in plan.outputs]


def saved_proxies(plan: LoopPlan) -> list[TensorProxy]:
    """New proxies of the gradients that the forward passes to `chunk_loop_finish`, in parts."""
    saved = []
    for i, dtype in zip(plan.grads, plan.grad_dtypes, strict=True):
        spec = plan.inputs[i]
        if spec.sharding.split or not spec.shape:
            saved.append(_proxy(spec, dtype=dtype))
        else:
            saved += [_proxy(spec, (hi - lo, *spec.shape[1:]), dtype) for lo, hi in part_bounds(spec, dtype)]
    return saved


def _grads_meta(loop: ChunkLoop, *args: TensorProxy) -> tuple[TensorProxy, ...]:
    return tuple(_proxy(loop.plan.inputs[i]) for i in loop.plan.grads)


def _print_loop(bsym: BoundSymbol, out: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterable[str]:
    """The call, followed by the plan and the bodies of its largest blocks, as comments."""
    loop = bsym.args[0]
    yield default_python_printer(bsym, out, args, kwargs)
    plan = loop.plan
    yield (
        f"  # {plan.name}: {plan.n} rows of {plan.op} in {plan.chunks} chunks of {plan.chunk_rows}, "
        f"blocks of {plan.block_rows}; {plan.mode}: {plan.why}"
    )
    over = bsym.args[1] if bsym.sym.name == "chunk_loop_backward_over" else plan.over
    for i, dtype in zip(plan.grads, plan.grad_dtypes, strict=True):
        spec = plan.inputs[i]
        how = f"summed over chunks in {str(dtype).removeprefix('torch.')}"
        if spec.sharding.split:
            how = "written over it" if i in over else "written chunk by chunk"
        yield f"  # gradient of {spec.name}: {how}"
    bodies = loop.forward if bsym.sym.name == "chunk_loop" and loop.forward else loop.backward
    yield from _print_body(bodies)
    if plan.opening:
        yield f"  # its rows, in blocks of {plan.opening.block_rows}:"
        yield from _print_body(loop.opening)


def _print_body(bodies: Mapping[int, Body]) -> Iterable[str]:
    for b in bodies[max(bodies)].trace.bound_symbols:
        if b.sym.id not in (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.DEL):
            for line in b.python(indent=0, print_depth=1):
                yield f"  #   {line}"


def _printer(bsym: BoundSymbol, out: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterable[str]:
    if bsym.sym.name == "chunk_loop_finish":
        return default_python_printer(bsym, out, args, kwargs)
    return list(_print_loop(bsym, out, args, kwargs))


def _register(name: str, meta: Any, fn: Any, tags: Sequence[OpTags] = ()) -> Any:
    return executor.register_operator(name, meta=meta, fn=fn, tags=tags, python_printer=_printer)


# --- forward alone ---------------------------------------------------------------------------------


def _loop_impl(loop: ChunkLoop, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if not loop.forward:  # planned for gradients in the forward, which turn out not to be needed
        return _with_grads_impl(loop, *inputs)[: len(loop.plan.outputs)]
    return tuple(run(loop, inputs, None, True)[0])


chunk_loop = _register("chunk_loop", lambda loop, *inputs: tuple(_output_proxies(loop.plan)), _loop_impl)


# --- gradients in the forward ----------------------------------------------------------------------


def _with_grads_meta(loop: ChunkLoop, *inputs: TensorProxy) -> tuple[TensorProxy, ...]:
    return (*_output_proxies(loop.plan), *saved_proxies(loop.plan))


def _with_grads_impl(loop: ChunkLoop, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    (spec,) = (loop.plan.outputs[i] for i in loop.plan.differentiable)
    one = torch.ones(spec.shape, dtype=spec.dtype, device=inputs[0].device)
    outputs, grads = run(loop, inputs, [one], True)
    return (*outputs, *grads)


# Its gradients are all there is to save: to make them once more would save nothing.
_ONCE = (OpTags.DONT_RECOMPUTE_IN_BACKWARD,)
chunk_loop_with_grads = _register("chunk_loop_with_grads", _with_grads_meta, _with_grads_impl, _ONCE)


chunk_loop_finish = _register(
    "chunk_loop_finish",
    _grads_meta,
    lambda loop, tangent, *saved: tuple(finish(loop.plan, tangent.reshape(()), saved)),
)


# --- recompute in the backward ---------------------------------------------------------------------


def _backward_impl(loop: ChunkLoop, *args: torch.Tensor, over: tuple[int, ...] = ()) -> tuple[torch.Tensor, ...]:
    count = len(loop.plan.differentiable)
    tangents, args = args[:count], args[count:]
    count = len(loop.plan.log_sums)
    _, parts = run(loop, args[count:], tangents, False, log_sums=args[:count], over=over)
    return tuple(finish(loop.plan, None, parts))


chunk_loop_backward = _register("chunk_loop_backward", _grads_meta, _backward_impl)

_backward_over = _register(
    "chunk_loop_backward_over",
    lambda loop, over, *args: _grads_meta(loop, *args),
    lambda loop, over, *args: _backward_impl(loop, *args, over=over),
)


def _chunk_loop_grad(loop: ChunkLoop, *inputs: TensorProxy) -> tuple[TensorProxy, ...]:
    plan = loop.plan
    if plan.mode == "forward":
        return chunk_loop(loop, *inputs)
    if plan.mode == "grads-in-forward":
        results = chunk_loop_with_grads(loop, *inputs)
        outputs, saved = results[: len(plan.outputs)], results[len(plan.outputs) :]
        tangent = prims.get_grad(outputs[plan.differentiable[0]])
        grads = chunk_loop_finish(loop, tangent, *saved)
    else:
        outputs = chunk_loop(loop, *inputs)
        tangents = [prims.get_grad(outputs[i]) for i in plan.differentiable]
        grads = chunk_loop_backward(loop, *tangents, *(outputs[i] for i in plan.log_sums), *inputs)
    for i, grad in zip(plan.grads, grads, strict=True):
        prims.put_grad(inputs[i], grad)
    return tuple(outputs)


register_grad(chunk_loop, _chunk_loop_grad)


def check_autograd(loop: ChunkLoop) -> None:
    """Let Thunder differentiate a loop alone, so that errors show while the head is still whole.

    Raises:
        ValueError: an input that needs a gradient gets none, or one of another shape.
        Exception: any error of Thunder's autograd.
    """
    plan = loop.plan
    if plan.mode == "forward":
        return
    trace = TraceCtx(None)
    with tracectx(trace):
        inputs = [_proxy(spec, requires_grad=i in plan.grads) for i, spec in enumerate(plan.inputs)]
        for p in inputs:
            prims.unpack_trivial(p, name=p.name)
        prims.python_return({"output": tuple(chunk_loop(loop, *inputs)), "flat_args": tuple(inputs)})
    trace.args = tuple(inputs)
    found = grad_transform_on_trace(trace).bound_symbols[-1].args[0]["output"]
    for i in plan.grads:
        if found[i] is None or tuple(found[i].shape) != plan.inputs[i].shape:
            raise ValueError(f"{plan.name} has no gradient of {plan.inputs[i].name}")


# --- for those who plan ----------------------------------------------------------------------------

_NAMES = (
    "chunk_loop",
    "chunk_loop_with_grads",
    "chunk_loop_backward",
    "chunk_loop_backward_over",
    "chunk_loop_finish",
)


def bind_loop(loop: ChunkLoop, inputs: Sequence[TensorProxy], outputs: Sequence[TensorProxy]) -> BoundSymbol:
    """The bound symbol that computes existing proxies `outputs` by the loop.

    Thunder takes a bound symbol for a constant if any of its outputs is detached. So no output of a loop with
    gradients is marked so; its plan knows which of them have gradients.
    """
    if loop.plan.differentiable:
        outputs = [under(out, out.name) for out in outputs]
        for out in outputs:
            out.tags.discard(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    return chunk_loop.bind(loop, *inputs, output=tuple(outputs))


def is_chunk_loop(bsym: BoundSymbol) -> bool:
    """Whether the bound symbol is one of a chunk loop's."""
    return bsym.sym.executor is executor and bsym.sym.name in _NAMES


def runs_rows(bsym: BoundSymbol) -> bool:
    """Whether the bound symbol is a loop that runs over rows, and not only the end of its gradients."""
    return is_chunk_loop(bsym) and bsym.sym.name != "chunk_loop_finish"


def rebind(bsym: BoundSymbol, loop: ChunkLoop) -> BoundSymbol:
    """The same bound symbol of another loop over the same region, whose gradients add up in the same dtypes.

    Raises:
        ValueError: it is another kind of bound symbol.
    """
    if loop.plan.grad_dtypes != loop_of(bsym).plan.grad_dtypes:
        raise ValueError(f"{loop.plan.name} adds up its gradients in other dtypes, so others hold them")
    return bsym.from_bsym(args=(loop, *bsym.args[1:]), _object_ctx={})


def loop_of(bsym: BoundSymbol) -> ChunkLoop:
    """The loop behind one of its bound symbols.

    Raises:
        ValueError: it is another kind of bound symbol.
    """
    if not is_chunk_loop(bsym):
        raise ValueError(f"{bsym.sym.name} is not part of a chunk loop; accepted are {', '.join(_NAMES)}")
    return bsym.args[0]


def makes_gradients(bsym: BoundSymbol) -> bool:
    """Whether a loss head makes its gradients in the forward there, where all of them are alive together."""
    return is_chunk_loop(bsym) and bsym.sym.name == "chunk_loop_with_grads"


def rows_with_gradients(bsym: BoundSymbol) -> dict[int, TensorProxy]:
    """The inputs by rows, by their index in the plan, over which a recomputing backward could write their gradients.

    A tile's rows are read before their gradient is written. Empty for any other bound symbol.
    """
    if not is_chunk_loop(bsym) or bsym.sym.name != "chunk_loop_backward":
        return {}
    plan = loop_of(bsym).plan
    given = bsym.args[-len(plan.inputs) :]
    same = {i for i, dtype in zip(plan.grads, plan.grad_dtypes, strict=True) if dtype == plan.inputs[i].dtype}
    return {i: given[i] for i in plan.rows_read_first if i in same and plan.inputs[i].sharding.split}


def writing_over_rows(bsym: BoundSymbol, over: tuple[int, ...]) -> BoundSymbol:
    """The backward that writes gradients over some of `rows_with_gradients`, which nobody reads later.

    Rows that autograd keeps for another backward stay, and their gradient gets its own memory.
    """
    return bsym.from_bsym(sym=_backward_over, args=(bsym.args[0], over, *bsym.args[1:]), _call_ctx={}, _object_ctx={})


def _without_over(bsym: BoundSymbol) -> BoundSymbol:
    return bsym.from_bsym(sym=chunk_loop_backward, args=(bsym.args[0], *bsym.args[2:]))


def overwritten(bsym: BoundSymbol) -> tuple[TensorProxy, ...]:
    """The arguments that a loop's bound symbol overwrites although other ops could read them: dead rows."""
    if not is_chunk_loop(bsym):
        return ()
    plan = loop_of(bsym).plan
    if bsym.sym.name == "chunk_loop_backward_over":
        return tuple(bsym.args[i - len(plan.inputs)] for i in bsym.args[1])
    return tuple(bsym.args[1 + i] for i in plan.over) if makes_gradients(bsym) else ()


def shared_memory(bsym: BoundSymbol) -> dict[str, TensorProxy]:
    """The argument that each result of a loop's bound symbol overwrites, by the result's name.

    A gradient overwrites its dead rows. A finished gradient overwrites the (first part of the) sum from which
    it was made. All other results have their own memory. Empty for any other bound symbol.
    """
    if not is_chunk_loop(bsym):
        return {}
    plan = loop_of(bsym).plan
    if bsym.sym.name == "chunk_loop_backward_over":
        given = bsym.args[-len(plan.inputs) :]
        return {g.name: given[i] for g, i in zip(bsym.output, plan.grads, strict=True) if i in bsym.args[1]}
    if bsym.sym.name not in ("chunk_loop_with_grads", "chunk_loop_finish"):
        return {}
    finishes = bsym.sym.name == "chunk_loop_finish"
    saved = list(bsym.args[2:] if finishes else bsym.output[len(plan.outputs) :])
    shared = {}
    for k, (i, dtype) in enumerate(zip(plan.grads, plan.grad_dtypes, strict=True)):
        spec = plan.inputs[i]
        count = 1 if spec.sharding.split or not spec.shape else len(part_bounds(spec, dtype))
        if finishes and (count > 1 or dtype == spec.dtype):
            shared[bsym.output[k].name] = saved[0]
        elif not finishes and i in plan.over:
            shared[saved[0].name] = bsym.args[1 + i]
        saved = saved[count:]
    return shared


def scratch_bytes(bsym: BoundSymbol) -> int:
    """Bytes that a loop's bound symbol holds while it runs, beyond its arguments and its results.

    Raises:
        ValueError: it is another kind of bound symbol.
    """
    return scratch_bytes_under(loop_of(bsym).plan, bsym)


def scratch_bytes_under(plan: LoopPlan, bsym: BoundSymbol) -> int:
    """The same, if the loop had another plan."""
    if bsym.sym.name == "chunk_loop" and plan.mode != "grads-in-forward":
        return plan.forward_scratch_bytes
    if bsym.sym.name == "chunk_loop_finish":
        return 0
    # Sums that are passed on are results in their own dtype; here they become results of another dtype.
    sums = plan.wider_sums_bytes if bsym.sym.name.startswith("chunk_loop_backward") else 0
    return plan.backward_scratch_bytes + sums


def _seconds(bsym: BoundSymbol, device: DeviceModel) -> float | None:
    """Seconds of the loop itself; its finish only scales the forward's results."""
    if bsym.sym.name == "chunk_loop_finish":
        return None
    return loop_seconds(loop_of(bsym).plan, device, backward=bsym.sym.name != "chunk_loop")


_TRAITS = MemoryTraits(
    writes=overwritten,
    shares=shared_memory,
    scratch_bytes=scratch_bytes,
    seconds=_seconds,
    group=lambda bsym: loop_of(bsym).group if bsym.sym.name != "chunk_loop_finish" else None,
    products=True,
)
_TRAITS_OVER_ROWS = replace(_TRAITS, last_write=True, in_place=True, runs=_without_over)
_BY_NAME = dict.fromkeys(_NAMES, _TRAITS) | {"chunk_loop_backward_over": _TRAITS_OVER_ROWS}
declare(executor, lambda name: _BY_NAME.get(name, PLAIN))
