"""What the variants of `optimizer.step()` hold, and what `explain` says of them."""

import pytest
import thunder
import torch
from torch import nn

from thunder_mem import MemEfficient, StepInBackward, explain, measure_peak, predict_step
from thunder_mem.optimizer.variants import step_variants
from thunder_mem.report.advice import advice

SCALARS = 16  # numbers, such as an operand on the CPU, are no tensors of the device

LATE = 8  # steps, after which RAdam's arithmetic is another
# Meta tensors do not run all of Adafactor's variants.
NAMES = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
OPTIONS = {"foreach=True": {"foreach": True}, "foreach=False": {"foreach": False}, "fused=True": {"fused": True}}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("after_a_step", [False, True])
def test_variants_hold_what_is_measured(name, after_a_step):
    def made(**options):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(*shape)) for shape in ((64, 256), (256,), (64, 256), (128, 300))]
        for p in parameters:
            p.grad = torch.randn_like(p)
        return getattr(torch.optim, name)(parameters, lr=1e-3, **options)

    asked = made()
    if after_a_step:
        asked.step()
    found = step_variants(asked, "cpu")
    assert [v.option for v in found][:2] == ["foreach=True", "foreach=False"]
    assert [v.option for v in found if v.is_used] == ["foreach=False"]
    for variant in found:
        optimizer = made(**OPTIONS[variant.option])
        for _ in range(LATE):
            optimizer.step()
        scalars = SCALARS + 8 * (name == "ASGD")  # which has two more
        assert 0 <= measure_peak(optimizer.step) - variant.temporary_bytes <= scalars, variant


def test_explain_says_what_the_step_holds():
    model, x = nn.Linear(256, 256), torch.randn(2, 256)
    jitted = thunder.jit(model, executors=[], transforms=[MemEfficient()])
    adamw = torch.optim.AdamW(model.parameters(), foreach=True)
    report = explain(jitted, x, prediction=predict_step(jitted, adamw, torch.sum, x), detail=True, bounds=False)
    sentence = "the step of AdamW(foreach=True) holds 257.00 KiB temporaries: fused=True no, foreach=False 512.00 KiB"
    assert sentence in report.notes
    (way,) = [way for way in advice(report) if "temporaries" in way.text]
    assert way.nbytes == (256 * 256 + 256) * 4 and way.code == "torch.optim.AdamW(model.parameters(), fused=True)"
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    report = explain(jitted, x, prediction=predict_step(jitted, fused, torch.sum, x), detail=True, bounds=False)
    assert not [way for way in advice(report) if "temporaries" in way.text]


def test_others_have_no_variants():
    class Own(torch.optim.SGD):
        pass

    p = nn.Parameter(torch.ones(3))
    assert step_variants(Own([p]), "cpu") == ()
    assert step_variants(torch.optim.Adafactor([p]), "cuda") == ()
    adam = torch.optim.Adam([p])
    assert [v.option for v in step_variants(adam, "cuda") if v.is_used] == ["foreach=True"]
    model = nn.Linear(4, 4)
    ours = StepInBackward(torch.optim.AdamW(model.parameters()))
    step = thunder.jit(model, executors=[], transforms=[MemEfficient(optimizer=ours)])
    assert predict_step(step, ours, torch.sum, torch.ones(2, 4)).step_variants == ()
