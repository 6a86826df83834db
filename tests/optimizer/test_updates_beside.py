"""Updates that run beside the backward: the same bits, kept memory, a legal order, and the time that is not hidden."""

from functools import partial

import pytest
import thunder
import torch
from thunder.core.trace import TraceCtx
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.fuzzing.stepping import running_beside
from thunder_mem import MemEfficient, StepInBackward, last_plan, measure_peak, predict_step, simulate
from thunder_mem.costs.plan_time import bound_symbol_seconds
from thunder_mem.decisions import pipeline
from thunder_mem.memory.device_models import device_model
from thunder_mem.optimizer import one_parameter, update
from thunder_mem.optimizer.update import end_update, is_update, start_update, update_of
from thunder_mem.prediction.training_step import training_step
from thunder_mem.rewrites import update_scheduling
from thunder_mem.trace.rebuilding import rebuilt
from thunder_mem.trace.verification import VerificationError, verify_rewrite


class Whole(torch.optim.Optimizer):
    """An optimizer of a user's own, which replaces its state in each step and keeps a small one on the device."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p] or {"v": torch.zeros_like(p), "most": torch.zeros(())}
                v = state["v"] * 0.9 + p.grad**2
                self.state[p] = {"v": v, "most": torch.maximum(state["most"], v.max())}
                p.sub_(group["lr"] * p.grad / (v.sqrt() + self.state[p]["most"] + 1e-8))


OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "own": Whole,
}


def model(width=64, layers=4):
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())))


def loss_of(y):
    return y.square().mean()


def batch(seed, rows=256):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))


def compiled(states, make=OPTIMIZERS["AdamW"], **options):
    net = model()
    ours = StepInBackward(make(net.parameters()), states=states, **options)
    return (
        net,
        ours,
        thunder.jit(net, executors=[], transforms=[MemEfficient(strict=True, verify=True, optimizer=ours)]),
    )


def train(net, ours, step, microbatches=1):
    for i in range(5):
        for j in range(microbatches - 1):
            with ours.accumulate():
                loss_of(step(batch(10 * i + j))).backward()
        loss_of(step(batch(i))).backward()
        ours.step()
        ours.zero_grad()
    state = {i: sorted((k, str(v)) for k, v in own.items()) for i, own in ours.state_dict()["state"].items()}
    return [p.detach().clone() for p in net.parameters()], str(sorted(state.items()))


def backward_of(step) -> TraceCtx:
    return thunder.last_backward_traces(step)[-1]


def between(trace):
    """For each start of an update, the number of operations until its end."""
    ops = [b for b in trace.bound_symbols if b.sym.name not in ("python_del", "del")]
    starts = {b.output.name: i for i, b in enumerate(ops) if b.sym is start_update}
    ends = {b.args[1].name: i for i, b in enumerate(ops) if b.sym is end_update}
    assert starts.keys() == ends.keys()
    return [ends[name] - i - 1 for name, i in starts.items()]


@pytest.fixture
def beside(monkeypatch):
    """A CPU counts as a device with streams, and parameters of 16 KiB run in four slices."""
    monkeypatch.setattr(one_parameter, "_SLICE_BYTES", {"cpu": 4096})
    monkeypatch.setattr(update_scheduling, "runs_beside", lambda update: True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("around", [{}, {"clip_value": 1e-3, "microbatches": 2}], ids=["plain", "clipped sums"])
def test_the_same_bits(beside, name, around):
    clip = {k: v for k, v in around.items() if k == "clip_value"}
    expected = train(*compiled("device", OPTIMIZERS[name], **clip), microbatches=around.get("microbatches", 1))
    net, ours, step = compiled("host", OPTIMIZERS[name], **clip)
    found = train(net, ours, step, microbatches=around.get("microbatches", 1))
    assert max(between(backward_of(step))) > 0
    assert all(map(torch.equal, found[0], expected[0])) and found[1] == expected[1]


class Replacing(torch.optim.Optimizer):
    """Replaces the parameter's memory and a state in a list."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state.setdefault("v", torch.zeros_like(p)).add_(p.grad)
                state["last"] = [p.grad.norm()]
                p.data = p.data - 0.1 * state["v"] / (1 + state["last"][0])


def test_what_a_step_replaces_is_kept_until_it_ends(beside, monkeypatch):
    """On CUDA the device may still read it. `run_beside` is given all of it."""
    released = []

    def run(work, handle, *tensors, kept):
        memory = [
            StorageWeakRef(t.untyped_storage()) for t in (*net.parameters(), *tree_leaves(ours.state_dict()["state"]))
        ]
        work(*tensors)
        released.append(sum(m.expired() for m in memory))
        assert kept

    net, ours, step = compiled("host", Replacing)
    for _ in range(2):
        loss_of(step(batch(0))).backward()
        ours.step()
        monkeypatch.setattr(update, "run_beside", run)
    assert len(released) == len(list(net.parameters())) and not any(released)


@pytest.mark.parametrize("name", ["AdamW", "own"])
def test_updates_that_run_as_late_as_streams_allow(beside, name):
    expected = train(*compiled("device", OPTIMIZERS[name]))
    with running_beside("late"):
        found = train(*compiled("host", OPTIMIZERS[name]))
    assert all(map(torch.equal, found[0], expected[0])) and found[1] == expected[1]


def test_predicted_step_is_the_measured_one(beside):
    _, ours, step = compiled("host")
    x = batch(0)
    training_step(step, ours, loss_of, x)
    assert max(between(backward_of(step))) > 0
    predicted = predict_step(step, ours, loss_of, x)
    assert predicted.measured_bytes == measure_peak(partial(training_step, step, ours, loss_of, x))


@pytest.mark.parametrize("states", ["device", "host"])
def test_steps_by_slices_count_in_the_memory_of_the_first(beside, states):
    """So the caller's reference stays true, and a step releases nothing that was there before it."""
    net, ours, step = compiled(states)
    training_step(step, ours, loss_of, batch(0))
    counts = [ours.state[p]["step"] for p in net.parameters()]
    training_step(step, ours, loss_of, batch(1))
    assert all(ours.state[p]["step"] is count for p, count in zip(net.parameters(), counts, strict=True))
    assert {count.item() for count in counts} == {2.0}


class Repeating(nn.Module):
    """Checkpoints, one of a wide layer, so that updates wait where gradients of biases are summed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = x + (checkpoint(lambda y, f=layer: f((y * 2).sin()), x, use_reentrant=False) if i % 2 else layer(x))
        return checkpoint(lambda y: self.down(F.gelu(self.up(y)).sin()), x, use_reentrant=False)


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_predicted_sums_are_the_measured_ones_within_a_budget(beside, count):
    torch.manual_seed(0)
    net, x = Repeating(), batch(0)
    ours = StepInBackward(torch.optim.AdamW(net.parameters()), states="host")
    free = thunder.jit(net, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])
    free(x)
    budget = last_plan(free).candidate.peak_bytes * 98 // 100
    step = thunder.jit(net, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours, budget=budget)])
    for _ in range(2):
        training_step(step, ours, loss_of, x)
    assert max(between(backward_of(step))) > 0
    predicted = predict_step(step, ours, loss_of, x, accumulate=count)
    assert predicted.measured_bytes == measure_peak(partial(training_step, step, ours, loss_of, x, accumulate=count))


def test_an_update_that_fails_is_seen_at_once(beside, monkeypatch):
    """And the next step says that the backward ended in the middle."""
    net, ours, step = compiled("host")
    loss = loss_of(step(batch(0)))
    with monkeypatch.context() as patch:
        patch.setattr(net[2].weight, "detach", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    assert not ours.consistent
    with pytest.raises(RuntimeError, match="ended with"):
        ours.step()


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"max_norm": 1.0, "two_pass": True}])
def test_updates_that_need_all_gradients_run_alone(beside, options):
    _, _, step = compiled("host", **options)
    step(batch(0))
    assert not any(b.sym is start_update for b in backward_of(step).bound_symbols)


# ---- a simulated GPU ----

WIDTH, LAYERS = 2048, 4


def simulated(monkeypatch=None, budget=None, rows=65536):
    """A step on a simulated H100, whose kernels take longer than the copies of its states."""
    if monkeypatch is not None:
        monkeypatch.setattr(update_scheduling, "runs_beside", lambda update: False)
    with simulate("H100-80GB"), torch.device("cuda"):
        net = nn.Sequential(
            *(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16), nn.GELU()))
        )
        ours = StepInBackward(torch.optim.AdamW(net.parameters()), states="host")
        transform = MemEfficient(strict=True, verify=True, optimizer=ours, budget=budget)
        step = thunder.jit(net, transforms=[transform])
        x = torch.zeros(rows, WIDTH, dtype=torch.bfloat16)
        return predict_step(step, ours, loss_of, x), step


@pytest.mark.slow
def test_copies_hide_behind_the_backward_without_a_higher_peak(monkeypatch):
    beside, step = simulated()
    alone, _ = simulated(monkeypatch)
    assert beside.peak_bytes <= alone.peak_bytes
    assert beside.state_transfers.link_s == alone.state_transfers.link_s
    assert beside.state_transfers.exposed_s < 0.5 * alone.state_transfers.exposed_s
    (decision,) = [d for d in last_plan(step).decisions if d.what == "optimizer states"]
    assert f"{beside.state_transfers.exposed_s * 1e3:.3g} ms of them not hidden" in decision.how


def test_updates_without_room_do_not_keep_others_from_running_beside():
    """With few rows the gradients are most of what is alive, and some updates have no room but in their own places."""
    predicted, step = simulated(rows=256)
    assert max(between(backward_of(step))) > 0
    moved = predicted.state_transfers
    assert moved.exposed_s < moved.update_s


def test_a_budget_with_room_hides_more():
    """With few rows there is no room for gradients that wait, unless a budget gives it."""
    default, step = simulated(rows=4096)
    peak_bytes = last_plan(step).candidate.peak_bytes
    roomy, step = simulated(rows=4096, budget=2 * peak_bytes)
    assert roomy.state_transfers.exposed_s < default.state_transfers.exposed_s
    assert default.peak_bytes <= roomy.peak_bytes and last_plan(step).candidate.peak_bytes <= 2 * peak_bytes


@pytest.fixture(scope="module")
def planned():
    """The prediction of a step, and its plan with updates beside other work."""
    found, place = [], pipeline.with_updates_beside
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "with_updates_beside", lambda plan: found.append(place(plan)) or found[-1])
        predicted, _ = simulated()
    return predicted, found[-1]


def test_the_time_not_hidden_is_that_of_the_trace(planned):
    """An independent walk over the joint trace: each end waits until its copies are over."""
    predicted, plan = planned
    device, now, waited, over = device_model("H100-80GB"), 0.0, 0.0, {}
    for b in plan.final.bound_symbols:
        if b.sym is start_update:
            moved = update_of(b).alone.transfers
            over[b.output.name] = now + moved.update_s
            now += moved.update_s - moved.exposed_s
        elif b.sym is end_update:
            late = max(0.0, over.pop(b.args[1].name) - now)
            now, waited = now + late, waited + late
        else:
            now += bound_symbol_seconds(b, device)
        assert len(over) <= 1
    assert waited == pytest.approx(predicted.state_transfers.exposed_s)


# ---- the verifier ----


def corrupted(trace, change):
    bsyms = list(trace.bound_symbols)
    change(bsyms)
    return rebuilt(trace, bsyms)


def first(bsyms, sym):
    return next(i for i, b in enumerate(bsyms) if b.sym is sym)


def without_an_end(bsyms):
    del bsyms[first(bsyms, end_update)]


def end_before_its_start(bsyms):
    bsyms.insert(first(bsyms, start_update), bsyms.pop(first(bsyms, end_update)))


def another_updates_end(bsyms):
    i, end = first(bsyms, start_update), first(bsyms, end_update)
    other = next(b for b in bsyms[end + 1 :] if b.sym is end_update)
    update, flight, *_ = bsyms[end].args
    bsyms[end] = bsyms[end].from_bsym(args=(update, flight, *other.args[2:]))
    assert bsyms[i].output is flight


def a_read_of_the_parameter_meanwhile(bsyms):
    i = first(bsyms, start_update)
    name = bsyms[i].args[1].name
    reader = max(j for j, b in enumerate(bsyms[:i]) if any(p.name == name for p in b.flat_proxy_args))
    bsyms.insert(i, bsyms.pop(reader))


def an_update_left_out(bsyms):
    del bsyms[first(bsyms, end_update)]
    del bsyms[first(bsyms, start_update)]


@pytest.mark.parametrize(
    "change",
    [
        without_an_end,
        end_before_its_start,
        another_updates_end,
        a_read_of_the_parameter_meanwhile,
        an_update_left_out,
    ],
)
def test_the_verifier_sees_other_orders(planned, change):
    before, after = planned[1].program.trace, planned[1].arranged
    verify_rewrite(before, after)
    assert any(map(is_update, after.bound_symbols))
    with pytest.raises(VerificationError):
        verify_rewrite(before, corrupted(after, change))
