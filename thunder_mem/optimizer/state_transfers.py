"""The time of updates whose states are on the host, by the rates of the link and of the memories.

    fetch 0   fetch 1          fetch 2
              step 0           step 1           step 2
                 send 0           send 1           send 2

A fetch of a slice runs beside the step and the send of the slice before; see `host_states.py`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from thunder_mem.memory.device_models import DeviceModel
from thunder_mem.optimizer.figures import StepFigures

__all__ = ["StateTransfers", "sliced_seconds", "state_transfers"]


@dataclass(frozen=True)
class StateTransfers:
    """The time of updates whose states are on the host, one after the other.

    Attributes:
        link_s: seconds of all copies, both ways added.
        exposed_s: seconds by which they prolong the step: the two ways overlap, and the next slice's fetch runs
            beside a step. In a plan only what no other work hides either (`rewrites/update_scheduling.py`).
        update_s: seconds of the updates, copies included.
        on_host_s: what the updates would take on the host's CPU instead.
    """

    link_s: float = 0.0
    exposed_s: float = 0.0
    update_s: float = 0.0
    on_host_s: float = 0.0

    def __add__(self, other: StateTransfers) -> StateTransfers:
        return StateTransfers(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def sliced_seconds(slices: int, fetch_s: float, step_s: float, send_s: float) -> float:
    """Seconds of an update by slices, with the seconds of one slice's parts.

    Example:
        >>> sliced_seconds(1, 2.0, 0.5, 2.0), sliced_seconds(3, 2.0, 0.5, 2.0)
        (4.5, 9.5)
    """
    return fetch_s + (slices - 1) * max(fetch_s, step_s + send_s) + step_s + send_s


def state_transfers(
    figures: StepFigures, parameter_bytes: int, device: DeviceModel, host: DeviceModel
) -> StateTransfers:
    """The transfers of one update that runs on the device.

    On the host, the gradient and the parameter would go there slice by slice, and the parameter would come back. The
    parameter goes, too: a copy that stayed on the host would be out of date after any write to the parameter. So
    optimizers with up to two states send no less, and the host's memory is slow: on no GPU of `DEVICE_MODELS` does any
    optimizer of `torch.optim` gain, and so none runs there.

    Args:
        figures: of the update.
        parameter_bytes: of the parameter.
        device: the device with the rates.
        host: the same for the host's CPU.
    """
    if not figures.state_bytes:
        return StateTransfers()
    slices = figures.slices
    one_way_s = figures.tensors * device.copy_s + figures.state_bytes / slices / device.link_bytes_per_s
    step_s = figures.moved_bytes / slices / device.bandwidth_bytes_per_s
    update_s = sliced_seconds(slices, one_way_s, step_s, one_way_s)
    parameter_s = device.copy_s + parameter_bytes / slices / device.link_bytes_per_s
    host_step_s = figures.moved_bytes / slices / host.bandwidth_bytes_per_s
    on_host_s = sliced_seconds(slices, 2 * parameter_s, host_step_s, parameter_s)
    return StateTransfers(2 * slices * one_way_s, update_s - slices * step_s, update_s, on_host_s)
