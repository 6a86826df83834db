"""One notion of a peak: what plans, budgets, reports, the frontier and the command line say is what a device holds."""

import json

import pytest
import thunder
import torch
import torch.nn.functional as F

from tests.fuzzing.configs import uncompiled_regions
from thunder_mem import (
    BudgetError,
    ChunkLossHead,
    MemEfficient,
    explain,
    last_plan,
    measure_peak,
    memory_time_frontier,
    predict,
)
from thunder_mem.command_line import main
from thunder_mem.planning import executor
from thunder_mem.prediction.simulate import simulate
from thunder_mem.trace.reading import read_trace

ONE_BYTES = 4  # the gradient of the loss, which `loss.backward()` makes and the backward does not take


def planned_and_measured(fn, *args):
    """What a plan says, and the most that is really held, while the caller holds all that is returned."""
    jitted = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])
    tensors = [*args, *(jitted.parameters() if isinstance(fn, torch.nn.Module) else ())]

    def run():
        for t in tensors:
            t.grad = None
        returned = jitted(*args)
        loss = returned if isinstance(returned, torch.Tensor) else returned[0]
        loss.backward()
        return returned

    run()
    for t in tensors:
        t.grad = None
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return last_plan(jitted).candidate.peak_bytes, measure_peak(run) + sum(held.values())


def one(h):
    return h.square().mean(), h.argmax(-1)


def two(h):
    return h.square().mean(), h.argmax(-1), (h > 0)


def the_last_is_small(h):
    return h.square().mean(), (h > 0), h.argmax(-1)[:3]


def returned_twice(h):
    found = h.argmax(-1)
    return h.square().mean(), found, {"again": found, "count": 3}


def detached(h):
    return h.square().mean(), h.detach()[0] * 2


@pytest.mark.parametrize("fn", (one, two, the_last_is_small, returned_twice, detached), ids=lambda f: f.__name__)
def test_a_plan_counts_what_autograd_makes_for_outputs_without_a_gradient(fn):
    """Zeros of their shape, the last of which Thunder's backward holds to its end."""
    planned, measured = planned_and_measured(fn, torch.randn(512, 128, requires_grad=True))
    assert planned == measured - ONE_BYTES


def test_so_does_it_for_an_argument_that_is_returned():
    planned, measured = planned_and_measured(
        lambda h, i: (h.square().mean(), i), torch.randn(512, 128, requires_grad=True), torch.arange(5000)
    )
    assert planned == measured - ONE_BYTES


def test_a_budget_is_kept_beside_outputs_without_a_gradient():
    x = torch.randn(512, 128, requires_grad=True)
    planned, measured = planned_and_measured(one, x)
    with pytest.raises(BudgetError):
        thunder.jit(one, executors=[], transforms=[MemEfficient(budget=measured - 4096)])(x)
    jitted = thunder.jit(one, executors=[], transforms=[MemEfficient(budget=measured)])
    jitted(x)
    assert last_plan(jitted).budget.peak_bytes == planned


class Tied(torch.nn.Module):
    """A weight under two names; without the last layer as its own, beside another of the same shape."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = torch.nn.Embedding(1000, 64), torch.nn.Linear(64, 1000, bias=False)
        self.other = torch.nn.Embedding(1000, 64)
        self.last.weight = self.embedding.weight

    def forward(self, tokens):
        return self.last(self.embedding(tokens) + self.other(tokens)).tanh().sum()


def test_a_parameter_of_two_names_counts_once():
    planned, measured = planned_and_measured(Tied(), torch.arange(30))
    assert planned == measured - ONE_BYTES


def test_a_plan_counts_what_flash_attention_holds():
    """On a GPU its backward adds up in float32, in rows and columns that are padded."""
    with simulate("H100-80GB"), torch.device("cuda"):
        qkv = [torch.zeros(2, 4, 200, 40, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        jitted = thunder.jit(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().mean(),
            transforms=[MemEfficient(strict=True)],
        )
        predicted = predict(jitted, *qkv, keep_outputs=True)
    planned = last_plan(jitted).candidate
    assert predicted.peak_event.scratch_bytes > 0
    peaks = [predicted.phase(half).peak_bytes for half in ("forward", "backward")]
    assert [planned.forward_peak_bytes, planned.backward_peak_bytes] == peaks


SCRIPT = """
import torch
from tests.decisions.test_one_peak import Looped

def build():
    return Looped(), (torch.zeros(512, dtype=torch.long), torch.zeros(512, dtype=torch.long))
"""


class Looped(torch.nn.Module):
    """A loss head that is chunked, below layers that are worth computing again, with its weight tied."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(4096, 64), torch.nn.Linear(64, 4096, bias=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
        self.head.weight = self.embedding.weight

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.softmax(layer(x).repeat(1, 16), -1)[:, :64]
        return F.cross_entropy(self.head(x), targets)


@pytest.fixture(scope="module")
def figures():
    """The peak of the plan that costs nothing, and the smallest there is, by the API."""
    with simulate("H100-80GB"), torch.device("cuda"):
        model, tokens, targets = Looped(), *(torch.zeros(512, dtype=torch.long) for _ in range(2))
        jitted = thunder.jit(model, transforms=[MemEfficient(strict=True)])
        report = explain(jitted, tokens, targets, bounds=False, detail=True)
        frontier = memory_time_frontier(model, tokens, targets, points=1)
    return last_plan(jitted).candidate.peak_bytes, report, frontier


@pytest.mark.slow
def test_a_report_and_the_frontier_name_the_plans_figure(figures):
    peak, report, frontier = figures
    assert report.prediction.scratch_bytes > 0 and peak == report.peak_bytes == frontier.points[0].peak_bytes
    first, _, parts, *_ = str(report).splitlines()
    assert first.startswith(f"Peak {report.peak_bytes / 2**20:.2f} MiB ({peak:,} bytes) in the forward, at chunk")
    assert "scratch" in parts and "held by the caller" in parts


@pytest.mark.slow
def test_a_budget_is_judged_by_the_frontiers_figure(figures):
    smallest = figures[2].points[-1].peak_bytes
    with simulate("H100-80GB"), torch.device("cuda"):
        model, tokens, targets = Looped(), *(torch.zeros(512, dtype=torch.long) for _ in range(2))
        step = thunder.jit(model, transforms=[MemEfficient(budget=smallest, strict=True)])
        assert predict(step, tokens, targets, keep_outputs=True).peak_bytes == smallest
        step = thunder.jit(model, transforms=[MemEfficient(budget=smallest - 1, strict=True)])
        with pytest.raises(BudgetError) as caught:
            predict(step, tokens, targets)
    assert caught.value.smallest_peak_bytes == smallest


@pytest.mark.slow
@pytest.mark.parametrize("beyond", (0, 1))
def test_so_it_is_on_the_command_line(figures, beyond, tmp_path, capsys):
    peak, _, frontier = figures
    smallest = frontier.points[-1].peak_bytes
    (tmp_path / "train.py").write_text(SCRIPT)
    asked = [f"{tmp_path / 'train.py'}:build", "--device", "H100-80GB", "--json"]
    if not beyond:
        assert main(["predict", *asked]) == 0 and json.loads(capsys.readouterr().out)["peak_bytes"] == peak
    code = main(["plan", *asked, "--budget", str(smallest - beyond)])
    data = json.loads(capsys.readouterr().out)
    assert (code, data["fits"], data["peak_bytes"]) == (beyond, not beyond, smallest)


class NanoGPT(torch.nn.Module):
    """Three layers of width 128 over 4 x 128 tokens, with its loss over 5,000 words; returns the loss."""

    def __init__(self):
        super().__init__()
        nanogpt = pytest.importorskip("thunder.tests.nanogpt_model")
        self.gpt = nanogpt.GPT(nanogpt.GPTConfig(block_size=128, vocab_size=5000, n_layer=3, n_head=4, n_embd=128))

    def forward(self, tokens, targets):
        return self.gpt(tokens, targets)[1]


@pytest.mark.slow
@pytest.mark.parametrize("budget", (None, "20MiB", "17MiB"))
def test_nano_gpt_chunks_its_head_and_takes_what_its_plan_says(budget):
    """Whole, its logits take 9.77 MiB."""
    with simulate("H100-80GB"), torch.device("cuda"):
        tokens, targets = (torch.zeros(4, 128, dtype=torch.long) for _ in range(2))
        step = thunder.jit(NanoGPT(), transforms=[MemEfficient(strict=True, budget=budget)])
        predicted = predict(step, tokens, targets, keep_outputs=True)
    (head,) = (d for d in last_plan(step).decisions if d.what == "loss head")
    assert "in 4 chunks of 128 rows" in head.how
    assert predicted.peak_bytes == last_plan(step).candidate.peak_bytes
    assert predicted.peak_bytes <= (17.7 if budget != "17MiB" else 17) * 2**20
    assert predicted.scratch_bytes > 2**21 and predicted.peak_event.phase == "forward"


def test_the_final_reading_is_that_of_the_final_trace(monkeypatch):
    """With chunks that grew after it was fused, and results written over what dies."""
    found, lower = [], executor.lower_plan
    monkeypatch.setattr(executor, "lower_plan", lambda *args: found.append(lower(*args)) or found[-1])

    def head(x, v, w, targets):
        return F.cross_entropy(F.linear(torch.tanh(x @ v) * 2, w), targets)

    x, v, w = (torch.ones(n, 8, requires_grad=True) for n in (4096, 8, 512))
    with uncompiled_regions():
        transform = MemEfficient(chunk=ChunkLossHead(), strict=True)
        thunder.jit(head, executors=["mem_pointwise"], transforms=[transform])(x, v, w, torch.arange(4096) % 512)
    (planned,) = found
    assert {"loss head", "reuse"} <= {d.what for d in planned.plan.decisions}
    fresh = read_trace(planned.final)
    assert (planned.final_source.graph, planned.final_source.storage_of) == (fresh.graph, fresh.storage_of)
