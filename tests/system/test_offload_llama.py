"""A LLaMA on a simulated GPU: a fast link and slow arithmetic offload, a slow link recomputes."""

from dataclasses import replace

import pytest
import torch
from litgpt import GPT, Config

from thunder_mem import simulate
from thunder_mem.analysis.partition_problem import study_program
from thunder_mem.memory.device_models import device_model
from thunder_mem.partition.budget_search import PartitionProblem, fit_budget
from thunder_mem.partition.offload_search import fit_with_offload
from thunder_mem.user_choices.offload import OffloadOption, moves_for

pytestmark = pytest.mark.slow
H100 = device_model("H100-80GB")
# 20 times slower products behind a link of 400 GB/s; and a link so slow that no other work hides a copy.
FAST_LINK = replace(
    H100, link_bytes_per_s=4e11, copy_s=1e-6, peak_flops={k: v / 20 for k, v in H100.peak_flops.items()}
)
SLOW_LINK = replace(H100, link_bytes_per_s=1e7)


@pytest.fixture(scope="module", params=[3, 12])
def llama(request):
    config = Config(
        n_layer=request.param, n_embd=512, n_head=8, block_size=2048, vocab_size=1024, padded_vocab_size=1024,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=1376, bias=False,
        parallel_residual=False, rotary_percentage=1.0,
    )  # fmt: skip
    with simulate("H100-80GB"), torch.device("cuda"):
        model = GPT(config).to(torch.bfloat16)
        return study_program(model, (torch.zeros(1, 2048, dtype=torch.long),), {})


def problem_on(llama, device) -> PartitionProblem:
    source, old = llama.source, llama.problem
    rate = H100.peak_flops["bfloat16"] / device.peak_flops["bfloat16"]
    repeat_s = [seconds * rate for seconds in old.repeat_s]
    moves = moves_for(OffloadOption(), source, old.fuse, old.choices, frozenset(), device, "cuda:0")
    return PartitionProblem(old.graph, old.fuse, repeat_s, old.choices, old.sort, moves)


def budget_of(llama) -> int:
    low, high = fit_budget(llama.problem, 1).peak_bytes, llama.problem.trial(frozenset()).peak_bytes
    return low + (high - low) // 4


def test_the_device_decides_between_the_link_and_arithmetic(llama):
    budget = budget_of(llama)
    fast, slow = (fit_with_offload(problem_on(llama, device), budget) for device in (FAST_LINK, SLOW_LINK))
    assert max(fast.peak_bytes, slow.peak_bytes) <= budget
    assert fast.offloaded and fast.seconds < fast.without_seconds
    assert not slow.offloaded and slow.seconds == slow.without_seconds > 0


def test_offloading_goes_below_what_recomputing_reaches(llama):
    smallest = fit_budget(llama.problem, 1).peak_bytes
    problem = problem_on(llama, FAST_LINK)
    fit = fit_with_offload(problem, smallest - 1)
    assert fit.offloaded and fit.without_seconds is None and fit.peak_bytes < smallest
    assert fit.peak_bytes == problem.trial(fit.rebuilt, fit.offloaded).peak_bytes
