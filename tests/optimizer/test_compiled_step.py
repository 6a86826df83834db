"""Steps that `torch.compile` makes one kernel: the same training within rounding, and no temporaries."""

import contextlib
import copy
import pickle
from functools import partial
from unittest import mock

import pytest
import thunder
import torch
import torch._dynamo.utils
from torch import nn

from thunder_mem import MemEfficient, StepInBackward, measure_peak, predict_step, simulate
from thunder_mem.optimizer import compiled_step
from thunder_mem.optimizer.figures import step_figures
from thunder_mem.optimizer.host_states import step_from_host
from thunder_mem.optimizer.one_parameter import first_state, step_alone
from thunder_mem.optimizer.update import is_update, update_of
from thunder_mem.prediction.training_step import training_step
from thunder_mem.regions.inductor_target import can_write, written
from thunder_mem.trace.reading import read_trace

NAMES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
COMPILING = pytest.mark.slow("compiled steps")


def optimizer_over(p, name, **more):
    return getattr(torch.optim, name)([p], lr=1e-2, **({"momentum": 0.9} if name == "SGD" else {}), **more)


def loss_of(y):
    return y.square().mean()


def trained(compiled, dtype=torch.float32, name="AdamW", **options):
    """A compiled model with its optimizer, and one step of its training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64), nn.LayerNorm(64)).to(dtype)
    adamw = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    ours = StepInBackward(adamw, compiled=compiled, **options)
    step = thunder.jit(model, executors=[], transforms=[MemEfficient(strict=True, optimizer=ours)])
    x = torch.randn(32, 64, dtype=dtype)
    return model, ours, step, x, lambda: training_step(step, ours, loss_of, x)


@pytest.fixture
def as_it_is(monkeypatch):
    """What `torch.compile` is given runs without compilation."""
    compiled_step._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    yield
    compiled_step._compiled.cache_clear()


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("ASGD", "RAdam")])  # which take another branch here
@pytest.mark.parametrize("clip", [{}, {"clip_value": 0.5}, {"scale": torch.tensor(0.25)}], ids=str)
def test_what_is_compiled_is_the_step(as_it_is, name, clip):
    torch.manual_seed(0)
    start = torch.randn(6, 5)
    parameters = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [optimizer_over(p, name) for p in parameters]
    for i in range(4):
        grad = torch.randn(6, 5)
        for p, optimizer, compiled in zip(parameters, optimizers, (False, True), strict=True):
            group = optimizer.param_groups[0]
            group["lr"] = 1e-2 / 2**i
            before = group["lr"], optimizer.state[p].get("exp_avg")
            step_alone(optimizer, group, p, grad if i % 2 else grad.t().contiguous().t(), compiled=compiled, **clip)
            assert p.grad is None and group["lr"] == before[0]
            assert before[1] is None or optimizer.state[p]["exp_avg"] is before[1]
    torch.testing.assert_close(*parameters, atol=1e-6, rtol=1e-6)
    mine, theirs = (o.state_dict() for o in reversed(optimizers))
    assert mine["param_groups"] == theirs["param_groups"]
    for key, value in theirs["state"][0].items():
        assert mine["state"][0][key].shape == value.shape
        torch.testing.assert_close(mine["state"][0][key], value)
    optimizer_over(nn.Parameter(start.clone()), name).load_state_dict(mine)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3, 4, 5)])
def test_parameters_of_any_shape(as_it_is, shape):
    p, q = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    for t, compiled in ((p, True), (q, False)):
        optimizer = optimizer_over(t, "AdamW")
        for _ in range(2):
            step_alone(optimizer, optimizer.param_groups[0], t, torch.ones(shape), compiled=compiled)
        assert optimizer.state[t]["exp_avg"].shape == shape
    torch.testing.assert_close(p, q)


def test_a_parameter_in_another_order(as_it_is):
    p, q = (nn.Parameter(torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)) for _ in range(2))
    for t, compiled in ((p, True), (q, False)):
        optimizer = optimizer_over(t, "AdamW")
        for grad in (torch.ones_like(t), torch.arange(120.0).view(2, 3, 4, 5)):
            step_alone(optimizer, optimizer.param_groups[0], t, grad, compiled=compiled)
        assert optimizer.state[t]["exp_avg"].stride() == t.stride()
    torch.testing.assert_close(p, q)


def test_a_failed_compilation_warns_once_and_steps(monkeypatch):
    def fails(fn, **_):
        def run(*args):
            raise torch._dynamo.exc.InternalTorchDynamoError("no compiler\nof a long story")

        return run

    compiled_step._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", fails)
    monkeypatch.setattr(compiled_step, "_FAILED", set())
    p, q = (nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    ours, plain = optimizer_over(p, "AdamW"), optimizer_over(q, "AdamW")
    with pytest.warns(UserWarning, match="torch.compile failed on a step of AdamW.*no compiler$") as seen:
        for _ in range(3):
            step_alone(ours, ours.param_groups[0], p, torch.ones(3, 3), compiled=True)
            step_alone(plain, plain.param_groups[0], q, torch.ones(3, 3))
    assert len(seen) == 1
    torch.testing.assert_close(p, q)
    with pytest.warns(UserWarning, match="AdamW before: steps run as without compiled=True"):
        StepInBackward(torch.optim.AdamW([p]), compiled=True)
    wide = torch.ones(4096, 1024)
    group = ours.param_groups[0]
    by_slices = step_figures(ours, group, wide.shape, wide.dtype, "cpu")
    assert step_figures(ours, group, wide.shape, wide.dtype, "cpu", compiled=True) == by_slices
    big = torch.ones(1 << 21)  # two slices, with states on the host
    monkeypatch.setattr(compiled_step, "_FAILED", set())
    away = optimizer_over(nn.Parameter(big), "AdamW", foreach=False)
    with pytest.warns(UserWarning, match="torch.compile failed") as seen:
        step_from_host(away, away.param_groups[0], away.param_groups[0]["params"][0], big, compiled=True)
    assert len(seen) == 1
    compiled_step._compiled.cache_clear()


def test_what_cannot_be_compiled_is_refused():
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match=r"compiled=True takes ASGD, Adadelta, .* not Adafactor"):
        StepInBackward(torch.optim.Adafactor([p]), compiled=True)
    with pytest.raises(ValueError, match=r"AdamW\(fused=True\) runs a kernel of PyTorch"):
        StepInBackward(torch.optim.AdamW([p], fused=True), compiled=True)
    with pytest.raises(ValueError, match="compiled is True or False, not 'yes'"):
        StepInBackward(torch.optim.AdamW([p]), compiled="yes")
    ours = StepInBackward(torch.optim.AdamW([p]), compiled=True)
    assert pickle.loads(pickle.dumps(ours)).compiled
    with pytest.raises(TypeError, match="not Adafactor"):
        ours.use(torch.optim.Adafactor([p]))


@pytest.mark.parametrize("states", ["device", "host"])
def test_a_plan_for_a_gpu_counts_one_kernel_without_temporaries(states):
    with simulate("H100-80GB"):
        model = nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
        ours = StepInBackward(torch.optim.NAdam(model.parameters()), compiled=True, states=states)
        step = thunder.jit(model, transforms=[MemEfficient(strict=True, optimizer=ours)])
        x = torch.ones(16, 4096, device="cuda", dtype=torch.bfloat16)
        prediction = predict_step(step, ours, lambda y: y.float().square().mean(), x)
        (update,) = (update_of(b) for b in read_trace(thunder.last_backward_traces(step)[-1]).bsyms if is_update(b))
    size = 4096 * 4096 * 2
    assert update.figures.moved_bytes == 7 * size  # parameter, gradient, two states; all but the gradient written, too
    if states == "device":
        assert (update.figures.temporary_bytes, update.figures.launches) == (0, 1)
        assert 4 * size < prediction.peak_bytes < 4.3 * size
    else:
        assert update.figures.temporary_bytes == 2 * 2 * (16 << 20)  # two slices of two states
        assert update.figures.launches == 2 * (2 * 2 + 1)


def test_adagrad_has_figures():
    p, grad = nn.Parameter(torch.ones(4096, 1024)), torch.ones(4096, 1024)
    adagrad = torch.optim.Adagrad([p], initial_accumulator_value=0.5)
    group = adagrad.param_groups[0]
    figures = step_figures(adagrad, group, p.shape, p.dtype, "cpu")
    step = partial(step_alone, adagrad, group, p, grad)
    step()
    assert 0 <= measure_peak(step) - figures.temporary_bytes <= 64
    assert figures.state_bytes == p.nbytes and figures.launches > 0
    assert first_state(adagrad, group, grad)[grad]["sum"].eq(0.5).all()


@COMPILING
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_follows_float64(name, dtype):
    torch.manual_seed(0)
    start = torch.randn(40, 25).to(dtype)
    parameters = exact, plain, ours = [nn.Parameter(t) for t in (start.double(), start.clone(), start.clone())]
    optimizers = [optimizer_over(p, name, foreach=False) for p in parameters]
    before = None
    for i in range(12):
        grad = torch.randn(40, 25).to(dtype)
        for p, optimizer in zip(parameters, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 1e-2 / (i + 1)
            if p is ours:
                step_alone(optimizer, optimizer.param_groups[0], p, grad, compiled=True)
            else:
                p.grad = grad.to(p.dtype)
                optimizer.step()
        if i == 2:
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    error, usual = ((p.double() - exact).abs().max().item() for p in (ours, plain))
    assert error <= 2 * usual
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before  # new rates compile nothing


@COMPILING
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["AdamW", "RAdam", "Adagrad"])
@pytest.mark.parametrize("more", [{}, {"clip_value": 1e-3}, {"max_norm": 0.1}, {"states": "host"}], ids=str)
def test_a_training_step_is_predicted_and_holds_less(name, dtype, more):
    peaks, after = [], []
    for compiled in (False, True):
        model, ours, step, x, run = trained(compiled, dtype, name, **more)
        run(), run()
        peaks.append(measure_peak(run))
        after.append([p.detach().clone() for p in model.parameters()])
        assert predict_step(step, ours, loss_of, x).measured_bytes == peaks[-1]
    assert peaks[1] < 0.86 * peaks[0]
    for p, q in zip(*after, strict=True):  # the first steps of a gradient near 0 have any size up to the rate
        assert (p - q).abs().mean() <= (1e-3 if dtype == torch.bfloat16 else 1e-6)


OPTIONS = {
    "AdamW": ({}, {"betas": (0.9, 0.95)}, {"betas": (0.8, 0.95), "weight_decay": 0.3}, {"eps": 1e-4, "amsgrad": True}),
    "SGD": ({}, {"momentum": 0.5}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.3}),
    "RMSprop": ({}, {"alpha": 0.5}, {"centered": True, "momentum": 0.9}, {"weight_decay": 0.1, "maximize": True}),
    "NAdam": (
        {},
        {"betas": (0.7, 0.8)},
        {"momentum_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True},
    ),
    "RAdam": (
        {},
        {"betas": (0.7, 0.8)},
        {"betas": (0.9, 0.9999)},
        {"weight_decay": 0.1, "maximize": True},
    ),
    "ASGD": ({"lambd": 0.5}, {"alpha": 0.5, "t0": 3.0}),
    "Adadelta": ({"rho": 0.7}, {"rho": 0.9}),
    "Adagrad": ({"lr_decay": 0.1}, {"initial_accumulator_value": 0.5}),
    "Rprop": ({"etas": (0.3, 1.5)}, {"step_sizes": (1e-4, 1e-2)}),
}


@COMPILING
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_its_own(name):
    """PyTorch 2.11 ran a program with the first `betas` for all others, while these were symbols."""
    for options in OPTIONS[name]:
        torch.manual_seed(0)
        ours, plain = (nn.Parameter(torch.zeros(64)) for _ in range(2))
        optimizers = [getattr(torch.optim, name)([p], lr=1e-2, foreach=False, **options) for p in (ours, plain)]
        for _ in range(10):
            grad = torch.randn(64)
            step_alone(optimizers[0], optimizers[0].param_groups[0], ours, grad, compiled=True)
            plain.grad = grad
            optimizers[1].step()
        error = (ours - plain).norm() / plain.norm()
        assert error <= (1e-5 if name in ("AdamW", "NAdam") else 3e-7), options  # whose corrections have 32 bits


@COMPILING
@pytest.mark.parametrize("name", NAMES)
def test_float64_parameters(name):
    torch.manual_seed(0)
    ours, plain = (nn.Parameter(torch.zeros(64, dtype=torch.float64)) for _ in range(2))
    optimizers = [getattr(torch.optim, name)([p], lr=1e-2, foreach=False) for p in (ours, plain)]
    for _ in range(9):
        grad = torch.randn(64, dtype=torch.float64)
        step_alone(optimizers[0], optimizers[0].param_groups[0], ours, grad, compiled=True)
        plain.grad = grad
        optimizers[1].step()
    assert (ours - plain).norm() <= 1e-7 * plain.norm()


@pytest.mark.parametrize("name", NAMES)
def test_without_the_compiler_steps_run_as_they_are(name):
    ours, plain = (nn.Parameter(torch.ones(8, 8)) for _ in range(2))
    optimizers = [optimizer_over(p, name, foreach=False) for p in (ours, plain)]
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            step_alone(optimizers[0], optimizers[0].param_groups[0], ours, torch.ones(8, 8), compiled=True)
            plain.grad = torch.ones(8, 8)
            optimizers[1].step()
    torch.testing.assert_close(ours, plain)


@COMPILING
def test_autograd_sees_the_write():
    p, q = nn.Parameter(torch.ones(4)), torch.ones(4, requires_grad=True)
    result = (q * p.detach()).sum()
    optimizer = torch.optim.AdamW([p])
    step_alone(optimizer, optimizer.param_groups[0], p, torch.ones(4), compiled=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@COMPILING
def test_a_group_that_became_fused_is_compiled():
    ours, plain = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizers = torch.optim.AdamW([ours]), torch.optim.AdamW([plain], fused=True)
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    step_alone(optimizers[0], optimizers[0].param_groups[0], ours, torch.ones(4), compiled=True)
    plain.grad = torch.ones(4)
    optimizers[1].step()
    torch.testing.assert_close(ours, plain)
    assert torch.optim.AdamW not in compiled_step._FAILED


@COMPILING
def test_a_schedule_of_betas_warns_when_it_compiled_too_often(monkeypatch):
    monkeypatch.setattr(compiled_step, "_FAILED", set())
    compiled_step._compiled.cache_clear()
    ours, plain = (nn.Parameter(torch.ones(64)) for _ in range(2))
    optimizers = [torch.optim.AdamW([p], lr=1e-2, foreach=False) for p in (ours, plain)]
    with pytest.warns(UserWarning, match="whose steps run as without compiled=True from now on"):
        for i in range(12):
            for optimizer in optimizers:
                optimizer.param_groups[0]["betas"] = 0.9 - 0.01 * i, 0.99
            step_alone(optimizers[0], optimizers[0].param_groups[0], ours, torch.ones(64), compiled=True)
            plain.grad = torch.ones(64)
            optimizers[1].step()
    torch.testing.assert_close(ours, plain, atol=1e-7, rtol=1e-6)


@COMPILING
def test_one_compilation_serves_all_shapes():
    torch._dynamo.reset()
    compiled_step._compiled.cache_clear()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    for shape in ((7,), (30, 40), (5, 6, 7), (2, 3, 4, 5), (1000,), *((n, 3) for n in range(2, 20))):
        p = nn.Parameter(torch.ones(shape))
        optimizer = optimizer_over(p, "Adamax")
        for _ in range(2):
            step_alone(optimizer, optimizer.param_groups[0], p, torch.ones(shape), compiled=True)
    assert counters["unique_graphs"] == before + 1


@COMPILING
@pytest.mark.parametrize("name", NAMES)
def test_the_compiler_writes_one_kernel_for_a_gpu(name):
    """The program that `torch.compile` finds on the CPU goes through Inductor for a simulated H100."""
    from torch._functorch import aot_autograd
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes import joint_graph
    from torch._subclasses.fake_tensor import FakeTensorMode

    seen, compile_ = [], torch.compile

    def backend(graph, inputs):
        seen.append((graph, inputs))
        return graph

    compiled_step._compiled.cache_clear()
    captured = partial(compile_, backend=backend, fullgraph=True, dynamic=False)
    static = mock.patch.object(compiled_step, "maybe_mark_dynamic", lambda t, dims: None)
    with static, mock.patch.object(torch, "compile", lambda fn, **_: captured(fn)):
        p = nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16))
        optimizer = optimizer_over(p, name)
        for _ in range(2):  # the state of SGD begins with the second
            scale = torch.ones(())
            step_alone(optimizer, optimizer.param_groups[0], p, torch.ones_like(p), compiled=True, scale=scale)
    compiled_step._compiled.cache_clear()
    graph, inputs = seen[-1]
    with contextlib.ExitStack() as stack:
        stack.enter_context(simulate("H100-80GB"))
        if not can_write():
            pytest.skip("Triton is not installed")
        # These ask the driver of a real device.
        stack.enter_context(mock.patch.object(aot_autograd, "preserve_rng_state", contextlib.nullcontext))
        stack.enter_context(mock.patch.object(joint_graph, "lazy_init", lambda device=None: None))
        stack.enter_context(config.patch({"joint_graph_constant_folding": False}))
        stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.device("cpu"))
        given = [torch.empty(t.shape, dtype=t.dtype, device="cuda" if t.dim() else "cpu") for t in inputs]
        text, _ = written(lambda: compile_fx(graph, given))
    call = text[text.index("def call(") : text.index("runner = ")]
    assert call.count(".run(") == 1
    assert "empty_strided_cuda" not in call and "extern_kernels" not in call
    numbers = {line.split("(")[1].split(",")[0] for line in call.splitlines() if ", (), ())" in line}
    (run,) = (line for line in call.splitlines() if ".run(" in line)
    arguments = run.partition(".run(")[2].split(", ")
    assert numbers and not numbers & set(arguments), run  # a kernel takes numbers of the CPU by value


@COMPILING
def test_gradients_added_up_are_stepped_with_the_last():
    model, ours, step, x, _ = trained(True)
    plain = copy.deepcopy(model)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    with ours.accumulate():
        loss_of(step(x)).backward()
    loss_of(step(2 * x)).backward()
    ours.step()
    for k in (1, 2):
        loss_of(plain(k * x)).backward()
    adamw.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=2e-5, rtol=1e-3)
