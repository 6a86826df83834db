"""Updates inside the backward: the same training as `loss.backward(); optimizer.step()`, or an error."""

import copy
import pickle

import pytest
import thunder
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from thunder_mem import MemEfficient, StepInBackward, explain, fits, last_plan, measure_peak, predict, predict_step
from thunder_mem.optimizer.one_parameter import step_alone
from thunder_mem.optimizer.update import is_update, update_of
from thunder_mem.prediction.training_step import training_step
from thunder_mem.semantics.kernel_scratch import estimated_scratch_bytes
from thunder_mem.trace.reading import read_trace

NAMES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


class Block(nn.Module):
    """A tied weight, a frozen one, one that nothing uses, and a part under a checkpoint."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + checkpoint(lambda v: self.down(torch.tanh(self.up(self.norm(v)))), x, use_reentrant=False)
        return self.frozen(x) @ self.embed.weight.t()


def ids(seed=0):
    return torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(seed))


def loss_of(logits):
    return logits.square().mean()


def made(optimizer=torch.optim.AdamW, **options):
    """A compiled block and its optimizer."""
    torch.manual_seed(0)
    model = Block()
    ours = StepInBackward(optimizer((p for p in model.parameters() if p.requires_grad), **options))
    return model, ours, thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])


@pytest.fixture(scope="module")
def block():
    return made()


@pytest.fixture
def fresh(block):
    """The compiled block with new parameters and a new optimizer, compiled once for all tests."""
    model, ours, step = block
    torch.manual_seed(0)
    model.load_state_dict(Block().state_dict())
    for p in model.parameters():
        p.grad = None
    return model, renew(ours, model, torch.optim.AdamW(trainable(model), lr=1e-2)), step


def as_text(state_dict):
    """An optimizer's state; parameters get theirs in the order of their updates."""
    return str(sorted(state_dict["state"].items())), str(state_dict["param_groups"])


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def renew(ours, model, optimizer):
    ours.wrapped = optimizer
    ours.load_state_dict(optimizer.state_dict())
    return ours


def run(model, optimizer, step, count, *, in_two=False):
    """Train; `in_two` hands the same gradients to an ordinary `step`."""
    losses = []
    for i in range(count):
        loss = loss_of(step(ids(i)))
        if in_two:
            with optimizer.accumulate():
                loss.backward()
        else:
            loss.backward()
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()], optimizer.state_dict()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [*NAMES, "Adafactor"])
@pytest.mark.parametrize("more", ["", "maximize", "weight_decay"])
def test_same_bits_as_a_step_after_the_backward(fresh, name, more):
    model, ours, step = fresh
    options = {"lr": 1e-2} | {"maximize": {"maximize": True, "lr": 1e-4}, "weight_decay": {"weight_decay": 0.1}}.get(
        more, {}
    )
    if name == "Rprop":
        options.pop("weight_decay", None)
    start = copy.deepcopy(model.state_dict())
    seen = []
    for in_two in (True, False):
        model.load_state_dict(start)
        groups = [{"params": trainable(model)[:2]}, {"params": trainable(model)[2:], "lr": 3e-3}]
        renew(ours, model, getattr(torch.optim, name)(groups, **options))
        seen.append(run(model, ours, step, 50, in_two=in_two))
    (losses, parameters, state), (our_losses, our_parameters, our_state) = seen
    assert losses == our_losses
    assert all(map(torch.equal, parameters, our_parameters))
    assert as_text(state) == as_text(our_state)


def test_follows_float64_eager(fresh):
    model, ours, step = fresh
    exact = copy.deepcopy(model).double()
    adamw = torch.optim.AdamW(trainable(exact), lr=1e-2)
    for i in range(10):
        adamw.zero_grad()
        loss = loss_of(exact(ids(i)))
        loss.backward()
        adamw.step()
        ours_loss = loss_of(step(ids(i)))
        ours_loss.backward()
        ours.step()
        assert ours_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, atol=2e-5, rtol=1e-4)


class Tied(nn.Module):
    """A parameter of two modules, which a compiled function takes twice."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gradients_of_a_parameter_that_is_taken_twice_are_added(dtype):
    torch.manual_seed(0)
    model = Tied().to(dtype)
    start, exact = model.embed.weight.detach().double(), copy.deepcopy(model).double()
    ours = StepInBackward(torch.optim.SGD(model.parameters(), lr=1.0))
    step = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])
    step(ids()).square().sum().backward()
    ours.step()
    exact(ids()).square().sum().backward()
    assert model.embed.weight.grad is None
    moved, gradient = start - model.embed.weight.detach().double(), exact.embed.weight.grad
    assert (moved - gradient).abs().max() < 16 * torch.finfo(dtype).eps * gradient.abs().max()


def test_every_parameter_is_updated_once_and_after_its_last_read(block):
    *_, step = block
    loss_of(step(ids())).backward()
    block[1].step()
    trace = thunder.last_backward_traces(step)[-1]
    updates = [(i, update_of(b)) for i, b in enumerate(trace.bound_symbols) if is_update(b)]
    labels = [u.label for _, u in updates]
    assert len(labels) == len(set(labels)) == 7  # the tied weight once; neither the frozen one nor the unused one
    for i, b in enumerate(trace.bound_symbols):
        for at, update in updates:
            reads = any(p.name == update.label for p in b.flat_proxy_args) and b.sym.name != "python_del"
            assert not (reads and i > at), f"{update.label} is read after its update"
    assert all(g is None for g in trace.output)


def test_a_plan_counts_the_temporaries_of_updates():
    _, ours, step = made()
    loss_of(step(ids())).backward()
    ours.step()
    trace = thunder.last_backward_traces(step)[-1]
    scratch = {update_of(b).label: estimated_scratch_bytes(b) for b in trace.bound_symbols if is_update(b)}
    assert scratch["t_up_weight"] >= 2 * 8 * 32 * 4  # AdamW holds two values of the parameter's size
    graph = read_trace(trace).graph
    assert {op.scratch_bytes for op in graph.ops if op.name == "update_parameter"} == set(scratch.values())


def test_accumulation_uses_the_sum(fresh):
    model, ours, step = fresh
    exact = copy.deepcopy(model).double()
    adamw = torch.optim.AdamW(trainable(exact), lr=1e-2)
    for i in range(3):
        (loss_of(exact(ids(i))) / 3).backward()
    adamw.step()
    for i in range(3):
        if i < 2:
            with ours.accumulate():
                (loss_of(step(ids(i))) / 3).backward()
        else:
            (loss_of(step(ids(i))) / 3).backward()
    ours.step()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, atol=1e-6, rtol=1e-4)


def test_clip_value(fresh):
    model, ours, step = fresh
    other = copy.deepcopy(model)
    sgd = torch.optim.SGD(trainable(other), lr=0.1)
    renew(ours, model, torch.optim.SGD(trainable(model), lr=0.1))
    ours.clip_value = 1e-3
    loss_of(other(ids())).backward()
    torch.nn.utils.clip_grad_value_(other.parameters(), 1e-3)
    sgd.step()
    loss_of(step(ids())).backward()
    ours.step()
    ours.clip_value = None
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_max_norm_is_exact(dtype):
    seen = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(dtype)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ours = StepInBackward(adamw, max_norm=1e-3)
        step = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])
        for i in range(6):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).to(dtype)
            if wrapped:
                if i % 2 == 0:  # two microbatches
                    with ours.accumulate():
                        loss_of(step(x)).backward()
                loss_of(step(2 * x)).backward()
                assert all(p.grad is None for p in model.parameters())
                ours.step()
            else:
                with ours.accumulate():  # gradients of the same trace
                    if i % 2 == 0:
                        loss_of(step(x)).backward()
                    loss_of(step(2 * x)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                adamw.step()
                adamw.zero_grad()
                ours.zero_grad()
        seen.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *seen))


def test_max_norm_waits_for_parameters_from_elsewhere():
    torch.manual_seed(1)
    inside, outside = nn.Linear(5, 5), nn.Linear(5, 5)
    exact = copy.deepcopy(nn.Sequential(inside, outside)).double()
    reference = torch.optim.SGD(exact.parameters(), lr=1.0)
    ours = StepInBackward(torch.optim.SGD([*inside.parameters(), *outside.parameters()], lr=1.0), max_norm=0.1)
    step = thunder.jit(inside, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])
    x = torch.randn(3, 5)
    with pytest.warns(UserWarning, match="max_norm needs the norm of all"):
        outside(step(x)).square().sum().backward()
    ours.step()
    exact(x.double()).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(exact.parameters(), 0.1)
    reference.step()
    for p, q in zip([*inside.parameters(), *outside.parameters()], exact.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, atol=1e-6, rtol=1e-5)


def test_schedulers_and_state(fresh):
    model, ours, step = fresh
    schedule = torch.optim.lr_scheduler.StepLR(ours, step_size=1, gamma=0.5)
    run(model, ours, step, 1)
    schedule.step()
    assert ours.param_groups[0]["lr"] == ours.wrapped.param_groups[0]["lr"] == 5e-3
    saved = ours.state_dict()
    assert saved["state"] and isinstance(torch.optim.AdamW(trainable(model)).load_state_dict(saved), type(None))
    again = pickle.loads(pickle.dumps(ours))
    assert again.consistent and str(again.state_dict()) == str(saved)


def test_a_closure_runs_first(fresh):
    _, ours, step = fresh

    def closure():
        loss = loss_of(step(ids()))
        loss.backward()
        return loss

    assert ours.step(closure).item() > 0


def test_step_without_a_backward(fresh):
    _, ours, _ = fresh
    with pytest.raises(RuntimeError, match="no backward gave a gradient"):
        ours.step()


def test_second_backward_before_step_changes_nothing(fresh):
    model, ours, step = fresh
    loss_of(step(ids())).backward()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="a second backward since the last step"):
        loss_of(step(ids())).backward()
    assert all(map(torch.equal, before, model.parameters()))
    ours.step()


def test_retained_graph_cannot_run_again(fresh):
    model, ours, step = fresh
    loss = loss_of(step(ids()))
    loss.backward(retain_graph=True)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError):
        loss.backward()
    assert all(map(torch.equal, before, model.parameters()))
    ours.step()


def test_two_forwards_before_their_backwards_wait_for_step(fresh):
    model, ours, step = fresh
    exact = copy.deepcopy(model).double()
    adamw = torch.optim.AdamW(trainable(exact), lr=1e-2)
    (loss_of(exact(ids(0))) + loss_of(exact(ids(1)))).backward()
    adamw.step()
    with pytest.warns(UserWarning, match="gradients wait for"):
        (loss_of(step(ids(0))) + loss_of(step(ids(1)))).backward()
    ours.step()
    ours.zero_grad()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, atol=1e-6, rtol=1e-4)
    loss_of(step(ids())).backward()
    assert all(p.grad is None for p in model.parameters())
    ours.step()


def test_gradient_from_outside_after_the_update(fresh):
    model, ours, step = fresh
    (loss_of(step(ids())) + model.up.weight.sum()).backward()
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(RuntimeError, match="from outside of the compiled program"):
        ours.step()
    assert not ours.consistent
    for later in (ours.step, ours.zero_grad, ours.state_dict):
        with pytest.raises(RuntimeError, match="load the state from before the backward"):
            later()
    model.zero_grad()
    ours.load_state_dict(before)
    assert ours.consistent
    loss_of(step(ids())).backward()
    ours.step()


def test_zero_grad_drops_no_gradients_that_are_used(fresh):
    """As in a loop of two models, where the loss of one passes through the other."""
    _, ours, step = fresh
    loss_of(step(ids())).backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) before step\(\)"):
        ours.zero_grad()
    ours.step()
    ours.zero_grad()


def test_a_parameter_that_a_result_shows_waits_for_step():
    class Shows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.seen, self.inside = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))

        def forward(self, x):
            return self.seen.permute(0, 1), (x @ self.inside).cos() @ self.seen

    model, x = Shows(), torch.randn(3, 4)
    exact = copy.deepcopy(model)
    ours, theirs = StepInBackward(torch.optim.SGD(model.parameters(), lr=0.1)), torch.optim.SGD(exact.parameters(), 0.1)
    step = thunder.jit(model, executors=[], transforms=[MemEfficient(optimizer=ours, strict=True)])
    for call, optimizer in ((step, ours), (exact, theirs)):
        shown, product = call(x)
        (shown.square().sum() + product.sum()).backward()
        assert model.inside.grad is None
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_interrupted_backward(fresh, monkeypatch):
    _, ours, step = fresh
    calls = []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step_alone(*args, **kwargs)

    monkeypatch.setattr("thunder_mem.optimizer.host_states.step_alone", failing)
    with pytest.raises(KeyboardInterrupt):
        loss_of(step(ids())).backward()
    monkeypatch.undo()
    assert not ours.consistent
    for action in (ours.step, ours.state_dict, lambda: loss_of(step(ids())).backward()):
        with pytest.raises(RuntimeError, match="5 of 7 parameters not updated"):
            action()
    ours.load_state_dict(ours.wrapped.state_dict())
    assert ours.consistent


def test_shared_gradient_memory_is_not_changed():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))

        def forward(self, x):
            return (x + self.a + self.b).square().sum()

    class InPlace(torch.optim.SGD):
        """Changes the gradients that it is given, as some optimizers do."""

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        with torch.no_grad():
                            p.sub_(p.grad.mul_(group["lr"]))

    model = Sum()
    ours = StepInBackward(InPlace(model.parameters(), lr=0.1))
    step = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])
    x = torch.zeros(5, requires_grad=True)
    step(x).backward()
    ours.step()
    assert torch.equal(x.grad, torch.full((5,), 4.0))
    assert torch.allclose(model.a, torch.full((5,), 0.6)) and torch.equal(model.a, model.b)


def test_closures_and_other_parameters():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    other = nn.Parameter(torch.ones(4))
    given = nn.Parameter(torch.ones(4))
    ours = StepInBackward(torch.optim.SGD([model.weight, model.bias, other, given], lr=0.1))

    def program(x, w):
        return (model(x) * w * other).sum()

    step = thunder.jit(program, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])
    before = given.detach().clone()
    step(torch.ones(2, 4), given).backward()
    assert model.weight.grad is None and other.grad is None and given.grad is not None
    ours.step()
    assert not torch.equal(given, before)


def test_a_program_without_its_parameters_says_so():
    ours = StepInBackward(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))
    step = thunder.jit(lambda x: (x * x).sum(), executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])
    step(torch.ones(3, requires_grad=True)).backward()
    assert any("updates in the backward" in r.what for r in last_plan(step).refused)
    assert "updates in the backward" in str(explain(step, detail=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name, options, clip",
    [
        ("AdamW", {}, {}),
        ("SGD", {"momentum": 0.9}, {"clip_value": 0.1}),
        ("AdamW", {"fused": True}, {}),
        ("NAdam", {}, {"max_norm": 0.1}),
        ("AdamW", {}, {"max_norm": 0.1, "two_pass": True}),
    ],
)
def test_predicted_step_is_the_measured_one(name, options, clip):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    ours = StepInBackward(getattr(torch.optim, name)(model.parameters(), lr=1e-2, **options), **clip)
    step = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])
    x = torch.randn(16, 64)
    with torch.no_grad():
        step(x)
    first = predict_step(step, ours, loss_of, x, first=True)
    measured = measure_peak(lambda: training_step(step, ours, loss_of, x))
    assert first.measured_bytes == measured
    for count in (1, 3):
        predicted = predict_step(step, ours, loss_of, x, accumulate=count)
        measured = measure_peak(lambda n=count: training_step(step, ours, loss_of, x, accumulate=n))
        assert predicted.measured_bytes == measured


def test_gradients_die_young():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(8)))
    x = torch.randn(4, 128)
    peaks = []
    for wrap in (lambda o: o, StepInBackward):
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1e-2))
        ours = optimizer if isinstance(optimizer, StepInBackward) else None
        step = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])
        training_step(step, optimizer, loss_of, x)
        peaks.append(measure_peak(lambda s=step, o=optimizer: training_step(s, o, loss_of, x)))
        predict(step, x)
    assert peaks[1] < peaks[0] / 4  # one gradient of eight, and activations


@pytest.mark.slow
def test_what_fits_with_updates_in_the_backward():
    def model():
        return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))

    def peak(make_optimizer, transforms):
        return fits(model, make_optimizer, [(4, 512)], loss_fn=loss_of, transforms=transforms).prediction.peak_bytes

    whole = peak(torch.optim.AdamW, [MemEfficient(strict=True)])
    ours = peak(lambda p: StepInBackward(torch.optim.AdamW(p)), [MemEfficient(strict=True)])
    assert ours < whole - 6 * 512 * 512 * 4
    with pytest.raises(ValueError, match="needs transforms="):
        peak(lambda p: StepInBackward(torch.optim.AdamW(p)), [])


@pytest.mark.parametrize("before", [False, True])
def test_a_step_with_a_tensor_for_a_learning_rate_is_predicted(before):
    model, x = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)), torch.randn(32, 64)
    ours = StepInBackward(torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3)))
    step = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])
    if before:
        training_step(step, ours, loss_of, x)
    prediction = predict_step(step, ours, loss_of, x)
    training_step(step, ours, loss_of, x)
    assert measure_peak(lambda: training_step(step, ours, loss_of, x)) == prediction.measured_bytes


def test_prediction_needs_the_optimizer_of_the_program(block):
    *_, step = block
    with pytest.raises(ValueError, match="give predict_step the StepInBackward"):
        predict_step(step, torch.optim.AdamW(block[0].parameters()), loss_of, ids())


class CountsInItsGroup(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class CountsItself(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        super().step()


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda p: StepInBackward(torch.optim.AdamW), TypeError, "AdamW is a class"),
        (lambda p: StepInBackward([p]), TypeError, "takes an optimizer of torch.optim"),
        (lambda p: StepInBackward(torch.optim.LBFGS([p])), TypeError, "LBFGS"),
        (lambda p: StepInBackward(StepInBackward(torch.optim.SGD([p]))), TypeError, "already"),
        (lambda p: StepInBackward(CountsInItsGroup([p])), TypeError, "changes 'k' of its parameter group"),
        (lambda p: StepInBackward(CountsItself([p])), TypeError, "changes its own 'count'"),
        (lambda p: StepInBackward(torch.optim.SparseAdam([p])), TypeError, "sparse gradients only"),
        (lambda p: StepInBackward(torch.optim.SGD([p]), clip_value=0), ValueError, "above 0"),
        (lambda p: StepInBackward(torch.optim.SGD([p]), clip_value=True), ValueError, "above 0"),
        (lambda p: StepInBackward(torch.optim.SGD([p]), two_pass="yes"), ValueError, "True or False"),
        (lambda p: StepInBackward(torch.optim.SGD([p]), max_norm=-1.0), ValueError, "max_norm is a number above 0"),
        (lambda p: StepInBackward(torch.optim.SGD([p]), max_norm=1, clip_value=1), ValueError, "not by both"),
        (lambda p: StepInBackward(torch.optim.Adam([p], differentiable=True)), ValueError, "differentiable"),
        (lambda p: MemEfficient(optimizer=torch.optim.SGD([p])), TypeError, r"StepInBackward\(SGD\(...\)\)"),
        (lambda p: MemEfficient(optimizer="adam"), TypeError, "StepInBackward or None"),
    ],
)
def test_bad_input(make, error, words):
    with pytest.raises(error, match=words):
        make(nn.Parameter(torch.ones(3)))
