"""Copies on a GPU, with streams that only take notes."""

import contextlib

import pytest
import torch

from thunder_mem.runtime import host_transfers


class _Stream:
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.notes.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        event = f"copy {sum('ends' in note for note in self.notes)}"
        self.notes.append(f"{event} ends")
        return event


@pytest.fixture
def notes(monkeypatch) -> list[str]:
    found: list[str] = []
    current = _Stream("current", found)
    sides = {True: _Stream("out", found), False: _Stream("in", found)}
    monkeypatch.setattr(host_transfers, "_copies_beside", lambda t: True)
    monkeypatch.setattr(host_transfers, "_side_stream", lambda device, to_host: sides[to_host])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
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
