"""Estimates of the scratch of kernels."""

import pytest
import torch
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.extend import OperatorExecutor

from tests.checking.collectives import tensor
from tests.checking.traces import body, unfused
from thunder_mem.semantics import kernel_scratch
from thunder_mem.semantics.kernel_figures import KernelFigures, NotWritten
from thunder_mem.semantics.kernel_scratch import empty_outputs, estimated_scratch_bytes, region_scratch_bytes
from thunder_mem.semantics.layout import Layout
from thunder_mem.semantics.op_traits import MemoryTraits, declare


@pytest.mark.parametrize(("multiplies", "nbytes"), [(False, 64 * 64 * 4), (True, 0)])
def test_a_product_of_bfloat16_adds_up_in_float32_unless_the_cpu_multiplies_bfloat16(monkeypatch, multiplies, nbytes):
    monkeypatch.setattr(kernel_scratch, "_multiplies_bfloat16", kernel_scratch._multiplies_bfloat16.__wrapped__)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: multiplies)
    bsyms = body(unfused(lambda x: (x @ x).sin(), torch.ones(64, 64, dtype=torch.bfloat16)))
    assert sum(map(estimated_scratch_bytes, bsyms)) == nbytes


@pytest.mark.parametrize(
    ("figures", "nbytes"), [(KernelFigures(2, 96, 400), 96), (NotWritten("unknown"), 0), (None, 0)]
)
def test_a_region_holds_what_its_kernels_hold_if_they_are_known(figures, nbytes):
    executor = OperatorExecutor("kernels_with_scratch", version="1")
    declare(executor, lambda name: MemoryTraits(kernels=lambda bsym, layout: figures))
    with tracectx(TraceCtx(None)):
        region = Symbol("region", executor=executor).bind(tensor("x", 4), output=tensor("y", 4))
    assert region_scratch_bytes(region, Layout()) == nbytes


def test_flash_attention_makes_no_offsets_and_no_mask():
    with tracectx(TraceCtx(None)):
        query, *made = (tensor(name, 4) for name in ("query", "out", "lse", "rows", "columns", "seed", "mask"))
        output = (*made[:4], 8, 8, *made[4:])
        names = ("sdpafx_grad_forward_scaled_dot_product_efficient_attention", "another")
        flash, other = (Symbol(name).bind(query, output=output) for name in names)
    assert [p.name for p in empty_outputs(flash)] == ["rows", "columns", "mask"]
    assert empty_outputs(other) == ()
