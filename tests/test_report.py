"""Reports: every figure equals the prediction's, every form opens, and nothing shown can break out of it."""

import io
import json
import pickle
import random
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import rich.console
import thunder
import torch
import torch.cuda._memory_viz as memory_viz
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from thunder_mem.plan import Candidate, Plan, Refusal
from thunder_mem.predict import Held, Prediction
from thunder_mem.replay import Event
from thunder_mem.report import Report, explain
from thunder_mem.report.curve import columns, ticks
from thunder_mem.report.facts import CATEGORIES
from thunder_mem.report.html import to_page
from thunder_mem.report.peaks import hills
from thunder_mem.report.snapshot import snapshot
from thunder_mem.report.svg import lives_svg, timeline_svg
from thunder_mem.transforms import MemEfficient


class Blocks(nn.Module):
    """Three equal blocks with shared weights."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        for _ in range(3):
            x = self.narrow(torch.nn.functional.gelu(self.wide(x)))
        return x.sum()


def compiled(transforms=()):
    jitted = thunder.jit(Blocks(), executors=[], transforms=list(transforms))
    jitted(torch.randn(8, 16))
    return jitted


@pytest.fixture(scope="module")
def planned():
    return explain(compiled([MemEfficient()]), budget_bytes=2**20)


def synthetic(ops, seed=0, name="op"):
    """A timeline of `ops` operations, half of them backward, with storages that live for random spans."""
    rng = random.Random(seed)
    storages = [Held(4096, "w", (), (32, 32), torch.float32, torch.device("cpu"), "argument", -1, ops - 1)]
    dying = [0] * (ops + 1)
    born = []
    for i in range(ops):
        nbytes = 64 * rng.randrange(1, 1000)
        last = min(ops - 1, i + rng.randrange(0, max(2, ops // 4)))
        device = torch.device("cpu")
        storages.append(Held(nbytes, f"{name}_t{i}", (), (nbytes // 4,), torch.float32, device, "computed", i, last))
        dying[last + 1] += nbytes
        born.append(nbytes)
    live, events = 4096, []
    for i in range(ops):
        live += born[i] - dying[i]
        phase = "forward" if i < ops // 2 else "backward"
        events.append(
            Event(i, phase, f"{name}{i % 7}", (f"{name}_t{i}",), f"/code/{name}.py:{i % 50 + 1}", live, born[i])
        )
    return Prediction(tuple(events), tuple(storages), 4096, "cpu", ("made up",))


def test_the_report_shows_the_predictions_peak_and_exactly_who_holds_it(planned):
    assert planned.peak_bytes == planned.prediction.peak_bytes == planned.peak.live_bytes
    assert sum(t.nbytes for t in planned.tenants) == planned.peak_bytes
    assert sum(t.count for t in planned.tenants) == len(planned.prediction.held_at_peak)
    assert sum(t.share for t in planned.tenants) == pytest.approx(1)
    assert planned.headroom_bytes == 2**20 - planned.prediction.total_peak_bytes
    text = str(planned)
    assert f"({planned.peak_bytes:,} bytes)" in text
    assert f"{planned.peak.op} #{planned.peak.index}" in text
    for candidate in planned.plan.candidates:
        assert candidate.name in text


def test_equal_layers_are_folded_into_one_row(planned):
    folded = [t for t in planned.tenants if t.count > 1]
    assert folded
    assert all(len(t.names) == min(t.count, 8) for t in folded)


def test_lines_of_the_users_code_are_found_even_for_the_backward(planned):
    peak = planned.peak
    assert peak.phase == "backward" and peak.place.undoes
    assert "test_report.py" in str(peak.place)
    assert "gelu" in peak.place.code
    linear = next(planned.moment(i) for i, e in enumerate(planned.prediction.timeline) if e.name.endswith("linear"))
    assert "torch/nn/modules/linear.py" in str(linear.place)
    assert "gelu" in linear.place.code  # where the user's code takes what the library made


def test_the_categories_sum_to_the_live_bytes(planned):
    for report in (planned, Report(synthetic(200))):
        for event, *parts in zip(report.prediction.timeline, *report.layers, strict=True):
            assert sum(parts) == event.live_bytes
    at_peak = dict(zip(CATEGORIES, planned.peak.by_category, strict=True))
    assert at_peak["saved for the backward"] > 0
    assert at_peak["held by the caller"] == planned.prediction.held_bytes


def test_bounds_speak_of_the_predicted_bytes(planned):
    assert [o.phase for o in planned.optimality] == ["forward", "backward"]
    for o in planned.optimality:
        assert not o.reason
        assert o.peak_bytes == planned.prediction.phase(o.phase).peak_bytes
        assert o.bound_bytes <= o.peak_bytes
        assert o.proven == (o.gap == 0)
    plain = explain(compiled())
    forward, backward = plain.optimality
    assert forward.proven
    assert backward.gap > 0  # Thunder's own order is not the best one
    assert backward.bound_bytes <= planned.optimality[1].peak_bytes < backward.peak_bytes


def test_without_memefficient_the_memory_is_reported_and_that_there_is_no_plan():
    report = explain(compiled(), bounds=False)
    assert report.plan is None and report.optimality == ()
    assert "MemEfficient made no plan" in str(report)
    assert report.peak_bytes > 0


def test_what_cannot_be_explained_says_why():
    never_called = thunder.jit(lambda x: x + 1, executors=[])
    with pytest.raises(ValueError, match="never been called"):
        explain(never_called)
    with pytest.raises(TypeError, match=r"thunder\.jit returned, not function"):
        explain(lambda x: x)
    with pytest.raises(TypeError, match="'1GiB'"):
        explain(never_called, budget_bytes="1GiB")
    with pytest.raises(ValueError, match="above 0, not -1"):
        explain(never_called, budget_bytes=-1)


def test_a_program_without_operations_has_a_report():
    report = Report(Prediction((), (), 64, "cpu"))
    assert report.peak is None and report.tenants == () and report.runner_ups == ()
    assert "Nothing runs" in str(report)


def test_a_budget_that_is_exceeded_is_called_so():
    report = Report(synthetic(20), budget_bytes=1)
    assert report.headroom_bytes == 1 - report.prediction.total_peak_bytes
    assert "does not fit into 1 B" in str(report)


def test_every_refusal_is_listed_with_its_reason():
    plan = Plan((), "a", (Candidate("a", 1, 2, 0),), "source", (Refusal("cross_entropy", "its [weights] are odd"),))
    text = str(Report(synthetic(20), plan))
    assert "cross_entropy" in text and "its [weights] are odd" in text


def test_rich_prints_names_with_brackets_as_they_are():
    console = rich.console.Console(width=100, record=True, file=io.StringIO())
    console.print(Report(synthetic(20, name="[red]x[/red]")))
    assert "[red]x[/red]" in console.export_text()


def test_json_says_the_same_and_is_plain(planned, tmp_path):
    planned.save(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["peak_bytes"] == max(data["timeline"]["live_bytes"]) == planned.peak_bytes
    assert sum(t["nbytes"] for t in data["tenants"]) == planned.peak_bytes
    assert data["plan"]["chosen"] == planned.plan.chosen
    assert len({len(column) for column in data["timeline"].values()}) == 1
    planned.save(tmp_path / "report.txt")
    assert (tmp_path / "report.txt").read_text() == f"{planned}\n"


def test_an_unknown_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'report\.doc'.*\.json"):
        Report(synthetic(20)).save(tmp_path / "report.doc")


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.sampled_from([0, 0.05, 0.3, 1]))
def test_hills_against_a_walk_from_every_top(live, share):
    least = max(1, share * (max(live) - min(live)))

    def descent(i):
        """How far one has to go down from `i` to get higher (to the left: as high)."""
        depths = []
        for step, higher in ((-1, lambda v: v >= live[i]), (1, lambda v: v > live[i])):
            lowest, j = live[i], i + step
            while 0 <= j < len(live) and not higher(live[j]):
                lowest, j = min(lowest, live[j]), j + step
            if 0 <= j < len(live):
                depths.append(live[i] - lowest)
        return min(depths, default=None)

    expected = [i for i in range(len(live)) if (d := descent(i)) is None or d >= least]
    expected.sort(key=lambda i: (-live[i], i))
    assert list(hills(live, count=50, share=share)) == expected
    assert live[hills(live)[0]] == max(live)


def test_hills_refuse_nonsense():
    with pytest.raises(ValueError, match="count from 1 up"):
        hills([1], count=0)
    with pytest.raises(ValueError, match=r"share in 0\.\.1"):
        hills([1], share=2)


def viewer_peak(events):
    """The highest point of the viewer's timeline, and that no two blocks overlap."""
    live, total, peak = {}, 0, 0
    for e in events:
        if e["action"] == "alloc":
            assert e["addr"] not in live
            live[e["addr"]] = e["size"]
            total += e["size"]
            peak = max(peak, total)
        elif e["action"] == "free_completed":
            assert live.pop(e["addr"]) == e["size"]
            total -= e["size"]
    return peak, live


@pytest.mark.parametrize("seed", range(4))
def test_the_snapshot_read_back_has_the_predicted_peak(planned, tmp_path, seed):
    report = planned if seed == 0 else Report(synthetic(300, seed))
    report.save(tmp_path / "snapshot.pickle")
    data = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    (events,) = data["device_traces"]
    peak, left = viewer_peak(events)
    assert peak == report.prediction.total_peak_bytes
    last = report.prediction.timeline[-1].index
    assert sum(left.values()) == sum(s.nbytes for s in report.prediction.storages if s.last >= last)
    (segment,) = data["segments"]
    assert {b["address"]: b["requested_size"] for b in segment["blocks"] if b["state"] == "active_allocated"} == left
    assert sum(b["size"] for b in segment["blocks"]) == segment["total_size"]


def test_blocks_of_a_snapshot_never_overlap():
    live = []
    for e in snapshot(synthetic(300))["device_traces"][0]:
        start, end = e["addr"], e["addr"] + e["size"]
        if e["action"] == "alloc":
            assert all(end <= a or b <= start for a, b in live)
            live.append((start, end))
        elif e["action"] == "free_completed":
            live.remove((start, end))


def test_pytorchs_own_viewer_takes_the_snapshot(planned):
    data = snapshot(planned.prediction)
    assert "snapshot.pickle" in memory_viz.trace_plot(data)
    assert f"segments: {len(data['segments'])}" in memory_viz.segsum(data)
    assert f"{len(data['device_traces'][0])} entries" in memory_viz.trace(data)
    categories = {e["category"] for e in data["device_traces"][0]}
    assert "unknown" in categories  # without it the viewer throws
    lines = {f["filename"] for e in data["device_traces"][0] for f in e["frames"]}
    assert __file__ in lines


def test_columns_never_lose_the_peak():
    live = [e.live_bytes for e in synthetic(1000).timeline]
    for most in (1, 7, 100, 1000, 5000):
        shown = columns(live, most)
        assert len(shown) == min(most, len(live))
        assert list(shown) == sorted(set(shown))
        assert max(live[p] for p in shown) == max(live)
    assert columns([], 5) == ()
    with pytest.raises(ValueError, match="at least 1 column"):
        columns(live, 0)


def test_ticks_are_few_and_reach_near_the_peak():
    for peak_bytes in (0, 1, 3, 700, 615_684, 2**40, 2**40 + 1):
        shown = ticks(peak_bytes)
        assert shown[0] == 0 and len(shown) <= 9
        assert peak_bytes * 3 // 4 <= shown[-1] <= peak_bytes


def test_pictures_are_drawn_and_do_not_change(planned, tmp_path):
    planned.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    for name in ("first.svg", "second.svg"):
        planned.save(tmp_path / name)
    first, second = ((tmp_path / name).read_text() for name in ("first.svg", "second.svg"))
    assert first == second and ElementTree.fromstring(first).tag.endswith("svg")
    Report(synthetic(50, name="a$b_{")).plot(tmp_path / "odd.png")  # no formula, whatever the names
    with pytest.raises(ValueError, match=r"'report\.gif'"):
        planned.plot(tmp_path / "report.gif")
    with pytest.raises(ValueError, match="nothing to draw"):
        Report(Prediction((), (), 64, "cpu")).plot(tmp_path / "empty.png")


class Page(HTMLParser):
    """Collects a page's text and tags, and fails where they do not close."""

    def __init__(self, page):
        super().__init__()
        self.words, self.tags, self._open = [], [], []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_says_what_the_text_says_and_needs_nothing_else(planned, tmp_path):
    planned.save(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    words = " ".join(page.words)
    assert f"({planned.peak_bytes:,} bytes)" in words
    for tenant in planned.tenants:
        assert tenant.names[0] in words
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not {"src", "href"} & {name for _, attrs in page.tags for name in attrs}
    assert not [word for word in ("http", "url(", "@import") if word in text]


def test_the_pictures_highest_column_is_the_peak(planned):
    drawn = ElementTree.fromstring(timeline_svg(planned))
    titles = [t.text for t in drawn.iter("title")]
    assert any(t.startswith(f"{planned.peak.op} #{planned.peak.index}:") for t in titles)
    assert len(titles) == len(planned.prediction.timeline)
    bars = ElementTree.fromstring(lives_svg(planned))
    assert len(list(bars.iter("rect"))) == len(planned.tenants)


def test_everything_shown_is_escaped():
    evil = "</title><script>alert('x')</script>&amp;\""
    plan = Plan((), evil, (Candidate(evil, 1, 2, 0),), evil, (Refusal(evil, evil),))
    page = Page(to_page(Report(synthetic(30, name=evil), plan, notes=(evil,))))
    assert "script" not in {tag for tag, _ in page.tags}
    assert evil in " ".join(page.words)


def test_a_notebook_gets_a_fragment(planned):
    fragment = planned._repr_html_()
    tags = [tag for tag, _ in Page(fragment).tags]
    assert tags[0] == "style" and not {"html", "body", "head"} & set(tags)
    rules = re.sub(r"@media[^{]*\{(.*?\}) \}", r"\1", Page(fragment).words[0], flags=re.S)
    selectors = [s for s in re.findall(r"([^{}]+)\{", rules) if s.strip()]
    assert selectors and all(part.strip().startswith(".thunder-mem") for s in selectors for part in s.split(","))


def test_twenty_thousand_operations_stay_a_small_page():
    report = Report(synthetic(20_000))
    page = to_page(report)
    assert len(page.encode()) < 5_000_000
    assert page.count("<rect") + page.count("<path") < 2_000
    assert f"({report.peak_bytes:,} bytes)" in page


def test_a_page_without_operations():
    assert "Nothing runs" in " ".join(Page(to_page(Report(Prediction((), (), 64, "cpu")))).words)
