"""`states="auto"`: a budget that counts the states decides where they are."""

import pickle

import pytest
import thunder
import torch
from torch import nn

from thunder_mem import MemEfficient, StepInBackward, last_plan, memory_time_frontier, predict_step, simulate
from thunder_mem.optimizer.figures import large_state_bytes
from thunder_mem.optimizer.host_states import is_large
from thunder_mem.partition.budget import BudgetError
from thunder_mem.planning import state_placement
from thunder_mem.prediction.training_step import training_step

WIDTH, LAYERS = 64, 4
STATE_BYTES = 2 * LAYERS * 4 * (WIDTH * WIDTH + WIDTH)


def loss_of(y):
    return y.square().mean()


def batch(seed=0):
    return torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(seed))


def compiled(states, budget=None, make=torch.optim.AdamW, on_infeasible="error"):
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    ours = StepInBackward(make(net.parameters(), lr=1e-2), states=states)
    transform = MemEfficient(strict=True, optimizer=ours, budget=budget, on_infeasible=on_infeasible)
    return net, ours, thunder.jit(net, executors=[], transforms=[transform])


@pytest.fixture(scope="module")
def free_bytes():
    """The peak of the program without a budget, without the states."""
    _, _, step = compiled("device")
    step(batch())
    return last_plan(step).candidate.peak_bytes


@pytest.fixture(scope="module")
def tight():
    """A budget in which the program fits, but no plan of it beside the states."""
    _, _, step = compiled("device", 1, on_infeasible="warn")
    with pytest.warns(UserWarning, match="no plan keeps"):
        step(batch())
    return last_plan(step).candidate.peak_bytes + STATE_BYTES // 2


def test_states_stay_where_the_budget_has_room(free_bytes):
    budget = free_bytes + STATE_BYTES
    _, ours, step = compiled("auto", budget)
    assert ours.undecided
    training_step(step, ours, loss_of, batch())
    assert ours.states == "device" and not ours.undecided
    (decision,) = [d for d in last_plan(step).decisions if d.what == "optimizer states"]
    assert (decision.before_bytes, decision.after_bytes) == (budget, free_bytes)
    predicted = predict_step(step, ours, loss_of, batch())
    assert predicted.host_bytes == 0


def test_states_leave_where_it_has_none(tight):
    _, ours, step = compiled("auto", tight)
    training_step(step, ours, loss_of, batch())
    assert ours.states == "host"
    predicted = predict_step(step, ours, loss_of, batch())
    assert predicted.host_bytes == STATE_BYTES
    assert last_plan(step).candidate.peak_bytes <= tight
    assert "states from the host" in next(d.how for d in last_plan(step).decisions if d.what == "optimizer states")


def test_the_faster_place_wins(free_bytes, tight):
    """Beside states on the device the plan buys recomputation, which costs less than all copies of states here."""
    smallest_bytes = tight - STATE_BYTES // 2
    budget = (smallest_bytes + free_bytes) // 2 + STATE_BYTES
    _, ours, step = compiled("auto", budget)
    step(batch())
    bought_ms = last_plan(step).budget.cost_ms
    _, other, step = compiled("host", budget)
    step(batch())
    copied_ms = predict_step(step, other, loss_of, batch()).state_transfers.exposed_s * 1e3
    assert 0 < bought_ms < copied_ms and ours.states == "device"


def test_the_same_training_wherever_they_are(tight):
    seen = []
    for states, budget in (("device", None), ("auto", tight), ("auto", None)):
        net, ours, step = compiled(states, budget)
        for i in range(5):
            training_step(step, ours, loss_of, batch(i))
        seen.append([p.detach() for p in net.parameters()])
        assert ours.states == ("host" if budget else "device")
    assert all(map(torch.equal, seen[0], seen[1])) and all(map(torch.equal, seen[0], seen[2]))
    assert ours.undecided  # without a budget


def test_states_that_exist_move_when_it_is_decided(tight):
    net, ours, step = compiled("auto", tight)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    ours.step()
    held = [v for p in net.parameters() for v in ours.state[p].values() if is_large(v, p)]
    ours.zero_grad()
    training_step(step, ours, loss_of, batch())
    now = [v for p in net.parameters() for v in ours.state[p].values() if is_large(v, p)]
    assert ours.states == "host" and len(held) == len(now) == 4 * LAYERS
    memory = {v.untyped_storage().data_ptr() for v in held}
    assert memory.isdisjoint(v.untyped_storage().data_ptr() for v in now)


def test_nothing_fits(free_bytes):
    _, ours, step = compiled("auto", 4096)
    with pytest.raises(BudgetError, match="no plan keeps the peak within"):
        step(batch())
    assert ours.undecided


def test_it_is_decided_once_and_copied(tight):
    _, ours, step = compiled("auto", tight)
    assert pickle.loads(pickle.dumps(ours)).undecided
    step(batch())
    assert ours.states == "host"
    again = pickle.loads(pickle.dumps(ours))
    assert again.states == "host" and not again.undecided
    step(torch.randn(128, WIDTH))  # another program, for which the device would have room
    assert ours.states == "host"


def test_later_programs_leave_room_for_the_states(free_bytes):
    budget = free_bytes + STATE_BYTES
    _, ours, step = compiled("auto", budget)
    step(batch())
    assert ours.states == "device"
    step(torch.randn(300, WIDTH))
    assert last_plan(step).candidate.peak_bytes + STATE_BYTES <= budget
    with pytest.raises(BudgetError, match="what the optimizer's states leave"):
        step(torch.randn(2000, WIDTH))


@pytest.mark.parametrize("how", ["an evaluation", "a study"])
def test_only_a_step_decides(tight, how):
    _, ours, step = compiled("auto", tight)
    if how == "a study":
        memory_time_frontier(step, batch(), points=1)
    else:
        with torch.no_grad():
            step(batch())
    assert ours.undecided
    step(batch())
    assert ours.states == "host"


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"amsgrad": True}])
def test_variants_of_an_optimizer(tight, options):
    _, ours, step = compiled("auto", tight, lambda ps, lr: torch.optim.AdamW(ps, lr=lr, **options))
    step(batch())
    assert ours.states == "host"


@pytest.mark.parametrize(
    "make, each",
    [
        (lambda ps: torch.optim.AdamW(ps, fused=True), 2),
        (lambda ps: torch.optim.AdamW(ps, amsgrad=True), 3),
        (lambda ps: torch.optim.SGD(ps), 0),
        (lambda ps: torch.optim.SGD(ps, momentum=0.9), 1),
        (lambda ps: torch.optim.Adafactor(ps), 0),
    ],
)
def test_the_bytes_of_states_before_they_exist(make, each):
    p, frozen = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(8), requires_grad=False)
    assert large_state_bytes(make([p, frozen])) == each * p.nbytes


def test_states_that_cannot_move_are_counted(tight, monkeypatch):
    monkeypatch.setattr(state_placement, "stays_on_device", lambda optimizer: "they are subclasses")
    _, ours, step = compiled("auto", tight)
    with pytest.raises(BudgetError, match="what the optimizer's states leave"):
        step(batch())
    assert ours.undecided


def test_without_parameters_to_update_nothing_is_decided(free_bytes):
    net, ours, step = compiled("auto", free_bytes)
    for p in net.parameters():
        p.register_hook(lambda grad: grad)
    step(batch()).sum().backward()
    assert ours.undecided


def test_optimizers_without_large_states(free_bytes):
    _, ours, step = compiled("auto", free_bytes, torch.optim.SGD)
    step(batch())
    assert ours.states == "device"


def test_a_share_of_a_card_decides():
    """A fifth of a simulated card of 24 GB, in which parameters of 2 GiB fit, but not beside 4 GiB of states."""
    size = 8192
    with simulate("RTX4090"), torch.device("cuda"):
        net = nn.Sequential(*(nn.Linear(size, size, bias=False, dtype=torch.bfloat16) for _ in range(16)))
        ours = StepInBackward(torch.optim.AdamW(net.parameters()), states="auto")
        step = thunder.jit(net, transforms=[MemEfficient(strict=True, optimizer=ours, budget="20%")])
        predicted = predict_step(step, ours, loss_of, torch.zeros(8, size, dtype=torch.bfloat16))
    assert ours.states == "host" and predicted.peak_bytes < 0.2 * (24 << 30)
