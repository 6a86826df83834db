"""Predicted equals measured, to the byte, on the CPU: forward and backward."""

import copy
import logging

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.models import efficient, inefficient
from tests.programs.predict_cases import CASES, WAYS, gpt, issue_1337, peaks_as_planned, randn, tensors_of
from thunder_mem.planning.record import last_plan
from thunder_mem.prediction.predict import PredictionError, predict
from thunder_mem.prediction.simulate import simulate
from thunder_mem.runtime.measure import measure_peak
from thunder_mem.transforms import MemEfficient

MIB = 2**20
# Compiling takes seconds a case, so only some are quick.
QUICK = [(case, "torch") for case in CASES if case != "gpt_loss"]
QUICK += [("inefficient", "planned"), ("tied", "planned"), ("gpt_loss", "chunked"), ("views", "planned pointwise")]
LONG = [(case, way) for case in CASES for way in WAYS if (case, way) not in QUICK and way != "chunked"]


def check(fn, args, jit, kwargs=None):
    """A call and its backward by `torch.autograd.backward`, predicted and measured; returns the prediction."""
    kwargs = kwargs or {}
    jitted = thunder.jit(fn, **jit)
    leaves = [*tensors_of((args, kwargs)), *(fn.parameters() if isinstance(fn, nn.Module) else ())]
    trains = any(t.requires_grad for t in leaves)

    def forward_and_backward():
        outs = tensors_of(jitted(*args, **kwargs))
        if trains:
            torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])

    def clear():
        for t in leaves:
            t.grad = None

    tangents = [torch.ones_like(t) for t in tensors_of(fn(*copy.deepcopy(args), **kwargs))] if trains else None
    prediction = predict(jitted, *args, kwargs=kwargs, tangents=tangents, keep_outputs=True)
    forward_and_backward()
    clear()
    assert prediction.assumptions == ()
    assert prediction.measured_bytes == measure_peak(forward_and_backward)
    clear()
    assert prediction.phase("forward").measured_bytes == measure_peak(lambda: jitted(*args, **kwargs))
    assert prediction.scratch_bytes >= 0
    return prediction


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case, way", QUICK, ids=lambda x: x)
def test_predicted_equals_measured(case, way):
    fn, args = CASES[case]()
    check(fn, args, WAYS[way]())


def test_an_operation_of_torch_ops_has_its_own_name():
    """Thunder prints `torch.torch.ops`."""
    jitted = thunder.jit(lambda x: nn.functional.log_softmax(x, -1).sum(), executors=[], transforms=[MemEfficient()])
    names = [event.name for event in predict(jitted, randn(4, 8)).timeline]
    assert names[-1] == "torch.ops.aten._log_softmax_backward_data"


@pytest.mark.slow
@pytest.mark.parametrize("case, way", LONG, ids=lambda x: x)
def test_predicted_equals_measured_in_every_other_way(case, way):
    fn, args = CASES[case]()
    check(fn, args, WAYS[way]())


@pytest.mark.parametrize("fn, peak_bytes", [(efficient, 3 * MIB // 4), (inefficient, 11 * MIB // 4)])
def test_issue_1337_has_the_peaks_of_the_issue(fn, peak_bytes):
    fn, args = issue_1337(fn)
    # on the CPU, eager code and Thunder's own order take the same
    assert measure_peak(fn, *copy.deepcopy(args)) == peak_bytes
    planned = predict(thunder.jit(fn, executors=[], transforms=[MemEfficient()]), *args)
    assert planned.measured_bytes == 3 * MIB // 4


def check_plan(fn, args, way="planned"):
    """The plan's peaks are the prediction's, with outputs kept by the caller and scratch as the plan estimates it."""
    jitted = thunder.jit(fn, **WAYS[way]())
    prediction = predict(jitted, *args, keep_outputs=True)
    candidate = last_plan(jitted).candidate
    assert [candidate.forward_peak_bytes, candidate.backward_peak_bytes] == peaks_as_planned(prediction)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["inefficient", "in_place", "views", "many_kernels", "net"])
def test_a_plans_peaks_are_the_predictions(case):
    check_plan(*CASES[case]())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["planned", "planned pointwise"])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_plans_peaks_are_the_predictions_of_a_language_model(layers, way):
    check_plan(gpt(layers), (torch.randint(0, 128, (2, 32)),), way)


def test_a_plan_counts_tied_arguments_once():
    check_plan(*CASES["tied"]())


@pytest.mark.slow
def test_what_a_region_holds_inside_is_known():
    """Inductor's wrapper of several kernels has buffers of its own, which no output shows."""
    fn, args = CASES["many_kernels"]()
    prediction = predict(thunder.jit(fn, **WAYS["torchcompile"]()), *args)
    (region,) = [e for e in prediction.phase("forward").timeline if e.bsym.sym.is_fusion]
    assert region.scratch_bytes > 0


def both(x, y):
    return x + y


GRADIENTS = {
    "one gradient for two leaves": (both, lambda: (randn(32, 32), randn(32, 32))),
    "a transposed gradient": (lambda x, y: x + y.t(), lambda: (randn(32, 32), randn(32, 32))),
    "a gradient from a reshape": (lambda x: x.t().reshape(-1) * 2, lambda: (randn(32, 16),)),
    "products that leave transposed ones": (
        lambda a, b: torch.einsum("bij,bjk->ik", a, b),
        lambda: (randn(4, 8, 16), randn(4, 16, 32)),
    ),
    "a leaf that is expanded": (lambda x: x * 2, lambda: (torch.randn(32).expand(32, 32).requires_grad_(),)),
    "arguments that share memory": (lambda x, y: x @ y.sin(), lambda: 2 * (randn(16, 16),)),
    "an argument of zero elements": (lambda x: (x * 2).sum(0), lambda: (randn(0, 64),)),
}


@pytest.mark.parametrize("fn, args", GRADIENTS.values(), ids=GRADIENTS.keys())
def test_what_autograd_copies_is_counted(fn, args):
    check(fn, args(), {"executors": []})


def test_a_gradient_that_is_there_is_added_to():
    x, y = randn(32, 32), randn(32, 32)
    jitted = thunder.jit(both, executors=[])
    one = torch.ones(32, 32)
    without = predict(jitted, x, y, tangents=[one])
    x.grad, y.grad = torch.zeros(32, 32), torch.zeros(32, 32)
    within = predict(jitted, x, y, tangents=[one])
    nbytes = 32 * 32 * 4
    assert within.held_bytes == without.held_bytes + 2 * nbytes
    assert without.measured_bytes - within.measured_bytes == 2 * nbytes  # no copies
    assert within.phases[-1] == "accumulate" and x.grad.sum() == 0


class MaskedHead(nn.Module):
    """A frozen layer, a buffer, and a mask."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 64).requires_grad_(False), nn.Linear(64, 16)
        self.register_buffer("scale", torch.randn(64))

    def forward(self, x, *, mask, factor):
        return self.last((self.first(x) * self.scale).relu()).masked_fill(mask, factor)


def test_frozen_parameters_buffers_and_keywords():
    check(MaskedHead(), (torch.randn(8, 16),), {"executors": []}, {"mask": torch.rand(8, 16) > 0.5, "factor": 2.0})


def test_parameters_in_one_storage_count_once():
    flat = torch.randn(2 * 32 * 32)

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(part.view(32, 32)) for part in flat.chunk(2))

        def forward(self, x):
            return (x @ self.a).relu() @ self.b

    prediction = check(Flat(), (torch.randn(4, 32),), {"executors": []})
    assert prediction.held_bytes == flat.nbytes + 4 * 32 * 4


def test_autocast_and_no_grad_are_part_of_the_call():
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    jitted = thunder.jit(model, executors=[])
    with torch.no_grad():
        assert predict(jitted, x).phases == ("forward",)
        with torch.autocast("cpu", torch.bfloat16):
            prediction = predict(jitted, x)
            jitted(x)
            assert prediction.measured_bytes == measure_peak(lambda: jitted(x))
    assert predict(jitted, x).phases == ("forward", "backward")


@pytest.mark.slow
def test_each_shape_has_its_own_prediction():
    jitted = thunder.jit(nn.Sequential(nn.Linear(16, 32), nn.GELU()), executors=[])
    for rows in (4, 16, 8):
        jitted(torch.randn(rows, 16))
    for rows in (4, 16, 8, 2):
        x = torch.randn(rows, 16)
        prediction = predict(jitted, x)
        jitted(x)
        assert prediction.phase("forward").measured_bytes == measure_peak(jitted, x)


def test_who_is_alive_at_the_peak_and_where_it_was_made():
    def f(x, w):
        h = x @ w
        return h.sin().sum()

    x, w = torch.randn(8, 1024), torch.randn(1024, 1024, requires_grad=True)
    prediction = predict(thunder.jit(f, executors=[]), x, w)
    assert prediction.peak_event.phase == "backward"
    assert sum(h.nbytes for h in prediction.held_at_peak) + prediction.scratch_bytes == prediction.peak_bytes
    names = [h.name for h in prediction.held_at_peak]
    assert names[0] == "w" or names[1] == "w"  # the parameter and its gradient are the largest
    by_name = {h.name: h for h in prediction.held_at_peak}
    assert (by_name["w"].kind, by_name["w"].born, by_name["w"].nbytes) == ("argument", -1, 4 * 2**20)
    sources = [e.source for e in prediction.phase("forward").timeline]
    assert all(s.startswith(__file__) for s in sources) and len(set(sources)) == 2
    assert all(e.bsym is not None for e in prediction.timeline)


def test_the_timeline_adds_up():
    fn, args = CASES["views"]()
    prediction = predict(thunder.jit(fn, executors=[]), *args)
    for event in prediction.timeline:
        assert event.live_bytes == sum(h.nbytes for h in prediction.held_at(event.index))
        new = [h for h in prediction.storages if h.born == event.index and h.kind == "computed"]
        assert event.allocated_bytes == sum(h.nbytes for h in new)


def test_without_arguments_the_last_call_is_meant():
    jitted = thunder.jit(both, executors=[])
    with pytest.raises(ValueError, match="never been called"):
        predict(jitted)
    args = (randn(64, 64), randn(64, 64))
    jitted(*args)
    alone, given = predict(jitted), predict(jitted, *args)
    assert alone.peak_bytes == given.peak_bytes and alone.assumptions != given.assumptions


def test_arguments_that_share_memory_count_once():
    x = torch.randn(64, 64)
    prediction = predict(thunder.jit(lambda a, b: a @ b, executors=[]), x, x.t())
    assert prediction.held_bytes == 64 * 64 * 4


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: predict(torch.sin, torch.ones(1)), TypeError, "predict takes what thunder.jit returned, not builtin"),
        (lambda: predict(thunder.jit(lambda x: x.nosuch()), torch.ones(1)), PredictionError, "cannot be traced"),
        (
            lambda: predict(thunder.jit(torch.sin), randn(1), tangents=[torch.ones(1)] * 2),
            ValueError,
            r"takes 1 tangents, .*shapes \(1,\); but 2 were given",
        ),
        (
            lambda: predict(thunder.jit(torch.sin), randn(3, 4), tangents=[torch.ones(4, 3)]),
            ValueError,
            r"number 0 is \(4, 3\) of torch.float32 on cpu and not \(3, 4\) of torch.float32 on cpu",
        ),
        (
            lambda: predict(thunder.jit(torch.sin), randn(3), tangents=[torch.ones(3, dtype=torch.int64)]),
            ValueError,
            "number 0 is .* of torch.int64",
        ),
        (
            lambda: predict(thunder.jit(lambda a: (a * 2, a > 0)), randn(3), tangents=[torch.ones(3)] * 2),
            ValueError,
            "number 1 is None, as that output has no gradient",
        ),
        (
            lambda: predict(thunder.jit(torch.sin), randn(3), tangents=[1.0]),
            TypeError,
            "tangents are tensors or None, but number 0 is float",
        ),
        (lambda: predict(thunder.jit(torch.sin), torch.ones(1)).phase("backward"), ValueError, "only 'forward'"),
        (
            lambda: predict(thunder.jit(torch.sin), torch.ones(1, device="meta")),
            ValueError,
            "meta device take no memory",
        ),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_two_gpus_are_one_too_many():
    with simulate("T4"):
        x, y = (torch.ones(3, device=f"cuda:{i}") for i in range(2))
        with pytest.raises(ValueError, match="lives on cuda:0 and cuda:1"):
            predict(thunder.jit(lambda x, y: (x * 2, y * 2)), x, y)


OUTPUTS = {
    "an input as it is": (lambda a: (a, a * 2), (0, 1)),
    "an input as it is, last": (lambda a: (a * 2, a), (0, 1)),
    "an input that nobody uses": (lambda a: (a, a * 2), (1,)),
    "only an input": (lambda a: (a, a * 2), (0,)),
    "a view of an input": (lambda a: (a.t(), a * 2), (0, 1)),
    "a boolean": (lambda a: (a * 2, a > 0), (0,)),
    "an index": (lambda a: (a.argmax(), a * 2), (1,)),
    "an index of each row": (lambda a: (a.exp().sum(0).roll(1, 0).cumsum(0), a.argmax(-1)), (0,)),
    "values and indices": (lambda a: torch.topk(a.sin(), 3), (0,)),
    "one that nobody uses": (lambda a: (a.sin(), a * 2), (1,)),
}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("fn, used", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_outputs_that_are_special_to_autograd(fn, used, before):
    a = randn(64, 64)
    jitted = thunder.jit(fn, executors=[])

    def call():
        outs = jitted(a)
        torch.autograd.backward([outs[i] for i in used], [torch.ones_like(outs[i]) for i in used])

    def measured():
        a.grad = torch.zeros_like(a) if before else None
        return measure_peak(call)

    measured()
    tangents = [torch.ones_like(t) if i in used else None for i, t in enumerate(fn(a))]
    expected = measured()
    a.grad = torch.zeros_like(a) if before else None
    prediction = predict(jitted, a, tangents=tangents, keep_outputs=True)
    assert prediction.measured_bytes == expected


@pytest.mark.parametrize(
    "fn",
    [lambda a: (a * 2, a > 0), lambda a: (a * 2, a.argmax()), lambda a: torch.topk(a.sin(), 3)],
    ids=["boolean", "index", "topk"],
)
def test_an_output_without_a_gradient(fn):
    a = torch.randn(8, 8, requires_grad=True)
    jitted = thunder.jit(fn, executors=[])

    def step():
        jitted(a)[0].backward(tangent)

    tangent = torch.ones_like(fn(a)[0])
    step()
    a.grad = None
    prediction = predict(jitted, a)
    assert prediction.phase("backward").peak_bytes > 0
    assert prediction.phase("forward").peak_bytes >= a.nbytes


def test_an_operation_that_fails_is_an_error_without_logs():
    """Thunder alone, whose backward of sequences fails."""
    targets, told = torch.zeros(2, 4, dtype=torch.long), []
    jitted = thunder.jit(lambda x: F.cross_entropy(x, targets), executors=[])
    logger, handler = logging.getLogger("torch._subclasses.fake_tensor"), logging.Handler()
    handler.emit = told.append
    logger.addHandler(handler)
    try:
        with pytest.raises(PredictionError, match="cannot follow the memory of"):
            predict(jitted, torch.zeros(2, 3, 4, requires_grad=True))
        assert not told and not logger.disabled
        with FakeTensorMode(), pytest.raises(RuntimeError):
            torch.empty(2) + torch.empty(3)
        assert told
    finally:
        logger.removeHandler(handler)
