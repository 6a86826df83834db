"""Advice is code to paste: it keeps what the user gave, changes what it names, and is not given twice."""

from dataclasses import replace

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn

from tests.programs.report_cases import Stack
from thunder_mem import ChunkLossHead, MemEfficient, StepInBackward, Tiles, explain
from thunder_mem.report.advice import advice
from thunder_mem.report.given_options import given_options
from thunder_mem.report.optimality import Optimality

NAMES = {"MemEfficient": MemEfficient, "StepInBackward": StepInBackward, "Tiles": Tiles, "ChunkLossHead": ChunkLossHead}


class Head(nn.Module):
    """A loss head too small for chunks, whose logits are the largest tensors."""

    def __init__(self):
        super().__init__()
        self.words = nn.Linear(8, 256)

    def forward(self, x, targets):
        return F.cross_entropy(self.words(x), targets)


class Wide(nn.Module):
    """A frozen block whose wide values are the largest tensors."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 256), nn.Linear(256, 8)
        self.requires_grad_(False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


HEAD = torch.randn(64, 8), torch.arange(64)


def explained(model, *args, **options):
    jitted = thunder.jit(model, executors=[], transforms=[MemEfficient(**options)])
    return explain(jitted, *args, bounds=False), jitted


def codes(report, call="MemEfficient("):
    return [way.code for way in advice(report) if call in way.code]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        {"budget": "100KiB", "on_infeasible": "warn", "keep": False},
        {"tile": Tiles(rows=4, accumulate="input"), "recompute": "layerwise"},
        {"chunk": ChunkLossHead(chunks=2), "sort": "bfs"},
    ],
    ids=["budget", "tiles", "chunks"],
)
@pytest.mark.filterwarnings("ignore:no plan keeps the peak")
def test_code_keeps_the_options_that_were_given(options):
    report, jitted = explained(Stack(), torch.randn(256, 16), **options)
    names = {**NAMES, "optimizer": torch.optim.SGD([torch.zeros(1)])}
    found = [code[code.index("MemEfficient(") :].removesuffix("])") for code in codes(report)]
    assert found
    for code in found:
        given = eval(code, names).given
        assert given.items() >= {name: x for name, x in options.items() if name != "chunk"}.items()
        assert str(given.get("chunk")) == str(options.get("chunk"))
    texts = given_options(thunder.compile_data(jitted), with_executors=True)
    theirs = codes(replace(report, compiled_by="memory_efficient", options=texts), "memory_efficient(")
    assert sum("executors=[]" not in code for code in theirs) <= 1  # the advice to omit them
    assert all(f"{name}={text}" in code for code in theirs for name, text in texts.items() if name != "executors")


def test_tiles_are_no_way_for_values_that_they_do_not_cut():
    report, _ = explained(Head(), *HEAD)
    largest = max((t for t in report.tenants if t.category == "working memory"), key=lambda t: t.nbytes)
    assert largest.shape == (64, 256)
    assert codes(report) and not [code for code in codes(report) if "tile=" in code]


def test_advice_for_tiles_lowers_the_peak_and_is_not_given_again():
    model, x = Wide(), torch.randn(64, 8)
    report, _ = explained(model, x)
    (code,) = [code for code in codes(report) if "tile=" in code]
    followed, _ = explained(model, x, **eval(code, NAMES).given)
    assert followed.peak_bytes < report.peak_bytes
    assert not [code for code in codes(followed) if "tile=Tiles(rows=8)" not in code]
    assert not [way for way in advice(followed) if way.short == "token-wise stretches in pieces" and way.code]


def test_an_exact_search_is_not_advised_again():
    report, _ = explained(Stack(), torch.randn(256, 16))
    gap = Optimality(report.peak.phase, report.peak_bytes, report.peak_bytes // 2)
    before = replace(report, optimality=(gap,))
    assert [code for code in codes(before) if 'sort="exact"' in code]
    after = replace(before, options={"sort": '"exact"'})
    assert not [way for way in advice(after) if way.short == "searches longer for an order" and way.code]


def test_a_list_that_fuses_is_not_advised_again():
    class Binary(nn.Linear):
        def forward(self, x, y):
            return F.binary_cross_entropy_with_logits(super().forward(x), y)

    def asked(**options):
        jitted = thunder.jit(Binary(64, 256), transforms=[MemEfficient()], **options)
        return [way.short for way in advice(explain(jitted, torch.rand(1024, 64), torch.rand(1024, 256), bounds=False))]

    assert "without executors=" in asked(executors=[])
    assert "without executors=" not in asked()  # where no operation of the program is one that could be fused
