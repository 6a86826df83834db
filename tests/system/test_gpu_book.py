"""The GPU's run book: it goes on where it was, ends what takes too long, and runs without a GPU what needs none."""

import json
import subprocess
import sys
import time

import pytest

from benchmarks.gpu import run, steps
from benchmarks.gpu.book import FAILED, NEEDS_GPU, OUT_OF_TIME, PASSED, Step, load, run_book, save
from benchmarks.gpu.longchat import COLUMNS, compared
from benchmarks.gpu.probes import hidden_share, predicted_head
from benchmarks.litgpt import command
from benchmarks.litgpt.matrix import Case

EVERYWHERE = ("cuda", "cpu", "simulate")


def python(code):
    return [sys.executable, "-c", code]


def step(name, minutes=1.0, kinds=EVERYWHERE):
    return Step(name, "something", minutes, kinds)


@pytest.fixture
def book(tmp_path):
    """Runs steps that are lines of Python; returns verdicts by name, and who ran."""
    out = tmp_path / "folder" / "cpu.json"

    def go(codes, steps=None, minutes=1.0):
        ran = []

        def command(step, device, path, minutes):
            assert path == out and device == "cpu"
            ran.append(step.name)
            return python(codes[step.name])

        found = run_book(steps or [step(name) for name in codes], "cpu", out, minutes, command=command)
        assert json.loads(out.read_text())["verdicts"] == found
        return {name: verdict["verdict"] for name, verdict in found.items()}, ran

    go.out = out
    return go


def test_a_step_that_fails_says_why_and_the_next_one_runs(book):
    verdicts, ran = book({"bad": "raise ValueError('no such thing')", "good": "print('fine')"})
    assert verdicts == {"bad": FAILED, "good": PASSED} and ran == ["bad", "good"]
    assert load(book.out)["verdicts"]["bad"]["error"] == "ValueError: no such thing"
    assert (book.out.parent / "cpu.good.log").read_text() == "fine\n"


def test_it_goes_on_where_it_was(book):
    book({"first": "", "second": "raise SystemExit(1)", "third": ""})
    verdicts, ran = book({"first": "", "second": "", "third": ""})
    assert ran == ["second"] and set(verdicts.values()) == {PASSED}


@pytest.mark.slow
def test_a_step_ends_at_its_limit_with_all_that_it_started(book, tmp_path):
    alive = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(alive)!r}).touch()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    begun = time.monotonic()
    verdicts, _ = book({"slow": code, "next": ""}, [step("slow", 0.5 / 60), step("next")])
    assert verdicts == {"slow": OUT_OF_TIME, "next": PASSED}
    assert time.monotonic() - begun < 3
    time.sleep(max(0, begun + 4 - time.monotonic()))
    assert not alive.exists()


def test_a_step_whose_own_clock_ended_it_is_out_of_time(book):
    verdicts, _ = book({"rows": "raise SystemExit(3)"})
    assert verdicts == {"rows": OUT_OF_TIME} and "error" not in load(book.out)["verdicts"]["rows"]


def test_when_all_minutes_are_over_nothing_more_begins(book):
    codes = {"long": "import time; time.sleep(30)", "never": ""}
    verdicts, ran = book(codes, [step("long", None), step("never")], minutes=0.5 / 60)
    assert verdicts == {"long": OUT_OF_TIME} and ran == ["long"]


def test_what_needs_a_gpu_says_so(book):
    verdicts, ran = book({"here": "", "there": ""}, [step("there", kinds=("cuda",)), step("here")])
    assert verdicts == {"there": NEEDS_GPU, "here": PASSED} and ran == ["here"]


def test_a_file_of_another_device_is_left_alone(book):
    book({"first": ""})
    with pytest.raises(ValueError, match="is of cpu, not of cuda"):
        run_book([step("first")], "cuda", book.out, 1.0)


def test_a_step_goes_on_at_the_part_where_it_was(tmp_path):
    out, ran = tmp_path / "out.json", []
    save(out, load(out))

    def parts(second):
        return {
            "first": lambda: ran.append("first") or {"ms": 1},
            "second": lambda: ran.append("second") or second(),
            "third": lambda: ran.append("third") or {"right": True},
        }

    assert steps.run_parts("some", parts(lambda: 1 / 0), out) == "second: ZeroDivisionError: division by zero"
    assert ran == ["first", "second", "third"]
    assert steps.run_parts("some", parts(lambda: {"right": False}), out) == "second: not as it should be"
    assert steps.run_parts("some", parts(lambda: {"right": True}), out) is None
    assert ran[3:] == ["second", "second"]
    assert load(out)["found"]["some"] == {"first": {"ms": 1}, "second": {"right": True}, "third": {"right": True}}


def test_every_step_has_parts():
    assert [s.name for s in run.STEPS] == list(steps.PARTS)
    assert sum(s.minutes or 0 for s in run.STEPS) <= 45


def test_the_columns_are_command_lines():
    for compiler, loss_inside, more in COLUMNS.values():
        case = Case("longchat-7b-16k", True, loss_inside, compiler)
        for device in ("cuda", "simulate:H100-80GB"):
            options, given = command.parse([*case.arguments(device), *more])
            options.check(given["compile"], given["distributed_mode"])
            assert options.mem_reuse == ("--mem_reuse" not in more)
            assert options.optimizer_in_backward == ("--optimizer_in_backward" in more)


def test_a_prediction_is_compared_with_what_was_measured():
    said = {"peak_bytes": 90, "library_bytes": 9, "reserved_peak_bytes": 130}
    found = compared(said, {"peak_bytes": 100, "reserved_peak_bytes": 104})
    assert found["allocated"] == {"predicted_bytes": 99, "measured_bytes": 100, "difference": -0.01}
    assert found["reserved"]["difference"] == 0.25
    assert compared(said, {}) == compared(said, {"error": "out of memory"}) == said


def test_copies_are_hidden_by_the_union_of_kernels():
    assert hidden_share([], [(0, 1)]) == 0 and hidden_share([(0, 2)], []) == 0
    assert hidden_share([(0, 2)], [(0, 1), (0, 1), (0.5, 1)]) == 0.5
    assert hidden_share([(0, 2), (1, 3)], [(0, 3)]) == 1


@pytest.mark.slow
def test_heads_are_predicted_for_a_gpu_that_is_not_there():
    eager, chunked = (predicted_head("H100-80GB", name)["peak_bytes"] for name in ("eager", "rows=512"))
    logits_bytes = 16384 * 32000 * 2
    assert eager >= 3 * logits_bytes > 3 * chunked


def test_without_a_gpu_one_line_says_what_runs(capsys):
    assert run.main([]) == 2
    assert "--device simulate" in capsys.readouterr().err


@pytest.mark.parametrize(
    "device, said", [("tpu", "simulate:NAME, not 'tpu'"), ("simulate:H9000", "known ones are V100")]
)
def test_an_unknown_device_is_refused_before_a_step_begins(device, said, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run.main(["--device", device, "--out", str(tmp_path / "out.json")])
    assert said in capsys.readouterr().err and not any(tmp_path.iterdir())


@pytest.mark.slow
def test_what_needs_no_gpu_runs_to_its_end(tmp_path):
    out = tmp_path / "out.json"
    arguments = ["--device", "simulate", "--out", str(out), "--only", "versions", "head", "workspace", "nvfuser"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu.run", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    record = load(out)
    expected = {"versions": PASSED, "head": PASSED, "nvfuser": NEEDS_GPU, "workspace": PASSED}
    assert {name: verdict["verdict"] for name, verdict in record["verdicts"].items()} == expected
    assert record["found"]["workspace"]["predicted"] == {"predicted_bytes": 32 * 2**20}
    assert record["found"]["versions"]["versions"]["versions"]["torch"]
