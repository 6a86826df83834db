"""The order of collectives, ZeRO-3 and the agreement of ranks, in process groups that are not there."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from dataclasses import dataclass

import pytest
import thunder
import torch
from thunder.core.trace import TraceCtx
from thunder.distributed import (
    FSDPBucketingStrategy,
    FSDPType,
    ddp,
    fsdp,
    reset_skip_data_parallel_grad_sync,
    set_skip_data_parallel_grad_sync,
)

from tests.checking.collectives import in_place, two_groups
from tests.programs.distributed_cases import CPU, VOCABULARY, model
from thunder_mem import MemEfficient, last_plan, predict_step, simulate
from thunder_mem.decisions import pipeline, stages
from thunder_mem.distributed import agreement as ranks
from thunder_mem.distributed.agreement import RanksDifferError, agree, first_difference, schedule_of
from thunder_mem.distributed.collective_order import free_predecessors, ordered_collectives
from thunder_mem.distributed.link_model import transfer_s
from thunder_mem.memory.device_models import DEVICE_MODELS
from thunder_mem.memory.plan import Arrangement, Plan, PlannedRegion
from thunder_mem.planning.plan_file import plan_json
from thunder_mem.rewrites.regathered_values import gathered_twice
from thunder_mem.semantics.collectives import awaited_futures, is_gather, is_reduction, starts
from thunder_mem.trace.reading import read_trace
from thunder_mem.transforms import mem_efficient


@dataclass
class Compiled:
    """A compilation: the trace as Thunder had it, prepared, and as it came out; and the plan."""

    given: TraceCtx
    prepared: TraceCtx
    planned: TraceCtx
    plan: object
    jitted: object


def compiled(wrap, rows: int = 8, layers: int = 3, checkpointed: bool = False, **options) -> Compiled:
    seen = {}

    def spy(name, function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            seen[name] = (args, result)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for room, name in ((pipeline, "prepared"), (stages, "with_overlap")):
            patch.setattr(room, name, spy(name, getattr(room, name)))
        jitted = wrap(
            thunder.jit(
                model(layers=layers, checkpointed=checkpointed),
                executors=[],
                transforms=[MemEfficient(strict=True, **options)],
            )
        )
        tokens = torch.zeros(2, rows, dtype=torch.long)
        jitted(tokens, tokens)
    (given,), prepared = seen["prepared"]
    return Compiled(given, prepared, seen["with_overlap"][1][0], last_plan(jitted), jitted)


def sharded(strategy=FSDPType.ZERO3):
    return lambda jitted: fsdp(jitted, device=CPU, sharding_strategy=strategy)


@pytest.fixture(scope="module")
def world():
    """A world of two that is not there, for the whole file."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield [torch.distributed.new_group([0, 1]) for _ in range(2)]
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def zero3(world):
    return compiled(sharded())


@pytest.fixture(scope="module")
def replicated(world):
    return compiled(ddp)


def _steps(trace: TraceCtx) -> list[tuple]:
    return [(b.sym.name, tuple(p.name for p in b.flat_proxy_outs)) for b in trace.bound_symbols]


def _moved(bsyms) -> list[str]:
    return [b.flat_proxy_args[0].name for b in bsyms if starts(b)]


# ---- order ----


@pytest.mark.slow
def test_ordering_collectives_only_permutes(replicated):
    before = replicated.given
    after = ordered_collectives(before)
    assert Counter(_steps(before)) == Counter(_steps(after))
    source = read_trace(before)
    place = {id(b): i for i, b in enumerate(after.bound_symbols)}
    for op, needs in enumerate(free_predecessors(source)):
        assert all(place[id(source.bsyms[n])] < place[id(source.bsyms[op])] for n in needs)
    assert _steps(ordered_collectives(after)) == _steps(after)


@pytest.mark.slow
def test_gradients_are_reduced_as_they_are_complete(replicated):
    """The head's among the first, the embedding's among the last; Thunder starts all behind the last gradient."""
    bsyms = replicated.prepared.bound_symbols
    at = [i for i, b in enumerate(bsyms) if is_reduction(b)]
    shapes = [tuple(bsyms[i].flat_proxy_args[0].shape) for i in at]
    whole = [k for k, shape in enumerate(shapes) if shape == (VOCABULARY, 8)]
    assert len(at) == 20 and whole[0] < 3 and whole[1] > 15
    behind = [sum(b.sym.name == "matmul" for b in bsyms[i:]) for i in at]
    assert behind[0] >= 10 and behind == sorted(behind, reverse=True)
    thunders = replicated.given.bound_symbols
    first = next(i for i, b in enumerate(thunders) if is_reduction(b))
    assert not any(b.sym.name == "matmul" for b in thunders[first:])


@pytest.mark.slow
def test_parameters_are_gathered_in_the_order_of_use(zero3):
    names = [n for n in _moved(zero3.prepared.bound_symbols) if n.startswith("t_")]
    forward = names[: names.index("t_head_weight") + 1]
    layer = [n.split("_")[2] for n in forward if n.startswith("t_blocks")]
    assert forward[0] == "t_embedding_weight" and layer == sorted(layer) and len(forward) == 20
    thunders = [n for n in _moved(zero3.given.bound_symbols) if n.startswith("t_")]
    assert thunders[0] != "t_embedding_weight"


@pytest.mark.slow
def test_the_layer_before_is_gathered_before_gradients_of_a_layer_are_reduced(zero3):
    bsyms = [b for b in zero3.prepared.bound_symbols if starts(b)]
    names = [b.flat_proxy_args[0].name for b in bsyms]
    backward = bsyms[names.index("t_head_weight") + 1 :]
    weights = [f"t_blocks_{layer}_1_weight" for layer in (2, 1, 0)]  # of shape (25, 8), padded to 26 rows
    gathers = [next(i for i, b in enumerate(backward) if b.flat_proxy_args[0].name == w) for w in weights]
    reductions = [i for i, b in enumerate(backward) if is_reduction(b) and tuple(b.flat_proxy_args[0].shape) == (26, 8)]
    assert backward[0].flat_proxy_args[0].name == "t_head_weight"
    for layer in range(3):
        assert gathers[layer] < reductions[layer]
    assert gathers[1] < reductions[1] < gathers[2] < reductions[2]


@pytest.mark.slow
def test_planning_keeps_the_order(zero3, replicated):
    for case in (zero3, replicated):
        assert schedule_of(case.planned).steps == schedule_of(case.prepared).steps
        forward, backward = thunder.last_traces(case.jitted)[-1], thunder.last_backward_traces(case.jitted)
        # Without a call of the backward, Thunder has made it all the same.
        assert schedule_of(forward).steps + schedule_of(backward[-1]).steps == schedule_of(case.planned).steps


@pytest.mark.slow
def test_batches_of_other_lengths_communicate_in_the_same_order(zero3):
    for rows, options in ((40, {}), (8, {"budget": "1GiB"})):
        other = compiled(sharded(), rows=rows, **options)
        assert other.plan.fingerprint != zero3.plan.fingerprint or rows == 8
        assert schedule_of(other.planned).steps == schedule_of(zero3.planned).steps


def test_a_program_that_does_not_communicate_is_left_alone():
    def fn(x):
        return x.sin().sum()

    jitted = thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])
    jitted(torch.ones(3, requires_grad=True))
    assert all(d.what != "communication" for d in last_plan(jitted).decisions)


def test_a_reduction_in_place_stays_behind_what_reads_before(world):
    trace = in_place(world[0])
    assert _steps(ordered_collectives(trace)) == _steps(trace)


# ---- ZeRO-3 ----


@pytest.mark.slow
def test_zero3_saves_no_gathered_parameter(zero3, world):
    two = compiled(sharded(FSDPType.ZERO2))

    def saved(case):
        made = {p.name for b in case.given.bound_symbols for p in b.flat_proxy_outs if any(awaited_futures(b))}
        return {p.name for p in thunder.last_traces(case.jitted)[-1].output[1][0]} & made

    assert len(saved(two)) >= 4 and not saved(zero3)
    assert zero3.plan.candidate.backward_peak_bytes < two.plan.candidate.backward_peak_bytes
    forward, backward = (
        t[-1].bound_symbols for t in (thunder.last_traces(zero3.jitted), thunder.last_backward_traces(zero3.jitted))
    )
    assert sum(map(is_gather, forward)) == 20 and sum(map(is_gather, backward)) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_the_backward_gathers_again_is_free_to_save(world, checkpointed):
    """Each weight that both halves gather, by the shard that they gather it from."""
    case = compiled(sharded(), layers=1, checkpointed=checkpointed)
    source = read_trace(case.prepared)
    shards: dict[bool, set[str]] = {False: set(), True: set()}
    for op, bsym in zip(source.graph.ops, source.bsyms, strict=True):
        if is_gather(bsym):
            shards[op.backward].add(bsym.flat_proxy_args[0].name)
    free = gathered_twice(source)
    assert len(free) >= len(shards[False] & shards[True]) > 0
    first = {s for s in free if not source.graph.ops[source.graph.allocator[s]].backward}
    assert first == free


def test_a_gathered_parameter_is_released_after_its_last_use(zero3):
    """In the forward of ZeRO-3, a layer's weights are gone before the layer after the next is in use."""
    forward = thunder.last_traces(zero3.jitted)[-1].bound_symbols
    gathered = {p.name for b in forward for p in b.flat_proxy_outs if any(awaited_futures(b))}
    alive, most = set(), 0
    for b in forward:
        if b.sym.name == "python_del":
            alive -= {p.name for p in b.flat_proxy_args}
        else:
            alive |= {p.name for p in b.flat_proxy_outs} & gathered
        most = max(most, sum(len(p) for p in [alive]))
    assert most <= 6 < len(gathered)


@pytest.mark.slow
def test_what_checkpoints_repeat_reads_parameters_gathered_again(world):
    """Of the forward's gathers nothing is kept for the backward but biases, which nothing else there needs."""
    found = [compiled(sharded(), rows=rows, layers=2, checkpointed=True) for rows in (64, 96)]
    for case in found:
        forward, backward = (traces(case.jitted)[-1] for traces in (thunder.last_traces, thunder.last_backward_traces))
        source = read_trace(forward)
        made = {p.name: source.graph.allocator[source.storage_of[p.name]] for p in forward.output[1][0]}
        kept = [op for op in made.values() if op is not None and is_gather(source.bsyms[op])]
        assert {source.bsyms[op].flat_proxy_outs[0].ndim for op in kept} <= {1}
        assert sum(b.sym.name == "linear" for b in backward.bound_symbols) == 2  # the first of each block
    one, other = (schedule_of(case.planned).steps for case in found)
    assert one == other


# ---- prediction ----


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrap", [lambda j, d: ddp(j), lambda j, d: fsdp(j, device=d)], ids=["ddp", "fsdp"])
def test_a_simulated_gpu_holds_what_a_cpu_does(world, wrap):
    """A step of AdamW, whose counters of steps, of four bytes for each of two parameters, are the host's."""

    def peak_bytes(device):
        with device:
            step, tokens = model(layers=0), torch.zeros(2, 8, dtype=torch.long)
        jitted = wrap(thunder.jit(step, executors=[], transforms=[MemEfficient(strict=True, chunk=False)]), device)
        step = predict_step(jitted, torch.optim.AdamW(jitted.parameters()), None, tokens, tokens)
        return max(e.live_bytes for e in step.timeline)  # before the device rounds blocks up to 512 bytes

    with simulate("H100-80GB"):
        simulated_bytes = peak_bytes(torch.device("cuda"))
    assert simulated_bytes + 2 * 4 == peak_bytes(CPU)


# ---- buckets ----


@pytest.mark.parametrize(
    ("wrap", "asked"),
    [
        (lambda j: fsdp(j, device=CPU, bucketing_strategy=FSDPBucketingStrategy.BLOCK), "bucketing_strategy=.*BLOCK"),
        (lambda j: ddp(j, bucket_size_in_mb=100), "bucket_size_in_mb=100"),
    ],
    ids=["fsdp", "ddp"],
)
def test_that_no_buckets_are_built_is_said(world, wrap, asked):
    """By Thunder neither: once it does, this is to be taken up."""
    tokens = torch.zeros(2, 8, dtype=torch.long)
    for transforms in ([], [MemEfficient(strict=True, chunk=False)]):
        jitted = wrap(thunder.jit(model(layers=0), executors=[], transforms=transforms))
        if transforms:
            with pytest.warns(UserWarning, match=f"{asked} changes nothing and can be left out: Thunder"):
                jitted(tokens, tokens)
        else:
            jitted(tokens, tokens)
        traces = (thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1])
        assert not any("pack" in b.sym.name and "unpack" not in b.sym.name for t in traces for b in t.bound_symbols)
    assert any(re.search(asked, r.what) for r in last_plan(jitted).refused)


@pytest.mark.parametrize("wrap", [lambda j: fsdp(j, device=CPU), ddp], ids=["fsdp", "ddp"])
def test_nothing_is_said_of_buckets_that_nobody_asked_for(world, wrap, recwarn):
    tokens = torch.zeros(2, 8, dtype=torch.long)
    wrap(thunder.jit(model(layers=0), executors=[], transforms=[MemEfficient(strict=True, chunk=False)]))(
        tokens, tokens
    )
    assert not [w for w in recwarn if "changes nothing" in str(w.message)]


# ---- what hides ----


@pytest.mark.slow
def test_no_less_is_hidden_than_in_thunders_order(world, replicated):
    """Of the same collectives: ZeRO-3, which Thunder ignores, has more of them."""
    for case in (compiled(sharded(FSDPType.ZERO2)), replicated):
        (how,) = (d.how for d in case.plan.decisions if d.what == "communication")
        ours, _, own = (float(ms) for ms in re.findall(r"([\d.e-]+) ms", how))
        assert ours < own


def test_seconds_of_a_collective(world):
    cpu = DEVICE_MODELS["cpu"]
    gather, reduce, scatter = (b for b in two_groups(world).bound_symbols if starts(b))
    whole = 2 * 4 * 4 * 4
    base = transfer_s(gather, cpu) - whole / 2 / 1e9
    assert transfer_s(reduce, cpu) - base == pytest.approx(2 * (whole / 2) / 2 / 1e9)
    assert transfer_s(scatter, cpu) - base == pytest.approx((whole / 2) / 2 / 1e9)


# ---- executors ----


def test_the_packages_executors_join_thunders_under_ddp(world, monkeypatch):
    """`ddp` takes the function up again, with the executors that it had."""
    found = []

    def stop(executors):
        found.extend(str(e.name) for e in with_own_executors(executors))
        raise KeyboardInterrupt

    with_own_executors = mem_efficient.with_own_executors
    monkeypatch.setattr(mem_efficient, "with_own_executors", stop)
    jitted = ddp(thunder.jit(model(), transforms=[MemEfficient(strict=True)]))
    with pytest.raises(KeyboardInterrupt):
        jitted(torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))
    if not torch.cuda.is_available():
        assert "mem_pointwise" in found and found.index("mem_pointwise") < found.index("torch")


# ---- ranks ----


class _Store(dict):
    """What other ranks have published, and what this one does."""

    def set(self, key, value):
        self[key] = value

    def get(self, key):
        if key not in self:
            raise RuntimeError("wait timeout")
        return self[key]

    def delete_key(self, key):
        return self.pop(key, None) is not None


class _Function:
    """Stands for what is compiled."""


@pytest.fixture
def store(world, monkeypatch):
    found = _Store()
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group=None: "gloo")
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: found)
    monkeypatch.setattr(ranks, "_agreements", ranks._Agreements(None))
    return found


def _publish(store, group, turn, steps, program="", plan=None):
    """What rank 1 says in its place."""
    key = f"thunder_mem/{group.group_name}/{turn}/1"
    digest = ranks.Schedule(tuple(steps), ()).digest
    plan = plan or {}
    store[key] = json.dumps([digest, program, ranks._digest(json.dumps(plan, sort_keys=True))])
    store[f"{key}/words"] = json.dumps({"steps": list(steps), "plan": plan})


def test_ranks_are_asked_once_a_function_and_way_to_communicate(world, store):
    trace, function = two_groups(world), _Function()
    steps = schedule_of(trace).steps
    assert len(steps) == 3 and steps[1] == "all_reduce of f32[4, 4], SUM over ranks [0, 1]"
    for turn in (0, 1):
        for group in world:
            _publish(store, group, turn, steps)
    agree(trace, function)
    agree(trace, function)  # known
    assert {key for key in store if key.endswith("/0")} == {f"thunder_mem/{g.group_name}/0/0" for g in world}
    agree(trace, _Function())
    with pytest.raises(RanksDifferError, match="rank 1 compiles nothing that communicates"):
        agree(trace, _Function())
    assert f"thunder_mem/{world[0].group_name}/0/0" not in store  # all have read it


def test_the_first_difference_is_named(world, store):
    trace = two_groups(world)
    steps = schedule_of(trace).steps
    _publish(store, world[0], 0, (*steps[:2], "broadcast of f32[1]"))
    with pytest.raises(RanksDifferError, match=r"collective 2 is reduce_scatter of f32\[4, 4\].* and broadcast of"):
        agree(trace, _Function())


def _a_plan(sort="lpmf", regions=2) -> Plan:
    alone = tuple(PlannedRegion((op,)) for op in range(regions))
    return Plan(alone, "planned", (Arrangement("planned", 1, 2, regions),), sort)


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (_a_plan("source"), 'its sort is "lpmf" on rank 0 and "source" on rank 1'),
        (_a_plan(regions=3), "number 0 of its candidates is"),
        (None, "its candidates is"),
    ],
)
def test_another_plan_for_the_same_program_is_told(world, store, theirs, says):
    trace = two_groups(world)
    _publish(store, world[0], 0, schedule_of(trace).steps, plan=theirs and plan_json(theirs))
    with pytest.raises(RanksDifferError, match=says):
        agree(trace, _Function(), _a_plan())


def test_plans_of_other_programs_are_not_compared(world, store):
    trace = two_groups(world)
    for group in world:
        _publish(store, group, 0, schedule_of(trace).steps, program="of another batch", plan=plan_json(_a_plan()))
    agree(trace, _Function(), _a_plan("source"))


def test_nobody_is_asked_where_nobody_is(world):
    agree(two_groups(world), _Function())  # a fake group
    assert schedule_of(in_place(world[0])).groups == (world[0],)


def test_steps_that_are_equal_do_not_differ():
    with pytest.raises(ValueError, match="do not differ"):
        first_difference(["a"], ["a"])


@pytest.mark.parametrize(("wrap", "warned"), [(sharded(), True), (ddp, False)], ids=["fsdp", "ddp"])
@pytest.mark.slow
def test_gradients_that_no_sync_spoils_are_warned_of(world, wrap, warned):
    """Thunder's own fault: with two processes they are off by a third and more, and those of `ddp` are right."""
    token = set_skip_data_parallel_grad_sync(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled(wrap)
    finally:
        reset_skip_data_parallel_grad_sync(token)
    assert any("fsdp are wrong after no_sync()" in str(w.message) for w in caught) is warned
