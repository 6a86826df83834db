"""A region of nvFuser goes on without it after its first error; `tests/with_nvfuser` has the real one's."""

import copy
import warnings

import pytest
import thunder
import torch

from thunder_mem import MemEfficient, predict, simulate
from thunder_mem.chunk_loop.symbols import is_chunk_loop, loop_of
from thunder_mem.fusers.nvfuser_fallback import GuardedFusion
from thunder_mem.regions.compiled_region import CompileWarning


def fn(x, y):
    return torch.sin(x) * y + torch.exp(-x)


@pytest.fixture(scope="module")
def region():
    """A region of nvFuser's model, whose operations also run on a CPU."""
    with simulate("H100-80GB", fusion="nvfuser"):
        jitted = thunder.jit(fn, transforms=[MemEfficient(strict=True)])
        predict(jitted, *(torch.ones(8, 8, device="cuda") for _ in range(2)))
        return next(b for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.is_fusion)


def guarded(region, definition):
    return GuardedFusion(definition, region.subsymbols, region.args, region.output)


def failing(error):
    calls = []

    def definition(*args):
        calls.append(args)
        raise error

    return definition, calls


def test_every_region_of_nvfuser_is_guarded(region):
    assert isinstance(next(iter(region._call_ctx.values())), GuardedFusion)


def test_inductor_takes_over_after_the_first_error(region):
    definition, calls = failing(RuntimeError(" INTERNAL ASSERT FAILED at fusion_segmenter.cpp:4623\nException raised"))
    fusion = guarded(region, definition)
    given = {p.name: t for p, t in zip(region.args, torch.randn(2, 8, 8), strict=True)}
    x, y = (given[name] for name in ("x", "y"))
    with pytest.warns(CompileWarning, match=r"RuntimeError: INTERNAL ASSERT FAILED at fusion_segmenter.cpp:4623\)"):
        (found,) = fusion(*given.values())
    torch.testing.assert_close(found, fn(x, y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fusion(*given.values())[0], fn(x, y))
        strict = guarded(region, definition)
        with pytest.raises(CompileWarning):
            strict(*given.values())
        torch.testing.assert_close(strict(*given.values())[0], fn(x, y))
    assert len(calls) == 2 and copy.deepcopy(fusion) is fusion


def test_without_an_error_it_is_nvfusers_result(region):
    assert guarded(region, lambda *args: ["nvFuser's"])(1, 2) == ["nvFuser's"]


def test_it_has_what_thunders_own_function_has(region):
    """`thunder.examine` shows nvFuser's code of a region by it."""

    class Definition:
        last_used = "nvFuser's definition"

    fusion = guarded(region, Definition())
    assert fusion.last_used == "nvFuser's definition" and copy.copy(fusion).last_used == fusion.last_used
    assert not hasattr(fusion, "last_inputs")


def test_a_device_without_memory_is_no_error_of_nvfusers(region):
    definition, calls = failing(torch.OutOfMemoryError("CUDA out of memory"))
    fusion = guarded(region, definition)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            fusion(*torch.randn(2, 8, 8))
    assert len(calls) == 2


def test_where_inductor_fails_too_nvfusers_error_is_raised(region):
    definition, _ = failing(ValueError("nvFuser's own"))
    with pytest.raises(ValueError, match="nvFuser's own"):
        guarded(region, definition)("no tensor", "at all")


def test_regions_in_loops_are_guarded_too():
    def head(h, w, t):
        return torch.nn.functional.cross_entropy(h @ w.t(), t)

    with simulate("H100-80GB", fusion="nvfuser"):
        jitted = thunder.jit(head, transforms=[MemEfficient(strict=True)])
        h, w = (torch.zeros(n, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (4096, 32000))
        predict(jitted, h, w, torch.zeros(4096, dtype=torch.long, device="cuda"))
        loop = loop_of(next(b for b in thunder.last_traces(jitted)[-1].bound_symbols if is_chunk_loop(b)))
    fused = [b for body in loop.backward.values() for b in body.trace.bound_symbols if b.sym.is_fusion]
    assert fused and all(isinstance(next(iter(b._call_ctx.values())), GuardedFusion) for b in fused)
