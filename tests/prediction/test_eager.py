"""`estimate`: a plain PyTorch step on a GPU that is not there, held against measured steps on the CPU."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from thunder_mem import StepInBackward, estimate, predict_step
from thunder_mem.prediction.predict import PredictionError
from thunder_mem.prediction.simulate import simulate
from thunder_mem.prediction.training_step import training_step
from thunder_mem.runtime.measure import measure_peak

MIB = 2**20


class Block(nn.Module):
    """No attention and no 16 bits: there kernels of a CPU and of a GPU differ inside."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.embed = nn.Embedding(300, 64)
        self.up, self.down, self.head = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 300, bias=False)
        self.head.weight = self.embed.weight
        self.checkpointed = checkpointed
        self.register_buffer("scale", torch.ones(64))

    def mlp(self, x):
        return x + self.down(torch.relu(self.up(x)))

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale
        x = checkpoint(self.mlp, x, use_reentrant=False) if self.checkpointed else self.mlp(x)
        return self.head(x)


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(64, 300).requires_grad_(False)
        self.a, self.b = nn.Linear(64, 4, bias=False), nn.Linear(4, 300, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def tokens():
    return torch.randint(0, 300, (4, 32))


def mean(logits):
    return logits.square().mean()


STEPS = {
    "AdamW": (Block, tokens, lambda p: torch.optim.AdamW(p, foreach=True), {}),
    "AdamW, fused": (Block, tokens, lambda p: torch.optim.AdamW(p, fused=True), {}),
    "checkpointed": (lambda: Block(True), tokens, lambda p: torch.optim.SGD(p, 0.1, foreach=True), {}),
    "microbatches": (Block, tokens, lambda p: torch.optim.AdamW(p, foreach=True), {"accumulate": 2}),
    "gradients kept": (
        Block,
        tokens,
        lambda p: torch.optim.SGD(p, 0.1, foreach=True),
        {"set_to_none": False},
    ),
    "LoRA": (LoRA, lambda: torch.randn(8, 64), lambda p: torch.optim.AdamW(p, foreach=True), {}),
    "no optimizer": (Block, tokens, None, {}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_peaks_where_the_measured_one_does(name):
    make, inputs, optimizer_of, how = STEPS[name]
    model, x = make(), inputs()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = None if optimizer_of is None else optimizer_of(trained)
    expected = estimate(model, optimizer, mean, x, **how).prediction
    run = lambda: training_step(model, optimizer, mean, x, **how)  # noqa: E731
    run()
    if optimizer is None:
        model.zero_grad()
    measured_bytes = measure_peak(run)
    # A checkpoint keeps the state of the CPU's generator, which is the host's. The rest are numbers of an optimizer.
    generator_bytes = torch.get_rng_state().numel() if name == "checkpointed" else 0
    assert abs(expected.measured_bytes + generator_bytes - measured_bytes) <= 64


def test_the_callers_own_step():
    """Autocast, gradients clipped, code that asks for CUDA; it is told from a model by returning nothing."""
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    def step(x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x.to("cuda")), torch.zeros(64, 512, device="cuda"))
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    found = estimate(step, optimizer, None, torch.randn(64, 512)).prediction
    assert found.phases == ("forward", "backward", "optimizer")
    assert len(found.library) == 2
    weights_bytes = sum(4 * p.numel() for p in model.parameters())
    assert found.held_bytes == 3 * weights_bytes + 64 * 512 * 4
    halves = [s for s in found.storages if s.dtype is torch.bfloat16 and s.shape == (1024, 512)]
    assert halves  # autocast keeps the weights' copies until it ends


def test_nothing_of_the_callers_changes():
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: (t, t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    estimate(model, optimizer, mean, tokens())
    assert not optimizer.state and optimizer.param_groups[0]["params"][0] is model.embed.weight
    for name, t in model.state_dict(keep_vars=True).items():
        assert t is before[name][0] and torch.equal(t, before[name][1]) and t.grad is None
    training_step(model, optimizer, mean, tokens())
    state = optimizer.state
    estimate(model, optimizer, mean, tokens())
    assert optimizer.state is state and type(state[model.up.weight]["exp_avg"]) is torch.Tensor
    in_backward = StepInBackward(optimizer)
    own = dict(vars(in_backward))
    estimate(model, in_backward, mean, tokens())
    assert dict(vars(in_backward)) == own and in_backward.state is state
    wrapped = SharedState(model.parameters(), lr=0.1)
    wrapped.state = state
    estimate(model, wrapped, mean, tokens())
    assert wrapped.state is state


class SharedState(torch.optim.SGD):
    """Its state is a property, as optimizers have it that wrap another one."""

    @property
    def state(self):
        return self.shared

    @state.setter
    def state(self, value):
        self.shared = value


def test_it_fails_without_a_trace():
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters())

    def broken(x):
        model(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        estimate(broken, optimizer, None, tokens())
    assert type(model.up.weight) is nn.Parameter and not optimizer.state
    assert estimate(model, optimizer, mean, tokens())


def test_where_the_model_lives_does_not_matter():
    def of(device):
        with torch.device(device):
            model, x = Block(), torch.zeros(4, 32, dtype=torch.long)
        return estimate(model, torch.optim.AdamW(model.parameters()), mean, x, device="T4").allocation

    with simulate("T4"):
        simulated = of("cuda")
    assert of("cpu") == of("meta") == simulated


def test_the_device_is_the_one_that_is_simulated():
    model = nn.Linear(4, 4)
    assert estimate(model, None, torch.sum, torch.zeros(2, 4)).device == "H100-80GB"
    with simulate("L4"):
        assert estimate(model, None, torch.sum, torch.zeros(2, 4)).device == "L4"
        with pytest.raises(ValueError, match="L4 is being simulated already"):
            estimate(model, None, torch.sum, torch.zeros(2, 4), device="T4")
    with pytest.raises(ValueError, match="unknown device 'H1000': the known ones are"):
        estimate(model, None, torch.sum, torch.zeros(2, 4), device="H1000")


def test_what_thunder_cannot_compile():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                torch._dynamo.graph_break()
                if x.sum().item() > -1e9 and i != 2:  # data decides
                    x = torch.special.bessel_j0(layer(x).detach()) + layer(x)
            return x

    model = Odd()
    found = estimate(model, torch.optim.AdamW(model.parameters()), mean, torch.randn(16, 64))
    assert found and found.prediction.peak_bytes > 3 * 4 * 64 * 65 * 4


def test_an_optimizer_that_steps_in_the_backward():
    """Gradients go as they come: torchtune's recipe, by hooks that know optimizers by parameter."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    plain = estimate(model, torch.optim.SGD(model.parameters(), 0.1), mean, torch.randn(1, 256)).prediction
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    hooked = estimate(model, None, mean, torch.randn(1, 256)).prediction
    assert "optimizer" in hooked.phases
    weight_bytes = 256 * 256 * 4
    assert plain.peak_bytes - hooked.peak_bytes >= 4 * weight_bytes
    assert all(not o.state for o in optimizers.values())


def test_checkpointing_and_16_bits_take_less():
    def peak_bytes(make):
        model = make()
        return estimate(model, None, mean, torch.randint(0, 300, (64, 512))).prediction.peak_bytes

    plain = peak_bytes(Block)
    assert peak_bytes(lambda: Block(True)) < plain
    assert peak_bytes(lambda: Block().bfloat16()) < 0.6 * plain


def test_dropout_keeps_a_byte_for_each_value():
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Dropout(0.5))
    found = estimate(model, None, mean, torch.zeros(1024, 1024)).prediction
    assert any(s.dtype is torch.bool and s.nbytes == MIB for s in found.storages)


def test_it_agrees_with_a_compiled_step():
    """Of a program without anything to plan or fuse, Thunder's own is the same."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    x = torch.zeros(512, 256)
    eager = estimate(model, None, mean, x).prediction
    with simulate("H100-80GB", fusion=None), torch.device("cuda"):
        same = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        compiled = predict_step(thunder.jit(same), None, mean, torch.zeros(512, 256))
    assert eager.held_bytes == compiled.held_bytes
    assert (len(eager.library), len(compiled.library)) == (2, 1)  # Thunder's backward runs in the calling thread
    assert eager.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.25)


@pytest.mark.parametrize(
    "model, optimizer, loss_fn, how, error, message",
    [
        (3, None, None, {}, TypeError, "a module or a function, not int"),
        (nn.Linear(4, 4), 3, None, {}, TypeError, "optimizer or None, not int"),
        (nn.Linear(4, 4), torch.optim.SGD, None, {}, TypeError, r"call it with the parameters, SGD\(model.parameters"),
        (nn.Linear(4, 4), "LBFGS", None, {}, TypeError, "closure"),
        (nn.Linear(4, 4), None, None, {}, ValueError, r"scalar tensor, but it is a tensor of shape \(2, 4\)"),
        (nn.Linear(4, 4), None, lambda out: 3, {}, ValueError, "scalar tensor, but it is int"),
        (nn.Linear(4, 4), None, lambda out: out.detach().sum(), {}, ValueError, "does not depend on anything"),
        (nn.Linear(4, 4), None, torch.sum, {"accumulate": 0}, ValueError, "from 1 up, not 0"),
        (nn.Linear(4, 4), None, torch.sum, {"accumulate": True}, ValueError, "from 1 up, not True"),
        (thunder.jit(nn.Linear(4, 4)), None, torch.sum, {}, TypeError, "use predict_step"),
        (torch.compile(nn.Linear(4, 4)), None, torch.sum, {}, TypeError, "give it the module"),
        (lambda x: x[x > 0], None, torch.sum, {}, PredictionError, "aten::gt.Scalar .* without data"),
    ],
)
def test_bad_input_is_answered_by_a_sentence(model, optimizer, loss_fn, how, error, message):
    optimizer = torch.optim.LBFGS(model.parameters()) if optimizer == "LBFGS" else optimizer
    with pytest.raises(error, match=message):
        estimate(model, optimizer, loss_fn, torch.zeros(2, 4, requires_grad=True), **how)
