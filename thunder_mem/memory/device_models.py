"""The rates of a device for the roofline: from data sheets, and in round figures for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from thunder_mem.memory.device_specs import DEVICES, DeviceSpec

__all__ = ["DEVICE_MODELS", "DeviceModel", "device_model"]


@dataclass(frozen=True)
class DeviceModel:
    """The rates of a device for the roofline.

    Attributes:
        name: as in `thunder_mem.memory.device_specs`, or "cpu".
        memory_bytes: its memory; 0 where it is not a limit.
        bandwidth_bytes_per_s: of its main memory, read plus write.
        peak_flops: matrix products per dtype name ("bfloat16", ...), in operations a second, dense.
        vector_flops: everything else, in operations a second.
        launch_s: seconds to start one kernel.
        link_bytes_per_s: of copies to the host's pinned memory, and back.
        copy_s: seconds to start one such copy.
        cache_bytes: its last-level cache, from which a value is read soon after it was written; 0 if unknown.
        flash_shares: of `peak_flops`, those that flash attention reaches in its forward and its backward.
        cudnn_shares: those that cuDNN's attention reaches.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float]
    vector_flops: float
    launch_s: float = 5e-6
    link_bytes_per_s: float = 2.5e10
    copy_s: float = 1e-5
    cache_bytes: int = 0
    flash_shares: tuple[float, float] = (1.0, 1.0)
    cudnn_shares: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        rates = (self.bandwidth_bytes_per_s, self.vector_flops, self.link_bytes_per_s, *self.peak_flops.values())
        rates += self.flash_shares + self.cudnn_shares
        if min(rates) <= 0 or min(self.launch_s, self.copy_s, self.memory_bytes, self.cache_bytes) < 0:
            raise ValueError(f"device {self.name!r}: rates must be positive, memory and starts not negative: {self}")
        object.__setattr__(self, "peak_flops", MappingProxyType(dict(self.peak_flops)))

    @property
    def least_copy_bytes(self) -> int:
        """Below this size, starting a copy takes longer than the copy."""
        return int(self.copy_s * self.link_bytes_per_s)

    @property
    def without_launches(self) -> DeviceModel:
        """A GPU whose host starts all kernels ahead; a CPU as it is, since it starts each one itself."""
        return self if self.name == "cpu" else replace(self, launch_s=0.0)

    def copy_seconds(self, nbytes: int) -> float:
        """Seconds of a copy to the host or back."""
        return self.copy_s + nbytes / self.link_bytes_per_s

    def attention_shares(self, kernel: str) -> tuple[float, float]:
        """The shares of a kernel of `ATTENTION_KERNELS`, forward and backward."""
        return self.cudnn_shares if kernel == "cudnn" else self.flash_shares

    def matmul_flops(self, dtype: str) -> float:
        """Operations a second of a matrix product in `dtype`; the vector rate if the device has no better."""
        return self.peak_flops.get(dtype, self.vector_flops)


def _gpu(
    spec: DeviceSpec, gb_per_s: float, half: float, single: float, double: float, bfloat: float, link: float, cache: int
) -> DeviceModel:
    # float32 without TF32, which PyTorch leaves off by default.
    tera = {"float16": half, "bfloat16": bfloat, "float32": single, "float64": double}
    peaks = {dtype: rate * 1e12 for dtype, rate in tera.items()}
    return DeviceModel(
        name=spec.name,
        memory_bytes=spec.memory_bytes,
        bandwidth_bytes_per_s=gb_per_s * 1e9,
        peak_flops=peaks,
        vector_flops=single * 1e12,
        link_bytes_per_s=link * 1e9,
        cache_bytes=cache * 2**20,
        flash_shares=_FLASH_SHARES.get(spec.name, (1.0, 1.0)),
        cudnn_shares=_CUDNN_SHARES.get(spec.name, (1.0, 1.0)),
    )


# PyTorch's flash kernel does not use Hopper's asynchronous products. Of causal attention with 32 heads of 16,384 rows,
# an H200 ran it at 338 Tflop/s forward and 313 backward, and cuDNN's kernel at 675 and 595. In groups of 16 heads
# forward and of two backward, cuDNN's reach 645 and 571 (benchmarks/results/gpu-h200.json).
_FLASH_SHARES = {"H100-80GB": (0.34, 0.3), "H200-141GB": (0.34, 0.3)}
_CUDNN_SHARES = {"H100-80GB": (0.65, 0.58), "H200-141GB": (0.65, 0.58)}

# Vendors' data sheets: GB/s, then dense Tflop/s of float16, float32, float64 and bfloat16; GB/s of the link to the
# host, four fifths of what 16 lanes of its generation of PCIe (3, 4 or 5) carry in one direction; MiB of the L2 cache.
_SHEETS = {
    "V100-16GB": (900, 125, 15.7, 7.8, 15.7, 12.6, 6),
    "V100-32GB": (900, 125, 15.7, 7.8, 15.7, 12.6, 6),
    "T4": (320, 65, 8.1, 0.25, 8.1, 12.6, 4),
    "RTX3090": (936, 71, 35.6, 0.56, 71, 25.2, 6),
    "RTX4090": (1008, 165, 82.6, 1.29, 165, 25.2, 72),
    "A10G": (600, 70, 31.5, 0.49, 70, 25.2, 6),
    "L4": (300, 121, 30.3, 0.49, 121, 25.2, 48),
    "L40S": (864, 362, 91.6, 1.43, 362, 25.2, 96),
    "A100-40GB": (1555, 312, 19.5, 19.5, 312, 25.2, 40),
    "A100-80GB": (2039, 312, 19.5, 19.5, 312, 25.2, 40),
    "H100-80GB": (3350, 989, 67, 67, 989, 50.4, 50),
    "H200-141GB": (4800, 989, 67, 67, 989, 50.4, 50),
    "B200-180GB": (7700, 2250, 75, 37, 2250, 50.4, 126),
}

# A desktop CPU in round figures, fixed so that plans do not depend on the machine they are made on.
_CPU = DeviceModel(
    "cpu",
    0,
    2e10,
    {"float64": 5e10, "float32": 1e11, "bfloat16": 1e11, "float16": 2e10},
    1e10,
    launch_s=3e-6,
    link_bytes_per_s=1e10,
    copy_s=1e-6,
)

DEVICE_MODELS: Mapping[str, DeviceModel] = MappingProxyType(
    {"cpu": _CPU} | {name: _gpu(DEVICES[name], *sheet) for name, sheet in _SHEETS.items() if name in DEVICES}
)
"""Every device of `thunder_mem.memory.device_specs` that has a data sheet here, and "cpu"; read-only."""


def device_model(name: str) -> DeviceModel:
    """The model of the device of that name; letter case does not matter.

    Raises:
        ValueError: no such device; the message lists the known ones.

    Example:
        >>> device_model("h100-80gb").matmul_flops("bfloat16")
        989000000000000.0
    """
    for known, model in DEVICE_MODELS.items():
        if isinstance(name, str) and known.lower() == name.lower():
            return model
    raise ValueError(f"no cost model for device {name!r}: there is one for {', '.join(DEVICE_MODELS)}")
