"""Copies on a GPU, with streams that only take notes."""

import contextlib

import pytest
import torch

from thunder_mem import offload_exec


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
    current, side = _Stream("current", found), _Stream("side", found)
    monkeypatch.setattr(offload_exec, "_copies_beside", lambda t: True)
    monkeypatch.setattr(offload_exec, "_side_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return found


def test_copies_wait_for_what_was_asked_before_and_are_waited_for_before_what_comes_after(notes):
    t, forward = torch.randn(8, 4).t(), torch.ones(1)
    host = offload_exec._offload(t)
    assert notes == ["side waits for current", "copy 0 ends"]
    host, same = offload_exec._offload_wait(host, t, forward)
    assert same is forward and notes[2:] == ["current waits for copy 0"]
    back = offload_exec._prefetch(host, "cpu")
    assert notes[3:] == ["side waits for current", "copy 1 ends"]
    back = offload_exec._prefetch_wait(back)
    assert notes[5:] == ["current waits for copy 1"]
    assert back.stride() == host.stride() == t.stride() and torch.equal(back, t)
    del back, host
    assert len(notes) == 6


def test_memory_that_is_still_filled_is_not_used_again_before_that(notes):
    back = offload_exec._prefetch(torch.ones(4), "cpu")
    assert "current waits for copy 0" not in notes
    del back  # something failed before it was waited for
    assert notes[-1] == "current waits for copy 0"
