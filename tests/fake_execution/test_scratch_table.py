"""What was measured is found again, whatever else is in the folder, and nothing depends on it being there."""

import json
import pathlib

import pytest
import thunder
import torch

from thunder_mem import predict
from thunder_mem.fake_execution import scratch
from thunder_mem.runtime import scratch_cache
from thunder_mem.runtime.output_layout import Output
from thunder_mem.runtime.scratch_cache import Probe, Table

PROBE = Probe(4096, 1024, (None, Output(("new", 1), 1024, (16, 16), (16, 1), 0, torch.float32)))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deeper" / "scratch.json"


def test_a_later_process_finds_what_was_saved(path):
    first = Table(path, "a machine")
    first.add("an operation", PROBE)
    assert first.find("an operation") == PROBE and not path.exists()
    first.save()
    later = Table(path, "a machine")
    assert later.find("an operation") == PROBE and later.find("another") is None
    assert Table(path, "another machine").find("an operation") is None


def test_processes_that_write_at_once_lose_nothing(path):
    one, other = Table(path, "m"), Table(path, "m")
    one.add("one", PROBE)
    other.add("other", Probe(8, 8))
    one.save()
    other.save()
    last = Table(path, "m")
    assert (last.find("one"), last.find("other")) == (PROBE, Probe(8, 8))
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # and leave nothing else behind


def edited(change):
    def edit(text):
        data = json.loads(text)
        entry = next(iter(data["probes"].values()))
        change(data, entry)
        return json.dumps(data)

    return edit


BROKEN = {
    "nothing": lambda text: "",
    "half of it": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[]",
    "null": lambda text: "null",
    "bytes": lambda text: "\udcff",
    "another format": edited(lambda data, entry: data.update(format=2)),
    "no machine": edited(lambda data, entry: data.pop("machine")),
    "no probes": edited(lambda data, entry: data.update(probes=[1])),
    "less than nothing": edited(lambda data, entry: entry.__setitem__(0, -1)),
    "a fraction": edited(lambda data, entry: entry.__setitem__(0, 1.5)),
    "true": edited(lambda data, entry: entry.__setitem__(1, True)),
    "no dtype": edited(lambda data, entry: entry[2][1].__setitem__(-1, "torch.nn")),
    "no such storage": edited(lambda data, entry: entry[2][1].__setitem__(0, "old")),
    "twice": lambda text: text.replace('"format": 1', '"format": 1, "format": 1'),
    "more than there is": edited(lambda data, entry: entry.__setitem__(0, 2**50)),
    "more at the end than ever": edited(lambda data, entry: entry.__setitem__(1, 8192)),
    "a view beyond its storage": edited(lambda data, entry: entry[2][1].__setitem__(2, 512)),
    "too few": edited(lambda data, entry: entry[2][1].pop()),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_that_is_not_one_counts_as_none_and_is_replaced(path, broken):
    table = Table(path, "m")
    table.add("an operation", PROBE)
    table.save()
    path.write_bytes(broken(path.read_text()).encode(errors="surrogateescape"))
    again = Table(path, "m")
    assert again.find("an operation") is None
    again.add("another", PROBE)
    again.save()
    assert Table(path, "m").find("another") == PROBE


def test_where_nothing_can_be_written_it_lasts_for_the_process(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "scratch.json", None):
        table = Table(path, "m")
        table.add("an operation", PROBE)
        table.save()
        assert table.find("an operation") == PROBE


def test_the_folder_is_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch_cache, "_TABLES", [])
    given = scratch_cache._table.__wrapped__(str(tmp_path), 3)
    assert given.path.parent == tmp_path / "thunder_mem" and "3 threads" in given.machine
    assert torch.__version__ in given.machine
    assert scratch_cache._table.__wrapped__(str(tmp_path), 4).path != given.path
    assert scratch_cache._table.__wrapped__("relative", 3).path.parent == pathlib.Path.home() / ".cache/thunder_mem"


mine = thunder.extend.OperatorExecutor("table_ops")
doubled = mine.register_operator("doubled", like=thunder.torch.tanh, fn=lambda a: (a.exp() * 2).clone())


@pytest.mark.parametrize("own", [False, True])
def test_predictions_measure_once_and_then_never_again(path, monkeypatch, own):
    """But an operation of somebody's own, whose code may change, is measured by each process."""

    def fn(x, w):
        return doubled(x @ w).sum() if own else torch.logsumexp((x @ w).bfloat16(), 1)

    x, w = torch.randn(64, 128), torch.randn(128, 32)
    jitted = thunder.jit(fn, executors=[mine] if own else [])
    measured = []
    probe = scratch.ProbingRunner._probe

    def counted(self, bsym, *args):
        measured.append(bsym.sym.name)
        return probe(self, bsym, *args)

    monkeypatch.setattr(scratch.ProbingRunner, "_probe", counted)
    found = []
    for _ in range(2):
        table = Table(path, "m")
        monkeypatch.setattr(scratch_cache, "table", lambda table=table: table)
        monkeypatch.setattr(scratch, "_PROBES", {})
        found.append(predict(jitted, x, w))
        table.save()
        measured.append("|")
    first, again = "/".join(measured).split("|")[:2]
    assert found[0] == found[1] and any(e.scratch_bytes for e in found[0].timeline)
    assert first.count("/") > 1 and again.strip("/") == ("doubled" if own else "")


def test_what_cannot_be_measured_is_said_every_time(monkeypatch):
    def fails(*_):
        raise RuntimeError("not today")

    monkeypatch.setattr(scratch, "record_curve", fails)
    monkeypatch.setattr(scratch, "_PROBES", {})
    monkeypatch.setattr(scratch_cache, "table", lambda: Table(None, ""))
    jitted = thunder.jit(lambda x: x.sin(), executors=[])
    for _ in range(2):
        (said,) = predict(jitted, torch.randn(5)).assumptions
        assert said == "sin: its scratch is unknown, it does not run on zeros (RuntimeError: not today)"
