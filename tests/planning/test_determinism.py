"""Plans and traces are the same in every process: whatever its hash seed, its threads, its rank."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANKS = 4


def started(seed: int, threads: int, rank: int) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.checking.plan_digests", str(threads)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ran(settings: Sequence[tuple[int, int]]) -> list[dict[str, list[str]]]:
    """What processes with these hash seeds and threads say, all running at once, as ranks do."""
    processes = [started(seed, threads, rank) for rank, (seed, threads) in enumerate(settings)]
    said = [process.communicate() for process in processes]
    for process, (_, error) in zip(processes, said, strict=True):
        assert process.returncode == 0, error.decode()[-2000:]
    return [json.loads(out) for out, _ in said]


def check(found: list[dict[str, list[str]]], first: dict[str, list[str]]) -> None:
    for other in found:
        assert other.keys() == first.keys()
        for name, texts in first.items():
            assert other[name] == texts, name


@pytest.mark.slow
def test_ranks_plan_alike():
    """Each with its own hash seed and number of threads, and all programs compiled twice in each."""
    first, *others = ran([(0, 1), (12345, 4), (1, 2), (4294967295, 1)])
    check(others, first)
    plans = [json.loads(texts[0]) for texts in first.values()]
    assert len({plan["fingerprint"] for plan in plans}) >= 4  # the programs are different ones
    assert any(region["executor"] for plan in plans for region in plan["regions"])
    assert any(plan["budget"] for plan in plans)
    assert all("backward_fn" in texts[2] for texts in first.values())


@pytest.mark.slow
def test_twenty_hash_seeds():
    (first,) = ran([(0, 1)])
    for seed in range(1, 20, RANKS):
        check(ran([(s, 1 + s % 3) for s in range(seed, min(seed + RANKS, 20))]), first)
