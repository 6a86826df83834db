"""Copies on a GPU, with streams that only take notes."""

import contextlib
import weakref

import pytest
import torch

from thunder_mem.runtime import host_transfers


class _Stream:
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes, self.stream_id = name, notes, len(name)

    def wait_stream(self, other) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.notes.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        work = "update" if self.name == "beside" else "copy"
        event = f"{work} {sum('ends' in note for note in self.notes)}"
        self.notes.append(f"{event} ends")
        return event


@pytest.fixture
def notes(monkeypatch) -> list[str]:
    found: list[str] = []
    streams = [_Stream("current", found)]
    beside = _Stream("beside", found)
    sides = {
        (to_host, of.stream_id): _Stream(f"{'out' if to_host else 'in'}{suffix}", found)
        for to_host in (True, False)
        for of, suffix in ((streams[0], ""), (beside, " of beside"))
    }

    @contextlib.contextmanager
    def on(stream):
        streams.append(stream)
        try:
            yield
        finally:
            streams.pop()

    monkeypatch.setattr(host_transfers, "_copies_beside", lambda t: True)
    monkeypatch.setattr(host_transfers, "_side_stream", lambda device, to_host, of: sides[to_host, of])
    monkeypatch.setattr(host_transfers, "_stream_beside", lambda device: beside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    return found


def test_copies_wait_for_what_was_asked_before_and_are_waited_for_before_what_comes_after(notes):
    t, forward = torch.randn(8, 4).t(), torch.ones(1)
    host = host_transfers._offload(t)
    assert notes == ["out waits for current", "copy 0 ends"]
    host, same = host_transfers._offload_wait(host, t, forward)
    assert same is forward and notes[2:] == ["current waits for copy 0"]
    back = host_transfers._prefetch(host, "cpu")
    assert notes[3:] == ["in waits for current", "copy 1 ends"]
    back = host_transfers._prefetch_wait(back)
    assert notes[5:] == ["current waits for copy 1"]
    assert back.stride() == host.stride() == t.stride() and torch.equal(back, t)
    del back, host
    assert len(notes) == 6


def test_memory_that_is_still_filled_is_not_used_again_before_that(notes):
    back = host_transfers._prefetch(torch.ones(4), "cpu")
    assert "current waits for copy 0" not in notes
    del back  # something failed before it was waited for
    assert notes[-1] == "current waits for copy 0"


def _fetched(t: torch.Tensor) -> None:
    target = torch.empty_like(t)
    host_transfers.start_copy(target, t, to_host=False)
    host_transfers.wait_for(target)


def test_work_beside_has_streams_of_its_own_and_is_waited_for_at_its_end(notes):
    handle, kept = torch.empty(0), torch.ones(2)
    alive = weakref.ref(kept)
    host_transfers.run_beside(_fetched, handle, torch.ones(4), kept=(kept,))
    del kept
    assert notes == [
        "beside waits for current",
        "in of beside waits for beside",
        "copy 0 ends",
        "beside waits for copy 0",
        "update 1 ends",
    ]
    assert alive() is not None
    host_transfers.wait_for(handle)
    assert notes[-1] == "current waits for update 1" and alive() is None


def test_work_beside_that_fails_is_waited_for(notes):
    handle = torch.empty(0)
    with pytest.raises(ZeroDivisionError):
        host_transfers.run_beside(lambda: 1 / 0, handle, kept=())
    assert notes == ["beside waits for current", "update 0 ends"]
    del handle
    assert notes[-1] == "current waits for update 0"
