"""Which names may share memory."""

import torch

from tests.checking.traces import body, claimed, unfused
from thunder_mem.semantics.aliases import Aliases


def test_results_of_an_operators_own_kernels_are_fresh_and_those_of_composed_operators_may_be_the_operand():
    trace = claimed(unfused(lambda x: (x.logcumsumexp(0), x.sum_to_size(3)), torch.ones(3)))
    (x,), made = trace.args, {b.sym.name: b.output.name for b in body(trace)}
    aliases = Aliases(body(trace))
    assert aliases(made["logcumsumexp"]) != aliases(x.name) == aliases(made["sum_to_size"])
