"""The forms of a report: each opens, says what the report says, and nothing shown can break out of it."""

import base64
import json
import pickle
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch.cuda._memory_viz as memory_viz

from tests.programs import report_cases
from tests.programs.report_cases import synthetic
from thunder_mem.memory.plan import Arrangement, Plan, Refusal
from thunder_mem.prediction.predict import Prediction
from thunder_mem.rendering.curve import columns, ticks, whole_numbers
from thunder_mem.rendering.svg import lives_svg, timeline_svg
from thunder_mem.report import Report
from thunder_mem.report.layout import timeline_view
from thunder_mem.report.snapshot import snapshot


@pytest.fixture
def planned():
    return report_cases.planned()


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
    saved = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    # What PyTorch's own viewer is given to draw, out of the page that it makes of the file.
    (embedded,) = json.loads(re.search(r"const local_files = (\[.*\])", memory_viz.trace_plot(saved))[1])
    data = pickle.loads(base64.b64decode(embedded["base64"]))
    assert data == saved
    (events,) = data["device_traces"]
    peak, left = viewer_peak(events)
    assert peak == report.peak_bytes
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
    assert f"segments: {len(data['segments'])}" in memory_viz.segsum(data)
    assert f"{len(data['device_traces'][0])} entries" in memory_viz.trace(data)
    categories = {e["category"] for e in data["device_traces"][0]}
    assert "unknown" in categories  # without it the viewer throws
    lines = {f["filename"] for e in data["device_traces"][0] for f in e["frames"]}
    assert report_cases.__file__ in lines


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


@pytest.mark.slow
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
    drawn = ElementTree.fromstring(timeline_svg(timeline_view(planned)))
    titles = [t.text for t in drawn.iter("title")]
    assert any(t.startswith(f"{planned.peak.op} #{planned.peak.index}:") for t in titles)
    assert len(titles) == len(planned.prediction.timeline)
    bars = ElementTree.fromstring(lives_svg(timeline_view(planned)))
    assert len(list(bars.iter("rect"))) == len(planned.tenants)


@pytest.mark.slow
def test_pictures_show_what_runs_in_tiles_chunks_and_groups(tmp_path):
    report = report_cases.in_parts()
    view = timeline_view(report)
    names = [e.name for e in report.prediction.timeline]
    parts = {"3 tiles of 8 rows", "4 chunks of 6 rows", "4 groups of heads"}
    assert {words for _, words in view.loops} == parts
    assert all("chunk_loop" in names[p] or "groups" in names[p] for p, _ in view.loops)
    assert not any(p in dict(view.loops) for p, name in enumerate(names) if name == "chunk_loop_finish")
    drawn = ElementTree.fromstring(timeline_svg(view))
    assert sum(r.get("class") == "loop" for r in drawn.iter("rect")) == len(view.loops)
    titles = [t.text for t in drawn.iter("title")]
    assert all(titles[p].endswith(f"\n{words}") for p, words in view.loops)
    assert parts <= {t.text for t in drawn.iter("text")}
    report.plot(tmp_path / "peak.svg")
    assert parts <= set(re.findall(r"<!-- (.*?) -->", (tmp_path / "peak.svg").read_text()))


def test_the_dataflow_shows_every_operation_and_every_life(planned):
    drawn = ElementTree.fromstring(planned.dataflow_svg())
    tag = "{http://www.w3.org/2000/svg}"
    titles = [t.text for t in drawn.iter(f"{tag}title")]
    timeline = planned.prediction.timeline
    for e in timeline:
        assert sum(t.startswith(f"{e.phase} #{e.index} {e.name}\n") for t in titles) == 1
    made = [s for s in planned.prediction.storages if s.born >= 0 and s.nbytes]
    lanes = [t for t in titles if "alive from #" in t]
    assert sorted(lanes) == sorted(t for t in lanes if any(t.endswith(f"#{s.born} to #{s.last}") for s in made))
    assert len(lanes) == len(made)
    boxes = [r for r in drawn.iter(f"{tag}rect") if "box" in r.get("class", "")]
    assert len(boxes) == len(timeline) and sum("peak" in r.get("class") for r in boxes) == 1
    by_height = {r.get("y"): r.get("fill") for r in boxes}
    assert len(set(by_height.values())) > 2  # coloured by live bytes


def test_lanes_that_are_alive_at_once_stand_apart(planned):
    drawn = ElementTree.fromstring(planned.dataflow_svg())
    paths = [p.get("d") for p in drawn.iter("{http://www.w3.org/2000/svg}path") if "lane" in p.get("class", "")]
    spans = [tuple(map(float, m.groups())) for d in paths if (m := re.fullmatch(r"M([\d.]+) ([\d.]+)V([\d.]+)", d))]
    assert len(spans) > 20
    for i, (x, top, bottom) in enumerate(spans):
        assert not any(x == x2 and top < bottom2 and top2 < bottom for x2, top2, bottom2 in spans[:i])


def test_the_dataflow_of_a_long_program_is_that_around_its_peak(tmp_path):
    report = Report(synthetic(1000))
    report.save(tmp_path / "program.flow.svg")
    drawn = ElementTree.fromstring((tmp_path / "program.flow.svg").read_text())
    boxes = [r for r in drawn.iter() if "box" in r.get("class", "")]
    assert len(boxes) == 200 and any("peak" in r.get("class") for r in boxes)
    assert "of 1000" in "".join(drawn.itertext())
    assert "Nothing runs" in Report(Prediction((), (), 64, "cpu")).dataflow_svg()
    with pytest.raises(ValueError, match="at least 1 operation"):
        report.dataflow_svg(0)
    assert "<details>" not in report.to_page() and "<details>" in Report(synthetic(50)).to_page()


def test_everything_shown_is_escaped():
    evil = "</title><script>alert('x')</script>&amp;\""
    plan = Plan((), evil, (Arrangement(evil, 1, 2, 0),), evil, (Refusal(evil, evil),))
    report = Report(synthetic(30, name=evil), plan, notes=(evil,))
    ElementTree.fromstring(report.dataflow_svg())
    page = Page(report.to_page())
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
    page = report.to_page()
    assert len(page.encode()) < 5_000_000
    assert page.count("<rect") + page.count("<path") < 2_000
    assert f"({report.peak_bytes:,} bytes)" in page


def test_a_page_without_operations():
    assert "Nothing runs" in " ".join(Page(Report(Prediction((), (), 64, "cpu")).to_page()).words)


@pytest.mark.parametrize("ops", [1, 3, 65, 3000])
def test_the_pictures_axis_counts_whole_operations(tmp_path, ops):
    Report(synthetic(ops)).plot(tmp_path / "peak.svg")
    labels = re.findall(r"<!-- #(.*?) -->", (tmp_path / "peak.svg").read_text())
    assert labels == [str(n) for n in whole_numbers(ops)]
    assert 1 <= len(labels) <= 12 and all(int(label) < ops for label in labels)


def test_the_page_scrolls_where_it_is_narrow_and_knows_dark_windows(planned):
    """Scaled to 400 pixels, letters of a picture would be 4 pixels high; columns of words would have one letter."""
    text = planned.to_page()
    assert text.count('<div class="wide"><svg ') == 2
    assert "min-width: 900px" in text and ".l { min-width: 12em }" in text
    cells = re.findall(r"<td( class=\"\w\")?>(.*?)</td>", text)
    assert all(marks for marks, _ in cells) and any(marks == ' class="l"' for marks, _ in cells)
    assert "prefers-color-scheme: dark" in text and "color-scheme: light dark" in text
    used, defined = (set(re.findall(pattern, text)) for pattern in (r"var\((--\w+)\)", r"(--\w+): #"))
    light, _, dark = text.rpartition("prefers-color-scheme: dark")
    assert used == defined == set(re.findall(r"(--\w+): #", light)) == set(re.findall(r"(--\w+): #", dark))
