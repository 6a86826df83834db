"""`make test-nvfuser` runs these, in an environment with nvFuser's wheel; elsewhere there is nothing to collect."""

from importlib.util import find_spec

import pytest
import torch

from thunder_mem.prediction.quick_interpreter import interpreted_quickly

collect_ignore_glob = [] if find_spec("nvfuser_direct") else ["test_*.py"]

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _interpreted_quickly():
    with interpreted_quickly():
        yield


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
