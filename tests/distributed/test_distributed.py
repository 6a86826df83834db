"""`ddp` and `fsdp` with `MemEfficient` in real processes: the same losses and gradients as eager PyTorch alone.

The ranks run all cases of a table of `distributed_cases.py` one after the other, once for all tests of that table.
"""

from __future__ import annotations

import multiprocessing as forkserver
import re
import time
from pathlib import Path

import pytest
import torch
from torch import multiprocessing

from tests.programs.distributed_cases import CASES, FOUR_CASES, MORE_CASES, SLOW_CASES, run_rank

# Seconds for all cases of a table; a rank that hangs does not hang the tests.
LIMITS = {"two": 600, "two, more": 600, "four": 600, "four, fused": 3000}


def _run(world: int, folder: Path, which: str) -> list[dict[str, dict]]:
    """What each case gave back, per rank."""
    forkserver.set_forkserver_preload(["tests.programs.distributed_cases"])  # imported once, for all ranks
    context = multiprocessing.start_processes(
        run_rank, (world, str(folder), which), nprocs=world, join=False, start_method="forkserver"
    )
    ends = time.monotonic() + LIMITS[which]
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < ends, "the ranks hang"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return _run(2, tmp_path_factory.mktemp("ranks"), "two")


@pytest.fixture(scope="module")
def ranks_later(tmp_path_factory):
    return _run(2, tmp_path_factory.mktemp("ranks_later"), "two, more")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return _run(4, tmp_path_factory.mktemp("four"), "four")


@pytest.fixture(scope="module")
def four_fused(tmp_path_factory):
    return _run(4, tmp_path_factory.mktemp("four_fused"), "four, fused")


def _agrees(found: list[dict], tolerance: float = 1e-5) -> None:
    assert max(rank["error"] for rank in found) < tolerance
    assert len({rank["digest"] for rank in found}) == 1


NOT_COMPARED = ("different_models", "different_plans", "one_rank_fails", "one_rank_overflows")
# Tests with the same ranks run in the same part: whichever runs first pays for all cases of the table.
two_ranks, four_ranks = pytest.mark.slow("ranks of two"), pytest.mark.slow("four ranks")


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_COMPARED])
def test_losses_and_gradients_are_eagers(ranks, name):
    _agrees([rank[name] for rank in ranks])


@two_ranks
@pytest.mark.parametrize("name", MORE_CASES)
def test_losses_and_gradients_of_more_are_eagers(ranks_later, name):
    _agrees([rank[name] for rank in ranks_later])


def test_every_gradient_is_reduced_once(ranks):
    tied = ranks[0]["ddp_chunked"]
    assert tied["forward"] == [] and tied["backward"].count("all_reduce") == tied["backward"].count("wait") == 7


@two_ranks
def test_no_mode_has_buckets(ranks_later):
    """Each parameter has collectives of its own, and a wait for each."""
    counts = ranks_later[0]["every_bucketing_mode"]["collectives"]
    assert {n for name, n in counts.items() if name.startswith("ddp")} == {2 * 2}
    assert {n for name, n in counts.items() if name.startswith("zero2")} == {2 * 4}


def test_zero3_gathers_again_and_saves_no_parameter(ranks):
    two, three = (ranks[0][name] for name in ("zero2", "zero3_layer"))
    assert two["forward"].count("all_gather") == three["forward"].count("all_gather") == 8
    assert "all_gather" not in two["backward"] and three["backward"].count("all_gather") >= 3
    assert three["backward"].count("reduce_scatter") == 8
    assert three["saved_bytes"] < two["saved_bytes"] and three["peaks"][1] < two["peaks"][1]


def _is_chunked(found: dict) -> bool:
    return any(what == "loss head" and "4 chunks" in how for what, how in found["decisions"])


def test_heads_are_chunked_under_ddp(ranks):
    assert _is_chunked(ranks[0]["ddp_chunked"])


@two_ranks
def test_heads_are_chunked_under_fsdp(ranks_later):
    assert _is_chunked(ranks_later[0]["zero3_block_chunked_late"])


PARAMETERS = 2 * 6 + 2  # of the blocks; an embedding and a head


def _runs_in_tiles(found: dict) -> bool:
    tiles = [how for what, how in found["decisions"] if what == "tiles"]
    return len(tiles) == 2 and all("in 5 tiles of 5 rows" in how for how in tiles)


def test_stretches_run_in_tiles_under_fsdp(ranks):
    """Tiles of a layer share its gathered weights, and each gradient is reduced once."""
    found = ranks[0]["zero3_tiles"]
    assert _runs_in_tiles(found)
    assert found["backward"].count("reduce_scatter") == PARAMETERS
    assert found["forward"].count("all_gather") == PARAMETERS


@two_ranks
def test_stretches_run_in_tiles_under_ddp(ranks_later):
    found = ranks_later[0]["ddp_tiles"]
    assert _runs_in_tiles(found) and found["backward"].count("all_reduce") == PARAMETERS


@two_ranks
def test_attention_runs_by_groups_of_heads_under_ddp_and_fsdp(ranks_later):
    for name, layers in (("ddp_heads", 1), ("zero3_heads", 2)):
        found = [how for what, how in ranks_later[0][name]["decisions"] if what == "heads"]
        assert found == layers * ["attention of 4 heads in 4 groups, 2 heads of keys not repeated"]
        reduced = "all_reduce" if name == "ddp_heads" else "reduce_scatter"
        assert ranks_later[0][name]["backward"].count(reduced) == layers * 14 + 2


def _updated(found: list[dict], parameters: int) -> None:
    for rank in found:
        assert rank["updates"] == parameters and rank["gradients"] == 0
        assert "optimizer.use(AdamW(step.parameters()))" in rank["message"]


def test_shards_are_updated_in_the_backward(ranks):
    """Each update follows the reduction of its gradient."""
    _updated([rank["zero2_stepping"] for rank in ranks], 8)


@two_ranks
def test_shards_with_states_on_the_host_are_updated_in_the_backward(ranks_later):
    _updated([rank["zero2_stepping_from_host"] for rank in ranks_later], 8)


@two_ranks
def test_a_norm_over_ranks_by_two_passes_of_ddp(ranks_later):
    _updated([rank["ddp_stepping_in_two_passes"] for rank in ranks_later], 7)


def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_step_on_all(ranks):
    for rank in ranks:
        for way in (False, True):
            assert rank["one_rank_overflows"][way] == {"same": True, "scale": 128.0}


@two_ranks
def test_a_head_whose_vocabulary_is_shared_out_runs_in_chunks_and_parts(ranks_later):
    """Of its logits, 24 rows of 64, nothing is gathered, and no rank ever has more than its own part of a chunk."""
    found = ranks_later[0]["tensor_parallel_head"]
    (how,) = found["loops"]
    assert not found["refused"] and "in 4 chunks of 6 rows" in how
    assert "log_sum_over_ranks" in found["text"] and "all_gather" not in found["text"]
    assert "[6, 32]" in found["text"] and "64]" not in re.sub(r"f32\[64(, 8)?\]|f32\[1, 64\]", "", found["text"])


def test_parameters_are_gathered_in_the_order_of_use(ranks):
    wanted = ["embedding_weight", *(f"blocks_0_{n}" for n in (0, 1, 3)), "head_weight"]
    starts = [name.removeprefix("t_") for name in ranks[0]["zero2"]["starts"]]
    order = [next(i for i, w in enumerate(wanted) if name.startswith(w)) for name in starts]
    assert order == sorted(order) and len(order) == 8


def test_ranks_that_would_communicate_differently_are_told(ranks):
    for me, other in ((0, 1), (1, 0)):
        message = ranks[me]["different_models"]["message"]
        assert f"on rank {me}" in message and f"on rank {other}" in message and "collective 7" in message


def test_ranks_that_plan_differently_are_told(ranks):
    for rank in ranks:
        message = rank["different_plans"]["message"]
        assert "other plans for the same program" in message and "on rank 0 and" in message


def test_a_rank_that_cannot_compile_does_not_hang_the_others(ranks):
    waiting, failing = (rank["one_rank_fails"] for rank in ranks)
    assert waiting["type"] == "RanksDifferError" and "rank 1 compiles nothing" in waiting["message"]
    assert failing["type"] == "BudgetError"


@four_ranks
@pytest.mark.parametrize("name", [name for name in FOUR_CASES if name not in NOT_COMPARED])
def test_four_ranks(four, name):
    _agrees([rank[name] for rank in four])


@four_ranks
def test_four_ranks_that_would_communicate_differently_are_told(four):
    assert all("would communicate differently" in rank["different_models"]["message"] for rank in four)


@four_ranks
@pytest.mark.parametrize("name", [name for name in SLOW_CASES if name not in ("peaks", "tensor_parallel_peaks")])
def test_four_ranks_with_fused_regions(four_fused, name):
    _agrees([rank[name] for rank in four_fused], 1e-4)


@four_ranks
def test_the_measured_peak_is_the_plans_but_for_what_gloo_still_holds(four_fused):
    for rank in four_fused:
        found = rank["peaks"]
        assert found["zero3"] < found["thunder"]
        for name in ("zero2", "zero3"):
            assert found[f"{name} planned"] <= found[name] < 1.1 * found[f"{name} planned"]


@four_ranks
def test_logits_that_are_summed_over_ranks_stay_whole(four_fused):
    assert any("summed over ranks" in why for why in four_fused[0]["tensor_parallel_losses"]["refused by rows"])


@four_ranks
def test_logits_in_parts_and_chunks_take_less(four_fused):
    for rank in four_fused:
        found = rank["tensor_parallel_peaks"]
        assert found["in parts"] < found["thunder"] / 2 and found["in chunks"] < found["in parts"] / 2
