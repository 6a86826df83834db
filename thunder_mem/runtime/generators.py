"""The states of all random generators that a training step may draw from: PyTorch's, Python's and numpy's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np
import torch

__all__ = ["kept_generators"]


def kept_generators(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Keep the states as they are now, and return the function that puts them back.

    Args:
        devices: whose generators count, beside the CPU's.
    """
    cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    on_gpus = {i: torch.cuda.get_rng_state(i) for i in cuda}
    on_cpu, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def put_back() -> None:
        torch.set_rng_state(on_cpu)
        for i, state in on_gpus.items():
            torch.cuda.set_rng_state(state, i)
        random.setstate(pythons)
        np.random.set_state(numpys)

    return put_back
