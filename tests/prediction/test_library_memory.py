"""What libraries keep on a GPU is a line of its own, and takes room from the device."""

import pytest
import thunder
import torch
from torch import nn

from thunder_mem import fits, predict, predict_step
from thunder_mem.fake_execution.replay import Event
from thunder_mem.memory.device_specs import DEVICES
from thunder_mem.prediction.caching_allocator import allocate
from thunder_mem.prediction.library_memory import cublas_workspace_bytes, library_memory, unknown_library_memory
from thunder_mem.prediction.simulate import simulate

A100, H100 = 8519680, 32 * 2**20


def on(device, model, *shapes, step=False):
    with simulate(device, fusion=None):
        with torch.device("cuda"):
            model = model()
            inputs = [torch.zeros(shape) for shape in shapes]
        jitted = thunder.jit(model)
        if step:
            return predict_step(jitted, None, lambda out: out.sum(), *inputs)
        with torch.no_grad():
            return predict(jitted, *inputs)


@pytest.mark.parametrize("name", DEVICES)
def test_a_workspace_is_larger_from_hopper_on(name):
    spec = DEVICES[name]
    assert cublas_workspace_bytes(spec.capability) == (H100 if spec.capability[0] >= 9 else A100)


@pytest.mark.parametrize("config, nbytes", [(":4096:8", 2**25), (":16:8", 2**17), (":4096:2:16:8", A100), ("x", A100)])
def test_the_environment_overrules_it(config, nbytes):
    assert cublas_workspace_bytes((8, 0), config) == nbytes


def test_each_thread_has_one_workspace_and_thunders_backward_runs_in_the_calling_one():
    """An H200's step of longchat peaked at its tensors and one workspace; eager's at two."""
    forward = on("A100-80GB", lambda: nn.Linear(8, 8), (4, 8))
    step = on("A100-80GB", lambda: nn.Linear(8, 8), (4, 8), step=True)
    assert [kept.nbytes for kept in forward.library] == [A100] == [kept.nbytes for kept in step.library]
    assert on("H100-80GB", lambda: nn.Linear(8, 8), (4, 8), step=True).library_bytes == H100

    def loss_with_a_product(out):
        return (out @ out.t()).sum()

    with simulate("A100-80GB"), torch.device("cuda"):
        jitted = thunder.jit(nn.Linear(8, 8))
        outside = predict_step(jitted, None, loss_with_a_product, torch.zeros(4, 8))
    assert outside.library_bytes == 2 * A100 == int(16.25 * 2**20)


def test_thunders_backward_hangs_on_a_meta_tensor_which_autograd_runs_in_the_calling_thread():
    loss = thunder.jit(nn.Linear(8, 8))(torch.zeros(4, 8)).sum()
    nodes = [loss.grad_fn]
    while not nodes[-1].name().startswith("ThunderFunction"):
        nodes.append(nodes[-1].next_functions[0][0])
    assert [made.device.type for made in nodes[-1]._input_metadata] == ["meta"]


def test_thunderfxs_backward_runs_in_a_thread_of_its_own():
    with simulate("A100-80GB"), torch.device("cuda"):
        jitted = thunder.jit(nn.Linear(8, 8))
        alone = predict_step(jitted, None, lambda out: out.sum(), torch.zeros(4, 8))
        as_fx = thunder.jit(nn.Linear(8, 8), thunderfx_disable_split_autograd=True)
        by_fx = predict_step(as_fx, None, lambda out: out.sum(), torch.zeros(4, 8))
    assert (len(alone.library), len(by_fx.library)) == (1, 2)
    events = alone.timeline
    assert [len(library_memory(events, (8, 0), {}, split_autograd=split)) for split in (True, False)] == [1, 2]


def test_without_a_product_there_is_none():
    assert on("H100-80GB", nn.GELU, (4, 8)).library == ()
    model = nn.Linear(8, 8)
    assert predict(thunder.jit(model, executors=[]), torch.zeros(4, 8)).library == ()  # a CPU has none


def test_it_is_in_no_figure_of_tensors_but_in_the_allocators():
    step = on("H100-80GB", lambda: nn.Linear(8, 8), (4, 8), step=True)
    allocation = allocate(step)
    assert step.measured_bytes + step.held_bytes < step.peak_bytes < 2**16
    assert allocation.library_bytes == step.library_bytes
    assert allocation.allocated_peak_bytes == step.peak_bytes + step.library_bytes
    assert allocation.reserved_peak_bytes >= allocation.allocated_peak_bytes
    assert step.phase("forward").library == step.library


def test_it_takes_room_from_the_device():
    answer = fits(lambda: nn.Linear(8, 8), None, [(4, 8)], device="H100-80GB")
    left = answer.headroom_bytes + answer.prediction.peak_bytes + H100
    assert left == DEVICES["H100-80GB"].usable_bytes


def test_products_of_eager_code_and_those_of_a_backward_count():
    forward, backward = Event(0, "forward", "aten::addmm"), Event(1, "backward", "aten::mm.out")
    assert library_memory([forward], (8, 0), {}) != library_memory([backward], (8, 0), {})
    assert len(library_memory([forward, forward, backward], (8, 0), {})) == 2
    assert library_memory([Event(0, "forward", "aten::add.Tensor")], (8, 0), {}) == ()
    assert library_memory([forward], (8, 0), {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}) == ()


def test_what_is_not_known_is_said():
    (said,) = unknown_library_memory([Event(0, "forward", "aten::convolution")])
    assert "cuDNN" in said
    assert unknown_library_memory([Event(0, "forward", "aten::mm")]) == ()
    convolved = on("A100-80GB", lambda: nn.Conv2d(3, 4, 3), (1, 3, 8, 8))
    assert any("cuDNN" in a for a in convolved.assumptions)
