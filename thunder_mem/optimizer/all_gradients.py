"""What all gradients of a step say together: their norm, and whether a number among them is not finite.

`max_norm` needs the norm before the first update, and a gradient scaler needs to know of infinities. Gradients may come
one at a time: a first backward hands each over and drops it, so they are never alive together. (LOMO, arXiv 2306.09782,
finds the norm by a first backward.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import dist, hypot, inf, isfinite
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.amp.grad_scaler import OptState
from torch.utils.weak import TensorWeakRef

from thunder_mem.optimizer.gradient_edges import is_asked_for

if TYPE_CHECKING:
    from thunder_mem.optimizer.compiled_updates import Updates

__all__ = ["AllGradients", "FirstPass", "Verdict", "is_on", "report_to_scaler", "size_of", "was_unscaled"]

_SAME = 1e-4  # eager code outside of the program may add numbers up in another order in the second backward


class Verdict(NamedTuple):
    """What happens to each gradient.

    Attributes:
        scale: it is multiplied by this number.
        skips: a gradient is not finite, so no parameter changes.
    """

    scale: torch.Tensor
    skips: bool = False


class AllGradients:
    """Norms of gradients that may come one at a time.

    Args:
        max_norm: of all gradients together, after a scaler's scale is taken back; None for any.
        scaler: scaled the loss, and wants to know of gradients that are not finite.
    """

    def __init__(self, max_norm: float | None, scaler: torch.amp.GradScaler | None) -> None:
        self.max_norm, self.scaler = max_norm, scaler
        self._norms: dict[int, torch.Tensor] = {}
        self._largest: list[torch.Tensor] = []

    def add(self, place: int, grad: torch.Tensor) -> None:
        """Look at one gradient; `place` orders the norms in their sum."""
        if self.max_norm is not None:
            self._norms[place] = torch.linalg.vector_norm(grad)
        self._look(grad)

    def add_all(self, grads: Sequence[torch.Tensor]) -> None:
        """Look at all gradients, which are alive together."""
        if self.max_norm is not None:
            self._norms[0] = torch.nn.utils.get_total_norm(grads)
        for grad in grads:
            self._look(grad)

    @property
    def found(self) -> list[torch.Tensor]:
        """The numbers that are kept."""
        return [*self._norms.values(), *self._largest]

    def clear(self) -> None:
        """Drop these numbers."""
        self._norms.clear()
        self._largest.clear()

    def _look(self, grad: torch.Tensor) -> None:
        if self.scaler is not None and grad.dtype == torch.float16:
            raise ValueError("a scaler's scale is not taken back in float16: keep the parameters in float32")
        if self.scaler is not None and grad.numel():
            self._largest.append(torch.linalg.vector_norm(grad, inf))  # not a number if one element is none

    def verdict(self) -> Verdict:
        """The verdict on the gradients seen. Only with a scaler does the CPU wait for the device.

        Raises:
            RuntimeError: the scaler has scaled no loss.
        """
        norms = [norm for _, norm in sorted(self._norms.items())]
        norm = None if not norms else norms[0] if len(norms) == 1 else _norm_of(norms)
        if self.scaler is None:
            if norm is None or self.max_norm is None:
                return Verdict(torch.ones(()))  # a scaler that is off
            return Verdict(torch.clamp(self.max_norm / (norm + 1e-6), max=1.0))
        if self.scaler._scale is None:
            raise RuntimeError("the scaler has scaled no loss yet: call scaler.scale(loss).backward()")
        scale = self.scaler._scale.double().reciprocal().float()
        skips = bool(self._largest) and not bool(_norm_of(self._largest, inf).isfinite())
        if norm is not None and self.max_norm is not None:
            norm = (norm * scale.to(norm.device)).to(norm.dtype)  # rounded as if the gradients had been divided before
            scale = scale * torch.clamp(self.max_norm / (norm + 1e-6), max=1.0).to(scale.device)
        return Verdict(scale, skips)


def _norm_of(norms: Sequence[torch.Tensor], order: float = 2.0) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), order)


class FirstPass:
    """A backward for the norm alone.

    Args:
        gradients: finds what all gradients say.
        forwards: the number of forwards that ran before it.
        parameters: of the optimizer.

    Attributes:
        verdict: what it found, once it has ended.
        left: by program, the parameters that have not been seen.
        tangents: by program, the sizes of the gradients of its results.
        used: the programs whose second backward has ended.
    """

    def __init__(self, gradients: AllGradients, forwards: int, parameters: Iterable[torch.Tensor]) -> None:
        self.gradients, self.forwards, self.parameters = gradients, forwards, tuple(parameters)
        self.verdict: Verdict | None = None
        self.left: dict[Updates, set[int]] = {}
        self.tangents: dict[Updates, list[list[float]]] = {}
        self.used: set[Updates] = set()
        self._before = {id(p): (TensorWeakRef(p.grad), p.grad._version) for p in parameters if p.grad is not None}

    def end(self) -> None:
        """Find the verdict.

        Raises:
            RuntimeError: no compiled backward ran to its end, or a parameter got its gradient from elsewhere.
        """
        if not self.left or any(self.left.values()):
            raise RuntimeError(
                "first_pass() saw no whole backward of a program that was compiled with this optimizer: call "
                "loss.backward(retain_graph=True) inside"
            )
        seen = self._seen()
        if others := [p for p in self.parameters if self._changed(p) or (p.grad is not None and id(p) not in seen)]:
            raise RuntimeError(
                f"{len(others)} parameters, the first of shape {tuple(others[0].shape)}, get their gradients from "
                "outside of the compiled program, and two backwards would add them twice: call zero_grad(), and leave "
                "two_pass out"
            )
        self.verdict = self.gradients.verdict()
        self.gradients.clear()

    def verdict_on(
        self, updates: Updates, forwards: int, tangents: Sequence[Sequence[float]], asked: Collection[bool]
    ) -> Verdict:
        """The verdict, for the second backward of a program, before it updates anything.

        Args:
            forwards: the number of forwards that ran by now.
            tangents: sizes of the gradients of the program's results.
            asked: whether the backward gives each parameter its gradient.

        Raises:
            RuntimeError: this backward has other gradients than the first.
        """
        if self.verdict is None or updates not in self.left or forwards != self.forwards:
            raise RuntimeError(FIRST_IS_MISSING)
        if not all(asked):
            raise RuntimeError("backward(inputs=...) asks for some gradients alone, and first_pass() saw all")
        if not all(map(_alike, tangents, self.tangents[updates])):
            raise RuntimeError(
                "the second backward is of another loss than the one in first_pass(), whose norm is known"
            )
        if any(map(self._changed, updates.parameters)):
            raise RuntimeError("gradients were added up or cleared since first_pass(): do so before it")
        seen = self._seen()
        others = (p for p in self.parameters if p.requires_grad and id(p) not in seen)
        if any(is_asked_for(p, "a parameter") for p in others):
            raise RuntimeError("the second backward reaches parameters that the one in first_pass() did not")
        return self.verdict

    def _seen(self) -> set[int]:
        return {id(p) for updates in self.left for p in updates.parameters}

    def _changed(self, p: torch.Tensor) -> bool:
        """Whether the parameter's gradient is another than before the first pass."""
        before, version = self._before.get(id(p), (None, 0))
        if before is None or p.grad is None:
            return before is not None or p.grad is not None
        return before() is not p.grad or p.grad._version != version


FIRST_IS_MISSING = (
    "two_pass=True needs a first backward of the same forward: "
    "with optimizer.first_pass(): loss.backward(retain_graph=True)"
)


def size_of(tangents: Sequence[torch.Tensor | None]) -> list[list[float]]:
    """For each gradient of a result, numbers that are others for another loss: norms and sums of its rows."""
    return [[] if t is None or not t.is_floating_point() else _size_of(t.detach()) for t in tangents]


def _size_of(t: torch.Tensor) -> list[float]:
    inner = tuple(range(1, t.dim()))
    if not inner:
        return t.reshape(-1).tolist()
    dtype = torch.promote_types(t.dtype, torch.float32)
    norms = torch.linalg.vector_norm(t, dim=inner, dtype=dtype).tolist()
    return [*norms, *(t.sum(inner, dtype=dtype) / max(1, t[:1].numel()) ** 0.5).tolist()]


def _alike(a: Sequence[float], b: Sequence[float]) -> bool:
    size = hypot(*a)
    if len(a) != len(b) or not isfinite(size):
        return len(a) == len(b) and not isfinite(hypot(*b))
    return dist(a, b) <= _SAME * size


def is_on(scaler: torch.amp.GradScaler | None) -> bool:
    """Whether a scaler scales: one with ``enabled=False`` does nothing."""
    return scaler is not None and scaler.is_enabled()


def report_to_scaler(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, skips: bool) -> None:
    """Tell the scaler whether the step was skipped, as its own check of gradients would."""
    scale = scaler._scale
    assert scale is not None
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {scale.device: torch.full((), float(skips), device=scale.device)}


def was_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether `scaler.unscale_(optimizer)` has divided the gradients that wait for `step`."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
