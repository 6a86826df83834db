"""Random programs give what eager gives, and the parts of the fuzzer catch what they claim to catch.

The default run takes a few hundred small programs, split over hypothesis (which shrinks) and seeds;
the slow ones take 2,000, and `python -m tests.fuzz` as many as asked for.
"""

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import thunder
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from tests.defects import DEFECTS, UNSUPPORTED
from tests.fuzz import (
    CONFIGS,
    PROFILES,
    Config,
    available,
    campaign,
    judge,
    kind,
    regression,
    shrink,
    uncompiled_regions,
)
from tests.generate import Profile, generate, materialise, prune, validate
from tests.minimise import minimise
from tests.oracle import Invalid, check, differences, expect, run
from tests.programs import Input, Program, Region, Step, constructs, function, source

MEM = [c for c in available() if c.name.startswith("mem")]
QUICK = [c for c in available() if c.name not in ("pointwise", "dataflow")]
SMALL = Profile(steps=7)


@pytest.fixture(autouse=True, scope="module")
def _uncompiled():
    with uncompiled_regions():
        yield


def programs(profile: Profile) -> st.SearchStrategy[Program]:
    return st.randoms(use_true_random=False).map(lambda rng: generate(rng, profile))


@pytest.mark.parametrize("config", QUICK, ids=lambda c: c.name)
@settings(
    max_examples=15,
    phases=(Phase.generate,),  # `shrink` knows programs, hypothesis does not
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
)
@given(program=programs(SMALL))
def test_small_programs(config: Config, program: Program):
    try:
        found = judge(program, config)
    except Invalid:
        assume(False)
    if found:
        small = shrink(program, config, kind(found[0]), True, 60)
        pytest.fail(f"{found[0]}\n{source(small)}{small!r}")


def report(result) -> str:
    return "\n".join(f"seed {s}: {name}: {d[0]}\n{source(p)}" for (name, _), (s, p, d) in result.failures.items())


@pytest.mark.parametrize("config", QUICK, ids=lambda c: c.name)
def test_seeded_programs(config: Config):
    result = campaign(60, 0, SMALL, [config], log=lambda *_, **__: None)
    assert not result.failures, report(result)
    assert sum(result.refused.values()) <= 5, result.refused


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 2000, 250))
def test_two_thousand_programs(start: int):
    result = campaign(250, 100_000 + 2 * start, PROFILES["thunder"], available(), log=lambda *_, **__: None)
    assert not result.failures, report(result)


@pytest.mark.slow
@pytest.mark.skipif(not MEM, reason="MemEfficient is not there yet")
@pytest.mark.parametrize("profile", ["checkpoint", "overwritten"])
def test_programs_that_thunder_alone_gets_wrong(profile: str):
    result = campaign(300, 500_000, PROFILES[profile], MEM, excuse=False, log=lambda *_, **__: None)
    assert not result.failures, report(result)


@pytest.mark.parametrize("name", DEFECTS)
def test_thunder_still_has_the_defect(name: str):
    """What the generator leaves out is what Thunder gets wrong; when it is repaired, take it in."""
    program = DEFECTS[name].program
    validate(program)
    assert check(program, thunder.jit), f"{name} is right now: {DEFECTS[name].reason}"


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_thunder_still_refuses(name: str):
    x = torch.ones(4, 3, requires_grad=True)
    UNSUPPORTED[name](x)
    with pytest.raises((RuntimeError, AttributeError, NotImplementedError, IndexError)):
        thunder.jit(UNSUPPORTED[name])(x)


# The fuzzer itself.
def test_a_seed_gives_one_program():
    script = "import random, tests.generate as g; print([g.generate(random.Random(s)) for s in range(40)])"
    root = Path(__file__).parents[1]
    texts = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            cwd=root,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1 and "Program" in texts.pop()


def test_programs_are_valid_and_varied():
    drawn = [generate(Random(seed)) for seed in range(400)]
    for program in drawn:
        validate(program)
        assert eval(repr(program)) == program
        assert prune(program, keep_dead=True) in (program, prune(program))
    seen = {c for program in drawn for c in constructs(program)}
    assert seen >= {
        *("view", "fresh", "in-place", "random", "checkpoint", "no_grad", "autocast", "gradient"),
        *("transposed input", "strided input", "offset input", "expanded input", "aliased inputs", "zero-size input"),
        *("bfloat16 input", "float16 input", "float64 input", "int64 input", "bool input"),
        *("input is output", "repeated output", "view in checkpoint", "checkpoint in checkpoint"),
    }
    assert "random in checkpoint" not in seen and "in-place in checkpoint" not in seen
    beyond = {c for seed in range(200) for c in constructs(generate(Random(seed), PROFILES["checkpoint"]))}
    assert {"random in checkpoint", "in-place in checkpoint"} <= beyond


def test_inputs_alias_as_they_say():
    inputs = (Input("x0", (4, 2), layout="transposed"), Input("x1", (2, 2), alias="x0[:2]"))
    tensors = materialise(inputs)
    assert not tensors["x0"].is_contiguous() and tensors["x1"].data_ptr() == tensors["x0"].data_ptr()
    assert torch.equal(materialise(inputs, double=True)["x0"], tensors["x0"].double())


CHAIN = Program(
    (Input("x0", (4, 3), grad=True), Input("x1", (4, 3)), Input("x2", (2,))),
    (
        Step("sin", ("v0",), ("x0",)),
        Step("mul", ("v1",), ("v0", "x1")),
        Region("checkpoint", (Step("exp", ("v2",), ("v1",)), Step("dropout", ("v3",), ("v2",), (0.5,))), ("v3",)),
        Step("add_scalar_", (), ("x2",), (0.5,)),
    ),
    ("v3", "v0"),
)


@pytest.mark.parametrize(
    "old, new, difference",
    [
        ("torch.sin", "torch.cos", "output 0"),
        ("v0 * x1", "v0.detach() * x1", "gradient x0"),
        ("v0 * x1", "(v0 * x1).double()", "output 0: torch.float64"),
        ("v0 * x1", "v0 * (x1 * 1.0001)", "output 0"),
        ("x2.add_(0.5)", "pass", "input x2"),
        ("x2.add_(0.5)", "x2.add_(0.5); torch.rand(1)", "random state after the forward"),
        ("0.5)\n        return", "0.25)\n        return", "output 0"),
    ],
)
def test_the_oracle_sees(old: str, new: str, difference: str):
    expected = expect(CHAIN)
    assert check(CHAIN, lambda fn: fn, expected) == []
    wrong = source(CHAIN).replace(old, new)
    assert wrong != source(CHAIN)
    # Different rounding of the input alone must show: x1 * 1.0001 is 800 units in the last place.
    got = run(CHAIN, function(wrong), materialise(CHAIN.inputs), expected[0].eager.asks_gradient)
    assert min((differences(e, got) for e in expected), key=len)[0].startswith(difference)


def test_the_oracle_lets_rounding_pass():
    program = Program((Input("x0", (64,), grad=True),), (Step("softmax", ("v0",), ("x0",), (0,)),), ("v0",))
    rounded = source(program).replace("torch.softmax(x0, 0)", "torch.softmax(x0.double(), 0).float()")
    expected = expect(program)
    got = run(program, function(rounded), materialise(program.inputs))
    assert not torch.equal(got.tensors["output 0"], expected[0].eager.tensors["output 0"])
    assert differences(expected[0], got) == []


def test_the_oracle_refuses_what_eager_refuses():
    leaf = Program((Input("x0", (2,), grad=True),), (Step("add_scalar_", (), ("x0",), (2,)),), ("x0",))
    with pytest.raises(Invalid, match="leaf Variable"):
        expect(leaf)


def test_minimise_finds_the_one_statement():
    program = next(p for s in range(1000) if len((p := generate(Random(s))).body) > 9 and "softmax" in source(p))
    small = minimise(program, lambda p: "softmax" in source(p))
    assert [s.op for s in small.body] == ["softmax"] or [s.op for s in small.body] == ["log_softmax"]
    validate(small)


def test_a_failure_is_shrunk_and_saved_as_a_test_that_fails(monkeypatch):
    def broken(fn):
        return lambda *inputs: tuple(o * 2 if o.is_floating_point() else o for o in fn(*inputs))

    config = Config("broken", broken)
    result = campaign(3, 0, SMALL, [config], log=lambda *_, **__: None)
    (alike, (_, program, found)) = next((k, f) for (_, k), f in result.failures.items())
    small = shrink(program, config, alike, True, 60)
    assert len(source(small)) <= len(source(program))
    monkeypatch.setitem(CONFIGS, "broken", config)
    scope: dict = {}
    exec(regression(small, config, found, True), scope)
    with pytest.raises(AssertionError):
        next(v for k, v in scope.items() if k.startswith("test_"))()
