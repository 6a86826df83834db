"""Rows that are picked before a product, on the trace alone."""

import torch
from torch.nn import functional as F

from tests.programs.chunk_tools import program_of
from thunder_mem.loop_body.leaves import read_program
from thunder_mem.loop_body.region import amplifying_products
from thunder_mem.tiling.hoist_slices import hoist_rows

ROWS, WIDTH, WIDE = 6, 4, 64


def picked_first(fn, *beside):
    """The picks and products of the trace in which rows of the logits are picked before their product, if they can be.

    Args:
        fn: of the logits and of what is `beside` them.
    """
    operands = torch.ones(ROWS, WIDTH), torch.ones(WIDE, WIDTH)
    program = program_of(lambda x, w, *beside: fn(F.linear(x, w), *beside), *operands, *beside)
    ((product, rows),) = amplifying_products(program)
    picker = next(leaf for leaf in program.leaves if leaf.name.startswith("slice"))
    hoisted = hoist_rows(program, picker, product, rows)
    return hoisted, list(read_program(hoisted.trace).leaves) if hoisted else []


def test_the_same_rows_of_two_readers_have_one_product():
    hoisted, leaves = picked_first(lambda z: (z[:-1].sin(), z[:-1].cos()))
    assert len(hoisted.products) == 1
    (product,) = (leaf for leaf in leaves if leaf.name == "linear")
    assert product.outputs[0].shape == (ROWS - 1, WIDE)


def test_a_new_product_has_the_line_of_the_old_one():
    _, leaves = picked_first(lambda z: z[:-1].sin())
    (product,) = (leaf for leaf in leaves if leaf.name == "linear")
    assert "test_hoist_slices.py:" in product.source


def test_columns_are_not_picked_first():
    assert picked_first(lambda z: z[:, :8].sin()) == (None, [])


def test_what_stands_beside_the_logits_alone_is_computed_for_the_picked_rows():
    _, leaves = picked_first(lambda z, u: (z + u * 2)[:-1], torch.ones(ROWS, WIDE))
    (scaled,) = (leaf.outputs[0] for leaf in leaves if leaf.name == "mul")
    assert scaled.shape == (ROWS - 1, WIDE)
