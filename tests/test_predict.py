"""Predicted equals measured, to the byte, on the CPU: forward, backward and the whole step."""

import copy

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.executors.torch_compile import torch_compile_ex
from torch import nn

from thunder_mem.attention import mem_attention_ex
from thunder_mem.executors import mem_pointwise_ex
from thunder_mem.measure import measure_peak
from thunder_mem.predict import PredictionError, predict
from thunder_mem.training_step import predict_step, training_step
from thunder_mem.transforms import MemEfficient


def randn(*shape):
    return torch.randn(*shape, requires_grad=True)


def efficient(a, b):
    """#1337: every path ends before the next begins."""
    total = None
    for scale in range(1, 6):
        path = ((a * scale).sin() + b).cos() * scale
        total = path if total is None else total + path
    return total


def inefficient(a, b):
    """#1337: all paths begin before the first ends."""
    paths = [(a * scale).sin() + b for scale in range(1, 6)]
    total = None
    for scale, path in enumerate(paths, 1):
        path = path.cos() * scale
        total = path if total is None else total + path
    return total


def in_place(x, w):
    y = x @ w
    y.add_(1)
    y = y.sin()
    y.mul_(2)
    return y.exp()


def views(x, w):
    a, b, c = (x @ w).chunk(3, -1)
    e = a.t().reshape(-1) * 2
    f = b.unsqueeze(0).expand(4, -1, -1).contiguous()
    g = (f * c).permute(2, 0, 1).reshape(8, -1)
    return e.sum() + g.sum(), a[::2].contiguous(), b.expand(2, *b.shape).sum(0)


class Net(nn.Module):
    """Convolution, batch normalisation (whose buffers change in place), pooling, linear."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 16, 3), nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return self.last(F.relu(self.second(x)).mean((2, 3)))


def gpt(layers=1):
    from litgpt import GPT, Config

    config = Config(
        block_size=64,
        vocab_size=128,
        padded_vocab_size=128,
        n_layer=layers,
        n_head=4,
        n_embd=32,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=88,
    )
    return GPT(config).to(torch.bfloat16)


CASES = {
    "efficient": lambda: (efficient, (randn(64, 64), randn(64, 64))),
    "inefficient": lambda: (inefficient, (randn(64, 64), randn(64, 64))),
    "in_place": lambda: (in_place, (randn(32, 48), randn(48, 64))),
    "views": lambda: (views, (randn(32, 48), randn(48, 96))),
    "net": lambda: (Net(), (torch.randn(4, 3, 16, 16),)),
    "gpt": lambda: (gpt(), (torch.randint(0, 128, (2, 32)),)),
}
WAYS = {
    "torch": lambda: {"executors": []},
    "pointwise": lambda: {"executors": [mem_attention_ex, mem_pointwise_ex]},
    "torchcompile": lambda: {"executors": [torch_compile_ex]},
    "efficient": lambda: {"executors": [mem_attention_ex, mem_pointwise_ex], "transforms": [MemEfficient()]},
}
# Compiling takes seconds a case, so only some are quick.
QUICK = [(case, "torch") for case in CASES if case != "gpt"]
QUICK += [("in_place", "pointwise"), ("in_place", "torchcompile"), ("views", "efficient")]
LONG = [(case, way) for case in CASES for way in WAYS if (case, way) not in QUICK]


def outputs_of(result):
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def check_case(case, way):
    fn, args = CASES[case]()
    jitted = thunder.jit(fn, **WAYS[way]())
    tangents = [torch.ones_like(t) for t in outputs_of(fn(*copy.deepcopy(args)))]
    prediction = predict(jitted, *args, tangents=tangents, keep_outputs=True)

    def forward_and_backward():
        outs = outputs_of(jitted(*args))
        torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])

    def clear():
        for t in (*args, *(fn.parameters() if isinstance(fn, nn.Module) else ())):
            t.grad = None

    forward_and_backward()
    clear()
    assert prediction.assumptions == ()
    assert prediction.measured_bytes == measure_peak(forward_and_backward)
    clear()
    assert prediction.phase("forward").measured_bytes == measure_peak(lambda: jitted(*args))
    assert prediction.scratch_bytes >= 0
    return prediction


@pytest.mark.parametrize("case, way", QUICK, ids=lambda x: x)
def test_predicted_equals_measured(case, way):
    check_case(case, way)


@pytest.mark.slow
@pytest.mark.parametrize("case, way", LONG, ids=lambda x: x)
def test_predicted_equals_measured_in_every_other_way(case, way):
    check_case(case, way)


def test_the_efficient_order_needs_less():
    needs = {}
    for fn in (efficient, inefficient):
        args = (torch.randn(64, 64), torch.randn(64, 64))
        needs[fn] = predict(thunder.jit(fn, executors=[]), *args)
    nbytes = 64 * 64 * 4
    assert needs[efficient].peak_bytes == (2 + 3) * nbytes
    assert needs[inefficient].peak_bytes == (2 + 6) * nbytes


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, maximize=True, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p),
    "SGD momentum": lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "Adagrad foreach": lambda p: torch.optim.Adagrad(p, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


def small_model():
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 16))


def mean_square(out):
    return (out.float() ** 2).mean()


def check_step(model, optimizer, loss_fn, *args, options=None, jit=None, before=2):
    options = options or {}
    jitted = thunder.jit(model, **(jit or {"executors": []}))
    prediction = predict_step(jitted, optimizer, loss_fn, *args, first=not before, **options)
    if not before:
        jitted(*args)  # compiles, steps nothing
    for _ in range(before):
        training_step(jitted, optimizer, loss_fn, *args, **options)
    measured = measure_peak(lambda: training_step(jitted, optimizer, loss_fn, *args, **options))
    assert prediction.measured_bytes == measured
    return prediction


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_step_with_any_optimizer(make):
    model = small_model()
    prediction = check_step(model, make(model.parameters()), mean_square, torch.randn(4, 32))
    assert prediction.phases == ("forward", "loss", "backward", "optimizer")


@pytest.mark.parametrize(
    "options", [{"accumulate": 3}, {"set_to_none": False}, {"accumulate": 2, "set_to_none": False}]
)
def test_a_step_however_gradients_are_kept(options):
    model = small_model()
    check_step(model, torch.optim.SGD(model.parameters()), mean_square, torch.randn(512, 32), options=options)


def test_the_first_step_makes_the_state():
    model = small_model()
    first = check_step(model, torch.optim.AdamW(model.parameters()), mean_square, torch.randn(4, 32), before=0)
    later = check_step(model, torch.optim.AdamW(model.parameters()), mean_square, torch.randn(4, 32))
    assert first.held_bytes < later.held_bytes


def test_a_step_of_a_network_with_buffers():
    model = Net()
    target = torch.zeros(4, dtype=torch.long)
    check_step(
        model,
        torch.optim.AdamW(model.parameters()),
        lambda out: F.cross_entropy(out, target),
        torch.randn(4, 3, 16, 16),
    )


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        logits = self.model(x)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), y.reshape(-1))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_a_language_model(way):
    model = WithLoss(gpt())
    tokens = torch.randint(0, 128, (2, 32))
    check_step(model, torch.optim.AdamW(model.parameters()), None, tokens, tokens, jit=WAYS[way]())


def test_nothing_of_the_callers_changes():
    model = Net()
    x = torch.randn(4, 3, 16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())
    state = torch.random.get_rng_state()
    predict_step(thunder.jit(model, executors=[]), optimizer, lambda out: out.sum(), x)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and not optimizer.state
    assert torch.equal(state, torch.random.get_rng_state())


def test_who_is_alive_at_the_peak_and_where_it_was_made():
    def f(x, w):
        h = x @ w
        return h.sin().sum()

    x, w = torch.randn(8, 1024), torch.randn(1024, 1024, requires_grad=True)
    prediction = predict(thunder.jit(f, executors=[]), x, w)
    assert prediction.peak_event.phase == "backward"
    assert sum(h.nbytes for h in prediction.held_at_peak) == prediction.peak_bytes
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
    jitted = thunder.jit(efficient, executors=[])
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
            "takes 1 tangents, but 2",
        ),
        (lambda: predict(thunder.jit(torch.sin), torch.ones(1)).phase("backward"), ValueError, "only 'forward'"),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "optimizer, loss_fn, options, error, message",
    [
        (torch.optim.LBFGS, mean_square, {}, TypeError, "LBFGS calls the model from a closure"),
        (lambda p: None, mean_square, {}, TypeError, "takes a torch.optim optimizer, not NoneType"),
        (torch.optim.SGD, None, {}, ValueError, r"it is a tensor of shape \(4, 16\): give predict_step a loss_fn"),
        (torch.optim.SGD, lambda out: 3, {}, ValueError, "but it is int"),
        (torch.optim.SGD, lambda out: out.detach().sum(), {}, ValueError, "does not depend on anything"),
        (torch.optim.SGD, mean_square, {"accumulate": 0}, ValueError, "an int from 1 up, not 0"),
    ],
)
def test_wrong_arguments_of_a_step(optimizer, loss_fn, options, error, message):
    model = small_model()
    with pytest.raises(error, match=message):
        predict_step(thunder.jit(model), optimizer(model.parameters()), loss_fn, torch.randn(4, 32), **options)
