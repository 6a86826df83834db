"""The time of updates whose states are on the host, by the rates of the link and of the memories.

    fetch 0   fetch 1          fetch 2
              step 0           step 1           step 2
                 send 0           send 1           send 2

A fetch of a slice runs beside the step and the send of the slice before; see `host_states.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from thunder_mem.memory.device_models import DeviceModel
from thunder_mem.optimizer.figures import StepFigures

__all__ = ["StateTransfers", "sliced_seconds", "state_transfers"]


@dataclass(frozen=True)
class StateTransfers:
    """The copies of updates, one after the other.

    Attributes:
        link_s: seconds of all copies, both ways added.
        exposed_s: seconds by which they prolong the step: the two ways overlap, and the next slice's fetch runs
            beside a step.
    """

    link_s: float = 0.0
    exposed_s: float = 0.0

    def __add__(self, other: StateTransfers) -> StateTransfers:
        return StateTransfers(self.link_s + other.link_s, self.exposed_s + other.exposed_s)


def sliced_seconds(slices: int, fetch_s: float, step_s: float, send_s: float) -> float:
    """Seconds of an update by slices, with the seconds of one slice's parts.

    Example:
        >>> sliced_seconds(1, 2.0, 0.5, 2.0), sliced_seconds(3, 2.0, 0.5, 2.0)
        (4.5, 9.5)
    """
    return fetch_s + (slices - 1) * max(fetch_s, step_s + send_s) + step_s + send_s


def state_transfers(figures: StepFigures, device: DeviceModel) -> StateTransfers:
    """The transfers of one update that runs on the device.

    Args:
        figures: of the update.
        device: the device with the rates.
    """
    if not figures.state_bytes:
        return StateTransfers()
    one_way_s = figures.tensors * device.copy_s + figures.state_bytes / figures.slices / device.link_bytes_per_s
    step_s = figures.moved_bytes / figures.slices / device.bandwidth_bytes_per_s
    total_s = sliced_seconds(figures.slices, one_way_s, step_s, one_way_s)
    return StateTransfers(2 * figures.slices * one_way_s, total_s - figures.slices * step_s)
