"""Whether a step fits on a GPU, real or simulated, and the largest batch and sequence that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import thunder
import torch
from thunder.core.transform_common import Transform

from thunder_mem.memory.device_specs import DeviceSpec
from thunder_mem.optimizer.step_in_backward import StepInBackward
from thunder_mem.prediction.caching_allocator import Allocation, allocate
from thunder_mem.prediction.predict import Prediction, PredictionError, predict
from thunder_mem.prediction.simulate import simulate
from thunder_mem.prediction.training_step import predict_step
from thunder_mem.transforms.mem_efficient import MemEfficient

__all__ = ["Capacity", "Largest", "capacity_of", "fits", "largest_batch", "largest_fitting", "largest_sequence"]

Shape = Sequence[int | str]
Batch = Sequence[Shape | tuple[Shape, torch.dtype]]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Capacity:
    """Whether a step fits on a device; true if it does.

    Attributes:
        fits: the allocated peak is within the device's usable memory.
        headroom_bytes: the bytes left at the peak; negative if the step does not fit.
        device: the device's name.
        usable_bytes: the memory that the device leaves to tensors.
        allocation: the peak with the allocator's rounding, and its estimate of fragmentation, which
            does not enter `fits`.
        prediction: the step, event by event.
    """

    fits: bool
    headroom_bytes: int
    device: str
    usable_bytes: int
    allocation: Allocation
    prediction: Prediction

    def __bool__(self) -> bool:
        return self.fits


@dataclass(frozen=True)
class Largest:
    """The largest size that fits.

    Attributes:
        size: that size; 0 if even the smallest does not fit.
        fit: the prediction for it; None if nothing fits.
        tried: every predicted size with its allocated peak in bytes, by size.
        limited: the search ended at its own limit, not at the device's.
    """

    size: int
    fit: Capacity | None
    tried: tuple[tuple[int, int], ...]
    limited: bool


def fits(
    model_fn: Callable[[], torch.nn.Module],
    optimizer: MakeOptimizer | None,
    batch_shapes: Batch,
    *,
    device: str = "H100-80GB",
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: int = 0,
    sizes: Mapping[str, int] | None = None,
    transforms: Sequence[Transform] = (),
    fusion: str | None = "mem_pointwise",
    accumulate: int = 1,
    set_to_none: bool = True,
) -> Capacity:
    """Whether a training step (or, without an optimizer, a forward under `no_grad`) fits on a device.

    Args:
        model_fn: builds the model; called with "cuda" as the default device, on which nothing is allocated.
        optimizer: builds the optimizer from the parameters, such as `torch.optim.AdamW`; None for inference. If it
            builds a `StepInBackward`, the backward of each `MemEfficient` in `transforms` updates the parameters.
        batch_shapes: one entry for each tensor of the batch: a shape, or a pair of shape and dtype
            (default: PyTorch's default dtype). A letter or word in a shape stands for a size in `sizes`.
        device: one of `thunder_mem.memory.device_specs.DEVICES`.
        loss_fn: from the model's output and the targets to the scalar loss; None if the model returns it.
        targets: the number of the batch's last tensors that go to `loss_fn` and not to the model.
        sizes: the numbers behind the names in `batch_shapes`.
        transforms: Thunder transforms, such as `[MemEfficient()]`.
        fusion: see `simulate`.
        accumulate, set_to_none: see `training_step`.

    Raises:
        ValueError: an unknown device, a name without a size, a wrong number of targets, a `StepInBackward` without
            a `MemEfficient`.
        PredictionError: the model cannot be traced.

    Example:
        >>> answer = fits(lambda: torch.nn.Linear(8, 1), torch.optim.SGD, [("B", 8)], sizes={"B": 4},
        ...               loss_fn=lambda out: out.mean(), device="T4")
        >>> bool(answer), answer.prediction.held_bytes
        (True, 164)
    """
    shapes = [_shape_and_dtype(entry, sizes or {}) for entry in batch_shapes]
    if not 0 <= targets <= len(shapes):
        raise ValueError(f"targets={targets}, but the batch has {len(shapes)} tensors")
    if targets and loss_fn is None:
        raise ValueError("targets go to loss_fn, but there is none")
    with simulate(device, fusion=fusion) as simulated:
        with torch.device("cuda"):
            model = model_fn()
            batch = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        inputs, rest = batch[: len(batch) - targets], batch[len(batch) - targets :]
        stepper = None if optimizer is None else optimizer(model.parameters())
        jitted = thunder.jit(model, transforms=_stepping(transforms, stepper))
        if stepper is None:
            with torch.no_grad():
                prediction = predict(jitted, *inputs)
        else:
            prediction = predict_step(
                jitted,
                stepper,
                None if loss_fn is None else lambda out: loss_fn(out, *rest),
                *inputs,
                accumulate=accumulate,
                set_to_none=set_to_none,
            )
        return capacity_of(prediction, simulated.spec)


def _stepping(transforms: Sequence[Transform], optimizer: torch.optim.Optimizer | None) -> list[Transform]:
    if not isinstance(optimizer, StepInBackward):
        return list(transforms)
    if not any(isinstance(t, MemEfficient) for t in transforms):
        raise ValueError("a StepInBackward needs transforms=[MemEfficient()], whose backward updates the parameters")
    return [t.with_optimizer(optimizer) if isinstance(t, MemEfficient) else t for t in transforms]


def largest_batch(
    model_fn: Callable[[], torch.nn.Module],
    optimizer: MakeOptimizer | None,
    batch_shapes: Batch,
    *,
    symbol: str = "B",
    multiple: int = 1,
    limit: int = 2**16,
    sizes: Mapping[str, int] | None = None,
    **options: Any,
) -> Largest:
    """The largest size for `symbol` in `batch_shapes` with which the step fits.

    Each candidate is predicted in full. A line through the last two predictions guesses the next candidate. The
    answer is certain: it fits, and the next larger candidate does not.

    Args:
        model_fn, optimizer, batch_shapes, sizes: as in `fits`.
        symbol: the name of the size in the shapes.
        multiple: candidates are multiples of it.
        limit: no candidate is larger.
        options: the other options of `fits`.

    Raises:
        ValueError: `symbol` is in no shape, or `multiple` and `limit` leave no candidate; else as `fits`.
    """
    names = {n for entry in batch_shapes for n in _split(entry)[0] if isinstance(n, str)}
    if symbol not in names:
        raise ValueError(
            f"no shape of the batch has the size {symbol!r}; they have {', '.join(sorted(names)) or 'none'}"
        )
    if multiple < 1 or limit < multiple:
        raise ValueError(f"there is no multiple of {multiple} from {multiple} to {limit}")

    def attempt(count: int) -> Capacity:
        size = count * multiple
        try:
            return fits(model_fn, optimizer, batch_shapes, sizes={**(sizes or {}), symbol: size}, **options)
        except PredictionError as error:
            raise PredictionError(f"with {symbol}={size}: {error}") from error

    return _search(attempt, limit // multiple, multiple)


def largest_sequence(
    model_fn: Callable[[], torch.nn.Module],
    optimizer: MakeOptimizer | None,
    batch_shapes: Batch,
    *,
    symbol: str = "T",
    multiple: int = 64,
    limit: int = 2**20,
    sizes: Mapping[str, int] | None = None,
    **options: Any,
) -> Largest:
    """The longest sequence, the size `symbol` in `batch_shapes`, with which the step fits; see `largest_batch`."""
    return largest_batch(
        model_fn, optimizer, batch_shapes, symbol=symbol, multiple=multiple, limit=limit, sizes=sizes, **options
    )


def _search(attempt: Callable[[int], Capacity], limit: int, multiple: int) -> Largest:
    found: dict[int, Capacity] = {}

    def headroom_bytes(count: int) -> int:
        found[count] = attempt(count)
        return found[count].headroom_bytes

    low = largest_fitting(headroom_bytes, limit)
    tried = tuple((n * multiple, found[n].allocation.allocated_peak_bytes) for n in sorted(found))
    return Largest(low * multiple, found.get(low), tried, limited=low == limit)


def largest_fitting(headroom_bytes: Callable[[int], int], limit: int, first: int = 1) -> int:
    """The largest count from 1 to `limit` that fits, if larger counts need more memory; 0 if none fits.

    Args:
        headroom_bytes: what is left with a count, negative if it does not fit; asked once for each count.
        limit: of the search.
        first: the count to begin with.

    Example:
        >>> largest_fitting(lambda count: 1000 - 3 * count, 10_000)
        333
    """
    found: dict[int, int] = {}
    low, high, count = 0, limit + 1, first
    while high - low > 1:
        found[count] = headroom_bytes(count)
        if found[count] >= 0:
            low = count
        else:
            high = count
        count = _guess(found, low, high)
    return low


def _guess(headroom_bytes: Mapping[int, int], low: int, high: int) -> int:
    """The next count strictly between `low` and `high`: where a line through two predictions meets the limit."""
    if len(headroom_bytes) < 2:
        guess = 2 * max(headroom_bytes)
    else:
        a, b = sorted(headroom_bytes, key=lambda n: abs(headroom_bytes[n]))[:2]
        slope = (headroom_bytes[a] - headroom_bytes[b]) / (b - a)
        guess = int(a + headroom_bytes[a] / slope) if slope > 0 else 2 * max(headroom_bytes)
        # A slightly wrong line would approach the answer slowly, from one side.
        guess = guess + 1 if guess == low else guess
    return max(low + 1, min(high - 1, guess))


def capacity_of(prediction: Prediction, spec: DeviceSpec) -> Capacity:
    """Compare a prediction, as the allocator counts it, with the device's memory."""
    allocation = allocate(prediction, spec.usable_bytes)
    headroom_bytes = spec.usable_bytes - allocation.allocated_peak_bytes
    return Capacity(headroom_bytes >= 0, headroom_bytes, spec.name, spec.usable_bytes, allocation, prediction)


def _split(entry: Any) -> tuple[Shape, torch.dtype]:
    if len(entry) == 2 and isinstance(entry[1], torch.dtype):
        return entry[0], entry[1]
    return entry, torch.get_default_dtype()


def _shape_and_dtype(entry: Any, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], torch.dtype]:
    shape, dtype = _split(entry)
    missing = [n for n in shape if isinstance(n, str) and n not in sizes]
    if missing:
        raise ValueError(f"the shape {tuple(shape)} names {missing[0]!r}, but sizes has only {sorted(sizes)}")
    return tuple(sizes[n] if isinstance(n, str) else n for n in shape), dtype
