"""What comes from outside is data: read strictly, bounded in size, never run; and what is shown is escaped."""

import ast
import json
import pickle
from html.parser import HTMLParser
from pathlib import Path

import pytest
import thunder
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thunder_mem
from thunder_mem import MemEfficient, explain, memory_time_frontier
from thunder_mem.command_line import main
from thunder_mem.command_line.program import UsageError, parse_input
from thunder_mem.costs.measured import _load
from thunder_mem.partition.budget import parse_budget
from thunder_mem.prediction.simulate import simulate
from thunder_mem.runtime.scratch_cache import Table
from thunder_mem.user_choices.config import ENVIRONMENT, parse_config
from thunder_mem.user_choices.written import MAX_CHARACTERS, MAX_ENTRIES

PACKAGE = Path(thunder_mem.__file__).parent
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
CODE = "__import__('os').system('touch {}')"


# ---- nothing is run ----


def test_what_evaluates_text_or_loads_pickles_is_known_by_name():
    """Only a region's own code, which Thunder printed from the trace; no input ever comes near."""
    # What Inductor writes for a region is run without its kernels, to learn what they keep.
    allowed = {("kernel_module.py", "exec"), ("kernel_module.py", "compile")}
    allowed |= {("replay.py", "eval"), ("replay.py", "exec"), ("replay.py", "compile")}
    # A statement of the model's own forward, as Python has it.
    allowed |= {("made_of_labels.py", "exec"), ("made_of_labels.py", "compile")}
    allowed |= {("_versions.py", "__import__")}  # torch and thunder, by names that stand there
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                function = node.func
                if isinstance(function, ast.Name) and function.id in ("eval", "exec", "compile", "__import__"):
                    found.add((path.name, function.id))
                if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                    pair = function.value.id, function.attr
                    if pair[0] in ("pickle", "marshal", "shelve", "yaml") and pair[1] in ("load", "loads"):
                        found.add((path.name, ".".join(pair)))
                    if pair in (("os", "system"), ("torch", "load"), ("subprocess", "run"), ("subprocess", "Popen")):
                        found.add((path.name, ".".join(pair)))
    assert found <= allowed, found - allowed


@pytest.mark.parametrize("form", ["{0}:recompute:-1", "Gelu+:{0}:-1", "Gelu+:recompute:{0}", "{0}.json"])
def test_text_that_is_code_is_refused_and_not_run(form, tmp_path):
    target = tmp_path / "made"
    with pytest.raises((ValueError, OSError)):
        MemEfficient(recompute=form.format(CODE.format(target)))
    assert not target.exists()


NOT_NUMBERS = ["1_0", "１０", "10\n", "1e3", "+1", "²", "٣", " ", "", "9" * 5000, "nan"]


@pytest.mark.parametrize(
    "text", [CODE, "1e999GiB", "-1", "1_0GiB", "10 GiB;", "∞%", "５０%", "50%\n", "１GiB", "0x10", *NOT_NUMBERS]
)
def test_budgets_that_are_no_sizes_are_refused(text, tmp_path):
    with pytest.raises(ValueError) as refused:
        parse_budget(text.format(tmp_path / "made"))
    assert not list(tmp_path.iterdir()) and len(str(refused.value)) < 500


@pytest.mark.parametrize("text", NOT_NUMBERS)
def test_one_kind_of_number_is_read_everywhere(text):
    with pytest.raises(ValueError) as refused:
        parse_config({"Gelu+": {"strategy": 1, "count": text}})
    assert len(str(refused.value)) < 500
    assert main(["predict", "a.py:f", "--accumulate", text]) == 2
    with pytest.raises(UsageError) as refused_shape:
        parse_input(f"2x{text}")
    assert len(str(refused_shape.value)) < 500


@pytest.mark.parametrize(
    "refuse",
    [
        lambda text: parse_config(text),
        lambda text: parse_config([text]),
        lambda text: parse_config({text: text}),
        lambda text: parse_config({"Gelu+": {"strategy": text, "count": text}}),
        lambda text: parse_config({"Gelu+": {text: 1}}),
        lambda text: MemEfficient(sort=text),
        lambda text: MemEfficient(costs=text),
        lambda text: MemEfficient(budget=1, offload=text),
        lambda text: MemEfficient(on_infeasible=text),
        lambda text: MemEfficient(chunk=text),
        lambda text: simulate(text).__enter__(),
        lambda text: simulate(fusion=text).__enter__(),
    ],
)
def test_messages_quote_little_of_what_was_given(refuse):
    with pytest.raises((ValueError, TypeError)) as refused:
        refuse("x" * 50_000)
    assert len(str(refused.value)) < 700


# ---- files ----


@settings(max_examples=50)
@given(JSON)
def test_a_configuration_parses_or_is_refused(value):
    try:
        config = parse_config(value)
    except ValueError:
        return
    assert parse_config(config.to_json()) == config


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe not utf-8",
        b"[" * 100_000,  # deeper than a parser can recurse
        b'{"Gelu+": "recompute", "Gelu+": "none"}',
        b'{"Gelu+": NaN}',
        b'{"Gelu+": 1e999}',
        b"",
        b"null",
        b"9" * 10_000,
        b"[" + b'"Gelu+:recompute:-1",' * 2 + b'""]',
    ],
    ids=["not utf-8", "deep", "twice", "NaN", "infinite", "empty", "null", "digits", "repeated"],
)
def test_files_that_are_no_configuration_are_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError):
        parse_config(path)


def test_sizes_are_bounded(tmp_path):
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MAX_CHARACTERS + 1)  # a hole: nothing is read
    many = {f"Op{i}+": "recompute" for i in range(MAX_ENTRIES + 1)}
    for given_ in (large, "x" * (MAX_CHARACTERS + 1), many, list(many)):
        with pytest.raises(ValueError, match="more than"):
            parse_config(given_)


def test_the_environment_is_held_to_the_same(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, CODE)
    with pytest.raises(ValueError, match=ENVIRONMENT):
        MemEfficient()


@given(JSON)
def test_any_json_in_the_place_of_measured_scratch_counts_as_none(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("table") / "scratch.json"
    for written in (value, {"format": 1, "machine": "here", "probes": value}, {"format": 1, "probes": {"0": value}}):
        path.write_text(json.dumps(written))
        assert Table(path, "here").find("anything") is None


@given(JSON)
def test_any_json_in_the_place_of_measured_times_is_refused_or_a_table_of_seconds(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("times") / "times.json"
    for written in (value, {"version": 1, "seconds": value}):
        path.write_text(json.dumps(written))
        try:
            seconds = _load(path)
        except ValueError:
            continue
        assert all(isinstance(s, float) and 0 <= s < float("inf") for s in seconds.values())


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"9" * 10_000, b"\xff", None], ids=["deep", "digits", "bytes", "huge"]
)
def test_broken_files_in_the_cache_folder_do_no_harm(tmp_path, content):
    path = tmp_path / "file.json"
    with path.open("wb") as file:
        file.truncate(2**26 + 1) if content is None else file.write(content)
    assert Table(path, "here").find("anything") is None
    with pytest.raises(ValueError, match="is not a file of measured times"):
        _load(path)


# ---- what is shown ----

EVIL = "<img src=x onerror=alert(1)>\"'&amp;<script>alert(2)</script>"


class _Elements(HTMLParser):
    """The elements and attributes of a page, and whether any can run something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def hostile() -> torch.nn.Module:
    """A module whose class and file have names that are markup; of attributes Thunder makes names of variables."""
    scope: dict = {"torch": torch}
    source = "def forward(self, x):\n    for child in self.children():\n        x = torch.sin(child(x))\n    return x\n"
    exec(compile(source, f"/tmp/{EVIL}.py", "exec"), scope)
    module = type(EVIL, (torch.nn.Module,), {"forward": scope["forward"]})()
    for i in range(2):
        module.add_module(str(i), torch.nn.Linear(4, 4))
    return module


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    module, x = hostile(), torch.ones(3, 4)
    jitted = thunder.jit(module, executors=[], transforms=[MemEfficient(strict=True)])
    report = explain(jitted, x)
    report.save(folder / "report.html")
    report.save(folder / "flow.flow.svg")
    report.save(folder / "snapshot.pickle")
    frontier = memory_time_frontier(module, x, executors=[], points=2)
    found = {p.name: p.read_text(encoding="utf-8") for p in folder.iterdir() if p.suffix != ".pickle"}
    found["report in a notebook"] = report._repr_html_()
    if hasattr(frontier, "_repr_html_"):
        found["frontier in a notebook"] = frontier._repr_html_()
    snapshot = pickle.loads((folder / "snapshot.pickle").read_bytes())  # written a moment ago, by us
    assert set(snapshot) >= {"segments", "device_traces"}
    return found


@pytest.mark.slow
def test_hostile_names_are_shown_as_text(pages):
    assert len(pages) >= 3
    assert any("onerror" in page for page in pages.values())  # the names are there
    for name, page in pages.items():
        elements = _Elements(page)
        assert not elements.tags & {"script", "img", "iframe", "object", "embed", "link", "base"}, name
        assert not {a for a in elements.attributes if a.startswith("on") or a == "src"}, name


@pytest.mark.slow
def test_hostile_names_end_no_json(pages, tmp_path):
    module, x = hostile(), torch.ones(3, 4)
    report = explain(thunder.jit(module, executors=[], transforms=[MemEfficient(strict=True)]), x)
    path = tmp_path / "report.json"
    report.save(path)
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(json.dumps(report.to_json()))
