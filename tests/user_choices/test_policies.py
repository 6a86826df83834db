"""Policies: what they see, what they are refused, and that the ready ones keep what they say."""

import pytest
import thunder
import torch
import torch.nn.functional as F

from thunder_mem import MemEfficient, RecomputeError, last_plan, predict
from thunder_mem.policies import (
    Action,
    OpInfo,
    every_second_matmul,
    first_of,
    keep_everything,
    offload_everything,
    recompute_everything,
    save_between_layers,
    save_by_name,
    save_only_attention_outputs,
    save_only_matmul_outputs,
)
from thunder_mem.runtime.host_transfers import is_transfer


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)
        self.proj = torch.nn.Linear(8, 8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 8)
        x = x + self.proj(y)
        return x + F.dropout(self.down(F.gelu(self.up(x)).sin().exp()), 0.2)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.h:
            x = block(x.sin())
        return x


EXECUTORS = ["mem_attention"]


def run(policy, executors=EXECUTORS) -> tuple[list[torch.Tensor], list]:
    """Gradients, and what the forward saves beside arguments, as bound symbols' words."""
    torch.manual_seed(0)
    model = Model()
    jitted = thunder.jit(model, executors=executors, transforms=[MemEfficient(recompute=policy, strict=True)])
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, 80).view(2, 5, 8).requires_grad_()
    jitted(x).square().sum().backward()
    trace = thunder.last_traces(jitted)[-1]
    made = {p.name: b for b in trace.bound_symbols for p in b.flat_proxy_outs}
    saved = [made[p.name] for p in trace.bound_symbols[-1].args[1][0] if not p.name.startswith("t_") and p.name in made]
    views = ("view", "reshape", "permute", "transpose", "unbind", "contiguous", "slice", "squeeze", "getitem")
    names = []
    for b in saved:
        while any(v in b.sym.name for v in views) and b.flat_proxy_args[0].name in made:
            b = made[b.flat_proxy_args[0].name]
        names.append(b.sym.name)
    return [x.grad, *(p.grad for p in model.parameters())], names


@pytest.fixture(scope="module")
def plain() -> list[torch.Tensor]:
    return run(None)[0]


def same_bits(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for g, e in zip(got, expected, strict=True):
        assert torch.equal(g, e)


def is_mask(name: str) -> bool:
    return name in ("lt", "unpack_trivial")


@pytest.mark.slow
def test_save_only_matmul_outputs(plain):
    grads, saved = run(save_only_matmul_outputs)
    same_bits(grads, plain)
    assert "linear" in saved and "lt" in saved
    assert {name for name in saved if not is_mask(name)} == {"linear"}


@pytest.mark.slow
def test_save_only_attention_outputs(plain):
    grads, saved = run(save_only_attention_outputs)
    same_bits(grads, plain)
    assert {name for name in saved if not is_mask(name)} == {"mem_attention_forward"}


@pytest.mark.slow
def test_save_between_layers(plain):
    """Beside attention, the one value that the second layer receives from the first."""
    grads, saved = run(first_of(save_between_layers, save_only_attention_outputs))
    same_bits(grads, plain)
    kept = [name for name in saved if not is_mask(name)]
    assert set(kept) == {"mem_attention_forward", "sin"} and kept.count("sin") == 1


@pytest.mark.slow
def test_every_second_matmul(plain):
    grads, saved = run(every_second_matmul)
    same_bits(grads, plain)
    kept = [name for name in saved if not is_mask(name)]
    assert set(kept) == {"linear", "mem_attention_forward"}
    assert kept.count("linear") < run(save_only_matmul_outputs)[1].count("linear")


@pytest.mark.slow
def test_everything_kept_and_everything_recomputed(plain):
    grads, kept = run(keep_everything)
    same_bits(grads, plain)
    again, saved = run(recompute_everything)
    same_bits(again, plain)
    assert all(map(is_mask, saved)) and len(saved) < len(kept)


@pytest.mark.slow
def test_save_by_name(plain):
    grads, saved = run(first_of(save_by_name("h.1.up", "Attention"), recompute_everything))
    same_bits(grads, plain)
    kept = [name for name in saved if not is_mask(name)]
    assert kept.count("linear") == 1 and "mem_attention_forward" in kept
    same_word = run(first_of(save_by_name("h.1.up", "Attention+"), recompute_everything))
    assert same_word[1] == saved  # as patterns are written
    _, both = run(first_of(save_by_name("h.*.up"), recompute_everything))
    assert [n for n in both if not is_mask(n)] == ["linear", "linear"]


def away(op, graph):
    return "offload" if op.is_attention or op.word == "Gelu" else "auto"


@pytest.mark.parametrize("budget", [None, "100%"])
@pytest.mark.slow
def test_what_a_policy_offloads_waits_on_the_host(plain, budget):
    model, x = Model(), torch.linspace(-1, 1, 80).view(2, 5, 8).requires_grad_()
    option = MemEfficient(recompute=away, budget=budget, strict=True)
    jitted = thunder.jit(model, executors=EXECUTORS, transforms=[option])
    predict(jitted, x)
    traces = (thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1])
    copies = [[b.sym.name for b in trace.bound_symbols if is_transfer(b)] for trace in traces]
    assert [names.count(n) for names, n in zip(copies, ("offload", "prefetch"), strict=True)] == [6, 6]
    (decision,) = (d for d in last_plan(jitted).decisions if d.what == "offload")
    assert decision.how.startswith("6 values")  # of each layer attention's two, and the result of GELU
    assert decision.after_bytes == 2 * (2 * 5 * 8 + 2 * 2 * 5 + 2 * 5 * 16) * 4
    same_bits(run(away)[0], plain)


@pytest.mark.slow
def test_what_cannot_be_offloaded_is_refused_with_the_reason():
    with pytest.raises(RecomputeError, match=r"cannot be offloaded: the caller holds it"):
        run(lambda op, graph: "offload")


@pytest.mark.slow
def test_a_policy_sees_what_may_be_offloaded(plain):
    seen: list[OpInfo] = []

    def look(op, graph):
        seen.append(op)
        return offload_everything(op, graph)

    grads, saved = run(look)
    same_bits(grads, plain)
    assert saved and all(name in ("unpack_trivial", "offload_wait") or is_mask(name) for name in saved)
    assert {None, "the caller holds it"} <= {op.offload_refusal for op in seen}


def test_by_a_line_of_source():
    """A function has no modules, but lines."""

    def fn(x):
        y = x.tanh()
        return (y.sin() * y).cos()

    line = fn.__code__.co_firstlineno + 1
    policy = first_of(save_by_name(f"test_policies.py:{line}"), recompute_everything)
    jitted = thunder.jit(fn, executors=[], transforms=[MemEfficient(recompute=policy, strict=True)])
    x = torch.linspace(0, 1, 4).requires_grad_()
    jitted(x).sum().backward()
    trace = thunder.last_traces(jitted)[-1]
    made = {p.name: b.sym.name for b in trace.bound_symbols for p in b.flat_proxy_outs}
    assert [made[p.name] for p in trace.bound_symbols[-1].args[1][0]] == ["tanh"]


@pytest.mark.slow
def test_what_a_policy_sees():
    seen: list[OpInfo] = []

    def look(op, graph):
        seen.append(op)
        assert graph.ops[op.index].allocates and not graph.ops[op.index].backward
        return Action.AUTO

    run(look)
    linears = [op for op in seen if op.word == "Linear"]
    assert [op.module for op in linears][:4] == ["h.0.qkv", "h.0.proj", "h.0.up", "h.0.down"]
    assert [op.layer for op in linears] == [0] * 4 + [1] * 4
    assert [op.rank for op in linears] == list(range(8)) and all(op.is_matmul for op in linears)
    gelu = next(op for op in seen if op.word == "Gelu")
    assert gelu.module == "h.0" and "test_policies.py" in gelu.source and gelu.nbytes == 2 * 5 * 16 * 4
    assert gelu.shapes[0] == (2, 5, 16) and gelu.dtypes == ("float32",)
    attention = [op for op in seen if op.is_attention]
    assert [op.word for op in attention] == ["Attention", "Attention"]
    assert {op.refusal for op in seen if op.word == "Dropout"} == {
        None,
        "it draws random numbers, fewer than its generator's state has bytes",
    }


@pytest.mark.slow
def test_strings_do_and_frozen_dataclasses_compose():
    def no_gelu(op, graph):
        return "recompute" if op.word == "Gelu" else "auto"

    assert first_of(no_gelu, keep_everything) == first_of(no_gelu, keep_everything)
    assert repr(save_by_name("a", "b")) == "save_by_name('a', 'b')"
    _, kept = run(first_of(no_gelu, keep_everything))
    assert len(kept) < len(run(keep_everything)[1])


def wrong(op, graph):
    return "save"


def fails(op, graph):
    raise KeyError("h.7")


def draws_again(op, graph):
    return "recompute" if op.symbol == "uniform" else "auto"


@pytest.mark.parametrize(
    "policy, reason",
    [
        (wrong, "the policy answers 'save' for sin"),
        (fails, "the policy fails for sin .*KeyError"),
        (draws_again, r"uniform \(Dropout, h.0\) must not be computed again: it draws random numbers"),
        (save_by_name("h.2.up"), "'h.2.up' names nothing in this program; near it are .*h.1.up"),
        (first_of(first_of(save_by_name("Gello"))), "'Gello' names nothing.*Gelu"),
    ],
)
@pytest.mark.slow
def test_what_makes_no_sense_is_an_error_even_when_not_strict(policy, reason: str):
    jitted = thunder.jit(Model(), executors=EXECUTORS, transforms=[MemEfficient(recompute=policy)])
    with pytest.raises(RecomputeError, match=reason):
        jitted(torch.zeros(2, 5, 8))


def test_what_is_no_policy():
    with pytest.raises(TypeError, match="a policy is a function"):
        first_of("keep")
    with pytest.raises(TypeError, match="save_by_name takes names"):
        save_by_name()
    for given in (3, object()):
        with pytest.raises(TypeError, match="recompute is a configuration or a policy"):
            MemEfficient(recompute=given)
    for make in (lambda: MemEfficient(recompute=save_by_name), lambda: first_of(save_by_name, keep_everything)):
        with pytest.raises(TypeError, match=r"^save_by_name is a class: write save_by_name\(\.\.\.\)"):
            make()


@pytest.mark.slow  # Inductor
@pytest.mark.parametrize("policy", [save_only_matmul_outputs, recompute_everything], ids=["matmuls", "nothing"])
def test_fused_gradients_are_eagers(policy):
    """Fused, rounding differs: against float64 eager, with the dropout that Thunder draws."""
    model = Model().double()
    for p in model.parameters():
        p.requires_grad_()
    x = torch.linspace(-1, 1, 80, dtype=torch.float64).view(2, 5, 8).requires_grad_()
    dropout = F.dropout
    try:
        F.dropout = lambda t, p: t * (torch.rand_like(t) < 1 - p) * (1 / (1 - p))
        torch.manual_seed(1)
        expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    finally:
        F.dropout = dropout
    jitted = thunder.jit(
        model, executors=["mem_attention", "mem_pointwise"], transforms=[MemEfficient(recompute=policy, strict=True)]
    )
    torch.manual_seed(1)
    got = torch.autograd.grad(jitted(x).square().sum(), [x, *model.parameters()])
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-9, atol=1e-9)
