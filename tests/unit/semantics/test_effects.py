"""Side effects of bound symbols."""

import torch

from tests.checking.traces import body, unfused
from thunder_mem.semantics.effects import _only_computes, effects_of


def test_arithmetic_is_known_at_a_glance_to_have_no_effect_and_draws_and_writes_are_not():
    bsyms = body(unfused(lambda x: (x.sin() + torch.rand_like(x), x.add_(1)), torch.ones(3, 3)))
    glances = {b.sym.name: _only_computes(b) for b in bsyms}
    assert {name: glances[name] for name in ("sin", "add", "uniform", "copy_")} == {
        "sin": True,
        "add": True,
        "uniform": False,
        "copy_": False,
    }


def test_pytorch_says_which_operators_without_an_implementation_of_thunders_draw():
    bsyms = body(unfused(lambda x: (torch.poisson(x), x.logcumsumexp(0)), torch.ones(3)))
    channels = {b.sym.name: effects_of(b).channels for b in bsyms}
    assert (channels["poisson"], channels["logcumsumexp"]) == (("rng:cpu",), ())
