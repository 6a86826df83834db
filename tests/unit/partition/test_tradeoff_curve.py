"""What alone carries the forward stays kept, so that the smallest plan is as small as by hand."""

from itertools import pairwise

import pytest
import thunder
import torch

from thunder_mem import MemEfficient
from thunder_mem.analysis.partition_problem import study_program
from thunder_mem.partition.block_boundaries import block_boundaries, without_first_block
from thunder_mem.partition.budget_search import fit_budget
from thunder_mem.partition.min_cut_partition import min_cut_partition
from thunder_mem.partition.tradeoff_curve import tradeoff_curves


class Block(torch.nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
        self.dropout = dropout

    def forward(self, x):
        mixed = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + torch.nn.functional.dropout(mixed, self.dropout)


@pytest.mark.slow
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
    by_layer = problem.trial(min_cut_partition(problem.graph, problem.fuse, problem.choices))
    assert smallest.peak_bytes <= by_layer.peak_bytes < problem.trial(frozenset()).peak_bytes


@pytest.mark.slow
def test_equal_layers_are_decided_once():
    """On every point equal layers have at most two patterns: the earlier ones have gone over to the next."""
    layers = 9
    model = torch.nn.Sequential(*(Block(0.0) for _ in range(layers)))
    problem = study_program(model, (torch.randn(2048, 64),), {}).problem
    graph = problem.graph
    found = block_boundaries(graph, problem.fuse, problem.repeat_s)
    bounds = [graph.allocator[s] for s in without_first_block(graph, problem.fuse, found)]
    forward = [s for s, op in enumerate(graph.allocator) if op is not None and not graph.ops[op].backward]

    def patterns(rebuilt: frozenset[int]) -> list[tuple[int, ...]]:
        """Per stretch between two anchors, which of its storages are rebuilt."""
        stretches: dict[int, list[int]] = {}
        for s in sorted(forward, key=lambda s: graph.allocator[s]):
            stretches.setdefault(sum(bound < graph.allocator[s] for bound in bounds), []).append(s)
        return [tuple(i for i, s in enumerate(of) if s in rebuilt) for _, of in sorted(stretches.items())]

    points = next(iter(tradeoff_curves(graph, problem.fuse, problem.repeat_s)))
    inner = [patterns(point.rebuilt)[2:-2] for point in points]  # the ends of a stack are no layers like the others
    changes = [sum(a != b for a, b in pairwise(p)) for p in inner]
    assert len(points) > layers and max(changes) == 1, changes
