"""Products around which stretches may grow."""

import torch
from torch.nn import functional as F

from tests.programs.chunk_tools import program_of
from thunder_mem.tiling.seeds import seeds_of


def test_the_largest_result_comes_first():
    x, narrow, wide = torch.ones(6, 4), torch.ones(8, 4), torch.ones(16, 4)
    program = program_of(lambda x, a, b: (F.linear(x, a), F.linear(x, b)), x, narrow, wide)
    made = [leaf.outputs[0].name for leaf in program.leaves if leaf.name == "linear"]
    assert [seed.key for seed in seeds_of(program, 1.0)] == [(name, 0, (0,)) for name in reversed(made)]


def test_a_convolution_whose_weight_depends_on_no_argument_only_pools():
    def fn(x, weight):
        return F.conv1d(x, weight), F.conv1d(x, torch.ones(8, 2, 1))

    program = program_of(fn, torch.ones(3, 2, 5), torch.ones(8, 2, 1))
    of_argument, _ = (leaf.outputs[0].name for leaf in program.leaves if leaf.name == "convolution")
    assert {seed.leaf.outputs[0].name for seed in seeds_of(program, 1.0)} == {of_argument}
