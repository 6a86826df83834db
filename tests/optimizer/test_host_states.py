"""States on the host: the same training, bit for bit, with copies that are waited for, and the predicted bytes."""

import copy
import pickle
import weakref
from collections import deque
from dataclasses import replace
from functools import partial

import pytest
import thunder
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from thunder_mem import MemEfficient, StepInBackward, fits, last_plan, measure_peak, predict_step, simulate
from thunder_mem.memory.device_models import DEVICE_MODELS, device_model
from thunder_mem.optimizer import one_parameter
from thunder_mem.optimizer.figures import StepFigures, step_figures
from thunder_mem.optimizer.host_states import is_large, step_from_host
from thunder_mem.optimizer.state_transfers import StateTransfers, sliced_seconds, state_transfers
from thunder_mem.prediction.training_step import training_step
from thunder_mem.runtime import host_transfers


class Own(torch.optim.Optimizer):
    """An optimizer of a user's own: one state flat, one that is replaced in each step, and a number."""

    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(m=torch.zeros(p.numel()), count=0, v=torch.zeros_like(p))
                state["count"] += 1
                state["m"].mul_(0.9).add_(p.grad.flatten())
                state["v"] = state["v"] * 0.9 + p.grad**2
                p.sub_(group["lr"] * state["m"].view_as(p) / (state["v"].sqrt() + state["count"]))


OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, momentum=0.5, centered=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "own": Own,
}


def loss_of(y):
    return y.square().mean()


def batch(seed=0):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """Parameters of 62.5 KiB in four slices."""
    monkeypatch.setattr(one_parameter, "_SLICE_BYTES", {"cpu": 16384})


@pytest.fixture(scope="module")
def program():
    """A compiled model and its optimizers, with states on the device and on the host; compiled once for each."""
    return {states: compiled(states) for states in ("device", "host")}


def compiled(states, make=OPTIMIZERS["AdamW"], **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 250), nn.Tanh(), nn.Linear(250, 64))
    ours = StepInBackward(make(model.parameters()), states=states, **options)
    return model, ours, thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])


def fresh(program, states, make, **options):
    """The compiled model with new parameters and another optimizer."""
    model, ours, step = program[states]
    torch.manual_seed(0)
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    ours.clip_value = options.get("clip_value")
    ours.use(make(model.parameters()))
    return model, ours, step


def train(model, optimizer, step, steps=range(20), schedule=None, microbatches=1):
    for i in steps:
        for left in reversed(range(microbatches)):
            if left:
                with optimizer.accumulate():
                    loss_of(step(batch(i))).backward()
            else:
                loss_of(step(batch(i + 100))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return [p.detach().clone() for p in model.parameters()], plain(optimizer.state_dict())


def plain(state_dict):
    """A state dict as text, by sorted keys; parameters get theirs in the order of their updates."""
    state = {i: sorted((k, str(v)) for k, v in own.items()) for i, own in sorted(state_dict["state"].items())}
    return str((state, state_dict["param_groups"]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("around", [{}, {"clip_value": 1e-3, "microbatches": 2}])
def test_the_same_bits_as_with_states_on_the_device(program, name, around):
    clip = {k: v for k, v in around.items() if k == "clip_value"}
    seen = []
    for states in ("device", "host"):
        model, ours, step = fresh(program, states, OPTIMIZERS[name], **clip)
        schedule = torch.optim.lr_scheduler.StepLR(ours, step_size=5, gamma=0.5)
        seen.append(train(model, ours, step, schedule=schedule, microbatches=around.get("microbatches", 1)))
    (parameters, state), (our_parameters, our_state) = seen
    assert all(map(torch.equal, parameters, our_parameters))
    assert state == our_state


def test_max_norm_and_groups():
    seen = []
    for states in ("device", "host"):

        def make(parameters):
            first, *rest = parameters
            return torch.optim.AdamW([{"params": [first], "lr": 1e-3}, {"params": rest, "weight_decay": 0.1}], lr=1e-2)

        seen.append(train(*compiled(states, make, max_norm=1e-3)))
    assert all(map(torch.equal, seen[0][0], seen[1][0])) and seen[0][1] == seen[1][1]


@pytest.mark.parametrize("name", ["AdamW", "own"])
@pytest.mark.parametrize("saved, loaded", [("host", "host"), ("host", "device"), ("device", "host")])
def test_a_state_goes_on_wherever_it_was_saved(program, name, saved, loaded):
    model, ours, step = fresh(program, "device", OPTIMIZERS[name])
    expected = train(model, ours, step, range(8))
    model, ours, step = fresh(program, saved, OPTIMIZERS[name])
    train(model, ours, step, range(4))
    state = pickle.loads(pickle.dumps(ours.state_dict()))  # as torch.save does
    parameters = copy.deepcopy(model.state_dict())
    model, ours, step = fresh(program, loaded, OPTIMIZERS[name])
    model.load_state_dict(parameters)
    before = copy.deepcopy(state)
    ours.load_state_dict(state)
    found = train(model, ours, step, range(4, 8))
    assert all(map(torch.equal, found[0], expected[0])) and found[1] == expected[1]
    if loaded == "host":
        large = [(i, k) for i, own in state["state"].items() for k, v in own.items() if torch.is_tensor(v) and v.dim()]
        assert all(torch.equal(state["state"][i][k], before["state"][i][k]) for i, k in large)  # these are copied


def test_loading_does_not_move_states_to_the_device(program, monkeypatch):
    model, ours, step = fresh(program, "host", OPTIMIZERS["AdamW"])
    train(model, ours, step, range(1))
    moved = []
    policy = torch.optim.Optimizer._process_value_according_to_param_policy

    def noting(param, value, param_id, param_groups, key=None):
        moved.append(key)
        return policy(param, value, param_id, param_groups, key)

    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(noting))
    ours.load_state_dict(ours.state_dict())
    assert set(moved) == {"step"}


def test_states_that_exist_already_move():
    model, ours, step = compiled("device")
    before = plain(train(model, ours, step, range(2)) and ours.state_dict())
    held = [v for p in model.parameters() for v in ours.state[p].values() if is_large(v, p)]
    memory = {v.untyped_storage().data_ptr() for v in held}
    moved = StepInBackward(ours.wrapped, states="host")
    assert plain(moved.state_dict()) == before
    now = [v for p in model.parameters() for v in ours.state[p].values() if is_large(v, p)]
    assert len(now) == len(held) == 8 and not memory & {v.untyped_storage().data_ptr() for v in now}
    again = pickle.loads(pickle.dumps(moved))
    assert again.states == "host" and plain(again.state_dict()) == before


def outside_loss(outside, y):
    return outside(y).square().sum()


def test_an_empty_parameter():
    p = nn.Parameter(torch.empty(0, 16))
    optimizer = StepInBackward(torch.optim.AdamW([p]), states="host")
    for _ in range(2):
        p.grad = torch.empty(0, 16)
        optimizer.step()
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (0, 16)


def test_gradients_that_wait_for_step():
    """Parameters of a part that is not compiled."""
    seen = []
    for states in ("device", "host"):
        torch.manual_seed(1)
        inside, outside = nn.Linear(64, 64), nn.Linear(64, 64)
        ours = StepInBackward(torch.optim.Adam([*inside.parameters(), *outside.parameters()]), states=states)
        step = thunder.jit(inside, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])
        for i in range(3):
            outside_loss(outside, step(batch(i))).backward()
            grad = outside.weight.grad.clone()
            ours.step()
            assert torch.equal(outside.weight.grad, grad)
            ours.zero_grad()
        x, loss = batch(), partial(outside_loss, outside)
        predicted = predict_step(step, ours, loss, x)
        assert predicted.measured_bytes == measure_peak(training_step, step, ours, loss, x)
        seen.append([p.detach() for p in (*inside.parameters(), *outside.parameters())])
    assert all(map(torch.equal, *seen))


@pytest.fixture
def late(monkeypatch):
    """Copies as late as CUDA may run them: when the device waits for them. Until then a fetch's memory is NaN."""
    ways = {True: deque(), False: deque()}

    class Late:
        def __init__(self, target, source, to_host):
            self.run = lambda: target.copy_(source())
            self.way = ways[to_host]
            self.way.append(self)

        def wait(self):
            while self in self.way:
                self.way.popleft().run()

    def copied_late(target, source, device, to_host):
        if not to_host:
            target.fill_(torch.nan)
        alive = weakref.ref(source) if to_host else lambda kept=source: kept
        setattr(target, host_transfers._IN_FLIGHT, Late(target, alive, to_host))

    monkeypatch.setattr(host_transfers, "_copies_beside", lambda t: True)
    monkeypatch.setattr(host_transfers, "_copy", copied_late)
    return ways


@pytest.mark.parametrize("name", ["AdamW", "own"])
def test_copies_that_run_as_late_as_streams_allow(program, name, late):
    expected = train(*fresh(program, "device", OPTIMIZERS[name]), range(5))
    model, ours, step = fresh(program, "host", OPTIMIZERS[name])
    found = train(model, ours, step, range(5))
    assert not any(late.values())  # every update waits for its own copies
    assert all(map(torch.equal, found[0], expected[0])) and found[1] == expected[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "fused", "Adafactor", "own"])
@pytest.mark.parametrize("clip", [{}, {"clip_value": 0.1}])
def test_predicted_step_is_the_measured_one(name, clip):
    model, ours, step = compiled("host", OPTIMIZERS[name], **clip)
    x = batch()
    with torch.no_grad():
        step(x)
    first = predict_step(step, ours, loss_of, x, first=True)
    assert first.measured_bytes == measure_peak(lambda: training_step(step, ours, loss_of, x))
    training_step(step, ours, loss_of, x)
    for count in (1, 3):
        predicted = predict_step(step, ours, loss_of, x, accumulate=count)
        measured = measure_peak(lambda n=count: training_step(step, ours, loss_of, x, accumulate=n))
        assert predicted.measured_bytes == measured
    large = [v for p in model.parameters() for v in ours.state[p].values() if is_large(v, p)]
    assert predicted.host_bytes == first.host_bytes == sum(v.nbytes for v in large) > 0
    own = [v for p in model.parameters() for v in ours.state[p].values() if isinstance(v, torch.Tensor)]
    held = [*model.parameters(), x, *(v for v in own if not any(v is u for u in large))]
    assert predicted.held_bytes == sum(t.nbytes for t in held)


@pytest.mark.parametrize("name, temporaries", [("AdamW", 2), ("fused", 0), ("amsgrad", 2)])
def test_an_update_holds_two_slices_however_many_there_are(name, temporaries):
    peaks = []
    for slices in (4, 12):
        p = nn.Parameter(torch.zeros(slices * 16384 // 4))
        optimizer, grad = OPTIMIZERS[name]([p]), torch.ones_like(p)
        update = partial(step_from_host, optimizer, optimizer.param_groups[0], p, grad)
        update()
        peaks.append(measure_peak(update))
    states = 3 if name == "amsgrad" else 2
    assert peaks[0] == peaks[1] and peaks[0] // 16384 == 2 * states + temporaries


def test_a_plan_names_the_price():
    _, ours, step = compiled("host")
    x = batch()
    training_step(step, ours, loss_of, x)
    (decision,) = [d for d in last_plan(step).decisions if d.what == "optimizer states"]
    predicted = predict_step(step, ours, loss_of, x, accumulate=2)
    assert decision.after_bytes == predicted.host_bytes
    assert f"{predicted.state_transfers.link_s * 1e3:.3g} ms on the link" in decision.how
    _, _, other = compiled("device")
    other(x)
    assert all(d.what != "optimizer states" for d in last_plan(other).decisions)


def test_a_simulated_gpu():
    size, layers = 8192, 2

    def predicted(states):
        with simulate("H100-80GB"), torch.device("cuda"):
            model = nn.Sequential(*(nn.Linear(size, size, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
            ours = StepInBackward(torch.optim.AdamW(model.parameters()), states=states)
            step = thunder.jit(model, transforms=[MemEfficient(strict=True, optimizer=ours)])
            return predict_step(step, ours, loss_of, torch.zeros(8, size, dtype=torch.bfloat16))

    device, host = predicted("device"), predicted("host")
    state_bytes = 2 * layers * size * size * 2
    assert host.host_bytes == state_bytes and device.host_bytes == 0  # powers of two already
    assert host.held_bytes == device.held_bytes - state_bytes
    assert host.peak_bytes <= device.peak_bytes - state_bytes + 2 * 2 * (16 << 20)  # two slices of each state
    link_s = 2 * state_bytes / device_model("H100-80GB").link_bytes_per_s
    assert link_s < host.state_transfers.link_s < 1.1 * link_s
    assert link_s / 2 < host.state_transfers.exposed_s < 0.7 * link_s  # eight slices each: both ways at once


def test_what_fits():
    size, layers = 2048, 4

    def peak(states):
        found = fits(
            lambda: nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers))),
            lambda parameters: StepInBackward(torch.optim.AdamW(parameters), states=states),
            [(4, size)],
            loss_fn=loss_of,
            transforms=[MemEfficient(strict=True)],
        )
        return found.prediction.peak_bytes

    weight_bytes = 4 * size * size
    assert peak("host") <= peak("device") - 2 * layers * weight_bytes + 4 * weight_bytes  # two of each state at once


@pytest.mark.parametrize("slices", [1, 2, 3, 7])
@pytest.mark.parametrize("fetch_s, step_s, send_s", [(2.0, 0.5, 2.0), (1.0, 4.0, 1.0), (5.0, 0.5, 1.0)])
def test_the_time_of_an_update_follows_its_rules(slices, fetch_s, step_s, send_s):
    fetched, sent = [0.0], [0.0, 0.0]
    for _ in range(slices):
        fetched.append(max(fetched[-1], sent[-2]) + fetch_s)
        sent.append(max(fetched[-1], sent[-1]) + step_s + send_s)
    assert sliced_seconds(slices, fetch_s, step_s, send_s) == pytest.approx(sent[-1])


def test_without_large_states_nothing_moves():
    cpu = device_model("cpu")
    assert state_transfers(StepFigures(0, 1), 0, device_model("T4"), cpu) == StateTransfers()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_update_is_faster_on_the_host(dtype):
    """So nothing runs there; a device for which it would pay shows here."""
    size, p = 4096, nn.Parameter(torch.empty(1, dtype=dtype))
    cpu = device_model("cpu")
    for name, make in OPTIMIZERS.items():
        if name == "own":
            continue
        optimizer = make([p])
        group = optimizer.param_groups[0]
        figures = step_figures(optimizer, group, (size, size), dtype, "cuda", states="host")
        assert figures.state_bytes or name == "Adafactor"
        for device in DEVICE_MODELS.values():
            if device is cpu:
                continue
            times = state_transfers(figures, size * size * dtype.itemsize, device, cpu)
            assert times.update_s <= times.on_host_s, (name, device.name)


def test_a_slow_link_and_three_states_would_pay_on_the_host():
    figures = StepFigures(0, 1, moved_bytes=20, state_bytes=6, tensors=3)
    slow, cpu = (
        replace(device_model("cpu"), link_bytes_per_s=1.0, bandwidth_bytes_per_s=rate, copy_s=0.0)
        for rate in (1e3, 100.0)
    )
    times = state_transfers(figures, 2, slow, cpu)
    assert (times.link_s, times.exposed_s) == pytest.approx((12.0, 12.0))
    assert times.update_s == pytest.approx(12.02) and times.on_host_s == pytest.approx(6.2)


def wrapped(p):
    return nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))


@pytest.mark.parametrize(
    "make, error, words",
    [
        (
            lambda p: StepInBackward(torch.optim.SGD([p]), states="disk"),
            ValueError,
            "'device', 'host' or 'auto', not 'disk'",
        ),
        (
            lambda p: StepInBackward(torch.optim.SGD([p]), states=None),
            ValueError,
            "'device', 'host' or 'auto', not None",
        ),
        (lambda p: StepInBackward(torch.optim.SGD([wrapped(p)]), states="host"), TypeError, "takes plain parameters"),
    ],
)
def test_bad_input(make, error, words):
    with pytest.raises(error, match=words):
        make(nn.Parameter(torch.ones(3)))


def test_a_state_that_cannot_move():
    class Wraps(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p]["pair"] = TwoTensor(torch.zeros_like(p), torch.zeros_like(p))

    model = nn.Linear(4, 4)
    ours = StepInBackward(Wraps(model.parameters()), states="host")
    step = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])
    with pytest.raises(TypeError, match="Wraps keeps 'pair' as a TwoTensor"):
        step(torch.ones(2, 4)).sum().backward()
    assert not ours.consistent
