"""The specifications of the GPUs that can be simulated."""

from __future__ import annotations

from dataclasses import dataclass

from thunder_mem.memory.outside_input import quoted

__all__ = ["DEVICES", "DeviceSpec", "device_spec"]

_MIB = 2**20


@dataclass(frozen=True)
class DeviceSpec:
    """A kind of GPU.

    Attributes:
        name: its name in `simulate`.
        marketing_name: as `torch.cuda.get_device_name` returns it.
        memory_bytes: as `torch.cuda.get_device_properties(...).total_memory` returns it.
        capability: (major, minor) compute capability.
        multiprocessors: number of streaming multiprocessors.
        context_bytes: an estimate of the memory that the CUDA context and the loaded kernels take
            before the first tensor. It depends on the driver and the loaded libraries.
    """

    name: str
    marketing_name: str
    memory_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    context_bytes: int = 600 * _MIB

    @property
    def threads_per_multiprocessor(self) -> int:
        """Most resident threads, by the table of compute capabilities in NVIDIA's CUDA programming guide."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536}.get(self.capability, 2048)

    @property
    def usable_bytes(self) -> int:
        """The bytes left for PyTorch's allocator."""
        return self.memory_bytes - self.context_bytes


# Total memory as the driver reports it (ECC on), in MiB: somewhat below the nominal size.
DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        DeviceSpec("V100-16GB", "Tesla V100-SXM2-16GB", 16151 * _MIB, (7, 0), 80),
        DeviceSpec("V100-32GB", "Tesla V100-SXM2-32GB", 32494 * _MIB, (7, 0), 80),
        DeviceSpec("T4", "Tesla T4", 14914 * _MIB, (7, 5), 40),
        DeviceSpec("RTX3090", "NVIDIA GeForce RTX 3090", 24132 * _MIB, (8, 6), 82),
        DeviceSpec("RTX4090", "NVIDIA GeForce RTX 4090", 24081 * _MIB, (8, 9), 128),
        DeviceSpec("A10G", "NVIDIA A10G", 22515 * _MIB, (8, 6), 80),
        DeviceSpec("L4", "NVIDIA L4", 22478 * _MIB, (8, 9), 58),
        DeviceSpec("L40S", "NVIDIA L40S", 45373 * _MIB, (8, 9), 142),
        DeviceSpec("A100-40GB", "NVIDIA A100-SXM4-40GB", 40326 * _MIB, (8, 0), 108),
        DeviceSpec("A100-80GB", "NVIDIA A100-SXM4-80GB", 81051 * _MIB, (8, 0), 108),
        DeviceSpec("H100-80GB", "NVIDIA H100 80GB HBM3", 81079 * _MIB, (9, 0), 132),
        DeviceSpec("H200-141GB", "NVIDIA H200", 143156 * _MIB, (9, 0), 132),
        DeviceSpec("B200-180GB", "NVIDIA B200", 182642 * _MIB, (10, 0), 148),
    )
}


def device_spec(name: str) -> DeviceSpec:
    """The device of that name; letter case does not matter.

    Raises:
        ValueError: the device is unknown; the message lists the known ones.

    Example:
        >>> device_spec("h100-80gb").capability
        (9, 0)
    """
    if not isinstance(name, str):
        raise ValueError(f"a device is given by its name, one of {', '.join(DEVICES)}, not by {quoted(name)}")
    for known, spec in DEVICES.items():
        if known.lower() == name.lower():
            return spec
    raise ValueError(f"unknown device {quoted(name)}: the known ones are {', '.join(DEVICES)}")
