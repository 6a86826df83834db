"""`MemEfficient` under ThunderFX: every subgraph is planned, and nothing of the caller's is touched."""

import functools
import inspect
import warnings
from pathlib import Path

import pytest
import thunder
import torch
from thunder.dynamo import ThunderCompiler, thunderfx
from torch import nn
from torch.utils.checkpoint import checkpoint

import thunder_mem
from tests.fuzzing.command import uncompiled_regions
from tests.programs.cases import randn
from thunder_mem import ChunkLossHead, MemEfficient, explain, fx, last_plan, why_no_plan
from thunder_mem.frontend import thunderfx as fx_programs
from thunder_mem.report.notes import about_subgraphs


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    with uncompiled_regions():
        yield


class Broken(nn.Module):
    """Two graphs, of which the first has three subgraphs: Thunder knows `sinc` only as something to fall back for."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = torch.sinc(self.b(nn.functional.gelu(self.a(x))))
        y = y * 2 + y.sin()
        torch._dynamo.graph_break()
        return self.c(y).softmax(-1)


def broken():
    torch.manual_seed(0)
    return Broken()


def seen(model, compiled, x):
    """The output, and the gradients of parameters and input, in float64."""
    x = x.detach().requires_grad_()
    y = compiled(x)
    model.zero_grad()
    y.square().sum().backward()
    return [t.detach().double() for t in (y, x.grad, *(p.grad for p in model.parameters()))]


def in_float64(x):
    model = broken().double()
    return seen(model, model, x.double())


def by_thunderfx(model, transforms):
    return (compiled := thunderfx(model, executors=["mem_pointwise"], transforms=transforms)), compiled


def by_a_backend(model, transforms):
    backend = ThunderCompiler(executors=["mem_pointwise"], transforms=transforms)
    return torch.compile(model, backend=backend), backend


def by_an_optimized_module(model, transforms):
    compiled = by_a_backend(model, transforms)[0]
    return compiled, compiled


def by_an_optimized_function(model, transforms):
    backend = ThunderCompiler(executors=["mem_pointwise"], transforms=transforms)
    return (compiled := torch.compile(lambda x: model(x), backend=backend)), compiled


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [by_thunderfx, by_a_backend, by_an_optimized_module, by_an_optimized_function])
def test_subgraphs_share_an_instance_and_each_has_a_plan(way):
    model, x = broken(), randn(5, 8, grad=False)
    transform = MemEfficient(strict=True)
    before, transforms = dict(vars(transform)), [transform]
    compiled, asked = way(model, transforms)
    torch.testing.assert_close(seen(model, compiled, x), in_float64(x), rtol=1e-4, atol=1e-5)

    assert transforms == [transform] and vars(transform) == before  # Thunder alone leaves two of its own in the list
    parts = fx.subgraphs(asked)
    assert [(p.name, p.compiler) for p in parts] == [
        ("graph 0, thunder_0", "thunder"),
        ("graph 0, inductor_1", "inductor"),
        ("graph 0, thunder_2", "thunder"),
        ("graph 1, thunder_0", "thunder"),
    ]
    plans = [last_plan(p.jitted) for p in parts if p.jitted]
    assert all(plans) and len({plan.fingerprint for plan in plans}) == 3
    highest = max(plans, key=lambda plan: plan.candidate.peak_bytes)
    assert last_plan(asked).to_json() == highest.to_json()


def test_explain_reports_breaks_and_fallbacks_with_their_lines():
    model = broken()
    compiled = thunderfx(model, executors=[], transforms=[MemEfficient()])
    compiled(randn(5, 8, grad=False))
    report = explain(compiled, bounds=False, detail=True)
    shown = fx.highest_peak(compiled)
    assert report.plan == last_plan(shown) and report.peak_bytes == explain(shown, bounds=False).peak_bytes
    text = " ".join(str(report).split())
    assert "ThunderFX made 4 subgraphs of the program, 3 of them for Thunder: this is graph 0, thunder_0" in text
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    for part in fx.subgraphs(compiled):
        assert (part.reason == "") == (part.jitted is not None)
        if part.jitted is None:
            path, _, line = part.source.rpartition(":")
            assert path == __file__ and "torch.sinc(" in lines[int(line) - 1] and part.operations == ("sinc",)
            assert part.reason == "sinc only has an automatic torch fallback in thunder."
            told = f"{part.name} (sinc) is compiled by Inductor, and MemEfficient does not see it: {part.reason}"
            assert f"{told}, at {part.source}" in text
    (found,) = fx.graph_breaks(compiled)
    path, _, line = found.source.rpartition(":")
    assert found.graph == 0 and path == __file__ and "graph_break()" in lines[int(line) - 1]
    assert f"graph 0 breaks at {found.source}: Call to `torch._dynamo.graph_break()`" in text
    assert report.to_json()["notes"] == list(report.notes)


def test_a_program_of_one_subgraph_is_predicted_and_explained_as_that():
    compiled = thunderfx(lambda x: (x * 2).sin().sum(), executors=[], transforms=[MemEfficient()])
    for ask in (explain, thunder_mem.predict):
        with pytest.raises(ValueError, match=r"never been called.* call it once"):
            ask(compiled)
        with pytest.raises(ValueError, match=r"call.* once, then .* without arguments"):
            ask(compiled, torch.zeros(1024))
    compiled(torch.zeros(1024))
    report = explain(compiled)
    assert report.peak_bytes == thunder_mem.predict(compiled).peak_bytes == 3 * 4096
    assert not any("ThunderFX" in note or "graph" in note for note in report.notes)


def test_explain_says_why_thunder_compiles_nothing():
    compiled = thunderfx(torch.sinc, executors=[], transforms=[MemEfficient()])
    with pytest.raises(ValueError, match="never been called"):
        explain(compiled)
    compiled(torch.ones(2))
    with pytest.raises(
        ValueError, match=r"Thunder compiles nothing of this program: .*sinc.* is compiled by Inductor.*: sinc only has"
    ):
        explain(compiled)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x):
        return self.lstm(x)[0].sum()


def test_a_program_that_dynamo_leaves_whole_is_warned_of_and_explained():
    compiled = thunderfx(Recurrent(), executors=[], transforms=[MemEfficient()])
    for ask in (explain, thunder_mem.predict):
        with pytest.raises(ValueError, match="has never been called"):
            ask(compiled)
    x = torch.randn(3, 2, 4)
    with pytest.warns(UserWarning, match="compiled nothing of this program, so MemEfficient changes nothing: .*LSTM"):
        compiled(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ThunderFX compiled nothing")
        compiled(x)  # once is enough
    for ask in (explain, thunder_mem.predict):
        with pytest.raises(
            ValueError, match=r"Dynamo leaves all of this program to eager PyTorch.*LSTM.*allow_rnn=True"
        ):
            ask(compiled)
    assert "allow_rnn" in why_no_plan(compiled) and last_plan(compiled) is None


def test_of_a_backend_it_is_not_known_whether_it_was_called():
    backend = ThunderCompiler(transforms=[MemEfficient()])
    torch.compile(Recurrent(), backend=backend)(torch.randn(3, 2, 4))
    with pytest.raises(ValueError, match=r"never been called .*, or Dynamo leaves all of it to eager"):
        explain(backend)


def test_without_our_transform_nothing_is_warned_of():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ThunderFX compiled nothing")
        thunderfx(Recurrent(), executors=[])(torch.randn(3, 2, 4))


@pytest.mark.slow
def test_predict_says_that_several_subgraphs_are_none_of_its():
    compiled = thunderfx(broken(), executors=[], transforms=[MemEfficient()])
    compiled(randn(5, 8, grad=False))
    with pytest.raises(TypeError, match=r"4 subgraphs.*measure_peak, or take \.jitted of one of"):
        thunder_mem.predict(compiled)
    assert thunder_mem.predict(fx.subgraphs(compiled)[0].jitted).peak_bytes > 0


def test_torch_compile_stays_as_lightning_wraps_it(monkeypatch):
    @functools.wraps(torch.compile)
    def wrapped(*args, **kwargs):
        return inspect.unwrap(wrapped)(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", wrapped)
    assert torch.equal(fx_programs.by_thunderfx(torch.sin)(torch.ones(2)), torch.ones(2).sin())
    assert torch.compile is wrapped


def test_other_things_are_no_programs_of_thunderfx():
    for other in (
        torch.compile(nn.Linear(2, 2)),
        torch.compile(torch.sin),
        thunder.jit(nn.Linear(2, 2)),
        torch.sin,
        None,
    ):
        assert not fx.is_fx(other)
        with pytest.raises(TypeError, match="is no program of ThunderFX: give what thunderfx"):
            fx.subgraphs(other)
    assert fx.subgraphs(thunderfx(torch.sin)) == ()


# --- the caller's list -----------------------------------------------------------------------------


def test_the_list_can_be_used_again_for_a_jitted_function():
    """Thunder alone leaves in it what removes the checks of arguments, and then mistakes a tensor for another."""
    transforms = [MemEfficient(strict=True)]
    thunderfx(lambda x: x * 2, executors=[], transforms=transforms)(torch.zeros(3))
    jitted = thunder.jit(lambda x: x.expand(2, x.shape[0]) + x.shape[0], executors=[], transforms=transforms)
    for n in (3, 4):
        assert torch.equal(jitted(torch.zeros(n)), torch.full((2, n), float(n)))


@pytest.mark.parametrize("transform", [MemEfficient(strict=True), ChunkLossHead(chunks=2)], ids=["plan", "chunk"])
def test_a_graph_of_dynamic_shapes_keeps_its_checks(transform):
    """Of the first graph Dynamo knows all shapes, of the second it does not: what checks those stays there."""

    def program(x):
        return (x @ torch.ones(2, 2)).mean(0)

    compiled = thunderfx(program, executors=[], transforms=[transform])
    for n in (3, 4, 5, 7):
        x = torch.arange(2.0 * n).reshape(n, 2)
        assert torch.equal(compiled(x), program(x))
    assert [_checks_tensors(p) for p in fx.subgraphs(compiled)] == [False, True]


def _checks_tensors(part):
    return "check_tensor_shape_and_metadata" in str(thunder.last_prologue_traces(part.jitted)[-1])


@pytest.mark.slow
def test_checks_that_dynamo_makes_are_pruned_in_every_subgraph():
    compiled = thunderfx(broken(), executors=[], transforms=[MemEfficient(strict=True)])
    compiled(randn(5, 8, grad=False))
    alone = thunderfx(broken(), executors=[])
    alone(randn(5, 8, grad=False))

    def checks(program):
        return [_checks_tensors(p) for p in fx.subgraphs(program) if p.jitted]

    assert checks(compiled) == checks(alone) == [False] * 3


def test_a_transform_of_the_callers_that_prunes_stays_in_the_list():
    from thunder.transforms.extraction_only_prologue_transform import ExtractionOnlyPrologueTransform

    transforms = [MemEfficient(strict=True), ExtractionOnlyPrologueTransform(skip_check_on_input_tensors=True)]
    given = list(transforms)
    thunder.jit(nn.Linear(3, 3), executors=[], transforms=transforms)(torch.zeros(2, 3))
    thunderfx(nn.Linear(3, 3), executors=[], transforms=transforms)(torch.zeros(2, 3))
    assert transforms == given


@pytest.mark.slow
def test_dynamic_shapes_are_planned_one_by_one():
    model = broken()
    compiled = thunderfx(model, executors=["mem_pointwise"], transforms=[MemEfficient(strict=True)], dynamic=True)
    for n in (5, 3, 6):
        x = randn(n, 8, grad=False)
        torch.testing.assert_close(seen(model, compiled, x), in_float64(x), rtol=1e-4, atol=1e-5)
    assert last_plan(compiled) is not None


def test_options_of_thunder_reach_every_subgraph():
    compiled = thunderfx(broken(), executors=[], transforms=[MemEfficient()], mem_efficient_sort="dfs")
    compiled(randn(5, 8, grad=False))
    assert [last_plan(p.jitted).sort for p in fx.subgraphs(compiled) if p.jitted] == ["dfs"] * 3


@pytest.mark.slow
def test_checkpoints_and_buffers_under_thunderfx():
    """Checkpoints are converted by ThunderFX's splitter, and a buffer is a parameter of the graph, written in place."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 4)

        def forward(self, x):
            y = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
            return self.last(self.norm(y).sin())

    def make():
        torch.manual_seed(0)
        return Checkpointed()

    model, eager, x = make(), make().double(), randn(5, 8, grad=False)
    compiled = thunderfx(model, executors=["mem_pointwise"], transforms=[MemEfficient(strict=True)])
    for k in range(2):
        got, expected = seen(model, compiled, x + k), seen(eager, eager, x.double() + k)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer.double(), eager.get_buffer(name).double())
    assert all(last_plan(p.jitted) for p in fx.subgraphs(compiled)) and last_plan(compiled) is not None


class Headed(nn.Module):
    """A loss head and a graph break; what holds the logits over the break is told by `way`."""

    def __init__(self, way):
        super().__init__()
        self.body, self.head, self.way = nn.Linear(16, 16), nn.Linear(16, 4096, bias=False), way

    def forward(self, x, target):
        logits = self.head(self.body(x).relu())
        if self.way == "read":
            torch._dynamo.graph_break()
            return nn.functional.cross_entropy(logits, target)
        loss = nn.functional.cross_entropy(logits, target)
        if self.way == "object":
            output = {"loss": loss, "logits": logits}
            torch._dynamo.graph_break()
            return output["loss"]
        torch._dynamo.graph_break()
        return loss


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way, whole", [("read", True), ("object", True), ("loss alone", False)])
def test_what_keeps_logits_whole_over_a_break_is_said(way, whole):
    step = thunderfx(Headed(way), executors=[], transforms=[MemEfficient(strict=True)])
    step(torch.randn(1024, 16), torch.randint(0, 4096, (1024,))).backward()
    (first, *_) = fx.subgraphs(step)
    assert any(d.what == "loss head" for d in last_plan(first.jitted).decisions) == (not whole)
    (found,) = fx.graph_breaks(step)
    told = (
        f"graph 0, thunder_0: linear is no loss head in chunks, as what runs behind the break at {found.source} still"
    )
    assert any(told in note for note in about_subgraphs(step)) == whole


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

    def wide(self, x):
        return nn.functional.gelu(self.a(x))

    def forward(self, x):
        y = checkpoint(self.wide, x, use_reentrant=False)  # first
        return self.b(y).square()  # second


def test_reports_name_the_users_lines_and_not_dynamos():
    """Of what a checkpoint holds its line: Thunder rewrites these nodes, and leaves away where they come from."""
    model, x = Checkpointed(), randn(32, 16)
    step = thunderfx(model, executors=[], transforms=[MemEfficient()])
    step(x).sum().backward()
    text = str(explain(step, detail=True))
    assert "<eval_with_key>" not in text
    numbers = {
        word: number
        for number, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        for word in ("first", "second")
        if line.endswith(f"# {word}")
    }
    assert all(f"test_fx.py:{number}" in text for number in numbers.values()) and len(numbers) == 2
