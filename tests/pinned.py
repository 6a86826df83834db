"""Everything pinned where tests run: threads, seeds, hypothesis' own choice of examples."""

import gc

import thunder_mem.compat  # noqa: F401 - before Thunder, which does not import with the newest PyTorch without it

# isort: split
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.fuzzing.quick_thunder import claimed_once, loaded_here, looked_up_once
from thunder_mem.runtime import scratch_cache
from thunder_mem.schedule import registry

torch.set_num_threads(1)
settings.register_profile(
    "thunder_mem", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("thunder_mem")


@pytest.fixture(autouse=True, scope="session")
def _measured_anew():
    """No test rests on what an earlier run of the tests has measured."""
    nowhere, kernels = scratch_cache.Table(None, ""), scratch_cache.Table(None, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch_cache, "table", lambda: nowhere)
        patch.setattr(scratch_cache, "kernel_table", lambda software, codec: kernels)
        yield


@pytest.fixture(autouse=True, scope="session")
def _looked_up_once():
    """Most of the time that tests take is Thunder's, which finds out the same things again and again."""
    with looked_up_once(), claimed_once(), loaded_here():
        yield


@pytest.fixture(autouse=True)
def _seed():
    """Each test draws the same, and multiplies float32 as exactly as PyTorch does by default, whoever ran before."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True)
def _no_sort_stays():
    """A sort that a test or a page registers is gone after it."""
    known = dict(registry._REGISTRY)
    yield
    registry._REGISTRY.clear()
    registry._REGISTRY.update(known)


@pytest.fixture(autouse=True, scope="module")
def _survivors_stay():
    """What outlives a file of tests is not looked through in the next ones, where every measurement collects."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def groups():
    """Two process groups of a world of two that is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield torch.distributed.new_group([0, 1]), torch.distributed.new_group([0, 1])
    finally:
        torch.distributed.destroy_process_group()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: looking through it again and again takes a tenth of the time.

    What tests leave behind is looked through seldom, for the same reason.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
