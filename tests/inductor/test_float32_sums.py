"""bfloat16 products added to float32 sums by the compiled kernel; whole numbers, which every order adds exactly."""

from contextlib import nullcontext

import pytest
import torch
from torch._inductor.codecache import CppCodeCache
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_mem.chunk_loop import float32_sums
from thunder_mem.chunk_loop.float32_sums import add_float32, scratch_bytes_of_sum
from thunder_mem.chunk_loop.matmul import adds_to_float32, gemm
from thunder_mem.runtime.allocation_watch import AllocationWatch
from thunder_mem.runtime.measure import measure_peak

needs_amx = pytest.mark.skipif(not float32_sums.is_available(), reason="this CPU has no AMX, or no compiler is here")

SHAPES = [(1, 1, 1), (3, 5, 7), (33, 65, 31), (129, 64, 32), (200, 130, 256), (40, 300, 257), (64, 20, 1025)]


def whole_numbers(rows, columns, layout):
    def made(*shape):
        return torch.randint(-3, 4, shape).bfloat16()

    return {
        "rows": lambda: made(rows, columns),
        "columns": lambda: made(columns, rows).t(),
        "neither": lambda: made(rows, 2 * columns, 3)[:, ::2, 1],
        "expanded": lambda: made(rows, 1).expand(rows, columns),
    }[layout]()


@needs_amx
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layouts", [("rows", "rows"), ("columns", "rows"), ("neither", "columns"), ("expanded",) * 2])
def test_sums_are_exact_for_all_sizes_and_layouts(shape, layouts):
    m, n, k = shape
    a, b = whole_numbers(m, k, layouts[0]), whole_numbers(k, n, layouts[1])
    around = torch.randint(-3, 4, (m + 2, n + 2)).float()
    want = around.clone()
    for add in (True, False):
        out = around[1:-1, 1:-1]
        product = a.float() @ b.float()
        want[1:-1, 1:-1] = want[1:-1, 1:-1] + product if add else product
        add_float32(out, a, b, add=add, scratch_bytes=1 << 16)
        assert torch.equal(around, want)  # and nothing beside `out` is written


@needs_amx
def test_a_sum_may_be_stored_by_columns():
    a, b, out = whole_numbers(40, 33, "rows"), whole_numbers(33, 70, "rows"), torch.ones(70, 40).t()
    add_float32(out, a, b, add=True, scratch_bytes=1 << 16)
    assert torch.equal(out, 1 + a.float() @ b.float())


@needs_amx
@pytest.mark.parametrize(
    ("shape", "strides"), [((1, 63), (1, 1)), ((1, 63), (0, 1)), ((63, 1), (1, 5)), ((63, 1), (7, 9)), ((1, 1), (7, 9))]
)
def test_a_sum_of_one_row_or_column_may_have_any_strides(shape, strides):
    a, b = whole_numbers(shape[0], 64, "rows"), whole_numbers(64, shape[1], "rows")
    memory = torch.full((1000,), -1.0)
    out = memory.as_strided(shape, strides)
    add_float32(out, a, b, add=True, scratch_bytes=1 << 16)
    assert torch.equal(out, a.float() @ b.float() - 1)
    assert (memory != -1).sum() <= out.numel()


@needs_amx
@pytest.mark.parametrize("default", ["meta", "float64"])
def test_defaults_of_the_user_change_nothing(default):
    float32_sums.is_available.cache_clear()
    dtype = torch.get_default_dtype()
    try:
        with torch.device("meta") if default == "meta" else nullcontext():
            torch.set_default_dtype(torch.float64 if default == "float64" else dtype)
            assert adds_to_float32("cpu", torch.bfloat16)
    finally:
        torch.set_default_dtype(dtype)


@needs_amx
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 3), (2, 3, 0)], ids=str)
def test_empty_products_add_nothing(shape):
    m, n, k = shape
    for add in (True, False):
        out = torch.full((m, n), float("nan"))
        add_float32(out, torch.ones(m, k).bfloat16(), torch.ones(k, n).bfloat16(), add=add, scratch_bytes=1 << 16)
        assert bool(out.isnan().all()) == add or not out.numel()


@needs_amx
def test_threads_share_the_memory_of_one():
    """Memory must not depend on the number of threads."""
    a, b = whole_numbers(500, 256, "columns"), whole_numbers(256, 130, "rows")
    want, before = a.float() @ b.float(), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = torch.empty(500, 130)
            held = measure_peak(lambda out=out: add_float32(out, a, b, add=False, scratch_bytes=1 << 17))
            assert held <= 1 << 17
            assert torch.equal(out, want)
    finally:
        torch.set_num_threads(before)


@needs_amx
@pytest.mark.parametrize("scratch_bytes", [1 << 16, 1 << 18, 1 << 20])
@pytest.mark.parametrize("fake", [False, True])
def test_a_sum_takes_the_memory_it_states_with_numbers_and_without(fake, scratch_bytes):
    with FakeTensorMode() if fake else nullcontext():
        a, b = (torch.zeros(s, dtype=torch.bfloat16) for s in ((300, 512), (512, 900)))
        out = torch.zeros(300, 900)
        with AllocationWatch() as watch:
            gemm(out, a, b, add=True, scratch_bytes=scratch_bytes)
    assert watch.peak_bytes == scratch_bytes_of_sum(512, 900, scratch_bytes) <= scratch_bytes


def test_without_a_compiler_products_are_added_in_float32(monkeypatch):
    def refused(*args):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(CppCodeCache, "load", refused)
    cached = float32_sums.is_available, float32_sums._library
    for function in cached:
        function.cache_clear()
    try:
        assert not adds_to_float32("cpu", torch.bfloat16)
        a, b, out = whole_numbers(70, 40, "columns"), whole_numbers(40, 50, "rows"), torch.ones(70, 50)
        gemm(out, a, b, add=True, scratch_bytes=1 << 16)
        assert torch.equal(out, 1 + a.float() @ b.float())
    finally:
        for function in cached:
            function.cache_clear()
