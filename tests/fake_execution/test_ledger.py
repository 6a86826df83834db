"""The ledger of storages: what is alive after each sweep, and what a sweep looks at."""

import gc
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from thunder_mem.fake_execution.replay import Ledger


def test_a_sweep_looks_only_at_what_died(monkeypatch):
    looked = []
    expired = StorageWeakRef.expired
    monkeypatch.setattr(StorageWeakRef, "expired", lambda self: looked.append(self) or expired(self))
    ledger = Ledger("cpu")
    tensors = [torch.empty(25) for _ in range(300)]
    for t in tensors:
        ledger.add("t", t, "computed")
    del t
    assert ledger.sweep() == 0 and looked == []
    del tensors[:3]
    assert ledger.sweep() == 300 and len(looked) == 3
    assert ledger.sweep() == 0 and len(looked) == 3
    assert ledger.live_bytes == 29_700


@pytest.fixture
def quick_collections():
    """Collections look only at what the test makes: other tests in the process leave millions of objects."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_storages_die_with_whatever_held_them_last(quick_collections):
    """Names, views, autograd's graph, containers and cycles, against all storages asked after every step."""
    draw = random.Random(0)
    ledger, known, held = Ledger("cpu"), [], []
    weight = torch.empty(7, requires_grad=True)
    ledger.add("weight", weight, "parameter", held=True)

    def follow(*tensors):
        for t in tensors:
            if t.untyped_storage()._cdata not in {ref.cdata for ref, _ in known if not ref.expired()}:
                known.append((StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes()))
            ledger.add("t", t, "computed")

    def step():
        match draw.randrange(6):
            case 0:
                held.append(torch.empty(draw.randrange(1, 50)))
                follow(held[-1])
            case 1:  # saved for the backward, by the graph alone
                saved = weight * 2
                held.append(saved.sin())
                follow(saved, held[-1])
            case 2 if held:
                held.append(draw.choice(held)[:1])
                follow(held[-1])
            case 3 if held:
                del held[draw.randrange(len(held))]
            case 4:
                cycle = [torch.empty(3)]
                cycle.append(cycle)
                follow(cycle[0])
            case 5 if draw.random() < 0.2:
                gc.collect()

    with FakeTensorMode(allow_non_fake_inputs=True):
        for _ in range(600):
            step()
            ledger.sweep()
            assert ledger.live_bytes == 28 + sum(nbytes for ref, nbytes in known if not ref.expired())
    held.clear()
    gc.collect()
    ledger.sweep()
    assert ledger.live_bytes == 28 and sum(ref.expired() for ref, _ in known) > 100


@pytest.mark.slow
def test_a_block_lives_as_long_as_any_storage_that_stands_for_it():
    ledger = Ledger("cpu")
    first, other = torch.empty(4), torch.empty(4)
    ledger.add("t", first, "computed")
    ledger.link(other, ledger.block_of(first))
    del first
    assert ledger.sweep() == 0
    del other
    assert ledger.sweep() == 16
