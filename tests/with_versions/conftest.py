"""`make test-versions` runs these with the oldest versions and with the newest; `make test` with those between.

It runs them without the conftest above, which needs Python 3.11 and knows the inside of one Thunder.
"""

import thunder_mem.compat  # noqa: F401 - before Thunder, which does not import with the newest PyTorch without it

# isort: split
import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
