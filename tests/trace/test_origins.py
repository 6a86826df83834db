"""Where operations come from: modules and layers around those that have no parameter."""

import thunder
import torch
from torch import nn

from thunder_mem.trace.origins import name_origins, origin_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu()).tanh()


def test_an_operation_without_parameters_is_in_the_module_around_its_neighbours_and_in_its_layer():
    jitted = thunder.jit(nn.Sequential(Block(), Block()), executors=[])
    jitted(torch.ones(2, 4))
    trace = name_origins(thunder.last_traces(jitted)[0], thunder.last_prologue_traces(jitted)[0])
    found = [(b.sym.name, origin.module) for b in trace.bound_symbols if (origin := origin_of(b)) is not None]
    layers = [("linear", "up"), ("relu", ""), ("linear", "down"), ("tanh", "")]
    assert found == [(name, f"{i}.{module}".rstrip(".")) for i in range(2) for name, module in layers]
