"""The size of a loop's blocks."""

from types import SimpleNamespace

import pytest
import torch
from thunder.core.prims import PrimIDs

from thunder_mem.loop_sizes.rows_per_chunk import floor_rows
from thunder_mem.tiling.build import _least_rows


@pytest.mark.parametrize(
    ("op", "rows"), [(PrimIDs.LINEAR, floor_rows("cpu", torch.float32)), (PrimIDs.MUL, 1)], ids=["product", "none"]
)
def test_a_block_with_a_product_inside_has_the_rows_that_keep_products_efficient(op, rows):
    member = SimpleNamespace(bsym=SimpleNamespace(sym=SimpleNamespace(id=op)))
    head = SimpleNamespace(device="cpu", dtype=torch.float32)
    assert _least_rows(SimpleNamespace(members=[member]), head) == rows > 0
