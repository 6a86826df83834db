"""The verifier: every plan of the suite passes it (it is on by default); seeded corruptions of plans do not."""

from random import Random

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, from_trace, tracectx

from tests.checking.collectives import two_groups
from tests.checking.corruptions import CORRUPTIONS, Rewritten, rewrite
from tests.checking.traces import replaced, unfused
from tests.programs.written_programs import WRITTEN, arguments
from thunder_mem import MemEfficient
from thunder_mem.decisions import pipeline
from thunder_mem.kernels.in_place import in_place
from thunder_mem.kernels.kernel_executor import mem_kernels_ex
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.semantics.effects import effects_of, leaves
from thunder_mem.semantics.op_traits import traits_of
from thunder_mem.trace.emission import emit
from thunder_mem.trace.renaming import renamed
from thunder_mem.trace.verification import VerificationError, is_verified, verify_final, verify_rewrite


def writes_and_draws(x, w):
    a, b = x * 2, w @ w
    first = torch.rand_like(a)
    read = a.t().sin() + b  # a view, read before the write
    a.add_(first)
    a.mul_(torch.rand_like(b))
    return read @ a, (a - b).sum()


def writes_to_arguments(x, w):
    y = x.cos() @ w
    x.add_(y)
    print_me = x.sum()
    x.mul_(w)
    return y - x, print_me


def narrow_casts(x, w):
    y = (x.bfloat16() @ w.bfloat16()).float()
    return torch.where(y > 0.5, y / 3.0, y - 1.0).sum(), y.bfloat16()


PROGRAMS = (*WRITTEN, writes_and_draws, narrow_casts)


def in_the_callers_memory() -> TraceCtx:
    x, w = torch.ones(12, 12), torch.ones(12, 12)
    return unfused(writes_to_arguments, x, w)


@pytest.fixture(scope="module")
def programs() -> list[Rewritten]:
    found = [rewrite(fn.__name__, unfused(fn, *arguments(fn).values())) for fn in PROGRAMS]
    return [*found, rewrite("writes_to_arguments", in_the_callers_memory())]


@pytest.mark.slow
def test_what_planning_emits_is_the_same_program(programs):
    for program in programs:
        verify_rewrite(program.planned.program.trace, program.after)
    assert any(r.copies for p in programs for r in p.planned.plan.regions)
    assert any(p.planned.trace is not p.planned.program.trace for p in programs)


@pytest.mark.slow
def test_a_region_may_run_the_operations_of_composites(programs):
    """As nvFuser's do, which know prims alone."""
    composites = 0
    for program in programs:
        bsyms = []
        for b in program.after.bound_symbols:
            parts = [leaf for part in b.subsymbols for leaf in leaves(part)]
            composites += b.sym.is_fusion and len(parts) > len(b.subsymbols)
            bsyms.append(b.from_bsym(subsymbols=parts) if b.sym.is_fusion else b)
        verify_rewrite(program.planned.program.trace, replaced(program.after, bsyms))
    assert composites


@pytest.mark.sampled(70)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda f: f.__name__)
def test_a_corrupted_plan_is_caught(programs, corrupt, seed):
    """Every corruption in every program that has what it needs, at three places each."""
    tried = 0
    for k, program in enumerate(programs):
        try:
            corrupted = corrupt(program, Random(1000 * seed + k))
        except Exception as error:  # emission itself refuses it
            assert isinstance(error, ValueError | KeyError | RuntimeError), program.name
            continue
        if corrupted is None:
            continue
        tried += 1
        with pytest.raises(VerificationError):
            verify_rewrite(program.planned.program.trace, corrupted)
            pytest.fail(f"{corrupt.__name__} of {program.name} was not seen:\n{corrupted}")
    assert tried


@pytest.mark.parametrize("executors", [[], [mem_pointwise_ex]], ids=["kernels", "regions"])
def test_nothing_reads_what_was_written_over(executors, monkeypatch):
    seen = []
    monkeypatch.setattr(pipeline, "verify_rewrite", lambda *traces: seen.append(traces))
    x = torch.randn(8, 8, requires_grad=True)
    thunder.jit(lambda x: ((x @ x).relu() @ x).sum(), executors=executors, transforms=[MemEfficient()])(x)
    (original, planned), *_ = seen
    verify_rewrite(original, planned)
    bsyms = list(planned.bound_symbols)
    over = [i for i, b in enumerate(bsyms) if traits_of(b).in_place and traits_of(b).writes(b)]
    assert over
    for i in over:  # the same step again reads what it has overwritten
        with pytest.raises(VerificationError, match=r"uses \w+, which \w+ has overwritten"):
            verify_rewrite(original, replaced(planned, [*bsyms[: i + 1], *bsyms[i:]]))


def test_what_is_overwritten_later_only_is_read_as_before():
    """A gradient over its operand, and then overwritten itself, as by the optimizer or by a sum of all ranks."""

    def fn(x):
        gradient = x.sin()
        seen = gradient.cos()
        made = mem_kernels_ex.opmap["mem_relu_backward"](gradient, x)
        prims.copy_(seen, made, grad_enabled=False)
        return made, seen

    trace = unfused(fn, torch.ones(3))
    *before, cosine, derivative, write, result = (in_place(b) or b for b in trace.bound_symbols)
    verify_rewrite(trace, replaced(trace, [*before, cosine, derivative, write, result]))
    with pytest.raises(VerificationError, match=r"uses \w+, which mem_relu_backward_over_gradient has overwritten"):
        verify_rewrite(trace, replaced(trace, [*before, derivative, cosine, write, result]))


# ---- effects that no function of tensors has: prints, contexts, collectives ----


def test_barriers_keep_their_order_and_what_has_effects_its_side():
    def fn(x):
        prims.python_print("a")
        x.add_(1)
        prims.python_print("b")
        return x.sin()

    trace = unfused(fn, torch.ones(3))
    verify_rewrite(trace, trace)
    prints = [i for i, b in enumerate(trace.bound_symbols) if b.sym.id is PrimIDs.PRINT]
    writes = [i for i, b in enumerate(trace.bound_symbols) if effects_of(b).writes]
    for a, b in ((prints[0], prints[1]), (writes[0], prints[1])):
        bsyms = list(trace.bound_symbols)
        bsyms[a], bsyms[b] = bsyms[b], bsyms[a]
        with pytest.raises(VerificationError, match="computed from other values"):
            verify_rewrite(trace, replaced(trace, bsyms))


def test_collectives_start_in_one_order(groups):
    trace = two_groups(groups)
    source = list(trace.bound_symbols)
    verify_rewrite(trace, trace)
    swapped = [source[i] for i in (3, 0, 1, 2, 7, 4, 8, 6, 5)] + source[9:]  # only what moves freely, and waits
    verify_rewrite(trace, replaced(trace, swapped))
    for a, b in ((1, 4), (1, 2), (2, 4)):
        bsyms = list(source)
        bsyms[a], bsyms[b] = bsyms[b], bsyms[a]
        with pytest.raises(VerificationError):
            verify_rewrite(trace, replaced(trace, bsyms))
    with pytest.raises(VerificationError):
        verify_rewrite(trace, replaced(trace, source[:8] + source[9:]))  # a wait that is lost


def test_a_print_that_is_lost_is_missed():
    trace = unfused(lambda x: (prims.python_print("a"), x.sin())[1], torch.ones(3))
    silent = replaced(trace, [b for b in trace.bound_symbols if b.sym.id is not PrimIDs.PRINT])
    with pytest.raises(VerificationError, match="0 steps and not 1"):
        verify_rewrite(trace, silent)


# ---- what may differ ----


def test_a_copy_may_be_added():
    trace = unfused(lambda x: x.sin().cos(), torch.ones(3))
    unpack, sine, cosine, result = trace.bound_symbols
    with tracectx(from_trace(trace)):
        copied = TensorProxy(like=sine.output)
    copy = prims.clone.bind(sine.output, output=copied)
    verify_rewrite(
        trace, replaced(trace, [unpack, sine, copy, renamed(cosine, {sine.output.name: copied}, outputs=False), result])
    )


def test_a_forward_must_not_need_the_gradient_of_its_result():
    trace = unfused(torch.sin, torch.ones(3, requires_grad=True))
    sine, given = (next(b for b in trace.bound_symbols if b.sym.name == name) for name in ("sin", "get_grad"))
    *before, result = trace.bound_symbols
    broken = replaced(trace, [*before, renamed(result, {sine.output.name: given.output}, outputs=False)])
    with pytest.raises(VerificationError, match="the gradient of one of its results"):
        verify_rewrite(broken, broken)


# ---- final traces ----


@pytest.fixture(scope="module")
def final() -> tuple[TraceCtx, TraceCtx]:
    def fn(x, w):
        y = torch.nn.functional.gelu(x @ w) @ w
        return (y.softmax(-1) @ x).sum()

    inputs = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    jitted = thunder.jit(fn, executors=[mem_pointwise_ex], transforms=[MemEfficient(strict=True)])
    jitted(*inputs)
    return thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]


def _of(trace: TraceCtx, prim: PrimIDs) -> list[int]:
    return [i for i, b in enumerate(trace.bound_symbols) if b.sym.id is prim]


def test_the_traces_that_run_pass(final):
    forward, backward = final
    saved = verify_final(forward)
    assert saved
    assert verify_final(backward, saved) == ()


@pytest.mark.parametrize("which", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("how", ["early del", "del twice", "defined again", "lost"])
def test_a_broken_final_trace_is_caught(final, which, how):
    trace = final[which]
    saved = verify_final(final[0])
    bsyms = list(trace.bound_symbols)
    dels = [i for i in _of(trace, PrimIDs.DEL) if any(isinstance(p, TensorProxy) for p in bsyms[i].flat_proxy_args)]
    at = dels[0]
    if how == "early del":
        bsyms.insert(at - 1, bsyms.pop(at))
    elif how == "del twice":
        bsyms.insert(at, bsyms[at])
    elif how == "defined again":
        gone = {p.name for p in bsyms[at].flat_proxy_args}
        maker = next(b for b in bsyms if gone & {p.name for p in b.flat_proxy_outs} and b.flat_proxy_args)
        if maker.sym.id is PrimIDs.UNPACK_SEQUENCE:
            maker = next(b for b in bsyms if b.sym.id is PrimIDs.UNPACK_TRIVIAL).from_bsym(output=maker.flat_proxy_outs)
        bsyms.insert(at + 1, maker)
    else:
        del bsyms[next(i for i, b in enumerate(bsyms) if b.sym.name.startswith("MemPointwise"))]
    with pytest.raises(VerificationError):
        verify_final(replaced(trace, bsyms), saved if which else None)


def test_a_backward_of_another_forward_is_caught(final):
    forward, backward = final
    saved = verify_final(forward)
    for wrong in (saved[::-1], saved[1:], ("other", *saved[1:])):
        with pytest.raises(VerificationError, match="the backward takes other values"):
            verify_final(backward, wrong)


# ---- when it runs ----


def test_small_programs_are_always_verified_and_long_ones_sampled():
    small = TraceCtx(None)
    assert is_verified(small, "ffffffff", None)
    assert not is_verified(small, "0", False)
    long = TraceCtx(None)
    long.bound_symbols = [None] * 20_000
    assert is_verified(long, "ffffffff", True)
    share = sum(is_verified(long, f"{k << 24:08x}", None) for k in range(256)) / 256
    assert 0.08 < share < 0.12


def test_a_plan_that_fails_is_a_failure_of_planning(monkeypatch):
    from thunder_mem.decisions import stages

    def wrong(source, trace, plan, executors, note):
        new = emit(source, trace, plan, executors, note)
        (sine,) = (b for b in new.bound_symbols if b.sym.name == "sin")
        without = {sine.output.name: sine.args[0]}
        new.bound_symbols = [renamed(b, without, outputs=False) for b in new.bound_symbols]
        return new

    monkeypatch.setattr(stages, "emit", wrong)
    x = torch.randn(4, 4)

    def fn(x):
        return (x @ x).sin() @ x

    with pytest.warns(UserWarning, match="VerificationError"):
        actual = thunder.jit(fn, executors=[], transforms=[MemEfficient()])(x)
    torch.testing.assert_close(actual, fn(x))
    with pytest.raises(VerificationError, match="computed from other values"):
        thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])(x)


def test_wrong_argument():
    with pytest.raises(TypeError, match="verify is True, False or None"):
        MemEfficient(verify="always")


def test_a_backward_that_no_gradient_reaches():
    """The unused argument asks for a gradient, so there is a backward; the loss of constants gives it nothing to do."""

    def program(x, w, targets, unused):
        return F.cross_entropy(x @ w, targets)

    x, w = torch.randn(9, 2), torch.randn(2, 8)
    targets, unused = torch.arange(9) % 8, torch.randn(3, requires_grad=True)
    compiled = thunder.jit(program, transforms=[MemEfficient(strict=True, verify=True)])
    torch.testing.assert_close(compiled(x, w, targets, unused), program(x, w, targets, unused))
