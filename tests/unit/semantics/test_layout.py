"""Which results share their operand's storage, and how results lie in memory."""

import torch
from torch.nn import functional as F

from tests.checking.traces import body, claimed, unfused
from thunder_mem.semantics.layout import Layout, is_view


def test_an_operator_that_thunder_knows_by_name_alone_is_a_view_if_its_schema_says_so():
    bsyms = body(unfused(lambda x: (x.swapaxes(0, 1), x.logcumsumexp(0)), torch.ones(2, 3)))
    views = {b.sym.name: is_view(b) for b in bsyms}
    assert (views["swapaxes"], views["logcumsumexp"]) == (True, False)


def test_elementwise_results_lie_as_their_operand_does_and_others_are_contiguous():
    def fn(x):
        return x.t().sin(), F.softmax(x.t(), 0), x.t().cumsum(0)

    x, layout = torch.ones(2, 3), Layout()
    _, *bsyms = body(claimed(unfused(fn, x)))  # the first unpacks x, which is contiguous if nothing says otherwise
    for bsym in bsyms:
        layout.run(bsym)
    strides = {b.sym.name: layout[b.output.name].stride() for b in bsyms}
    for name, result in zip(("sin", "softmax", "cumsum"), fn(x), strict=True):
        assert strides[name] == result.stride(), name
