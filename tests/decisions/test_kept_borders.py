"""Which inputs of stretches in tiles the backward may receive, and what of them it repeats."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.fuzzing.command import uncompiled_regions
from thunder_mem import MemEfficient, Tiles
from thunder_mem.decisions import program, tile_borders
from thunder_mem.decisions.refine import _is_repeated


def step(x, up, down):
    def layer(x):
        x = x - x.softmax(0)  # mixes rows, so no stretch takes it in
        return x + F.linear(F.relu(F.linear(x, up)), down)

    return checkpoint(lambda x: layer(layer(x)).softmax(0), x, use_reentrant=False).square().sum()


@pytest.fixture(scope="module")
def asked():
    """What `keeping_borders` is asked about a program with two stretches inside of a checkpoint."""
    calls = []
    with pytest.MonkeyPatch.context() as patch, uncompiled_regions():
        patch.setattr(program, "keeping_borders", lambda *args: calls.append(args))
        args = [torch.ones(s, requires_grad=True) for s in ((64, 32), (128, 32), (32, 128))]
        thunder.jit(step, executors=[], transforms=[MemEfficient(strict=True, tile=Tiles(rows=16))])(*args)
    return calls[0]


def test_the_borders_of_stretches_are_their_inputs_by_rows_the_last_first(asked):
    _, source, _, _, offered, gathered = asked
    borders = tile_borders._borders(source, offered - gathered)
    differences = [op.allocates for op in source.graph.ops if op.name == "sub" and not op.backward]
    assert borders == [frozenset(made) for made in reversed(differences)] and len(borders) == 2


def test_the_result_of_a_stretch_is_repeated_if_the_backward_needs_it(asked):
    """That of the second is not needed: a softmax needs its own result."""
    partitioned, source, _, _, offered, _ = asked
    results = program._results_of_tiles(source)
    assert len(results) == 2 and results & offered == {min(results)}
    _, read = partitioned(offered)
    assert sum(map(_is_repeated, read.graph.ops, read.bsyms)) == 1


def test_the_peak_from_the_first_backward_of_a_stretch_on_is_compared(asked):
    partitioned, _, _, _, offered, _ = asked
    _, read = partitioned(offered)
    values = sum(s.nbytes for s in read.graph.storages if s.held)
    assert tile_borders._peak_bytes(partitioned, offered) > values > 0
