"""Random numbers inside a checkpoint that are drawn a second time: the same ones, and nothing else drawn or kept."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core.trace import from_trace
from thunder.core.transform_common import Transform

from tests.checking.traces import unfused
from tests.frontend import test_checkpoint as checkpoints
from tests.frontend.test_checkpoint import Ops, checkpoint, close, drop
from thunder_mem import MemEfficient, simulate
from thunder_mem.costs.roofline import cost_s
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.pipeline import plan_joint_trace
from thunder_mem.frontend.checkpoint_tags import take_over_checkpoints
from thunder_mem.memory.device_models import device_model
from thunder_mem.partition.min_cut_partition import saved_storages
from thunder_mem.prediction.predict import predict
from thunder_mem.runtime.measure import measure_peak
from thunder_mem.runtime.rng_replay import original, replays_rng_state, saves_rng_state
from thunder_mem.trace.renaming import renamed
from thunder_mem.trace.verification import VerificationError, verify_rewrite

DRAWING = [
    checkpoints.dropout, checkpoints.two_dropouts, checkpoints.masks_of_two_checkpoints, checkpoints.rand_like,
    checkpoints.randn_like, checkpoints.attention_dropout, checkpoints.nested, checkpoints.dropout_and_in_place,
    checkpoints.autocast,
]  # fmt: skip
WIDE = 72  # squared, more than the bytes of a CPU generator's state

_uncompiled = checkpoints._uncompiled


def wide() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = (torch.randn(WIDE, WIDE, dtype=torch.float64, generator=generator) / 8 for _ in range(2))
    return tuple(t.requires_grad_() for t in made)


def jitted(fn, **options):
    return thunder.jit(fn, transforms=[MemEfficient(strict=True, verify=True)], **options)


def redraws(fn) -> tuple[list[str], list[str]]:
    """The names of what notes a state, in the forward, and of what draws from one, in the backward."""
    forward, backward = thunder.last_traces(fn)[-1], thunder.last_backward_traces(fn)[-1]
    noting = [b.sym.name for b in forward.bound_symbols if saves_rng_state(b)]
    assert not any(replays_rng_state(b) for b in forward.bound_symbols)
    return noting, [b.sym.name for b in backward.bound_symbols if replays_rng_state(b)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("executors", ["no fusion", "mem_pointwise"])
@pytest.mark.parametrize("program", DRAWING, ids=lambda p: p.__name__)
def test_gradients_are_eagers(program, executors, monkeypatch):
    monkeypatch.setattr(checkpoints, "inputs", wide)
    fn = jitted(lambda x, w: program(Ops(False), x, w), executors=checkpoints.EXECUTORS[executors])
    for got, expected in zip(checkpoints.run(fn), checkpoints.run(program, Ops(True)), strict=True):
        close(got, expected)
    noting, drawing = redraws(fn)
    assert len(noting) == len(drawing) > 0


def blocks(x, w):
    for _ in range(3):
        x = x + checkpoint(lambda x, w: drop((x @ w).sin()) @ w, x, w)
    return x


def test_nothing_but_states_is_kept_beside_the_blocks_inputs():
    fn = jitted(blocks, executors=[])
    args = wide()
    fn(*args)
    saved = [p for p in thunder.last_traces(fn)[-1].bound_symbols[-1].args[1][0] if p.name not in ("x", "w")]
    states = [p for p in saved if p.dtype is thunder.uint8]
    assert [p.shape for p in states] == [(torch.get_rng_state().numel(),)] * 3
    others = [p for p in saved if p.dtype is not thunder.uint8]
    assert [p.shape for p in others] == [(WIDE, WIDE)] * 2  # what enters the second and third


def test_what_is_drawn_between_forward_and_backward_changes_nothing():
    args = wide()
    fn = jitted(blocks, executors=[])
    gradients = []
    for draws in (0, 5):
        torch.manual_seed(3)
        out = fn(*args)
        torch.rand(draws)
        before = torch.get_rng_state()
        gradients.append(torch.autograd.grad(out.sum(), args))
        assert torch.equal(before, torch.get_rng_state())
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_the_generator_is_as_it_was_when_drawing_fails():
    from thunder_mem.runtime import rng_replay

    def fails(*_, **__):
        torch.rand(3)
        raise MemoryError

    drawing = rng_replay._redrawing(fails, torch.device("cpu"))
    before = torch.get_rng_state()
    with pytest.raises(MemoryError):
        drawing(torch.Generator().manual_seed(5).get_state())
    assert torch.equal(before, torch.get_rng_state())


def test_a_few_numbers_are_not_worth_a_state():
    fn = jitted(lambda x, w: checkpoint(lambda x, w: drop((x @ w)[:4]).exp() @ w, x, w), executors=[])
    fn(*wide())
    assert redraws(fn) == ([], [])


def test_outside_a_checkpoint_numbers_are_drawn_once():
    fn = jitted(lambda x, w: drop((x @ w).sin()).exp() @ w, executors=[])
    fn(*wide())
    assert redraws(fn) == ([], [])


class TakesOver(Transform):
    def transform_traces_pre_prologue(self, prologue, computation, epilogue, **_):
        return prologue, take_over_checkpoints(computation), epilogue


def joint_trace():
    return unfused(blocks, *wide(), transforms=[TakesOver()])


def test_what_may_be_drawn_only_once_is_kept():
    """As in programs that are recorded as CUDA graphs: the mask, as before."""
    trace = joint_trace()
    planned = plan_joint_trace(trace, (), PlanningOptions(redraw=False))
    assert not any(saves_rng_state(b) or replays_rng_state(b) for b in planned.trace.bound_symbols)
    kept = saved_storages(planned.source.graph)
    assert [planned.source.graph.storages[s].nbytes for s in kept].count(WIDE * WIDE) == 3
    assert len(kept) == 3 + 3  # with what the blocks return: all else is computed again, as ever
    drawn_again = plan_joint_trace(trace, (), PlanningOptions())
    assert sum(map(replays_rng_state, drawn_again.trace.bound_symbols)) == 3


@pytest.mark.parametrize("fusing", [[], ["mem_pointwise"]])
def test_bytes_are_as_predicted(fusing):
    args = wide()
    fn = jitted(blocks, executors=fusing)
    prediction = predict(fn, *args, keep_outputs=True)
    tangent = torch.ones(WIDE, WIDE, dtype=torch.float64)

    def step():
        return torch.autograd.grad(fn(*args), args, tangent)

    step()
    assert prediction.assumptions == ()
    assert prediction.phase("forward").measured_bytes == measure_peak(lambda: fn(*args))
    assert redraws(fn) == (["noted_uniform"] * 3, ["redrawn_uniform"] * 3)


def test_attention_with_dropout_on_a_gpu_that_is_not_there():
    """The efficient kernel runs again from its state, where a checkpoint encloses it; its mask is never a tensor."""

    def fn(q, k, v, bias):
        for _ in range(2):
            q = q + checkpoint(
                lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, attn_mask=b, dropout_p=0.1).sin(),
                q,
                k,
                v,
                bias,
            )
        return q

    with simulate("H100-80GB"):
        q, k, v = (
            torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        bias = torch.zeros(2, 1, 128, 128, device="cuda", dtype=torch.bfloat16)
        compiled = jitted(fn, executors=["sdpa", "mem_pointwise"])
        prediction = predict(compiled, q, k, v, bias)
        noting, drawing = redraws(compiled)
    assert len(noting) == len(drawing) == 2 and all("scaled_dot_product" in name for name in drawing)
    assert prediction.peak_bytes > 0
    for trace in (thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]):
        for b in trace.bound_symbols:
            if saves_rng_state(b) or replays_rng_state(b):
                assert cost_s(b, device_model("H100-80GB")) == cost_s(original(b), device_model("H100-80GB")) > 0


def test_states_that_are_taken_for_each_other_are_found():
    planned = plan_joint_trace(joint_trace(), (), PlanningOptions())
    after = from_trace(planned.trace)
    first, second, *_ = (b.output[0] for b in planned.trace.bound_symbols if saves_rng_state(b))
    swap = {first.name: second, second.name: first}
    after.bound_symbols = [renamed(b, swap) if replays_rng_state(b) else b for b in planned.trace.bound_symbols]
    verify_rewrite(planned.program.trace, planned.trace)
    with pytest.raises(VerificationError, match="draws other numbers"):
        verify_rewrite(planned.program.trace, after)
