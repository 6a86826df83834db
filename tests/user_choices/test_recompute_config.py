"""The written form of what to recompute: what parses, what is refused and in which words, and what it does."""

import json
import re
from functools import cache

import pytest
import thunder
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from thunder_mem import MemEfficient, RecomputeError, last_plan
from thunder_mem.user_choices.config import ENVIRONMENT, RecomputeConfig, parse_config
from thunder_mem.user_choices.written import STRATEGIES, Entry

words = st.from_regex(r"[A-Z][A-Za-z]{0,8}", fullmatch=True)
patterns = st.lists(words, min_size=1, max_size=3).map(lambda w: "+".join(w) + "+")
configs = st.builds(
    RecomputeConfig,
    st.dictionaries(
        patterns, st.tuples(st.sampled_from(STRATEGIES), st.sampled_from([-1, 1, 2, 40])), min_size=1, max_size=4
    ).map(lambda d: tuple(Entry(p, *rest) for p, rest in d.items())),
    st.booleans(),
)


@given(configs)
def test_every_written_form_says_the_same(config: RecomputeConfig):
    text = str(config)
    assert parse_config(text) == parse_config(text.split(",")) == parse_config(config.to_json()) == config
    assert parse_config(json.loads(json.dumps(config.to_json()))) == config


@given(st.text(max_size=40))
def test_text_parses_or_is_refused_with_a_reason(text: str):
    if text.endswith(".json"):
        return
    try:
        config = parse_config(text)
    except ValueError as error:
        assert len(str(error)) > 20
    else:
        assert parse_config(str(config)) == config


def test_numbers_name_onnx_runtimes_strategies():
    assert str(parse_config("Gelu+:1:-1, Cast+:2:4 ,Softmax+Dropout+:0:1")) == (
        "Gelu+:recompute:-1,Cast+:compromised:4,Softmax+Dropout+:none:1"
    )
    assert parse_config({"Gelu": "recompute"}) == parse_config("Gelu+:1:-1")


@pytest.mark.parametrize(
    "given, reason",
    [
        ("Gelu+:1", "2 fields, not 3"),
        ("Gelu+", "'Gelu+' is neither \"layerwise\" nor an entry Pattern:strategy:count, such as Gelu+:recompute:-1"),
        ("Layerwise", "'Layerwise' is neither \"layerwise\" nor an entry"),
        ("none", "'none' is neither"),
        ("Gelu+:1:2:3", "4 fields, not 3"),
        ("Gelu+:often:1", "the strategy is none or recompute or compromised"),
        ("Gelu+:3:1", "the strategy is"),
        ("Gelu+:1:0", "the count is a number above 0, or -1"),
        ("Gelu+:1:-2", "the count is"),
        ("Gelu+:1:many", "the count is"),
        ("Gelu+:1:9999999999", "the count is"),
        ("+:1:1", "a pattern is names"),
        ("__import__('os'):1:1", "a pattern is names"),
        ("Gelu+:1:1,Gelu+:2:1", "two entries speak of Gelu+"),
        ("Gelu+:1:1,Gelu:1:1", "two entries speak of Gelu+"),
        ("", 'is empty; it is "Pattern:strategy:count,..." or "layerwise"'),
        (" ", "is empty"),
        ({}, 'is empty; it is "Pattern:strategy:count,..." or "layerwise"'),
        ({"Gelu+": {"strategy": 1, "number": 2}}, "unknown field 'number'"),
        ({"Gelu+": True}, "the strategy is"),
        ({"Gelu+": {"count": True}}, "the count is"),
        ({"layerwise": "yes"}, "is true or false"),
        ({7: "recompute"}, "a pattern is names"),
        (["Gelu+:1:1"] * 10_001, "more than 10,000"),
        ("G" * (2**20 + 1), "more than 1,048,576"),
        (7, "is a string, a list of strings, a dict or a path"),
        ([1], "is a string, a list"),
    ],
)
def test_what_is_wrong_is_said(given, reason: str):
    with pytest.raises(ValueError) as error:
        parse_config(given)
    assert reason in str(error.value)


def test_a_json_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"Gelu+": {"strategy": "recompute", "count": 2}, "layerwise": true}')
    assert str(parse_config(path)) == str(parse_config(str(path))) == "layerwise,Gelu+:recompute:2"
    path.write_text('["Gelu+:1:-1"]')
    assert str(parse_config(path)) == "Gelu+:recompute:-1"
    for text, reason in (
        ('{"Gelu+": 1, "Gelu+": 2}', r"has the key 'Gelu\+' twice"),
        ("{", "is not JSON"),
        ("[" * 5000, "is not JSON"),
        ("3", "is a string, a list"),
        ("[1, 2]", "is a string, a list"),
        ('{"Gelu+": {"how": 1}}', "has the unknown field 'how'"),
        (" " * (2**20 + 1), "more than 1,048,576 bytes"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{reason}"):
            parse_config(path)
    with pytest.raises(FileNotFoundError):
        parse_config(tmp_path / "missing.json")


def test_the_environment_speaks_where_the_argument_does_not(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "Gelu+:1:-1")
    assert str(MemEfficient()._options.recompute) == "Gelu+:recompute:-1"
    assert str(MemEfficient(recompute="layerwise")._options.recompute) == "layerwise"
    monkeypatch.setenv(ENVIRONMENT, "Gelu")
    with pytest.raises(ValueError, match=f"{ENVIRONMENT}: 'Gelu' is neither"):
        MemEfficient()


class Layer(torch.nn.Module):
    """The backward needs the result of the first GELU; of the second only what dropout makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.across, self.down = torch.nn.Linear(8, 24), torch.nn.Linear(24, 24), torch.nn.Linear(24, 8)

    def forward(self, x):
        return self.down(F.dropout(F.gelu(self.across(F.gelu(self.up(x)))), 0.2))


def mlp(layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Layer() for _ in range(layers)))


@cache
def step(recompute: str | None, **options) -> tuple[list[torch.Tensor], thunder.ThunderModule]:
    model = mlp()
    jitted = thunder.jit(model, executors=[], transforms=[MemEfficient(recompute=recompute, strict=True, **options)])
    torch.manual_seed(1)
    jitted(torch.linspace(-2, 2, 40).view(5, 8)).square().sum().backward()
    return [p.grad for p in model.parameters()], jitted


def saved(jitted) -> int:
    last = thunder.last_traces(jitted)[-1].bound_symbols[-1]
    return sum(p.numel * p.dtype.bytes for p in last.args[1][0] if not p.name.startswith(("t_", "input")))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "config",
    [
        "Gelu+:recompute:-1",
        "Gelu+:recompute:1",
        "Linear+:recompute:-1",
        "Dropout+:recompute:-1",
        "Dropout+:compromised:-1",
        "Gelu+Dropout+:1:-1,Gelu+:1:-1,Linear+:1:-1,Dropout+:1:-1",
        "layerwise",
        "layerwise,Gelu+Dropout+:none:-1",
    ],
)
def test_gradients_are_the_same_bits_and_less_is_saved(config: str):
    """The same operations on the same values, once more: not one bit may differ, dropout included."""
    plain, without = step(None)
    grads, jitted = step(config)
    for got, expected in zip(grads, plain, strict=True):
        assert torch.equal(got, expected)
    assert saved(jitted) < saved(without)
    asked = next(d for d in last_plan(jitted).decisions if d.what == "recompute")
    assert asked.after_bytes < asked.before_bytes and asked.how == str(parse_config(config))


def test_a_count_takes_the_first():
    none, one, both = (saved(step(c)[1]) for c in (None, "Gelu+:recompute:1", "Gelu+:recompute:-1"))
    assert none - one == one - both > 0


def test_a_kernel_that_leaves_nothing_has_what_its_pattern_asks_for():
    """Where GELU is decomposed, parts of it are there to rebuild."""
    model = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 8))
    jitted = thunder.jit(model, executors=[], transforms=[MemEfficient(recompute="Gelu+:recompute:1", strict=True)])
    jitted(torch.zeros(5, 8, requires_grad=True)).sum().backward()
    assert "mem_gelu_backward" in str(thunder.last_backward_traces(jitted)[-1])
    jitted = thunder.jit(model, executors=[], transforms=[MemEfficient(recompute="Gelu+:compromised:1")])
    with pytest.raises(RecomputeError, match="there is no compromise"):
        jitted(torch.zeros(5, 8, requires_grad=True))


@pytest.mark.slow
def test_none_keeps_what_would_be_rebuilt_for_free():
    """With a fusion executor the GELU is rebuilt anyway; an entry can stop that."""

    def saved_of(recompute) -> int:
        jitted = thunder.jit(mlp(), executors=["mem_pointwise"], transforms=[MemEfficient(recompute=recompute)])
        thunder.compile_data(jitted).get_computation_and_inputs(torch.zeros(5, 8))
        return saved(jitted)

    assert saved_of("Gelu+:none:-1") > saved_of(None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "config, reason",
    [
        ("Gello+:1:-1", "matches nothing in this program; the nearest that do: Gelu+"),
        ("Nothing+Like+That+:1:-1", "matches nothing"),
        ("Gelu+:1:5", "asks for 5, but Gelu+ occurs 4 times"),
        ("Gelu+:2:-1", "there is no compromise"),
    ],
)
def test_what_the_program_does_not_have_is_an_error_even_when_not_strict(config: str, reason: str):
    jitted = thunder.jit(mlp(), executors=[], transforms=[MemEfficient(recompute=config)])
    with pytest.raises(RecomputeError) as error:
        jitted(torch.zeros(5, 8))
    assert reason in str(error.value)


def test_random_numbers_are_refused_by_name():
    def fn(x):
        return (torch.rand_like(x) * x).sin()

    jitted = thunder.jit(fn, executors=[], transforms=[MemEfficient(recompute="RandLike+:1:-1")])
    with pytest.raises(RecomputeError, match=r"RandLike\+ cannot be recomputed: it draws random numbers"):
        jitted(torch.zeros(3, requires_grad=True))


@pytest.mark.parametrize("config", ["Gelu+:recompute:-1", "Linear+Gelu+:none:2", "layerwise"])
@pytest.mark.slow
def test_a_batch_without_rows_is_no_error(config: str):
    """Its values have no bytes, so there is nothing to choose; the next batch may have rows again."""
    jitted = thunder.jit(mlp(), executors=[], transforms=[MemEfficient(recompute=config, strict=True)])
    jitted(torch.zeros(0, 8)).sum().backward()
    jitted = thunder.jit(mlp(), executors=[], transforms=[MemEfficient(recompute="Gello+:1:-1")])
    with pytest.raises(RecomputeError, match="matches nothing"):
        jitted(torch.zeros(0, 8))


def test_layers_are_needed_for_layerwise():
    jitted = thunder.jit(lambda x: x.sin().exp(), executors=[], transforms=[MemEfficient(recompute="layerwise")])
    with pytest.raises(RecomputeError, match="finds no layers here"):
        jitted(torch.zeros(3, requires_grad=True))


def test_a_program_without_a_backward_ignores_it():
    jitted = thunder.jit(lambda x: x.sin().exp(), executors=[], transforms=[MemEfficient(recompute="Gelu+:1:-1")])
    assert jitted(torch.zeros(3)).tolist() == [1, 1, 1]


@pytest.mark.slow
def test_layerwise_saves_what_layers_hand_on_and_masks():
    _, jitted = step("layerwise")
    last = thunder.last_traces(jitted)[-1].bound_symbols[-1]
    kept = [p for p in last.args[1][0] if not p.name.startswith(("t_", "input"))]
    expected = [((5, 8), thunder.float32)] + [((5, 24), thunder.bool8)] * 2
    assert sorted(((tuple(p.shape), p.dtype) for p in kept), key=str) == sorted(expected, key=str)


@pytest.mark.slow
def test_with_a_budget_the_choice_stands():
    _, jitted = step("Gelu+:recompute:-1", budget="1GiB")
    assert saved(jitted) == saved(step("Gelu+:recompute:-1")[1])


def test_repr_can_be_evaluated():
    import thunder_mem

    transform = MemEfficient(recompute="Gelu+:1:-1")
    assert repr(eval(repr(transform), {"thunder_mem": thunder_mem})) == repr(transform)
