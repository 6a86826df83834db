"""Everything pinned: threads, seeds, hypothesis' own choice of examples."""

import os

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(2)
settings.register_profile(
    "thunder_mem", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("thunder_mem")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
