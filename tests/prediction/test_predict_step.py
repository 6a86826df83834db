"""Predicted equals measured, to the byte, on the CPU: whole training steps."""

import copy

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.programs.predict_cases import CASES, WAYS, Net, Tied, trained
from thunder_mem import MemEfficient, StepInBackward, predict
from thunder_mem.fake_execution import operator_scratch, scratch
from thunder_mem.prediction.simulate import simulate
from thunder_mem.prediction.training_step import predict_step, training_step
from thunder_mem.runtime.measure import measure_peak

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
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Adadelta foreach": lambda p: torch.optim.Adadelta(p, foreach=True),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Rprop foreach": lambda p: torch.optim.Rprop(p, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, fused=True, momentum=0.9),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "AdamW with a tensor for a learning rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
}


def small_model():
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 16))


def mean_square(out):
    return (out.float() ** 2).mean()


def check_step(model, optimizer, loss_fn, *args, options=None, jit=None, before=2):
    options = options or {}
    jitted = model if thunder.compile_data(model) else thunder.jit(model, **(jit or {"executors": []}))
    prediction = predict_step(jitted, optimizer, loss_fn, *args, first=not before, **options)
    if not before:
        jitted(*args)  # compiles, steps nothing
    for _ in range(before):
        training_step(jitted, optimizer, loss_fn, *args, **options)
    measured = measure_peak(lambda: training_step(jitted, optimizer, loss_fn, *args, **options))
    assert prediction.measured_bytes == measured
    return prediction


@pytest.fixture(scope="module")
def compiled_once():
    model = small_model()
    return model, thunder.jit(model, executors=[])


@pytest.mark.sampled(7)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_step_with_any_optimizer(make, compiled_once):
    model, jitted = compiled_once
    prediction = check_step(jitted, make(model.parameters()), mean_square, torch.randn(4, 32))
    assert prediction.phases == ("forward", "loss", "backward", "optimizer")


@pytest.mark.parametrize(
    "options", [{"accumulate": 3}, {"set_to_none": False}, {"accumulate": 2, "set_to_none": False}]
)
def test_a_step_however_gradients_are_kept(options):
    model = small_model()
    check_step(model, torch.optim.SGD(model.parameters()), mean_square, torch.randn(512, 32), options=options)


def test_the_last_gradient_of_a_microbatch_is_gone_before_the_next():
    """With the loss inside of the compiled function no operator runs between the two."""
    model, args, loss_fn = trained("in_place")
    prediction = check_step(model, torch.optim.SGD(model.parameters()), loss_fn, *args, options={"accumulate": 3})
    assert prediction.phase("forward").peak_bytes < prediction.phase("backward").peak_bytes


def test_the_first_step_makes_the_state():
    model = small_model()
    first = check_step(model, torch.optim.AdamW(model.parameters()), mean_square, torch.randn(4, 32), before=0)
    later = check_step(model, torch.optim.AdamW(model.parameters()), mean_square, torch.randn(4, 32))
    assert first.held_bytes < later.held_bytes


class History(torch.optim.Optimizer):
    """A user's optimizer whose state is a list and a table."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if not self.state[p]:
                    self.state[p] = {"history": [torch.zeros_like(p) for _ in range(3)], "sums": {}}
                    self.state[p]["sums"]["all"] = torch.zeros_like(p)
                for t in (*self.state[p]["history"], self.state[p]["sums"]["all"]):
                    t.mul_(0.9).add_(p.grad)
                p.add_(self.state[p]["history"][0], alpha=-group["lr"])


@pytest.mark.parametrize(("in_backward", "before"), [(False, 0), (False, 2), (True, 2)])
def test_a_state_of_lists_and_tables(in_backward, before):
    model = small_model()
    optimizer = StepInBackward(History(model.parameters())) if in_backward else History(model.parameters())
    jit = {"executors": [], "transforms": [MemEfficient(strict=True, optimizer=optimizer)] if in_backward else []}
    prediction = check_step(model, optimizer, mean_square, torch.randn(8, 32), jit=jit, before=before)
    parameters_bytes = sum(p.nbytes for p in model.parameters())
    assert prediction.held_bytes == (5 if before else 1) * parameters_bytes + 8 * 32 * 4


def test_the_first_step_in_the_backward_makes_lists_and_tables():
    model, x = small_model(), torch.randn(8, 32)
    history = History(model.parameters())
    ours = StepInBackward(history)
    step = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])
    training_step(step, ours, mean_square, x)
    history.state.clear()
    prediction = predict_step(step, ours, mean_square, x, first=True)
    assert measure_peak(lambda: training_step(step, ours, mean_square, x)) == prediction.measured_bytes


@pytest.mark.slow
def test_a_step_of_a_network_with_buffers():
    model = Net()
    target = torch.zeros(4, dtype=torch.long)
    check_step(
        model,
        torch.optim.AdamW(model.parameters()),
        lambda out: F.cross_entropy(out, target),
        torch.randn(4, 3, 16, 16),
    )


class Square(nn.Module):
    """One wide parameter, which holds the peak when its gradients meet."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(128, 128))

    def forward(self, x):
        return (x @ self.weight) @ self.weight.t()


SUMS = {
    "the weight squared": lambda w, out: (w * w).sum() + out.sum(),
    "three uses": lambda w, out: w.sin().sum() + w.cos().sum() + w.exp().sum() + out.sum(),
    "a weight and its transpose": lambda w, out: (w + w.t()).sum() + out.sum(),
    "pieces": lambda w, out: sum((part * 2).sum() for part in w.chunk(4)) + out.sum(),
    "a node that adds by itself": lambda w, out: sum(t.sum() for t in torch.std_mean(w, 0)) + out.sum(),
    "an output used twice": lambda w, out: out.sin().sum() + out.exp().sum(),
    "an output with itself": lambda w, out: (out * out).sum(),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rows", [1, 160])
@pytest.mark.parametrize("loss", SUMS.values(), ids=SUMS.keys())
def test_gradients_that_meet_are_added_where_autograd_adds_them(loss, rows):
    model = Square()
    check_step(model, torch.optim.SGD(model.parameters()), lambda out: loss(model.weight, out), torch.randn(rows, 128))


ROWS = torch.arange(300) % 128
SCATTERS = {
    "index": lambda y: y[ROWS].square().sum(),
    "two indices": lambda y: y[ROWS, ROWS % 64].square().sum(),
    "index_select": lambda y: y.index_select(0, ROWS).square().sum(),
    "gather": lambda y: y.gather(0, ROWS[:, None].expand(300, 64)).square().sum(),
    "take": lambda y: y.take(ROWS).square().sum(),
    "topk": lambda y: y.topk(4).values.square().sum(),
    "sort": lambda y: y.sort(-1).values[:, :4].square().sum(),
    "max": lambda y: y.max(-1).values.square().sum(),
    "median": lambda y: y.median(-1).values.square().sum(),
    "cummax": lambda y: y.cummax(-1).values.square().sum(),
    "scatter into the output": lambda y: y.scatter(0, ROWS[:8, None], 1.0).square().sum(),
    "put into the output": lambda y: y.index_put((ROWS[:8],), y[:8]).square().sum(),
}


class ScattersItself(torch.autograd.Function):
    """Its own code scatters into a copy, as it says."""

    @staticmethod
    def forward(ctx, y):
        return y.index_select(0, ROWS)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(128, 64).index_add(0, ROWS, grad)


def hooked(y):
    y.register_hook(lambda grad: torch.zeros_like(grad).index_add(0, ROWS[:128], grad))
    return y.sin().sum()


SCATTERS["a hook of the user's"] = hooked
SCATTERS["index_reduce"] = lambda y: y.index_reduce(0, ROWS[:8], y[:8].detach(), "amax").square().sum()
SCATTERS["a function of the user's"] = lambda y: ScattersItself.apply(y).square().sum()


@pytest.mark.parametrize("loss", SCATTERS.values(), ids=SCATTERS.keys())
def test_a_loss_scatters_its_gradient_into_zeros(loss):
    """Autograd's formulas scatter in place, but for fake tensors into a copy."""
    model, x = nn.Linear(32, 64), torch.randn(128, 32)
    check_step(model, None, loss, x, before=0)


def test_a_checkpoint_of_the_loss_scatters_into_a_copy_again():
    model, x = nn.Linear(32, 64), torch.randn(128, 32)

    def body(y):
        z = y.exp()
        return (z.index_add(0, ROWS[:128], y) * z).square().sum()

    jitted = thunder.jit(model, executors=[])

    def loss(y):
        return checkpoint(body, y, use_reentrant=False, preserve_rng_state=False)

    def step():
        loss(jitted(x)).backward()
        for p in model.parameters():
            p.grad = None

    step()
    assert predict_step(jitted, None, loss, x).measured_bytes == measure_peak(step)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_of_tied_weights_meet(accumulate):
    model = Tied()
    tokens = torch.randint(0, 128, (1, 2))
    optimizer = torch.optim.SGD(model.parameters())
    check_step(model, optimizer, lambda out: out.sum(), tokens, options={"accumulate": accumulate})


@pytest.mark.parametrize("trained", [True, False])
def test_a_head_outside_of_the_compiled_model(trained):
    """Its parameters are in the optimizer, or they are not and keep their gradients from step to step."""
    body, head, target = nn.Linear(16, 64), nn.Linear(64, 256), torch.randint(0, 256, (4,))
    parameters = [*body.parameters(), *(head.parameters() if trained else ())]
    optimizer = torch.optim.AdamW(parameters)
    for p in () if trained else head.parameters():
        p.grad = torch.zeros_like(p)  # as an earlier step left it
    check_step(body, optimizer, lambda out: F.cross_entropy(head(out), target), torch.randn(4, 16))
    for p in (*body.parameters(), *head.parameters()):
        p.grad = None
    predict_step(
        thunder.jit(body, executors=[]), optimizer, lambda out: F.cross_entropy(head(out), target), torch.randn(4, 16)
    )
    assert all(p.grad is None for p in (*body.parameters(), *head.parameters()))


def test_a_head_outside_of_the_compiled_model_on_a_simulated_gpu():
    def step(device):
        with torch.device(device):
            body, head, target = nn.Linear(16, 64), nn.Linear(64, 256), torch.zeros(4, dtype=torch.long)
            x = torch.ones(4, 16)
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1, foreach=False)
        jitted = thunder.jit(body, executors=[])
        return predict_step(jitted, optimizer, lambda out: F.cross_entropy(head(out), target), x)

    on_cpu = step("cpu")
    with simulate("H100-80GB"):
        on_cuda = step("cuda")
    assert (on_cuda.measured_bytes, on_cuda.held_bytes) == (on_cpu.measured_bytes, on_cpu.held_bytes)


LOSSES = {
    "the function returns the loss": (lambda a: (a * 2).sin().sum(), None),
    "an eager sum": (lambda a: (a * 2).sin(), torch.sum),
    "several outputs": (lambda a: (a.sin(), a * 2), lambda outs: outs[0].mean() + outs[1].square().sum()),
    "an output that is the input": (lambda a: (a, a * 2), lambda outs: outs[0].sum() + outs[1].sum()),
    "only the input that is returned": (lambda a: (a, a * 2), lambda outs: outs[0].sum()),
    "an output that is not used": (lambda a: (a.sin(), a * 2), lambda outs: outs[1].sum()),
}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("fn, loss_fn", LOSSES.values(), ids=LOSSES.keys())
def test_a_backward_without_an_optimizer(fn, loss_fn, before):
    """What people write: `loss_fn(jitted(x)).backward()`, with a gradient from before or without."""
    x = torch.randn(64, 64, requires_grad=True)
    jitted = thunder.jit(fn, executors=[])

    def run():
        x.grad = torch.zeros_like(x) if before else None
        return measure_peak(lambda: (jitted(x) if loss_fn is None else loss_fn(jitted(x))).backward())

    run()
    measured = run()
    x.grad = torch.zeros_like(x) if before else None
    prediction = predict_step(jitted, None, loss_fn, x)
    assert prediction.measured_bytes == measured
    assert prediction.held_bytes == x.nbytes * (2 if before else 1) and "optimizer" not in prediction.phases


def test_a_model_without_an_optimizer():
    model, x = small_model(), torch.randn(64, 32)
    prediction = check_step(model, None, mean_square, x, before=0)
    gradients_bytes = sum(p.nbytes for p in model.parameters())
    assert prediction.phases == ("forward", "loss", "backward")
    assert prediction.timeline[-1].live_bytes >= prediction.held_bytes + gradients_bytes
    with simulate("H100-80GB"):
        with torch.device("cuda"):
            model, x = small_model(), torch.ones(64, 32)
        simulated = predict_step(thunder.jit(model, executors=[]), None, mean_square, x)
    assert (simulated.measured_bytes, simulated.held_bytes) == (prediction.measured_bytes, prediction.held_bytes)


def test_groups_and_parameters_that_no_output_depends_on():
    model = small_model()
    model.idle = nn.Linear(16, 16)
    first, *rest = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": rest, "weight_decay": 0.0}])
    check_step(model, optimizer, mean_square, torch.randn(4, 32))


# Of every program, in every way it is compiled; those that compile quickly by default.
QUICK = [(case, "torch") for case in ("efficient", "in_place", "views")] + [("inefficient", "planned")]
LONG = [(case, way) for case in CASES for way in WAYS if (case, way) not in QUICK and way != "chunked"]
LONG += [("gpt_loss", "chunked")]


def check_adamw(case, way):
    model, args, loss_fn = trained(case)
    check_step(model, torch.optim.AdamW(model.parameters()), loss_fn, *args, jit=WAYS[way]())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case, way", QUICK, ids=lambda x: x)
def test_an_adamw_step(case, way):
    check_adamw(case, way)


@pytest.mark.slow
@pytest.mark.parametrize("case, way", LONG, ids=lambda x: x)
def test_an_adamw_step_in_every_other_way(case, way):
    check_adamw(case, way)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["many_kernels", "net"])
def test_a_plan_for_torchcompile_is_no_higher_than_thunders_own(case):
    """The planner does not see what Inductor keeps between two kernels of a region; here that does not matter."""
    peaks = []
    for way in ("torchcompile", "planned torchcompile"):
        model, args, loss_fn = trained(case)
        jitted = thunder.jit(model, **WAYS[way]())
        peaks.append(predict_step(jitted, torch.optim.AdamW(model.parameters()), loss_fn, *args).peak_bytes)
    assert peaks[1] <= peaks[0]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch", "planned pointwise"])
@pytest.mark.parametrize("case", ["inefficient", "in_place", "views", "net", "gpt_loss"])
def test_a_step_with_every_optimizer_however_gradients_are_kept(case, way):
    model, args, loss_fn = trained(case)
    jitted = thunder.jit(model, **WAYS[way]())
    for make in OPTIMIZERS.values():
        for options in ({}, {"set_to_none": False}, {"accumulate": 3}):
            for p in model.parameters():
                p.grad = None  # which the options before may have left
            check_step(jitted, make(model.parameters()), loss_fn, *args, options=options)


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "optimizer, loss_fn, options, error, message",
    [
        (torch.optim.LBFGS, mean_square, {}, TypeError, "LBFGS calls the model from a closure"),
        (lambda p: 3, mean_square, {}, TypeError, "takes a torch.optim optimizer or None, not int"),
        (
            lambda p: torch.optim.AdamW,
            mean_square,
            {},
            TypeError,
            r"AdamW is the class: call it with the parameters, AdamW\(model.parameters\(\)\)",
        ),
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


def forget():
    """Whatever was measured is measured again."""
    scratch._PROBES.clear()
    operator_scratch._OPERATOR_PROBES.clear()
    scratch.scratch_cache.table()._known.clear()


def test_a_predicted_step_leaves_predictions_as_they_were():
    """What is measured for a prediction is not measured under the mode that watches a step."""
    torch.manual_seed(0)
    first, frozen, last = torch.nn.Linear(32, 64), torch.nn.Linear(64, 64).requires_grad_(False), torch.nn.Linear(64, 8)
    model = torch.nn.Sequential(first, torch.nn.Tanh(), frozen, torch.nn.Tanh(), last)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x = torch.randn(16, 32)
    forget()
    jitted = thunder.jit(model, executors=[])
    step = predict_step(jitted, optimizer, torch.sum, x, set_to_none=False)
    after = predict(jitted, x)
    forget()
    before = predict(jitted, x)
    assert after.peak_bytes == before.peak_bytes

    def run():
        training_step(jitted, optimizer, torch.sum, x, set_to_none=False)

    run()
    run()
    assert measure_peak(run) == step.peak_bytes - step.held_bytes
