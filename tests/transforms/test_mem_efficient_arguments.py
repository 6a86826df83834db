"""What `MemEfficient` refuses, what it does when something in it fails, users' orders, and determinism."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import thunder
import torch

import thunder_mem
import thunder_mem.transforms.before_autograd as before_autograd
from tests.checking.orders import latest_first
from tests.fuzzing.command import uncompiled_regions
from tests.programs.cases import randn
from thunder_mem import SORTS, GraphError, MemEfficient, last_plan
from thunder_mem.decisions import pipeline, stages
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.schedule.registry import register_sort


@pytest.fixture(autouse=True, scope="module")
def _uncompiled():
    with uncompiled_regions():
        yield


@pytest.mark.parametrize(
    ("arguments", "error", "given", "accepted"),
    [
        ({"sort": "fastest"}, ValueError, "'fastest'", "source, lpmf, .*auto.* function"),
        ({"sort": 3}, TypeError, "3", "a name or a function"),
        ({"sort": None}, TypeError, "None", "a name or a function"),
        ({"sort": ["auto"]}, TypeError, r"\['auto'\]", "a name or a function"),
        ({"chunk": 1}, TypeError, "1", "chunk is True or False"),
        ({"chunk": None}, TypeError, "None", "chunk is True or False"),
        ({"strict": "yes"}, TypeError, "'yes'", "strict is True or False"),
        ({"on_infeasible": "ignore"}, ValueError, "'ignore'", '"error" or "warn"'),
    ],
    ids=str,
)
def test_a_wrong_argument_says_what_was_given_and_what_is_accepted(arguments, error, given, accepted):
    with pytest.raises(error, match=given) as raised:
        MemEfficient(**arguments)
    raised.match(accepted)


def test_unknown_and_positional_arguments_are_refused():
    with pytest.raises(TypeError, match="fastest"):
        MemEfficient(fastest=True)
    with pytest.raises(TypeError, match="positional"):
        MemEfficient("auto")


@pytest.mark.parametrize(
    "arguments",
    [{}, {"sort": "lpmf", "chunk": False, "strict": True}, {"budget": "2MiB", "on_infeasible": "warn", "keep": False}],
    ids=str,
)
def test_its_text_makes_it_again(arguments):
    text = repr(MemEfficient(**arguments))
    assert repr(eval(text, {"thunder_mem": thunder_mem})) == text
    assert all(f"{name}={value!r}" in text for name, value in arguments.items())
    assert MemEfficient(**arguments).given == arguments


def test_two_that_differ_in_one_option_are_refused():
    both = [MemEfficient(budget="2MiB"), MemEfficient(budget="2MiB", on_infeasible="warn")]
    with pytest.raises(ValueError, match="one MemEfficient plans a program"):
        thunder.jit(torch.sin, executors=[], transforms=both)(torch.ones(2))


def branches(x, w):
    """Two independent branches, a write, and a random number: whatever goes wrong with an order shows."""
    big = (x @ w).sin()
    noise = torch.rand_like(big)
    buffer = x * 1
    before = buffer * 2
    buffer.add_(1)
    return (big * noise).sum(0) + w.exp().sum(0), before + buffer


def run(transforms=(), fn=branches, **options):
    """Outputs and gradients under one seed, and the jitted function."""
    x, w = randn(4, 4), randn(4, 4, seed=1)
    jitted = thunder.jit(fn, transforms=list(transforms), **({"executors": [mem_pointwise_ex]} | options))
    torch.manual_seed(5)
    outputs = jitted(x, w)
    return [*outputs, *torch.autograd.grad(sum(o.sum() for o in outputs), [x, w])], jitted


@pytest.fixture(scope="module")
def thunders_own():
    return run()[0]


def assert_same(got, expected):
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def fail(*_, **__):
    raise RuntimeError("planted")


STAGES = {
    "writes": (before_autograd, "without_writes"),
    "checkpoints": (before_autograd, "take_over_checkpoints"),
    "chunks": (before_autograd, "chunk_trace"),
    "plan": (pipeline, "plan_program"),
    "emit": (stages, "emit"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("executors", [[], [mem_pointwise_ex]], ids=["no fusion", "pointwise"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_is_one_warning_and_thunders_own_result(stage, executors, monkeypatch, thunders_own):
    monkeypatch.setattr(*STAGES[stage], fail)
    with pytest.warns(UserWarning, match="MemEfficient left .*: RuntimeError: planted") as caught:
        got, jitted = run([MemEfficient()], executors=executors)
    assert sum("MemEfficient" in str(w.message) for w in caught) == 1
    assert_same(got, thunders_own)
    assert (last_plan(jitted) is None) == (stage in ("plan", "emit"))


@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_raises_when_strict(stage, monkeypatch):
    monkeypatch.setattr(*STAGES[stage], fail)
    with pytest.raises(RuntimeError, match="planted"):
        run([MemEfficient(strict=True)])


def test_a_failure_does_not_outlast_its_compilation(monkeypatch, thunders_own):
    transform = MemEfficient()
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="planted"):
        patch.setattr(*STAGES["plan"], fail)
        run([transform])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got, jitted = run([transform])
    assert_same(got, thunders_own)
    assert last_plan(jitted) is not None


def names(jitted) -> list[str]:
    return [b.sym.name for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.name in ("sin", "cos", "exp")]


@pytest.mark.parametrize("as_type", [list, tuple, torch.tensor, iter], ids=lambda t: t.__name__)
def test_a_users_order_is_the_order_that_runs(as_type):
    def three(x, w):
        a, b, c = x.sin(), x.cos(), x.exp()
        return a, b, c + w

    def reversed_order(graph):
        return as_type(latest_first(graph))

    got, jitted = run([MemEfficient(sort=reversed_order, strict=True)], three, executors=[])
    assert_same(got, run(fn=three, executors=[])[0])
    assert names(jitted) == ["exp", "cos", "sin"]
    assert last_plan(jitted).sort == "reversed_order"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sort", [*SORTS, latest_first], ids=lambda s: s if isinstance(s, str) else s.__name__)
def test_every_sort_gives_the_same_results(sort, thunders_own):
    assert_same(run([MemEfficient(sort=sort, strict=True)])[0], thunders_own)


def test_a_registered_sort_is_known_by_name(thunders_own):
    register_sort("latest first", latest_first)
    assert_same(run([MemEfficient(sort="latest first", strict=True)])[0], thunders_own)


ILLEGAL = {
    "too short": (lambda g: range(len(g) - 1), GraphError, "is missing"),
    "one op twice": (lambda g: [0, *range(len(g) - 1)], GraphError, "twice"),
    "out of range": (lambda g: [*range(len(g) - 1), len(g)], GraphError, "the ops are 0"),
    "negative": (lambda g: [*range(len(g) - 1), -1], GraphError, "the ops are 0"),
    "backwards": (lambda g: range(len(g))[::-1], GraphError, "breaks the edge"),
    "names": (lambda g: [op.name for op in g.ops], GraphError, "op indices"),
    "floats": (lambda g: [float(i) for i in range(len(g))], GraphError, "op indices"),
    "booleans": (lambda g: [False, True, *range(2, len(g))], GraphError, "op indices"),
    "nothing": (lambda g: None, TypeError, "not a sequence of op indices"),
    "an op": (lambda g: g.ops[0], TypeError, "not a sequence of op indices"),
    "raising": (lambda g: {}["a bug"], KeyError, "a bug"),
    "no argument": (lambda: None, TypeError, "argument"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_order_is_refused_with_its_cause(name, thunders_own):
    sort, error, cause = ILLEGAL[name]
    with pytest.raises(error, match=cause):
        run([MemEfficient(sort=sort, strict=True)])
    with pytest.warns(UserWarning, match=f"{error.__name__}.*{cause}") as caught:
        got, jitted = run([MemEfficient(sort=sort)])
    assert sum("MemEfficient" in str(w.message) for w in caught) == 1
    assert last_plan(jitted) is None
    assert_same(got, thunders_own)


# Determinism.
SCRIPT = """
import re, thunder, torch
from tests.transforms.test_mem_efficient_arguments import branches, last_plan, uncompiled_regions
from thunder_mem import MemEfficient
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.w = torch.nn.BatchNorm1d(4), torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        big, small = branches(self.norm(x).float(), self.w)
        return torch.nn.functional.gelu(big.bfloat16()).float() * small, torch.softmax(small, -1)

for executors in ([], [mem_pointwise_ex]):
    jitted = thunder.jit(Net(), executors=executors, transforms=[MemEfficient(strict=True)])
    with uncompiled_regions():
        sum(o.sum() for o in jitted(torch.ones(4, 4))).backward()
    print(last_plan(jitted).to_json())
    for trace in (thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]):
        print(re.sub("(?m)^ *#.*", "", str(trace)))
"""


@pytest.mark.slow  # test_determinism.py compares four seeds
def test_plan_and_traces_do_not_depend_on_the_hash_seed():
    def printed(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    first = printed("0")
    assert first.count("'fingerprint'") == 2 and first.count("def backward_fn") == 2 and "MemPointwise" in first
    assert printed("1") == first
    assert printed("12345") == first


def test_a_program_compiled_twice_has_one_plan():
    first, second = (last_plan(run([MemEfficient(strict=True)])[1]) for _ in range(2))
    assert first.to_json() == second.to_json()
    other = last_plan(run([MemEfficient(strict=True)], fn=lambda x, w: (x.sin(), w.cos()))[1])
    assert other.fingerprint != first.fingerprint


def test_compiling_leaves_no_trace_on_the_transform_or_the_list():
    transform = MemEfficient(strict=True)
    before, transforms = dict(vars(transform)), [transform]
    executors = [mem_pointwise_ex]
    jitted = thunder.jit(branches, transforms=transforms, executors=executors)
    jitted(randn(4, 4), randn(4, 4, seed=1))
    assert vars(transform) == before and transforms == [transform] and executors == [mem_pointwise_ex]
