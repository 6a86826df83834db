"""What is said of a stretch."""

import torch
from torch.nn import functional as F

from tests.programs.chunk_tools import program_of
from thunder_mem.tiling.tile_build import _label


def test_a_stretch_is_named_by_its_first_product_and_the_number_of_others():
    program = program_of(F.linear, torch.ones(6, 4), torch.ones(8, 4))
    (product,) = (leaf for leaf in program.leaves if leaf.is_product)
    assert [_label([product] * n) for n in (1, 2, 3)] == [
        "linear with t_0, t_1",
        "linear with t_0, t_1 and 1 more product",
        "linear with t_0, t_1 and 2 more products",
    ]
