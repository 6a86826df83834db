"""Plan files: what was saved compiles again, and whatever else is refused by name."""

import json

import pytest
import thunder
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzzing.configs import uncompiled_regions
from tests.programs.cases import randn
from tests.system.test_inputs import JSON
from thunder_mem import MemEfficient, PlanFileError, last_plan, policies, recompute_table, save_plan
from thunder_mem.planning import plan_file
from thunder_mem.planning.plan_file import read_plan


def fn(x, w):
    return (torch.nn.functional.gelu(x @ w) * 2).sum()


def other(x, w):
    return (torch.nn.functional.gelu(x @ w) * 3).sum()


def compiled(function=fn, executors=("mem_pointwise",), **options):
    return thunder.jit(function, executors=list(executors), transforms=[MemEfficient(strict=True, **options)])


def arguments(n: int = 8):
    return randn(n, 8), randn(8, 8, seed=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    with uncompiled_regions():
        jitted = compiled()
        jitted(*arguments())
        save_plan(jitted, path)
    return path, last_plan(jitted)


def test_the_plan_of_the_file_is_compiled(saved):
    path, plan = saved
    with uncompiled_regions():
        jitted, args = compiled(plan=path), arguments()
        grads = torch.autograd.grad(jitted(*args), args)
        assert last_plan(jitted).to_json() == plan.to_json()
        for ours, want in zip(grads, torch.autograd.grad(fn(*args), args), strict=True):
            torch.testing.assert_close(ours, want)
    assert f"plan={str(path)!r}" in repr(MemEfficient(plan=path))


def test_a_file_names_the_versions_that_made_it(saved):
    versions = read_plan(saved[0]).versions
    assert (versions["torch"], versions["thunder"]) == (str(torch.__version__), str(thunder.__version__))


@pytest.mark.parametrize(
    "make,args,says",
    [
        (lambda p: compiled(other, plan=p), arguments(), "another program"),
        (lambda p: compiled(plan=p), arguments(4), "another program"),
        (lambda p: compiled(plan=p, reuse=False), arguments(), "reuse is 'True' there, 'False' here"),
        (lambda p: compiled(plan=p, executors=()), arguments(), "executors"),
        (lambda p: compiled(plan=p, recompute=policies.recompute_everything), arguments(), "recompute"),
        (lambda p: compiled(plan=p, sort="dfs"), arguments(), "sort is 'auto' there, 'dfs' here"),
        (lambda p: compiled(plan=p, costs="measured"), arguments(), "costs is 'roofline' there, 'measured' here"),
    ],
    ids=["constant", "shape", "reuse", "executors", "policy", "sort", "costs"],
)
def test_what_is_not_the_files_is_refused(saved, make, args, says):
    jitted = make(saved[0])
    for _ in range(2):  # nothing is left that a second call would run
        with pytest.raises(PlanFileError, match=says), uncompiled_regions():
            jitted(*args)


@pytest.mark.parametrize(
    "change,says",
    [
        (lambda d: d["versions"].update(torch="1.0"), "torch is '1.0' there"),
        (lambda d: d["program"].update(digest="0" * 16), "another program"),
        (lambda d: d["plan"]["regions"].reverse(), "number 0 of its regions is"),
        (lambda d: d["plan"]["regions"].pop(), "the number of its regions is"),
        (lambda d: d["plan"].update(sort="none"), 'its sort is "none" there'),
        (lambda d: d["plan"]["candidates"][0].update(forward_peak_bytes=1), "candidates"),
        (lambda d: d["plan"].update(extra=1), "its extra is 1 there, null here"),
    ],
)
def test_an_edited_file_is_refused(saved, tmp_path, change, says):
    data = json.loads(saved[0].read_text())
    change(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanFileError, match=says), uncompiled_regions():
        compiled(plan=path)(*arguments())


def test_where_planning_fails_the_file_is_refused_too(saved, monkeypatch):
    monkeypatch.setattr("thunder_mem.decisions.stages.emit", lambda *args: 1 / 0)
    jitted = thunder.jit(fn, executors=["mem_pointwise"], transforms=[MemEfficient(plan=saved[0])])
    with pytest.raises(PlanFileError, match="ZeroDivisionError"), pytest.warns(UserWarning), uncompiled_regions():
        jitted(*arguments())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(JSON, st.sampled_from([None, "format", "versions", "options", "program", "plan"]))
def test_whatever_else_a_file_holds_is_refused_or_read(saved, tmp_path, value, key):
    data = value if key is None else {**json.loads(saved[0].read_text()), key: value}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    try:
        read = read_plan(path)
    except PlanFileError:
        return
    assert key in ("versions", "options", "plan") and isinstance(value, dict) and getattr(read, key) == value


@pytest.mark.parametrize(
    "content,says",
    [
        ('{"format": 1, "format": 1}', "has the key 'format' twice"),
        ('{"format": NaN}', "it holds 'NaN', which is no number here"),
        ('{"format": 1e999}', "holds '1e999'"),
    ],
)
def test_a_file_means_one_thing(tmp_path, content, says):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(PlanFileError, match=says):
        read_plan(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["program"].update(digest=1),
        lambda d: d["program"].update(digest="0123456789abcdef\n"),
        lambda d: d["program"].update(operations=True),
        lambda d: d["program"].update(operations="1_0"),
        lambda d: d["plan"]["candidates"][0].update(regions=True),
        lambda d: d["versions"].update(torch="2" * 10_000),
        lambda d: d["options"].update({"x" * 10_000: "y" * 10_000}),
        lambda d: d["plan"].update(sort="x" * 10_000),
        lambda d: d["plan"].update({"x" * 10_000: ["y" * 10_000]}),
        lambda d: d.update(format=10**1000),
    ],
)
def test_refusals_are_strict_and_short(saved, tmp_path, change):
    data = json.loads(saved[0].read_text())
    change(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanFileError) as refused, uncompiled_regions():
        compiled(plan=path)(*arguments())
    assert len(str(refused.value).replace(str(path), "")) < 500


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 100_000, b"null", b"9" * 10_000])
def test_files_that_are_no_json_are_refused(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanFileError):
        MemEfficient(plan=path)


def test_a_file_is_bounded(tmp_path):
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(plan_file.MAX_BYTES + 1)
    with pytest.raises(PlanFileError, match="more than"):
        read_plan(path)


def test_there_must_be_a_plan_to_save(tmp_path):
    with pytest.raises(ValueError, match="nothing of it was compiled yet: call it once"):
        save_plan(compiled(), tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_file_and_nothing_is_left_behind(tmp_path):
    with uncompiled_regions():
        jitted = compiled()
        jitted(*arguments())
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder: name a file in it"):
        save_plan(jitted, tmp_path / "folder")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing for plan.json$"):
        save_plan(jitted, tmp_path / "missing" / "plan.json")
    assert [p.name for p in tmp_path.rglob("*")] == ["folder"]


def test_a_plan_of_a_step_is_not_one_of_an_evaluation(tmp_path):
    model, x, path = torch.nn.Linear(4, 4), torch.ones(2, 4), tmp_path / "plan.json"

    def jitted(**options):
        return thunder.jit(model, executors=[], transforms=[MemEfficient(**options)])

    trained = jitted()
    trained(x)
    save_plan(trained, path)
    with torch.no_grad(), pytest.raises(PlanFileError, match=r"with a backward, and this one is without .*no_grad"):
        jitted(plan=path)(x)
    with torch.no_grad():
        evaluated = jitted()
        evaluated(x)
    save_plan(evaluated, path)
    with pytest.raises(PlanFileError, match=r"a plan without a backward .*, and this one is with a backward"):
        jitted(plan=path)(x)


# ---- torch.autograd.Function ----


def test_programs_that_differ_in_a_constant_are_others(tmp_path):
    """Also in one that neither shapes nor dtypes show, such as a memory format."""

    def digest(memory_format):
        jitted = thunder.jit(
            lambda x: x.contiguous(memory_format=memory_format).sin(), executors=[], transforms=[MemEfficient()]
        )
        jitted(randn(2, 3, 4, 4))
        save_plan(jitted, tmp_path / "plan.json")
        return json.loads((tmp_path / "plan.json").read_text())["program"]["digest"]

    assert digest(torch.contiguous_format) != digest(torch.channels_last)


def gate(factor):
    """A function by its own rule for gradients, whose class has the same name whatever that rule is."""

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x.sigmoid()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * factor * x

    return lambda x, w: Gate.apply(x @ w).sum()


def test_a_program_with_an_autograd_function_is_the_same_in_every_compilation(tmp_path):
    """Thunder names the operator after an object's address; the rule for its gradient is a part of the program."""
    path = tmp_path / "plan.json"
    jitted = compiled(gate(2.0), executors=())
    jitted(*arguments())
    save_plan(jitted, path)
    x, w = arguments()
    again = compiled(gate(2.0), executors=(), plan=path)
    (found,) = torch.autograd.grad(again(x, w), x)
    (want,) = torch.autograd.grad(gate(2.0)(x, w), x)
    torch.testing.assert_close(found, want)
    with pytest.raises(PlanFileError, match="another program"):
        compiled(gate(3.0), executors=(), plan=path)(x, w)


def test_patterns_name_an_autograd_function_as_its_user_does():
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 3

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    table = recompute_table(compiled(lambda x, w: Triple.apply(x @ w).sin().sum(), executors=()), *arguments())
    assert "MatMul+Triple+:recompute:-1" in str(table)
