"""Where a loop may stand in a trace."""

from types import SimpleNamespace

import torch

from tests.checking.traces import body, unfused
from thunder_mem.loop_body.leaves import read_program
from thunder_mem.tiling.splice import _makers, _writers


def test_a_value_depends_on_what_makes_it_and_on_nothing_else():
    bsyms = body(unfused(lambda x: (x.sin().cos(), x.exp()), torch.ones(3)))
    (cos,) = (b for b in bsyms if b.sym.name == "cos")
    assert [bsyms[i].sym.name for i in _makers(bsyms, {cos.output.name})] == ["unpack_trivial", "sin", "cos"]


def test_writes_to_what_a_region_reads_are_found_also_through_views_and_no_others():
    def fn(x, y):
        seen = x.view(-1).sin()
        y.mul_(2)
        x.add_(1)
        return seen

    program = read_program(unfused(fn, torch.ones(4), torch.ones(3)))
    region = SimpleNamespace(program=program, leaves=[b for b in program.leaves if b.name == "sin"], inputs=())
    bsyms = program.roots[:-1]
    (at,) = _writers(bsyms, region)
    assert bsyms[at].sym.name == "copy_" and bsyms[at].args[1].shape == (4,)
