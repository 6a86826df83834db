"""The present simulated GPU; `prediction/simulate.py` enters and leaves it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_mem.memory.device_specs import DeviceSpec

__all__ = ["CURRENT", "SimulatedDevice", "simulated_device"]


@dataclass(frozen=True)
class SimulatedDevice:
    """The GPU that is simulated at present.

    Attributes:
        spec: its memory, capability and names.
        fusion: the fusion executor in place of those of a real machine, one of `FUSIONS` of
            `fusers/fusion_executors.py`.
        mode: the mode that all fake tensors belong to.
    """

    spec: DeviceSpec
    fusion: str | None
    mode: FakeTensorMode

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def memory_bytes(self) -> int:
        """All of its memory; `spec.usable_bytes` is the part for tensors."""
        return self.spec.memory_bytes


CURRENT: ContextVar[SimulatedDevice | None] = ContextVar("thunder_mem_simulated_device", default=None)


def simulated_device() -> SimulatedDevice | None:
    """The device simulated at present, or None outside of `simulate`."""
    return CURRENT.get()
