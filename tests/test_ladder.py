"""The ladder's anchors: what alone carries the forward stays kept, so that the smallest plan is as small as by hand."""

import pytest
import thunder
import torch

from thunder_mem import MemEfficient
from thunder_mem.fit_budget import fit_budget
from thunder_mem.saving import storages_to_rebuild
from thunder_mem.study import study_program


class Block(torch.nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
        self.dropout = dropout

    def forward(self, x):
        mixed = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + torch.nn.functional.dropout(mixed, self.dropout)


@pytest.mark.parametrize(
    ("dropout", "dtype"),
    [
        pytest.param(0.0, torch.float32, marks=pytest.mark.slow),
        (0.0, torch.bfloat16),
        pytest.param(0.1, torch.float32, marks=pytest.mark.slow),
        pytest.param(0.1, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_the_smallest_plan_is_no_larger_than_with_what_layers_hand_on_alone(dropout, dtype):
    model = torch.nn.Sequential(*(Block(dropout) for _ in range(5))).to(dtype)
    x = torch.randn(2048, 64, dtype=dtype)
    smallest = fit_budget(study_program(model, (x,), {}).problem, 1)
    layerwise = thunder.jit(model, transforms=[MemEfficient(recompute="layerwise", strict=True)])
    problem = study_program(layerwise, (x,), {}).problem
    by_layer = problem.trial(storages_to_rebuild(problem.graph, problem.fuse, problem.choices))
    assert smallest.peak_bytes <= by_layer.peak_bytes < problem.trial(frozenset()).peak_bytes
