"""Fused regions that write results over inputs which nobody reads any more: the mark and the code.

Inductor orders a write after a read of the same memory only if data flows from the reader to the write. (torch 2.11
loses its weaker edges when it fuses: with ``x.copy_(row normalised x)`` beside a sum over the columns of ``x``, the sum
reads the new values.) So every write here has its readers among its operands:

- An *early* write follows the operation that makes the value, if all readers of the memory lead to that value. Later
  operations read the memory anew.
- *Late* writes come at the end. All outputs that read the overwritten memory enter each value by ``torch.where`` under
  a flag that is always false: a select in registers if all run as one loop.

`rewrites/region_reuse.py` decides which of the two is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.extend import OperatorExecutor
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_mem.semantics.layout import may_stand_in
from thunder_mem.semantics.op_traits import region_function

__all__ = [
    "InplaceOutput",
    "InplacePlan",
    "fits",
    "inplace_outputs",
    "interleave",
    "never",
    "own_inputs",
    "show_over",
    "write_late",
]


@dataclass(frozen=True, slots=True)
class InplaceOutput:
    """One output of a region that overwrites one input.

    Attributes:
        output, input: their positions.
        after: the leaf operation that makes the value, directly followed by the write; None for a late write.
        saved: autograd saved the input, and still owns it if the graph is kept for another backward.
    """

    output: int
    input: int
    after: int | None = None
    saved: bool = False


@dataclass(frozen=True, slots=True)
class InplacePlan:
    """All outputs of a region that overwrite inputs.

    Attributes:
        takes: one for each such output.
        readers: positions of the outputs that must exist before the late writes.
        doubles: by the position of an output, the reader whose elements it shows in the same order.
    """

    takes: tuple[InplaceOutput, ...]
    readers: tuple[int, ...] = ()
    doubles: tuple[tuple[int, int], ...] = ()

    @property
    def late(self) -> tuple[InplaceOutput, ...]:
        return tuple(t for t in self.takes if t.after is None)


def inplace_outputs(bsym: BoundSymbol) -> dict[str, TensorProxy]:
    """The argument that each result of a region overwrites, by the result's name; empty for other bound symbols."""
    if not bsym.sym.is_fusion or not bsym._call_ctx:
        return {}
    reuse = getattr(region_function(bsym), "reuse", None)
    return {bsym.output[t.output].name: bsym.args[t.input] for t in reuse.takes} if reuse else {}


def _write_over(value: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    return (memory if memory.shape == value.shape else memory.view(value.shape)).copy_(value)


_write_over_symbol = OperatorExecutor("thunder_mem_reuse", version="0.1").register_operator(
    "write_over", meta=lambda value, memory: TensorProxy(like=value), fn=_write_over
)


def interleave(
    leaves: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy], reuse: InplacePlan
) -> tuple[list[BoundSymbol], list[Proxy]]:
    """The region's operations with its early writes among them, and its outputs under their new names."""
    names: Any = TraceCtx(None)
    names.names = {p.name for p in (*inputs, *(o for leaf in leaves for o in leaf.flat_proxy_outs))}
    swap: dict[Variable, Proxy] = {}
    program: list[BoundSymbol] = []
    with tracectx(names):
        for i, leaf in enumerate(leaves):
            program.append(leaf.from_bsym_swap_proxies(swap, skip_output=True) if swap else leaf)
            for take in reuse.takes:
                if take.after == i:
                    value = leaf.flat_proxy_outs[0]
                    written = value.replace_name(f"{value.name}_written", disambiguate=True)
                    program.append(_write_over_symbol.bind(value, inputs[take.input], output=written))
                    swap[variableify(value)] = written
    return program, [swap.get(variableify(o), o) for o in outputs]


def write_late(
    outputs: Sequence[torch.Tensor], inputs: Sequence[Any], reuse: InplacePlan, flag: torch.Tensor
) -> list[Any]:
    """The outputs of a region after its late writes; `flag` is False, which the compiler must not know."""
    import torch._inductor.inductor_prims  # takes seconds, and a plan that never runs does not need it

    given = list(outputs)
    late = reuse.late
    early = {t.output for t in reuse.takes} - {t.output for t in late}
    # A buffer of its own for each reader, or the compiler would recompute it from overwritten values.
    ready = {
        o: given[o] if o in early else torch.ops.prims.inductor_force_stride_order(given[o], given[o].stride())
        for o in dict.fromkeys((*reuse.readers, *(t.output for t in late)))
    }
    before = [ready[o] for o in reuse.readers]
    for o, value in ready.items():
        given[o] = value
    for o, reader in reuse.doubles:  # in a buffer of its own it would take memory that no plan knows of
        given[o] = given[reader].view(given[o].shape)
    seal = before[0] if before else None
    for value in before[1:]:
        assert seal is not None
        seal = torch.where(flag, value.reshape(seal.shape).to(seal.dtype), seal)
    for take in late:
        value = ready[take.output]
        if seal is not None and [*reuse.readers] != [take.output]:
            value = torch.where(flag, seal.reshape(value.shape).to(value.dtype), value)
        given[take.output] = _write_over(value, inputs[take.input])
    return given


def show_over(outputs: Sequence[torch.Tensor], inputs: Sequence[Any], reuse: InplacePlan) -> list[torch.Tensor]:
    """The outputs at the memory where the compiled region puts them; for tensors without data."""
    shown = list(outputs)
    for take in reuse.takes:
        value, memory = shown[take.output], inputs[take.input]
        if may_stand_in(value, memory):
            shown[take.output] = memory.view(value.shape)
    return shown


def fits(unfused: Callable[[list[Any]], Sequence[torch.Tensor]], args: tuple[Any, ...], reuse: InplacePlan) -> bool:
    """Whether, at the strides of `args`, every result has the layout of the input that it overwrites."""
    with torch.utils._python_dispatch._disable_current_modes(), FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a, static_shapes=True) if isinstance(a, torch.Tensor) else a for a in args]
        outputs = unfused(list(fakes))
    return all(may_stand_in(outputs[take.output], fakes[take.input]) for take in reuse.takes)


def own_inputs(inputs: tuple[Any, ...], reuse: InplacePlan) -> tuple[Any, ...]:
    """The inputs, with copies of those that autograd keeps for another backward (`retain_graph=True`)."""
    if torch._C._current_graph_task_id() == -1 or not torch._C._autograd._get_current_graph_task_keep_graph():
        return inputs
    copies = {take.input for take in reuse.takes if take.saved}
    return tuple(x.clone() if i in copies else x for i, x in enumerate(inputs))


@cache
def never(device: torch.device) -> torch.Tensor:
    """A boolean that is false."""
    return torch.zeros((), dtype=torch.bool, device=device)
