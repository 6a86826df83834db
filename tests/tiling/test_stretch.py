"""What a stretch takes in."""

import pytest
import torch
from torch.nn import functional as F

from tests.programs.chunk_tools import program_of
from thunder_mem.loop_body.region import row_space
from thunder_mem.tiling.stretch import Closure, _drawn


def test_a_mask_of_random_numbers_is_as_good_as_drawn_and_what_it_masks_is_not():
    program = program_of(lambda x: F.dropout(x, 0.5), torch.ones(3, 4))
    drawn = _drawn(program)
    assert [leaf.name for leaf in program.leaves if leaf.outputs and leaf.outputs[0].name in drawn] == ["uniform", "lt"]


@pytest.mark.parametrize(("rank", "taken"), [(2, True), (16, False)])
def test_a_product_of_narrow_values_is_taken_in_if_its_rank_is_low(rank, taken):
    program = program_of(F.linear, torch.ones(64, 32), torch.ones(rank, 32))
    (product,) = (leaf for leaf in program.leaves if leaf.is_product)
    rows, n = row_space(product, 0, (0,), "tiles")
    closure = Closure(program, n)
    closure.narrow = closure.row_bytes(product.inputs[0])
    assert closure.takes_narrow(product, {0: rows}) is taken
