"""The benchmark's command lines: one run, the matrix, what they write, and the matrix of the GPU run book."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import thunder

from benchmarks import cards, longest_sequence, tokens
from benchmarks.gpu import matrix as run_book
from benchmarks.litgpt import command, rows, table
from benchmarks.litgpt.harness import run
from benchmarks.litgpt.matrix import COMPILERS, FUSERS, MODELS, OURS, Case, cases, runs_on
from benchmarks.litgpt.options import Options
from benchmarks.litgpt.render import draw, markdown
from thunder_mem import last_plan

TINY = ["--model_name", "pythia-14m", "--n_layers", "1", "--block_size", "32", "--scale", "0.25", "--device", "cpu"]
QUICK = ["--max_iters", "3", "--warmup_iters", "1", "--return_metrics_as_json", "True"]


def row(compiler, peak_bytes=None, **more):
    case = {"model": "gpt2-124m", "checkpointing": True, "loss_inside": False, "compiler": compiler}
    figures = {"device": "somewhere", "versions": {"torch": "2"}}
    figures |= {"error": "out of `memory`"} if peak_bytes is None else {"peak_bytes": peak_bytes}
    return {**case, "command": f"run {compiler}", **figures, **more}


def test_all_of_thunders_options_are_there():
    parser = command.make_parser()
    ours = command.parse(["--compile", "thunder", "--dynamic", "True", "--mem_budget", "40GiB", "--mem_chunk", "False"])
    assert ours[0].mem_budget == "40GiB" and ours[0].mem_chunk is False
    (transform,) = command.parse(["--compile", "thunder", "--mem_efficient", "True", "--mem_tile", "False"])[
        0
    ].transforms()
    assert "tile=False" in repr(transform)
    assert ours[1]["dynamic"] is True
    code = command.load_thunders().Benchmark_litGPT.__init__.__code__
    thunders = code.co_varnames[1 : code.co_argcount]
    assert {f"--{name}" for name in thunders} <= set(parser._option_string_actions)


@pytest.mark.parametrize("loss_inside", ["False", pytest.param("True", marks=pytest.mark.slow)])
def test_one_run_on_a_cpu_writes_thunders_metrics(tmp_path, loss_inside):
    path = tmp_path / "folder" / "metrics.json"
    arguments = [*TINY, *QUICK, "--loss_inside", loss_inside, "--json_path", str(path), "--global_batch_size", "2"]
    assert command.main(arguments) == 0
    found = json.loads(path.read_text())
    assert found["memory_used_GB"] == found["peak_bytes"] / 1e9
    assert found["peak_bytes"] > found["held_bytes"] > 0
    assert found["GA"] == 2 and found["loss_inside"] == (loss_inside == "True")
    assert found["average_iter_time"] > 0 and found["tokens_per_sec"] > 0
    assert found["min_iter_time"] <= found["median_iter_time"]
    assert found["versions"]["torch"]


def test_what_cannot_run_ends_with_one_line(capsys):
    assert command.main([*TINY, "--mem_budget", "min"]) == 2
    assert "--mem_efficient True" in capsys.readouterr().err


@pytest.mark.slow
def test_the_compiler_gets_the_options():
    options = Options(device="simulate:A100-40GB", mem_efficient=True, fusion_type="dataflow", mem_sort="source")
    done = run(options, model_name="pythia-14m", n_layers=1, block_size=32, compile="thunder")
    assert thunder.compile_data(done.model).compile_options["fusion_type"] == "dataflow"
    assert last_plan(done.model).sort == "source"
    assert done.perf_metrics["memory_used_GB"] == done.loop_peak.peak_bytes / 1e9


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["nvfuser", "mem_pointwise"])
def test_who_fuses_is_asked_for(fusion):
    options = Options(device="simulate:A100-40GB", mem_efficient=True, fusion=fusion)
    done = run(options, model_name="pythia-14m", n_layers=1, block_size=32, compile="thunder")
    assert {r.executor for r in last_plan(done.model).regions} >= {fusion}
    assert {r.executor for r in last_plan(done.model).regions}.isdisjoint({"nvfuser", "mem_pointwise"} - {fusion})


@pytest.mark.slow
def test_thunderfx_compiles_with_the_transform(tmp_path):
    path = tmp_path / "metrics.json"
    arguments = [*TINY, *QUICK, "--compile", "dynamo+thunder", "--mem_efficient", "True", "--json_path", str(path)]
    done = subprocess.run([sys.executable, "-m", "benchmarks.litgpt", *arguments], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert json.loads(path.read_text())["mem_efficient"][0].startswith("thunder_mem.MemEfficient(")


def test_the_matrix_is_every_combination_once():
    found = cases()
    assert len(set(found)) == len(found) == len(MODELS) * len(COMPILERS) * 4
    commands = {case.command("cpu") for case in found} | {case.command("cuda") for case in found}
    assert len(commands) == 2 * len(found)
    for case in cases(["gpt2-124m"], checkpointing=(True,)):
        for device in ("cpu", "cuda", "simulate:H100-80GB"):
            if not runs_on(case.compiler, device):
                continue
            options, given = command.parse(case.arguments(device))
            options.check(given["compile"], given["distributed_mode"])
    with pytest.raises(ValueError, match="gpt5"):
        cases(["gpt5"])


SIMULATED = {
    tuple(row[name] for name in ("model", "checkpointing", "loss_inside", "compiler")): row
    for row in rows.load(table.RESULTS / "litgpt-simulate-H100-80GB.json")
}


def test_the_simulated_matrix_has_every_row():
    assert set(SIMULATED) == {(c.model, c.checkpointing, c.loss_inside, c.compiler) for c in cases()}
    assert not [case for case, row in SIMULATED.items() if "error" in row]
    text = (table.RESULTS / "litgpt-simulate-H100-80GB.md").read_text()
    assert text == markdown(list(SIMULATED.values()))


@pytest.mark.parametrize("fuser", FUSERS)
def test_no_row_of_the_simulated_matrix_is_above_thunders_own(fuser):
    """Nor is the smallest budget's above the default's, but by what is outside of the compiled function."""
    ours = [name for name in COMPILERS if name.startswith(OURS) and name.endswith(fuser)]
    for case in {case[:3] for case in SIMULATED}:
        peaks = {name: SIMULATED[(*case, name)]["peak_bytes"] for name in COMPILERS if name.endswith(fuser)}
        own = min(peaks[f"Thunder {passes}, {fuser}"] for passes in ("consecutive", "dataflow"))
        assert all(peaks[name] <= own for name in ours), case
        assert all(peaks[name] <= 1.002 * peaks[f"{OURS}, {fuser}"] for name in ours), case


def test_a_table_goes_on_where_it_stopped(tmp_path, monkeypatch):
    ran = []

    def fake_run(case, device, iterations, timeout_s):
        ran.append(case.compiler)
        figures = row(case.compiler, 10**9) if case.compiler != "torch.compile" else row(case.compiler)
        return {**figures, **case.__dict__, "command": case.command(device, iterations)}

    monkeypatch.setattr(table, "run_apart", fake_run)
    arguments = ["--models", "gpt2-124m", "--checkpointing", "on", "--loss_inside", "off", "--results", str(tmp_path)]
    some = ["--compilers", "eager", "torch.compile"]
    assert table.main([*arguments, *some]) == 1  # one failed
    assert ran == ["eager", "torch.compile"]
    ran.clear()
    assert table.main(arguments) == 1
    assert ran == [name for name in COMPILERS if name != "eager"]  # the failed one again
    ran.clear()
    assert table.main([*arguments, "--compilers", "eager", "--again"]) == 1
    assert ran == ["eager"]
    found = rows.load(tmp_path / "litgpt-simulate-H100-80GB.json")
    assert [r["compiler"] for r in found] == list(COMPILERS)
    text = (tmp_path / "litgpt-simulate-H100-80GB.md").read_text()
    assert "failed" in text and "out of memory" in text
    assert (tmp_path / "litgpt-simulate-H100-80GB.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_run_that_fails_says_so():
    bad = rows.run_apart(Case("longchat-7b-16k", True, False, "eager"), "simulate:H9000", 2, 120)
    assert "unknown device 'H9000'" in bad["error"]
    here = rows.run_here(Case("longchat-7b-16k", True, False, "eager"), "simulate:H9000", 2)
    assert "unknown device 'H9000'" in here["error"]
    late = rows.run_apart(Case("longchat-7b-16k", True, False, "eager"), "simulate:H100-80GB", 2, 0.1)
    assert "not done after" in late["error"]


@pytest.mark.slow
def test_a_row_is_named_by_its_case():
    eager = Case("longchat-7b-16k", True, True, "eager")
    found = rows.run_here(eager, "cpu", 3)
    assert Case(*(found[name] for name in ("model", "checkpointing", "loss_inside", "compiler"))) == eager
    assert found["compile"] == "eager" and found["peak_bytes"] > found["held_bytes"]
    assert found["command"].endswith("--compile eager") and found["wall_s"] > 0


def test_markdown_marks_the_least_and_names_failures(tmp_path):
    made = [
        row("eager", 4 * 10**9),
        row("torch.compile"),
        row("Thunder dataflow, nvFuser", 2 * 10**9),
        row("MemEfficient, nvFuser", 10**9),
        row("MemEfficient, mem_pointwise", 3 * 10**9, median_iter_time=12.0),
    ]
    text = markdown(made)
    ratios = "0.500 | 0.500 | 0.750 | 0.750 |"  # each by the best peer of the same fuser
    assert f"| gpt2-124m | on | outside | 4.000 | failed | 2.000 | **1.000** | 3.000 | {ratios}" in text
    assert "- gpt2-124m, checkpointing on, loss outside, torch.compile: `out of memory`" in text
    assert "| 12.0 |" in text
    draw(made, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000


def test_the_run_books_matrix_has_every_row_once_and_the_published_ones_first():
    order = run_book.order()
    assert set(order) == set(cases()) and len(order) == len(cases())
    first = order[: 2 * len(COMPILERS)]
    assert all(case.model == "longchat-7b-16k" and case.checkpointing for case in first)


@pytest.mark.slow
def test_the_run_books_matrix_runs_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(run_book, "ITERATIONS", 3)
    path = tmp_path / "cpu.json"
    arguments = ["--device", "cpu", "--rows", "1", "--out", str(path)]
    for count in (1, 2):
        assert run_book.main(arguments) == 0
        record = json.loads(path.read_text())
        assert [r["compiler"] for r in record["rows"]] == ["eager", "torch.compile"][:count]
        assert all("peak_bytes" in r for r in record["rows"])


GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def test_the_guide_shows_the_table_of_cards():
    rows = [cards.Planned(**row) for row in json.loads(cards.RESULTS.read_text())["rows"]]
    assert cards.table(rows) in (GUIDES / "step_in_backward.md").read_text(encoding="utf-8")


def test_the_guide_shows_the_bytes_of_a_token():
    rows = [tokens.Row(**row) for row in json.loads(tokens.RESULTS.read_text())["rows"]]
    guide = (GUIDES / "tiles.md").read_text(encoding="utf-8")
    for compiler in tokens.COMPILERS:
        figures = [f"{row.token_bytes / 1e3:.0f}" for row in rows if row.compiler == compiler]
        assert len(figures) == len(tokens.TOKENS)
        assert any(" | ".join(figures) in line.replace("*", "") for line in guide.splitlines()), (compiler, figures)


@pytest.mark.slow
def test_the_guide_shows_the_longest_sequences():
    rows = [longest_sequence.Longest(**row) for row in json.loads(longest_sequence.RESULTS.read_text())["rows"]]
    assert [row.way for row in rows] == list(longest_sequence.WAYS)
    usable_bytes = longest_sequence.DEVICES[longest_sequence.DEVICE].usable_bytes
    assert all(row.peak_bytes <= usable_bytes < row.beyond_bytes for row in rows)
    assert longest_sequence.table(rows) in (GUIDES / "tiles.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_longest_sequence_is_found_by_few_plans():
    asked = []

    def planned(layers, tokens):
        asked.append((layers, tokens))
        peak_bytes = 3 * 10**9 + layers * (5 * 10**8 + 8192 * tokens) + 90_000 * tokens
        return longest_sequence.Planned("eager", layers, tokens, peak_bytes, "backward", "mm", 0.0)

    row = longest_sequence.longest("eager", planned)
    assert row.tokens == 181 * 1024 and row.peak_bytes < row.beyond_bytes
    assert len(asked) <= 10
