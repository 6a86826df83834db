"""The judge itself: injection really happens, and what fails only with it is found."""

import os
import textwrap

import pytest
import thunder
import torch
from thunder.extend import get_executor

from tests.upstream import excluded
from tests.upstream.inject import injected
from tests.upstream.records import Record, append, close, falls_in, own_sides, read
from tests.upstream.run import Runner, imported, verdict
from thunder_mem import MemEfficient, last_plan

JIT = thunder.jit  # a module's own name for it


def double(x):
    return (x * 2).sin()


def test_every_name_of_jit_is_replaced_and_given_back():
    plain = thunder.jit
    with injected() as injection:
        assert JIT is thunder.jit is not plain
        for side, planned in (("without", False), ("default", True), ("pointwise", True)):
            injection.side, before = side, injection.programs
            f = JIT(double, executors=[])
            torch.testing.assert_close(f(torch.ones(3)), double(torch.ones(3)))
            assert (last_plan(f) is not None) is planned
            assert injection.programs - before == planned
    assert JIT is thunder.jit is plain


def test_pointwise_joins_where_nothing_fuses():
    with injected() as injection:
        injection.side = "pointwise"
        for given, fuses in (([], True), (["torch"], True), (["torchcompile"], False), (None, False)):
            f = thunder.jit(double, executors=given)
            names = [e.name for e in thunder.compile_data(f).executors_list]
            assert ("mem_pointwise" in names) is fuses
            assert not fuses or names.index("mem_pointwise") < names.index("torch")
        injection.side = "default"
        f = thunder.jit(double, executors=[get_executor("torch")])
        assert "mem_pointwise" not in [e.name for e in thunder.compile_data(f).executors_list]


def test_a_jitted_module_that_is_transformed_again_is_injected_once():
    with injected() as injection:
        injection.side = "default"
        f = thunder.jit(torch.nn.Linear(2, 2))
        again = thunder.core.transforms.add_transform(f, transform=MemEfficient())
        transforms = thunder.list_transforms(again)
    assert [type(t).__name__ for t in transforms] == ["MemEfficient", "_Counting"]


FILE = """
    import os
    import pytest
    import thunder
    import torch
    from thunder import jit

    def injected(f):
        return any(isinstance(t, thunder.Transform) for t in thunder.list_transforms(f))

    def test_1_right():
        assert jit(torch.sin)(torch.zeros(2)).sum() == 0

    @pytest.mark.parametrize("name", ["sin", "cos"])
    def test_2_worse(name):
        f = jit(getattr(torch, name))
        f(torch.zeros(2))
        assert not injected(f), "this is with it"

    def test_3_wrong():
        assert jit(torch.sin)(torch.zeros(2)).sum() == 1

    def test_3_wrong_when_imported():
        import sys
        assert "thunder_mem" not in sys.modules

    def test_4_skipped():
        pytest.skip("for no reason")

    def test_5_dies():
        if injected(jit(torch.sin)):
            os._exit(1)
"""


@pytest.mark.slow
def test_a_regression_a_crash_and_nothing_else_is_found(tmp_path, monkeypatch):
    tests = tmp_path / "package" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_it.py").write_text(textwrap.dedent(FILE))
    runner = Runner(tmp_path / "runs", tests)
    names = ("1_right", "2_worse[sin]", "2_worse[cos]", "3_wrong", "3_wrong_when_imported", "4_skipped", "5_dies")
    ids = [f"test_it.py::test_{name}" for name in names]
    monkeypatch.setenv("COLUMNS", "200")
    runner.run(ids)
    runner.run(ids[6:], "--upstream-all")  # as one that died is tried once more
    known = runner.known("test_it.py")
    assert (ids[0], "without") not in known  # it passes with it
    assert [known[id, "without"].outcome for id in ids[1:]] == ["passed"] * 2 + ["failed"] * 2 + ["skipped", "passed"]
    assert known[ids[3], "without"].cause == "AssertionError: assert tensor(0.) == 1"
    assert known[ids[0], "default"].programs == known[ids[0], "pointwise"].programs == 1
    found = verdict(known, ids, "default")
    worse = "failed: AssertionError: this is with it"
    assert found["regressions"] == {ids[1]: worse, ids[2]: worse, ids[6]: "crashed: the process died"}
    assert (found["passed"], found["in which a program was compiled"]) == (1, 3)

    runner.run(ids[3:5], "--upstream-plain")
    found = imported(runner.known("test_it.py"), ids)
    assert list(found["fail without it"]) == [ids[3]] and list(found["regressions"]) == [ids[4]]


def test_files_of_thousands_are_shared_out():
    sides = [own_sides(f"test_ops.py::test_{i}") for i in range(100)]
    assert set(sides) == {("default",), ("pointwise",)} and 35 < sides.count(("default",)) < 65
    assert own_sides("test_core.py::test_1") == ("default", "pointwise")


def test_an_exclusion_that_is_not_needed_is_named(monkeypatch):
    monkeypatch.setattr(excluded, "EXCLUDED", {("test_a.py::test_[xy]", "default"): "cannot apply"})
    known = {("test_a.py::test_x", "without"): Record("test_a.py::test_x", "without", "passed")}
    known |= {(f"test_a.py::test_{n}", "without"): Record(f"test_a.py::test_{n}", "without", "passed") for n in "yz"}
    known |= {
        (f"test_a.py::test_{n}", "default"): Record(f"test_a.py::test_{n}", "default", outcome)
        for n, outcome in (("x", "failed"), ("y", "passed"), ("z", "passed"))
    }
    found = verdict(known, [f"test_a.py::test_{n}" for n in "xyz"], "default")
    assert found["excluded"] == {"test_a.py::test_x": "cannot apply"}
    assert found["excluded without need"] == ["test_a.py::test_y"]
    assert not found["regressions"]


def test_the_last_record_counts_and_a_larger_share_holds_the_smaller(tmp_path):
    for outcome in ("started", "failed", "started", "passed"):
        append(tmp_path, Record("test_a.py::test_x", "default", outcome))
    append(tmp_path, Record("test_a.py::test_y", "default", "started"))
    assert list(read(tmp_path, "test_a.py")) == [("test_a.py::test_x", "default")]  # a run that was stopped goes on
    close(tmp_path, "test_a.py")
    known = read(tmp_path, "test_a.py")
    assert known["test_a.py::test_x", "default"].outcome == "passed"
    assert known["test_a.py::test_y", "default"].outcome == "crashed"
    ids = [f"test_{i}" for i in range(1000)]
    small, large = ({i for i in ids if falls_in(i, share)} for share in (0.2, 0.5))
    assert small < large and 150 < len(small) < 250 and 450 < len(large) < 550
    assert all(falls_in(i, 1.0) for i in ids) and not any(falls_in(i, 0.0) for i in ids)
    assert os.listdir(tmp_path) == ["test_a.py.jsonl"]
