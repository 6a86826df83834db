"""What predictions leave out of Thunder's interpreter changes neither a trace nor a guard."""

import re
import threading
from collections import OrderedDict
from contextlib import contextmanager

import pytest
import thunder
import torch
from thunder.core import interpreter

from thunder_mem import predict
from thunder_mem.prediction.predict import PredictionError
from thunder_mem.prediction.quick_interpreter import _QUICK, interpreted_quickly

LIST, EMPTY, TEXT, NUMBER, NOTHING, DICT = [1, 2], [], "ab", 3, None, {"a": 2}
X = torch.ones(3)


class Attributes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.number, self.none, self.list, self.tuple = "x", 2, None, [1, 2], (1, 2)
        self.dict, self.ordered, self.nothing = {"k": 2.0}, OrderedDict(), []
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3)])


OF_MODULES = {
    "a text": lambda self, x: x * len(self.text) if self.text else x,
    "a number": lambda self, x: x * 2 if self.number and not self.none else x,
    "a list": lambda self, x: x * 2 if self.list else x,
    "a list's length": lambda self, x: x * len(self.list),
    "a dict": lambda self, x: x * 2 if self.dict else x,
    "a dict's length": lambda self, x: x * len(self.dict) + len(self.ordered),
    "a tuple": lambda self, x: x * len(self.tuple) if self.tuple else x,
    "an empty list": lambda self, x: x * 2 if not self.nothing else x * len(self.nothing),
    "layers": lambda self, x: self.layers[0](x) * len(self.layers) if self.layers else x,
    "global containers": lambda self, x: x * len(LIST) if LIST and DICT and not EMPTY else x,
    "global values": lambda self, x: x * NUMBER + NUMBER if TEXT and not NOTHING else x,
    "global items": lambda self, x: x * DICT["a"] * LIST[0],
}
OF_ARGUMENTS = {
    "list": [1, 2],
    "empty list": [],
    "dict": {"a": 1},
    "empty dict": {},
    "text": "abc",
    "int": 2,
    "float": 0.0,
    "none": None,
    "tuple": (1,),
    "tensors": [X],
}


def asked(x, values):
    return x * len(values) if hasattr(values, "__len__") and values else x * 2 if values else x


def guards(fn, *args):
    jitted = thunder.jit(fn, executors=[])
    jitted(*args)
    traces = thunder.last_prologue_traces(jitted)[-1], thunder.last_traces(jitted)[0]
    return re.sub(r"took \d+ \w+|0x\w+", "", "\n".join(map(str, traces)))


@contextmanager
def as_thunder_is():
    """All tests trace quickly, but not within."""
    within = _QUICK._within
    for _ in range(within):
        _QUICK.leave()
    try:
        yield
    finally:
        for _ in range(within):
            _QUICK.enter()


def replaced():
    lookasides = interpreter._default_lookaside_map
    names = interpreter.dis, interpreter.inspect, interpreter.globals_lookup, lookasides[bool], lookasides[len]
    return *names, interpreter.InterpreterFrame.get_or_make_python_frame


@pytest.mark.parametrize("name", OF_MODULES)
def test_a_modules_attributes_and_globals_are_guarded_as_by_thunder(name):
    module = type("Program", (Attributes,), {"forward": OF_MODULES[name]})()
    with as_thunder_is():
        expected = guards(module, X)
    with interpreted_quickly():
        assert guards(module, X) == expected


@pytest.mark.parametrize("name", OF_ARGUMENTS)
def test_arguments_are_guarded_as_by_thunder(name):
    with as_thunder_is():
        expected = guards(asked, X, OF_ARGUMENTS[name])
    with interpreted_quickly():
        assert guards(asked, X, OF_ARGUMENTS[name]) == expected


def test_errors_tell_the_same_line():
    def fails(x):
        if x.ndim:
            raise KeyError("no")

    told = []
    for context in (as_thunder_is, interpreted_quickly):
        with context(), pytest.raises(KeyError) as failed:
            thunder.jit(fails)(X)
        told.append([(f.name, f.lineno) for f in failed.traceback[-1:]])
    assert told[0] == told[1]


def test_a_prediction_traces_quickly_and_leaves_the_interpreter_as_it_was(monkeypatch):
    entered, enter = [], _QUICK.enter
    monkeypatch.setattr(_QUICK, "enter", lambda: entered.append(enter()))
    with as_thunder_is():
        before = replaced()
        jitted = thunder.jit(asked, executors=[])
        predict(jitted, X, [1, 2])
        assert len(entered) == 1 and replaced() == before
        with pytest.raises(PredictionError):
            predict(thunder.jit(lambda x: x.item()), X)
        assert replaced() == before
        hits = thunder.cache_hits(jitted)
        assert jitted(X, [1, 2]).equal(X * 2) and thunder.cache_hits(jitted) == hits + 1


def test_threads_that_overlap_leave_it_as_it_was():
    with as_thunder_is():
        before = replaced()
        entered, left = threading.Event(), threading.Event()

        def other():
            with interpreted_quickly():
                entered.set()
                left.wait()

        thread = threading.Thread(target=other)
        with interpreted_quickly():
            thread.start()
            entered.wait()
        assert replaced() != before  # the other is within
        left.set()
        thread.join()
        assert replaced() == before
