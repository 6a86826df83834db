"""Parameters that a module uses under several names."""

from types import SimpleNamespace

import torch
from thunder.core.prims import PrimIDs
from thunder.core.trace import TraceCtx, tracectx

from tests.checking.collectives import tensor
from thunder_mem.semantics.shared_parameters import memory_name, tag_shared_parameters


def test_all_names_of_one_parameter_name_one_memory():
    module = torch.nn.ModuleDict({"embed": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 4)})
    module["head"].weight = module["embed"].weight
    names = ("embed.weight", "head.weight", "head.bias")
    with tracectx(TraceCtx(None)):
        arguments = [tensor(f"t{i}", 4) for i in range(3)]
    getters = [
        SimpleNamespace(sym=SimpleNamespace(id=PrimIDs.UNPACK_PARAMETER), args=(module, name), output=p)
        for name, p in zip(names, arguments, strict=True)
    ]
    tag_shared_parameters(arguments, SimpleNamespace(bound_symbols=getters), module)
    assert list(map(memory_name, arguments)) == ["t0", "t0", "t2"]
