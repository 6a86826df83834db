"""Autograd's treatment of the gradients of a compiled backward: it keeps, copies or adds them as `.grad`.

A gradient that nobody else holds and that has its parameter's layout becomes `.grad` directly. Any other gradient is
copied. A gradient is added to an existing `.grad`. PyTorch's engine decides this, so the engine itself runs here, on
fake CPU tensors that stand for the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_mem.fake_execution.fake_twins import Twins, Watch
from thunder_mem.fake_execution.replay import Ledger

__all__ = ["ACCUMULATE", "accumulate"]

ACCUMULATE = "accumulate"
"""The phase of what autograd copies or adds."""


class _HandOver(torch.autograd.Function):
    """The node of the compiled backward, as the engine sees it: gradients come out of it."""

    @staticmethod
    def forward(ctx: Any, box: list[Any], *leaves: torch.Tensor) -> torch.Tensor:
        ctx.box = box
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.box.pop()


def accumulate(
    inputs: Sequence[Any],
    grads: list[Any],
    mode: FakeTensorMode,
    ledger: Ledger,
    *,
    direct: list[tuple[int, torch.Tensor]],
    probe: bool,
) -> list[torch.Tensor]:
    """Pass `grads` to the leaves among `inputs`; record the memory in `ledger`, as `ACCUMULATE`.

    Args:
        inputs: fake tensors or other values.
        grads: one for each of `inputs`, or None; emptied, so that nobody else holds them.
        mode: of all those tensors.
        ledger: has the tensors' storages.
        direct: gradients that reach an input without the compiled backward, because the function returned
            that input: position among `inputs`, and gradient; also emptied.
        probe: the tensors stand for this machine's, whose kernels' scratch can be measured.

    Returns:
        The gradients at the end, including those of inputs that are not leaves. The caller decides how long
        they live.
    """
    pairs = [(t, g) for t, g in zip(inputs, grads, strict=True) if isinstance(t, torch.Tensor) and g is not None]
    grads.clear()
    passed_on = [g for t, g in pairs if not t.is_leaf]
    pairs = [(t, g) for t, g in pairs if t.is_leaf and t.requires_grad]
    passed_on += [g for at, g in direct if not inputs[at].is_leaf]
    straight = [(inputs[at], g) for at, g in direct if inputs[at].is_leaf]
    direct.clear()
    if not pairs and not straight:
        return passed_on
    twins = Twins(mode, ledger)
    watch = Watch(ledger, probe=probe, twins=twins)
    watch.phase = ACCUMULATE
    taking, ends = [t for t, _ in pairs], [t for t, _ in straight]
    leaf_of = _leaves(taking + ends, twins)
    leaves = list(leaf_of.values())
    box = [_twins_of([g for _, g in pairs], twins)]
    given = [twins.to_cpu(g) for _, g in straight]
    with mode:
        roots = [_HandOver.apply(box, *(leaf_of[id(t)] for t in taking))] if taking else []
        ones = [torch.empty_like(root) for root in roots]
        pairs.clear()
        straight.clear()
        with watch:
            torch.autograd.backward([*(leaf_of[id(t)] for t in ends), *roots], [*given, *ones])
    del given
    ledger.sweep()
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return [*found, *passed_on]


def _twins_of(grads: list[torch.Tensor], twins: Twins) -> list[torch.Tensor]:
    """One twin for each distinct tensor, in a function of its own so that nothing here keeps any alive."""
    once: dict[int, torch.Tensor] = {}
    for g in grads:
        if id(g) not in once:
            once[id(g)] = twins.to_cpu(g)
    return [once[id(g)] for g in grads]


def _leaves(tensors: Sequence[torch.Tensor], twins: Twins) -> dict[int, torch.Tensor]:
    """The leaf that stands for each tensor, by the tensor's id, with the gradient it has now."""
    leaves: dict[int, torch.Tensor] = {}
    for t in tensors:
        if id(t) in leaves:
            continue
        leaf = leaves[id(t)] = twins.of(t)
        if leaf is not t and t.grad is not None:
            leaf.grad = twins.to_cpu(t.grad)
    return leaves
