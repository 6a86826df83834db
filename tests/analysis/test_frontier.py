"""Memory against time: plans that exist, in order, and as a user gets them by their budgets."""

import json
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import thunder
import torch

from tests.programs.models import stack
from thunder_mem import MemEfficient, last_plan, memory_time_frontier, predict, simulate
from thunder_mem.analysis.partition_problem import study_program
from thunder_mem.costs.plan_time import plan_seconds
from thunder_mem.memory.device_models import device_model


def test_the_problem_of_a_simulated_device_needs_no_device_later():
    with simulate("H100-80GB"), torch.device("cuda"):
        study = study_program(torch.nn.Linear(8, 8), (torch.zeros(4, 8),), {}, executors=[])
    assert study.problem.trial(frozenset()).peak_bytes > 0


@pytest.fixture(scope="module")
def frontier():
    return memory_time_frontier(stack(), torch.zeros(4096, 64), executors=[], points=4)


@pytest.mark.slow
def test_every_point_saves_memory_and_takes_longer(frontier):
    assert len(frontier.points) > 2
    assert frontier.points[0].recompute_ms == 0
    assert frontier.nothing_recomputed.peak_bytes >= frontier.points[0].peak_bytes
    for more, less in pairwise(frontier.points):
        assert less.peak_bytes < more.peak_bytes
        assert less.recompute_ms > more.recompute_ms and less.step_ms > more.step_ms
        assert less.saved_bytes < more.saved_bytes
        assert less.bound_ms <= less.recompute_ms
    for point in frontier.points:
        assert point.peak_bytes == max(point.forward_peak_bytes, point.backward_peak_bytes)


@pytest.mark.slow
def test_a_points_budget_gives_its_plan(frontier):
    for point in frontier.points[1:]:
        compiled = thunder.jit(
            stack(), executors=[], transforms=[MemEfficient(budget=int(point.config.removeprefix("budget=")))]
        )
        compiled(torch.zeros(4096, 64))
        plan = last_plan(compiled)
        assert plan.candidate.peak_bytes <= point.peak_bytes
        assert plan.budget.recompute_ms <= point.recompute_ms


@pytest.mark.slow
def test_with_offload_the_frontier_goes_further_down(frontier):
    further = memory_time_frontier(stack(), torch.zeros(4096, 64), executors=[], points=4, offload=True)
    last = further.points[-1]
    assert last.peak_bytes < frontier.points[-1].peak_bytes
    assert last.host_bytes > 0 and last.config == f"budget={last.peak_bytes}, offload=True"
    for more, less in pairwise(further.points[1:]):
        assert less.peak_bytes < more.peak_bytes and less.cost_ms > more.cost_ms
    assert further.points[0] == frontier.points[0] and further.points[1].peak_bytes < further.points[0].peak_bytes
    option = MemEfficient(budget=last.peak_bytes, offload=True)
    compiled = thunder.jit(stack(), executors=[], transforms=[option])
    predict(compiled, torch.zeros(4096, 64))
    assert last_plan(compiled).budget.peak_bytes <= last.peak_bytes and last_plan(compiled).budget.offloaded


@pytest.mark.slow
def test_what_fits_is_the_fastest_that_does(frontier):
    first, *_, last = frontier.points
    assert frontier.within(first.peak_bytes) == first
    assert frontier.within(last.peak_bytes) == last
    assert frontier.within(last.peak_bytes - 1) is None
    assert frontier.within(first.peak_bytes - 1) == frontier.points[1]


@pytest.mark.slow
def test_it_prints_serialises_and_draws(frontier, tmp_path):
    lines = str(frontier).splitlines()
    assert len(lines) == 3 + len(frontier.points) and lines[-1].endswith(frontier.points[-1].config)
    assert json.loads(json.dumps(frontier.to_json()))["points"][0]["recompute_ms"] == 0
    for name in ("a.svg", "b.svg", "c.png"):
        frontier.save(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes()[1:4] == b"PNG"
    frontier.save(tmp_path / "page.html")
    drawn = ElementTree.fromstring(re.search(r"<svg.*?</svg>", (tmp_path / "page.html").read_text(), re.DOTALL)[0])
    points = [t.text for t in drawn.iter("title")]
    assert len(points) == 1 + len(frontier.points) and points[-2].startswith(frontier.points[-1].config)
    with pytest.raises(ValueError, match=r"not 'd\.txt'"):
        frontier.save(tmp_path / "d.txt")


@pytest.mark.parametrize("points", [0, -1, 1.5, True, "8"])
def test_wrong_points(points):
    with pytest.raises(ValueError, match="from 1 up"):
        memory_time_frontier(stack(), torch.zeros(8, 64), points=points)


@pytest.mark.slow
def test_offload_is_written_as_for_mem_efficient():
    named = memory_time_frontier(stack(), torch.zeros(64, 64), executors=[], points=1, offload="only:Linear+Softmax+")
    assert named.points
    with pytest.raises(ValueError, match=r"""such as "only:Gelu\+", not 'Softmax\+'"""):
        memory_time_frontier(stack(), torch.zeros(64, 64), offload="Softmax+")


def test_what_is_no_program_is_a_type_error():
    with pytest.raises(TypeError, match=r"memory_time_frontier takes a function, a module or what thunder.jit made of"):
        memory_time_frontier(3, torch.zeros(8))


def test_without_a_backward_there_is_none():
    with pytest.raises(ValueError, match="no backward"):
        memory_time_frontier(lambda x: x + 1, torch.zeros(8), executors=[])


def test_time_of_a_plan_counts_kernels_and_fused_reads_once():
    def program(x):
        return x.exp().sin().cos()

    study = study_program(program, (torch.zeros(1024, 1024, requires_grad=True),), {}, executors=[])
    planned = study.plan(frozenset())
    cpu = device_model("cpu")
    kernels = [b for b in planned.source.bsyms if b.sym.executor is not None]
    assert plan_seconds(planned.plan, planned.source, cpu) >= len(kernels) * cpu.launch_s
    fused = study_program(program, (torch.zeros(1024, 1024, requires_grad=True),), {}, executors=["torchcompile"])
    one = fused.plan(frozenset())
    assert any(r.executor for r in one.plan.regions)
    assert plan_seconds(one.plan, one.source, cpu) < plan_seconds(planned.plan, planned.source, cpu)
