"""Modules that a `forward` makes, in a process that has used `torch.compile`."""

import pytest
import thunder
import torch
from torch._dynamo.mutation_guard import GenerationTracker, install_generation_tagging_init

from thunder_mem import MemEfficient


class _Unread(dict):
    """A dictionary that nobody iterates over."""

    written = 0

    def __setitem__(self, key, value):
        self.written += 1
        super().__setitem__(key, value)

    def items(self):
        raise AssertionError("the whole dictionary is read")


class _MakesModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.product = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.nn.Identity()(self.product(x)).sin().sum()


def test_dynamos_dictionary_of_modules_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__", "__setstate__"):  # to be taken back after the test
        monkeypatch.setattr(torch.nn.Module, name, getattr(torch.nn.Module, name))
    monkeypatch.setattr(torch.nn.Module, "___needs_generation_tag_patch", True, raising=False)
    install_generation_tagging_init()  # as the first `torch.compile` does
    values = _Unread()
    monkeypatch.setattr(GenerationTracker.generation_values, "values", values)
    model, x = _MakesModule(), torch.ones(2, 4)
    assert (before := values.written) >= 2  # more where a test before has used `torch.compile`
    found = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True)])(x)
    assert values.written > before  # the record still works while Thunder traces
    torch.testing.assert_close(found, model(x))
