"""Whatever fails ends in the program as Thunder alone compiles it: compiled, right, and with one warning."""

import warnings
from random import Random
from types import SimpleNamespace

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.prims import PrimIDs
from thunder.core.proxies import variableify
from torch.utils.checkpoint import checkpoint

import thunder_mem.tiling.find as chunking
import thunder_mem.transforms.before_autograd as before_autograd
import thunder_mem.transforms.chunk_loss_head as chunk_loss_head
import thunder_mem.transforms.mem_efficient as mem_efficient
from tests.checking.corruptions import CORRUPTIONS, Rewritten
from tests.checking.corruptions_of_traces import exchanged_operands, no_return, redefined, swapped_effects
from tests.checking.traces import replaced, unfused
from tests.fuzzing.command import uncompiled_regions
from thunder_mem import ChunkLossHead, MemEfficient, last_plan
from thunder_mem.chunk_loop import symbols
from thunder_mem.decisions import pipeline, stages
from thunder_mem.planning import executor
from thunder_mem.planning.fallback import final_halves
from thunder_mem.planning.record import last_failure
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex

B, T, D, V = 3, 9, 8, 131


@pytest.fixture(autouse=True, scope="module")
def _uncompiled():
    with uncompiled_regions():
        yield


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, a, w = (torch.randn(s, generator=generator) for s in ((B, T, D), (D, D), (V, D)))
    counts = torch.zeros(D, dtype=dtype)
    return [t.to(dtype).requires_grad_() for t in (x, a, w)], torch.randint(0, V, (B, T), generator=generator), counts


def step(x, a, w, t, counts):
    """A checkpoint, writes to a value and to an argument, random numbers, and a loss head behind a slice."""
    h = checkpoint(lambda x, a: F.gelu(x @ a).sin() @ a, x, a, use_reentrant=False)
    noise = torch.rand_like(h, dtype=torch.float32).to(h.dtype)
    h.add_(noise * torch.rand_like(h, dtype=torch.float32).to(h.dtype))
    counts.add_(1.0)
    counts.mul_(3.0)
    gate = torch.tanh(h @ a) * 0.5
    h = h * gate + x.exp()
    logits = torch.matmul(h, w.transpose(0, 1))[:, :-1]
    return F.cross_entropy(logits.reshape(-1, V), t[:, 1:].reshape(-1)), gate.square().mean()


def run(fn, dtype=torch.float32):
    leaves, t, counts = tensors(dtype)
    torch.manual_seed(3)
    results = fn(*leaves, t, counts)
    return [*results, *torch.autograd.grad(sum(results), leaves), counts]


def assert_right(got, exact):
    for ours, theirs in zip(got, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def exact():
    return run(step, torch.float64)


def compiled(transform, executors=()):
    return thunder.jit(step, executors=list(executors), transforms=[transform])


def checked(exact, transform, cause="", executors=(mem_pointwise_ex,)):
    """The function, compiled under one warning that names the cause and as right as float32 is."""
    jitted = compiled(transform, executors)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = run(jitted)
    said = [str(w.message) for w in caught if type(transform).__name__ in str(w.message)]
    assert len(said) == bool(cause) and all(cause in s for s in said), said
    assert_right(got, exact)
    return jitted


def loops(jitted):
    traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    return [b.sym.name for trace in traces for b in trace.bound_symbols if "chunk_loop" in b.sym.name]


def head_in_chunks(**options):
    return MemEfficient(chunk=ChunkLossHead(chunks=4), verify=True, **options)


@pytest.mark.slow
def test_nothing_fails(exact):
    jitted = checked(exact, head_in_chunks())
    assert loops(jitted) and last_plan(jitted) is not None


def fail(*_, **__):
    raise RuntimeError("planted")


BEFORE_AUTOGRAD = {
    "program": (mem_efficient, "program_of"),
    "origins": (before_autograd, "expand_scalars"),
    "writes": (before_autograd, "without_writes"),
    "checkpoints": (before_autograd, "take_over_checkpoints"),
    "chunks": (before_autograd, "chunk_trace"),
    "reading": (chunking, "read_program"),
}
HEADS = {
    "growing": (chunking, "grow"),
    "picking": (chunking, "hoist_rows"),
    "building": (chunking, "build_loop"),
    "splicing": (chunking, "splice"),
    "autograd": (symbols, "chunk_loop_finish"),
}
PLANNING = {
    "prepared": (pipeline, "prepared"),
    "plan": (pipeline, "plan_program"),
    "emit": (stages, "emit"),
    "reuse": (stages, "reuse_and_sort"),
    "overlap": (stages, "with_overlap"),
    "verify": (pipeline, "verify_rewrite"),
    "fit": (stages, "fit_loops"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", BEFORE_AUTOGRAD)
def test_what_fails_before_autograd(stage, exact, monkeypatch):
    monkeypatch.setattr(*BEFORE_AUTOGRAD[stage], fail)
    jitted = checked(exact, head_in_chunks(), "RuntimeError: planted")
    assert last_plan(jitted) is not None and bool(loops(jitted)) == (stage not in ("chunks", "reading"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", HEADS)
def test_a_head_that_fails_is_whole_and_says_why(stage, exact, monkeypatch):
    monkeypatch.setattr(*HEADS[stage], fail)
    jitted = checked(exact, head_in_chunks())
    assert not loops(jitted)
    assert any("planted" in r.reason for r in last_plan(jitted).refused)


@pytest.mark.parametrize(
    "executors",
    [
        pytest.param((), id="no fusion", marks=pytest.mark.slow),
        pytest.param((mem_pointwise_ex,), id="pointwise"),
    ],
)
@pytest.mark.parametrize("stage", PLANNING)
@pytest.mark.slow
def test_what_fails_in_planning_runs_without_loops(stage, executors, exact, monkeypatch):
    """The loops were in the trace long before; Thunder alone has none."""
    monkeypatch.setattr(*PLANNING[stage], fail)
    jitted = checked(exact, head_in_chunks(), "RuntimeError: planted", executors)
    assert not loops(jitted)
    assert last_plan(jitted) is None and last_failure(jitted) == "RuntimeError: planted"
    with pytest.raises(RuntimeError, match="planted"):
        run(compiled(head_in_chunks(strict=True), executors))


def corrupting(corrupt, seed, caught):
    """`emit`, then the corruption of what it gives; notes in `caught` whether there was anything to corrupt."""
    emit = stages.emit

    def corrupted(source, trace, plan, executors, note):
        new = emit(source, trace, plan, executors, note)
        planned = SimpleNamespace(source=source, trace=trace, plan=plan)
        broken = corrupt(Rewritten("step", planned, new), Random(seed))
        if broken is not None:
            caught.append(corrupt.__name__)
        return new if broken is None else broken

    return corrupted


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "corrupt",
    [
        c if c in (exchanged_operands, redefined, swapped_effects) else pytest.param(c, marks=pytest.mark.slow)
        for c in CORRUPTIONS
    ],
    ids=lambda f: f.__name__,
)
def test_a_corrupted_plan(corrupt, exact, monkeypatch):
    caught = []
    monkeypatch.setattr(stages, "emit", corrupting(corrupt, 1, caught))
    jitted = compiled(head_in_chunks(), [mem_pointwise_ex])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = run(jitted)
    assert_right(got, exact)
    failed = bool(last_failure(jitted))
    assert failed == bool(caught) or (failed and not loops(jitted))  # or the emission itself refuses
    assert sum("MemEfficient" in str(w.message) for w in said) == failed
    assert bool(loops(jitted)) != failed


def lost_write(bsyms, at):
    return [b for b in bsyms if b.sym.name != "add_"]


def another_loop_input(bsyms, at):
    loop, other = bsyms[at], bsyms[at].args[2]
    return [*bsyms[:at], loop.from_bsym(args=(loop.args[0], other, *loop.args[2:])), *bsyms[at + 1 :]]


def early_loop(bsyms, at):
    return [*bsyms[: at - 2], bsyms[at], *bsyms[at - 2 : at], *bsyms[at + 1 :]]


def lost_loop(bsyms, at):
    return [*bsyms[:at], *bsyms[at + 1 :]]


def another_reader(bsyms, at):
    """What reads one value of the body reads another of its shape."""
    tanh = next(i for i, b in enumerate(bsyms) if b.sym.name == "tanh")
    exp = next(b for b in bsyms if b.sym.name == "exp")
    swap = {variableify(exp.output): bsyms[tanh].output}
    return [*bsyms[: tanh + 1], *(b.from_bsym_swap_proxies(swap, skip_output=True) for b in bsyms[tanh + 1 :])]


@pytest.mark.parametrize(
    "corrupt", [lost_write, another_loop_input, early_loop, lost_loop, another_reader], ids=lambda f: f.__name__
)
@pytest.mark.slow
def test_a_corrupted_chunking(corrupt, exact, monkeypatch):
    """What is spliced wrongly is seen before autograd, and the heads stay whole."""
    splice = chunking.splice

    def corrupted(*args):
        new, gone = splice(*args)
        at = next(i for i, b in enumerate(new.bound_symbols) if symbols.is_chunk_loop(b))
        return replaced(new, corrupt(list(new.bound_symbols), at)), gone

    monkeypatch.setattr(chunking, "splice", corrupted)
    jitted = checked(exact, head_in_chunks(), "VerificationError")
    assert not loops(jitted) and last_plan(jitted) is not None
    jitted = checked(exact, ChunkLossHead(chunks=4), "VerificationError")
    assert not loops(jitted)


@pytest.mark.slow
def test_rows_picked_from_what_only_a_composite_knows(exact, monkeypatch):
    """As it was: a slice that is moved reads a transpose inside `matmul`."""
    import thunder_mem.tiling.hoist_slices as chunk_hoist

    rewritten = chunk_hoist.rewritten
    monkeypatch.setattr(chunk_hoist, "rewritten", lambda roots, instead, wanted: rewritten(roots, instead, ()))
    jitted = checked(exact, head_in_chunks(), "VerificationError")
    assert not loops(jitted)


@pytest.mark.parametrize("half", [0, 1], ids=["forward", "backward"])
@pytest.mark.slow
def test_a_broken_final_trace_gives_way_to_thunders_own(half, exact, monkeypatch):
    """Broken after planning, where nothing but names is looked at any more."""
    final = executor.final_trace

    def broken(trace):
        at = next(i for i, b in enumerate(trace.bound_symbols) if b.sym.id is PrimIDs.DEL)
        bsyms = list(trace.bound_symbols)
        bsyms.insert(at, bsyms[at])
        return replaced(trace, bsyms)

    def corrupted(trace, transform):
        backwards = thunder.core.compile_data._compile_data.get()[1].last_backward_traces
        if len(backwards) == 1 and half:
            backwards.append(broken(backwards[-1]))
        elif not half and not backward(trace):
            trace = broken(trace)
        return final(trace, transform)

    def backward(trace):
        return thunder.core.trace.TraceTag.BACKWARD in trace.tags

    monkeypatch.setattr(mem_efficient, "final_trace", corrupted)
    jitted = checked(exact, head_in_chunks(), "VerificationError")
    assert not loops(jitted) and last_plan(jitted) is None and "del" in last_failure(jitted)


@pytest.mark.slow
def test_without_a_gradient(monkeypatch):
    monkeypatch.setattr(stages, "emit", fail)
    for corrupt in (fail, lambda *a: no_return(Rewritten("", None, real_emit(*a)), Random(0))):
        monkeypatch.setattr(stages, "emit", corrupt)
        (x, a, w), t, counts = tensors()
        jitted = compiled(head_in_chunks())
        with torch.no_grad(), pytest.warns(UserWarning, match="left this program as Thunder compiles it"):
            got = jitted(x.detach(), a.detach(), w.detach(), t, counts)
        assert got[0].isfinite() and not any(
            "chunk" in b.sym.name for b in thunder.last_traces(jitted)[-1].bound_symbols
        )


real_emit = stages.emit


def test_rows_that_cannot_be_written_over(exact, monkeypatch):
    monkeypatch.setattr(chunk_loss_head, "write_over_dead_rows", fail)
    jitted = compiled(ChunkLossHead(chunks=4))
    with pytest.warns(UserWarning, match="ChunkLossHead left .*: RuntimeError: planted"):
        got = run(jitted)
    assert loops(jitted)
    assert_right(got, exact)


def test_thunders_own_halves_compute_a_function_and_its_gradient():
    x = torch.ones(3, requires_grad=True)
    data = thunder.compile_data(thunder.jit(torch.sin))
    with compile_data_and_stats(data, None):
        forward, backward = final_halves(unfused(torch.sin, x), (), ())
    returned, (saved, others) = forward.python_callable()(x.detach())
    torch.testing.assert_close(returned["flat_output"], (x.detach().sin(),))
    (grad,) = backward.python_callable()([[*saved], [*others]], [torch.ones(3)])
    torch.testing.assert_close(grad, x.detach().cos())
    assert final_halves(unfused(torch.sin, x.detach()), (), ())[1] is None


def test_checkpoints_are_kept_where_planning_fails(monkeypatch):
    monkeypatch.setattr(executor, "lower_plan", fail)
    x = torch.ones(3, requires_grad=True)
    jitted = thunder.jit(
        lambda x: checkpoint(lambda a: a.exp().sin(), x, use_reentrant=False),
        executors=[],
        transforms=[MemEfficient()],
    )
    with pytest.warns(UserWarning, match="left this program as Thunder compiles it"):
        jitted(x)
    backward = thunder.last_backward_traces(jitted)[-1]
    assert [b.sym.name for b in backward.bound_symbols].count("exp") == 1
