"""The verifier: every plan of the suite passes it (it is on by default); seeded corruptions of plans do not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
import thunder
import torch
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from tests.collectives import two_groups
from tests.traces import replaced, unfused
from tests.written_programs import WRITTEN, arguments
from thunder_mem import MemEfficient
from thunder_mem.aliases import Aliases
from thunder_mem.effects import effects_of
from thunder_mem.emit import emit
from thunder_mem.executors import mem_pointwise_ex
from thunder_mem.joint_plan import Planned, PlanningOptions, plan_joint_trace
from thunder_mem.plan import PlannedRegion
from thunder_mem.trace_graph import BACKWARD
from thunder_mem.verify import VerificationError, is_verified, verify_final, verify_rewrite


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


@dataclass(frozen=True)
class Rewritten:
    """A program, planned: its trace before, the plan, and the trace that was emitted."""

    name: str
    planned: Planned
    after: TraceCtx

    def emit(self, regions: Sequence[PlannedRegion]) -> TraceCtx:
        plan = replace(self.planned.plan, regions=tuple(regions))
        return emit(self.planned.source, self.planned.trace, plan, {"mem_pointwise": mem_pointwise_ex}, "corrupted")


def rewrite(name: str, trace: TraceCtx) -> Rewritten:
    planned = plan_joint_trace(trace, [mem_pointwise_ex], PlanningOptions(strict=True))
    after = emit(planned.source, planned.trace, planned.plan, {"mem_pointwise": mem_pointwise_ex}, "planned")
    return Rewritten(name, planned, after)


def in_the_callers_memory() -> TraceCtx:
    x, w = torch.ones(12, 12), torch.ones(12, 12)
    return unfused(writes_to_arguments, x, w)


@pytest.fixture(scope="module")
def programs() -> list[Rewritten]:
    found = [rewrite(fn.__name__, unfused(fn, *arguments(fn).values())) for fn in PROGRAMS]
    return [*found, rewrite("writes_to_arguments", in_the_callers_memory())]


def test_what_planning_emits_is_the_same_program(programs):
    for program in programs:
        verify_rewrite(program.planned.original, program.after)
    assert any(r.copies for p in programs for r in p.planned.plan.regions)
    assert any(p.planned.trace is not p.planned.original for p in programs)


# ---- corruptions of the plan: its regions ----


def _edges(program: Rewritten) -> list[tuple[int, int]]:
    """Pairs of steps of which the second needs the first, directly."""
    regions = program.planned.plan.regions
    graph = program.planned.source.graph
    home = {op: i for i, r in enumerate(regions) for op in r.ops if op not in r.copies}
    return sorted(
        {
            (home[p], i)
            for i, r in enumerate(regions)
            for op in r.ops
            for p in graph.predecessors[op]
            if p not in r.ops and p in home and home[p] < i
        }
    )


def swapped_regions(program, rng):
    edges = _edges(program)
    a, b = rng.choice(edges)
    regions = list(program.planned.plan.regions)
    regions[a], regions[b] = regions[b], regions[a]
    return program.emit(regions)


def late_region(program, rng):
    a, b = rng.choice(_edges(program))
    regions = list(program.planned.plan.regions)
    regions.insert(b, regions.pop(a))
    return program.emit(regions)


def lost_region(program, rng):
    needed = [i for i, _ in _edges(program)]
    regions = list(program.planned.plan.regions)
    del regions[rng.choice(needed)]
    return program.emit(regions)


def lost_op(program, rng):
    regions = list(program.planned.plan.regions)
    many = [i for i, r in enumerate(regions) if len(r.ops) > 1]
    if not many:
        return None
    i = rng.choice(many)
    op = rng.choice(regions[i].ops[:-1])
    kept = tuple(o for o in regions[i].ops if o != op)
    regions[i] = replace(regions[i], ops=kept, copies=tuple(c for c in regions[i].copies if c != op))
    return program.emit(regions)


def reversed_region(program, rng):
    regions = list(program.planned.plan.regions)
    graph = program.planned.source.graph
    chains = [i for i, r in enumerate(regions) if any(set(graph.predecessors[o]) & set(r.ops) for o in r.ops)]
    if not chains:
        return None
    i = rng.choice(chains)
    regions[i] = replace(regions[i], ops=regions[i].ops[::-1])
    return program.emit(regions)


def all_copies(program, rng):
    """A region whose results the rest never sees, for they have new names."""
    i = rng.choice([i for i, _ in _edges(program)])
    regions = list(program.planned.plan.regions)
    regions[i] = replace(regions[i], copies=regions[i].ops)
    return program.emit(regions)


def forward_in_backward(program, rng):
    """A forward region that is merged into a backward one."""
    regions = list(program.planned.plan.regions)
    fused = [r.executor is not None for r in regions]
    pairs = [(a, b) for a, b in _edges(program) if not regions[a].backward and regions[b].backward]
    pairs = [(a, b) for a, b in pairs if fused[a] and fused[b]]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    ops = tuple(sorted({*regions[a].ops, *regions[b].ops}))
    regions[a] = replace(regions[a], ops=ops)
    del regions[b]
    return program.emit(regions)


def twice(program, rng):
    """An effect that happens twice."""
    source = program.planned.source
    regions = list(program.planned.plan.regions)
    effects = [i for i, r in enumerate(regions) if any(not source.effects[op].pure for op in r.ops)]
    if not effects:
        return None
    i = rng.choice(effects)
    regions.insert(i, replace(regions[i], copies=regions[i].ops))
    return program.emit(regions)


# ---- corruptions of the emitted trace ----


def _positions(trace: TraceCtx, wanted: Callable[[BoundSymbol], bool]) -> list[int]:
    return [i for i, b in enumerate(trace.bound_symbols) if wanted(b)]


def _with(program: Rewritten, i: int, *new: BoundSymbol) -> TraceCtx:
    bsyms = list(program.after.bound_symbols)
    bsyms[i : i + 1] = new
    return replaced(program.after, bsyms)


def _effects_in(bsym: BoundSymbol):
    return [effects_of(b) for b in (bsym.subsymbols if bsym.sym.is_fusion else (bsym,))]


def swapped_effects(program, rng):
    """Two draws, two writes, or a draw and a write of what was drawn, in the other order."""
    at = _positions(program.after, lambda b: any(e.channels or e.writes for e in _effects_in(b)))
    if len(at) < 2:
        return None
    i = rng.randrange(len(at) - 1)
    a, b = at[i], at[i + 1]
    first, second = (_effects_in(program.after.bound_symbols[k])[0] for k in (a, b))
    if not (set(first.channels) & set(second.channels) or (first.writes and first.writes == second.writes)):
        return None
    bsyms = list(program.after.bound_symbols)
    bsyms[a], bsyms[b] = bsyms[b], bsyms[a]
    return replaced(program.after, bsyms)


def lost_write(program, rng):
    at = _positions(program.after, lambda b: any(e.writes for e in _effects_in(b)))
    return _with(program, rng.choice(at)) if at else None


def late_reader(program, rng):
    """A read of memory that is moved behind the write to it."""
    bsyms = list(program.after.bound_symbols)
    aliases = Aliases(bsyms)
    found = []
    for i, write in enumerate(bsyms):
        written = {aliases(name) for e in _effects_in(write) for name in e.writes}
        for k in range(i):
            reader = bsyms[k]
            made = {p.name for p in reader.flat_proxy_outs}
            reads = written & {aliases(p.name) for p in reader.flat_proxy_args}
            between = {p.name for b in bsyms[k + 1 : i + 1] for p in b.flat_proxy_args}
            if reads and made and not written & set(map(aliases, made)) and not made & between:
                found.append((k, i))
    if not found:
        return None
    k, i = rng.choice(found)
    bsyms.insert(i, bsyms.pop(k))
    return replaced(program.after, bsyms)


def another_number(program, rng):
    def literal(b):
        return next((k for k, x in enumerate(b.args) if type(x) is float), None)

    at = _positions(program.after, lambda b: literal(b) is not None and not b.sym.is_fusion)
    if not at:
        return None
    i = rng.choice(at)
    b = program.after.bound_symbols[i]
    k = literal(b)
    return _with(program, i, b.from_bsym(args=(*b.args[:k], b.args[k] + 1, *b.args[k + 1 :])))


def exchanged_operands(program, rng):
    def differ(b):
        return len(b.args) > 1 and all(isinstance(a, TensorProxy) for a in b.args[:2]) and b.args[0] is not b.args[1]

    at = _positions(program.after, lambda b: b.sym.name == "matmul" and differ(b) and b.args[0].name != b.args[1].name)
    if not at:
        return None
    i = rng.choice(at)
    b = program.after.bound_symbols[i]
    return _with(program, i, b.from_bsym(args=(b.args[1], b.args[0])))


def another_dtype(program, rng):
    inner = [
        (i, k)
        for i, b in enumerate(program.after.bound_symbols)
        if b.sym.is_fusion
        for k, s in enumerate(b.subsymbols)
        if "dtype" in s.kwargs or s.sym.id is PrimIDs.CONVERT_ELEMENT_TYPE
    ]
    if not inner:
        return None
    i, k = rng.choice(inner)
    fusion = program.after.bound_symbols[i]
    part = fusion.subsymbols[k]
    wrong = part.from_bsym(kwargs={**part.kwargs, "dtype": torch.float16}, args=part.args[:1])
    parts = [*fusion.subsymbols[:k], wrong, *fusion.subsymbols[k + 1 :]]
    return _with(program, i, fusion.from_bsym(subsymbols=parts))


def _fusion(program, rng):
    at = _positions(program.after, lambda b: b.sym.is_fusion)
    return (i := rng.choice(at), program.after.bound_symbols[i]) if at else None


def unnamed_input(program, rng):
    if (found := _fusion(program, rng)) is None:
        return None
    i, fusion = found
    read = {p.name for s in fusion.subsymbols for p in s.flat_proxy_args}
    kept = [a for a in fusion.args if a.name not in read]
    return _with(program, i, fusion.from_bsym(args=tuple(kept)))


def empty_fusion_part(program, rng):
    if (found := _fusion(program, rng)) is None:
        return None
    i, fusion = found
    made = {p.name for p in fusion.flat_proxy_outs}
    k = rng.choice([k for k, s in enumerate(fusion.subsymbols) if made & {p.name for p in s.flat_proxy_outs}])
    return _with(program, i, fusion.from_bsym(subsymbols=[*fusion.subsymbols[:k], *fusion.subsymbols[k + 1 :]]))


def exchanged_fusion_operands(program, rng):
    """Another value of the same trace instead of one that a fusion's member reads."""
    if (found := _fusion(program, rng)) is None:
        return None
    i, fusion = found
    with_tensors = [
        (k, s) for k, s in enumerate(fusion.subsymbols) if isinstance(s.args[:1] and s.args[0], TensorProxy)
    ]
    others = [p for p in fusion.args if isinstance(p, TensorProxy)]
    if not with_tensors or not others:
        return None
    k, part = rng.choice(with_tensors)
    others = [p for p in others if p.name != part.args[0].name]
    if not others:
        return None
    wrong = part.from_bsym(args=(rng.choice(others), *part.args[1:]))
    parts = [*fusion.subsymbols[:k], wrong, *fusion.subsymbols[k + 1 :]]
    corrupted = fusion.from_bsym(subsymbols=parts)
    return _with(program, i, corrupted) if _matters(fusion, k) else None


def _matters(fusion: BoundSymbol, k: int) -> bool:
    """Whether the results of a fusion depend on its member `k`."""
    needed = {p.name for p in fusion.flat_proxy_outs}
    for at in range(len(fusion.subsymbols) - 1, -1, -1):
        part = fusion.subsymbols[at]
        if needed & {p.name for p in part.flat_proxy_outs}:
            if at == k:
                return True
            needed |= {p.name for p in part.flat_proxy_args}
    return False


def another_result(program, rng):
    """The gradients of two arguments exchanged, or another value returned."""
    result = program.after.bound_symbols[-1]
    returned = result.args[0]
    if not isinstance(returned, dict) or "output" not in returned or len(returned["output"]) < 2:
        return None
    a, b, *rest = returned["output"]
    if not isinstance(a, Proxy) or not isinstance(b, Proxy) or a.name == b.name:
        return None
    wrong = result.from_bsym(args=({**returned, "output": (b, a, *rest)},))
    return replaced(program.after, [*program.after.bound_symbols[:-1], wrong])


def redefined(program, rng):
    """A name that is given to another value."""
    at = _positions(
        program.after, lambda b: isinstance(b.output, TensorProxy) and not b.sym.is_fusion and b.sym != prims.get_grad
    )
    at = [i for i in at if program.after.bound_symbols[i].sym.id is not PrimIDs.UNPACK_TRIVIAL]
    if len(at) < 2:
        return None
    a, b = sorted(rng.sample(at, 2))
    first, second = program.after.bound_symbols[a], program.after.bound_symbols[b]
    if first.sym == second.sym:  # which may well be the same value, computed again
        return None
    return _with(program, b, second, second.from_bsym(output=first.output))


def untagged(program, rng):
    at = _positions(program.after, lambda b: b.sym.is_fusion and BACKWARD in b.tags)
    if not at:
        return None
    i = rng.choice(at)
    b = program.after.bound_symbols[i]
    return _with(program, i, b.from_bsym(tags=b.tags - {BACKWARD}))


def mistagged(program, rng):
    at = _positions(program.after, lambda b: b.sym.is_fusion and BACKWARD not in b.tags)
    if not at or "fw_flat_out" not in program.after.bound_symbols[-1].args[0]:
        return None
    i = rng.choice(at)
    b = program.after.bound_symbols[i]
    return _with(program, i, b.from_bsym(tags=b.tags | {BACKWARD}))


def no_return(program, rng):
    return replaced(program.after, program.after.bound_symbols[:-1])


CORRUPTIONS = (
    swapped_regions, late_region, lost_region, lost_op, reversed_region, all_copies, forward_in_backward, twice,
    swapped_effects, lost_write, late_reader, another_number, exchanged_operands, another_dtype, unnamed_input,
    empty_fusion_part, exchanged_fusion_operands, another_result, redefined, untagged, mistagged, no_return,
)  # fmt: skip


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
            verify_rewrite(program.planned.original, corrupted)
            pytest.fail(f"{corrupt.__name__} of {program.name} was not seen:\n{corrupted}")
    assert tried


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


def test_collectives_of_a_group_keep_their_order(groups):
    trace = two_groups(groups)
    source = list(trace.bound_symbols)
    verify_rewrite(trace, trace)
    swapped = [source[i] for i in (3, 0, 1, 2, 7, 4, 5, 6, 8)] + source[9:]  # only what moves freely
    verify_rewrite(trace, replaced(trace, swapped))
    for a, b in ((1, 4), (5, 6), (6, 8)):
        bsyms = list(source)
        bsyms[a], bsyms[b] = bsyms[b], bsyms[a]
        with pytest.raises(VerificationError):
            verify_rewrite(trace, replaced(trace, bsyms))
    with pytest.raises(VerificationError):
        verify_rewrite(trace, replaced(trace, source[:8] + source[9:]))  # a wait that is lost


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
    from thunder_mem import delegate

    def wrong(source, trace, plan, executors, note):
        new = emit(source, trace, plan, executors, note)
        new.bound_symbols = [b for b in new.bound_symbols if b.sym.name != "sin"]
        return new

    monkeypatch.setattr(delegate, "emit", wrong)
    x = torch.randn(4, 4)

    def fn(x):
        return (x @ x).sin() @ x

    with pytest.warns(UserWarning, match="VerificationError"):
        actual = thunder.jit(fn, executors=[], transforms=[MemEfficient()])(x)
    torch.testing.assert_close(actual, fn(x))
    with pytest.raises(VerificationError, match="before it is defined"):
        thunder.jit(fn, executors=[], transforms=[MemEfficient(strict=True)])(x)


def test_wrong_argument():
    with pytest.raises(TypeError, match="verify is True, False or None"):
        MemEfficient(verify="always")
