"""What `read_trace` says of real Thunder traces, against PyTorch running them bound symbol by bound symbol."""

from collections import Counter
from random import Random
from types import SimpleNamespace

import pytest
import thunder
import torch
from thunder.core import prims
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import FutureTensorProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbolTag
from thunder.core.utils import AutocastStack
from thunder.executors.passes import del_last_used
from thunder.transforms.autodiff import split_into_forward_and_backward
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tests.checking.orders import random_order
from tests.checking.traces import Traced, body, claimed, replaced, run, traced_programs, unfused
from tests.programs.generate import Profile
from tests.programs.written_programs import WRITTEN, arguments, checkpointed, many_outputs, written
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.prediction.predict import predict
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex
from thunder_mem.runtime.output_layout import Output, describe, meta_like
from thunder_mem.semantics.effects import effects_of
from thunder_mem.semantics.layout import Layout, is_view
from thunder_mem.trace.reading import BACKWARD, read_trace

with_traces = pytest.mark.slow("dense traces")


@pytest.fixture(scope="module")
def dense() -> list[Traced]:
    """Programs whose arguments are contiguous and apart, as `Layout` takes them to be."""
    return [*map(written, WRITTEN), *traced_programs(25, Profile(layouts=(), aliases=False))]


# ---- storages ----


def partition(key_of: dict[str, int]) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for name, key in key_of.items():
        groups.setdefault(key, set()).add(name)
    return set(map(frozenset, groups.values()))


@with_traces
@pytest.mark.parametrize("claim", [False, True], ids=["open", "claimed"])
def test_storages_are_those_of_real_tensors(dense, claim):
    for traced in dense:
        trace = claimed(traced.trace) if claim else traced.trace
        ran = run(trace, traced.inputs) if claim else traced.run
        source = read_trace(trace)
        assert partition({n: source.storage_of[n] for n in ran.tensors}) == partition(
            {n: ran.storage(n) for n in ran.tensors}
        ), traced.text
        for name in set(ran.tensors) - _mistyped(trace, ran):
            storage = source.graph.storages[source.storage_of[name]]
            assert storage.nbytes == ran.nbytes(name), f"{name} of {traced.text}"
            assert storage.device == "cpu"


def _mistyped(trace, ran) -> set[str]:
    """What Thunder itself has the dtype of wrong (its sum of booleans is one), and what shares memory with it."""
    proxies = {p.name: p for b in trace.bound_symbols for p in (*b.flat_proxy_args, *b.flat_proxy_outs)}
    wrong = {ran.storage(n) for n, t in ran.tensors.items() if to_torch_dtype(proxies[n].dtype) != t.dtype}
    assert len(wrong) <= 2
    return {n for n in ran.tensors if ran.storage(n) in wrong}


@with_traces
def test_regions_lie_as_their_operations_do_one_by_one(dense):
    """Outputs of fused regions, for inputs of any strides: what PyTorch itself says of the same operations."""
    rng, seen = Random(0), Counter()
    for traced in dense[::3]:
        for region in (b for b in mem_pointwise_ex.fusion_pass(traced.trace).bound_symbols if b.sym.is_fusion):
            if not all(isinstance(p, TensorProxy) for p in region.args):
                continue
            for permuted in (False, True):
                given = [_empty(p, rng if permuted else None) for p in region.args]
                with FakeTensorMode() as mode:
                    fakes = [mode.from_tensor(t, static_shapes=True) for t in given]
                    expected = describe(_function(region)(*fakes), fakes)
                metas = meta_like(given)
                layout = Layout.of({p.name: t for p, t in zip(region.args, metas, strict=True)})
                layout.run(region)
                found = describe([layout[p.name] for p in region.output], metas)
                assert list(map(_shown, found)) == list(map(_shown, expected)), f"{region} of {traced.text}"
                seen[permuted] += any(o.stride != torch.empty(o.shape).stride() for o in found)
    assert min(seen[False], seen[True]) > 5


def _function(region):
    return next(iter(region._call_ctx.values()))


def _empty(p: TensorProxy, rng: Random | None) -> torch.Tensor:
    """A tensor of the proxy's shape, contiguous or with its dims in memory in any order, some with gaps."""
    shape = tuple(map(int, p.shape))
    order = list(range(len(shape)))
    if rng is None:
        return torch.empty(shape, dtype=to_torch_dtype(p.dtype))
    rng.shuffle(order)
    whole = torch.empty([shape[i] * rng.choice((1, 1, 2)) for i in order], dtype=to_torch_dtype(p.dtype))
    part = whole[tuple(slice(shape[i]) for i in order)]
    return part.permute([order.index(i) for i in range(len(shape))])


def _shown(output: Output) -> tuple:
    """All that memory depends on: of a dim of size 1, or of an empty tensor, strides mean nothing."""
    strides = [s for n, s in zip(output.shape, output.stride, strict=True) if n > 1 and 0 not in output.shape]
    return output.where, output.storage_bytes, output.shape, strides, output.offset


def test_a_copy_for_want_of_a_stride_is_one_and_a_reshape_that_needs_none_is_a_view():
    trace = unfused(lambda x: (x.t().reshape(-1), x.reshape(-1), x.t().contiguous(), x.contiguous()), torch.ones(3, 4))
    source = read_trace(trace)
    copy, view, copied, same = (p.name for p in source.result.args[0]["output"])
    assert source.storage_of[view] == source.storage_of[same] == source.storage_of["x"]
    assert len({source.storage_of[n] for n in (copy, copied, "x")}) == 3


def test_an_expanded_value_has_the_bytes_of_what_it_shows():
    source = read_trace(unfused(lambda x: (x * 2).expand(100, 4) + 0, torch.ones(1, 4)))
    assert sorted(s.nbytes for s in source.graph.storages) == [16, 16, 1600]


def test_a_view_keeps_all_of_its_base():
    """The last op reads 4 bytes of a value of 4,000, and nobody else does."""
    graph = read_trace(unfused(lambda x: (x * 2)[0].sin(), torch.ones(1000))).graph
    assert price_order(graph).live_bytes[-1] == 4000 + 4000 + 4


def test_is_view_of_each_symbol():
    trace = unfused(lambda x: (x.t(), x[1:], x.reshape(-1), x * 2, x.sum(), x.to(torch.float64)), torch.ones(3, 4))
    kinds = {p.name: is_view(b) for b in body(trace) for p in b.flat_proxy_outs}
    output = trace.bound_symbols[-1].args[0]["output"]
    # A cast is one too: a copy only if the dtype differs.
    assert [kinds[p.name] for p in output] == [True, True, True, False, False, True]


@with_traces
def test_a_pure_read_is_not_taken_for_a_write(dense):
    for traced in dense:
        trace = claimed(traced.trace)
        wrote = {id(b): w for b, w in zip(body(trace), run(trace, traced.inputs).wrote, strict=True)}
        source = read_trace(trace)
        for op, b in zip(source.graph.ops, source.bsyms, strict=True):
            # `copy_` onto itself overwrites nothing that a version counter shows, every other write does.
            assert not op.writes or wrote[id(b)], f"{op.name} of {traced.text}"


# ---- what is held, and what can be freed ----


class Net(torch.nn.Module):
    """Convolution, batch normalisation (whose buffers change in place) and linear."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3)
        self.last = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def test_of_a_joint_trace_arguments_are_held_and_activations_are_not():
    trace = unfused(Net(), torch.ones(2, 2, 6, 6))
    source = read_trace(trace)
    graph = source.graph
    names = {p.name for p in trace.args}
    assert {s.name for s in graph.storages if s.held} == names and len(names) > 6
    assert graph.outputs == {source.storage_of[n] for n in source.returned_names if n in source.storage_of}
    saved = [
        s
        for s, users in enumerate(graph.users)
        if graph.allocator[s] is not None and {graph.ops[u].backward for u in users} == {False, True}
    ]
    dying = [s for s in saved if s not in graph.outputs]
    assert dying
    for s in dying:
        born, dies = price_order(graph).live_range(s)
        assert (born, dies) == (graph.allocator[s], max(graph.users[s])) and dies < len(graph)


def test_of_a_final_backward_only_parameters_are_held():
    net = thunder.jit(Net(), executors=[])
    net(torch.ones(2, 2, 6, 6)).sum().backward()
    trace = thunder.last_backward_traces(net)[-1]
    source = read_trace(trace)
    assert any(b.sym.name == "clear_mutable_collection" for b in trace.bound_symbols)
    assert {b.sym.id for b in source.prefix} == {PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE}
    graph = source.graph
    held = {s.name for s in graph.storages if s.held}
    assert held == {"t_last_weight", "t_conv_weight", "t_norm_weight"} & set(source.storage_of)
    freeable = [s for s, a in enumerate(graph.allocator) if a is None and not graph.storages[s].held]
    timeline = price_order(graph)
    assert {timeline.live_range(s)[0] for s in freeable} == {0}
    assert any(timeline.live_range(s)[1] < len(graph) // 2 for s in freeable)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fn", WRITTEN, ids=lambda f: f.__name__)
def test_the_source_order_is_priced_as_what_thunder_runs(fn):
    """The joint trace, op by op, against the final traces on fake tensors: forward and backward peak."""
    inputs = arguments(fn)
    jitted = thunder.jit(fn, executors=[])
    predicted = predict(jitted, *inputs.values(), keep_outputs=True)
    graph = read_trace(unfused(fn, *inputs.values())).graph
    assert "forward" in predicted.phases
    for phase, backward in (("forward", False), ("backward", True))[: len(predicted.phases)]:
        live = [e.live_bytes for e in predicted.phase(phase).timeline]  # but for what CPU kernels hold inside
        assert price_order(graph.half(backward)).peak_bytes == max(live)


def test_gradients_of_the_outputs_are_there_before_the_backward_starts():
    """They are its arguments: however late one is needed, no order brings it later."""

    def fn(x, w):
        outputs = []
        for _ in range(4):
            x = (x @ w).sin()
            outputs.append(x * 2)
        return tuple(outputs)

    trace = unfused(fn, *(torch.ones(8, 8, requires_grad=True) for _ in range(2)))
    late = sorted(body(trace), key=lambda b: b.sym == prims.get_grad)  # wherever they stand
    for source in (read_trace(trace), read_trace(replaced(trace, [*late, trace.bound_symbols[-1]]))):
        half = source.graph.half(True)
        given = [i for i, b in enumerate(source.bsyms) if b.sym == prims.get_grad]
        assert len(given) == 4
        for seed in range(5):
            assert [half.ops[i].payload for i in random_order(half, Random(seed))[:4]] == given


# ---- forward, backward, and what stays outside ----


def made(bsyms) -> list[str]:
    return [p.name for b in bsyms for p in b.flat_proxy_outs]


@with_traces
def test_the_halves_are_those_of_thunders_own_split(dense):
    compiling = SimpleNamespace(executors_list=(), autocast_stack=AutocastStack(), is_grad_enabled=True)
    split = 0
    for traced in dense:
        source = read_trace(traced.trace)
        halves: tuple[list, list] = ([], [])
        for op, b in zip(source.graph.ops, source.bsyms, strict=True):
            if b.sym != prims.get_grad:
                halves[op.backward].append(b)
        returned = traced.trace.bound_symbols[-1].args[0]
        if not (isinstance(returned, dict) and "fw_flat_out" in returned):
            assert halves[0] == list(source.bsyms)
            continue
        with compile_data_and_stats(compiling, None):
            forward, backward = split_into_forward_and_backward(traced.trace)
        assert made(halves[0]) == made(b for b in body(forward) if b.sym.id not in UNPACKING), traced.text
        # Thunder drops what is dead from the backward only.
        kept = [] if backward is None else made(b for b in body(backward) if b.sym.id not in UNPACKING)
        assert set(kept) <= set(made(halves[1])), traced.text
        assert [n for n in made(halves[1]) if n in set(kept)] == kept, traced.text
        split += bool(kept)
    assert split > 10


UNPACKING = (PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE)


def test_a_recomputed_forward_belongs_to_the_backward():
    source = read_trace(written(checkpointed).trace)
    recomputed = [
        op for op, b in zip(source.graph.ops, source.bsyms, strict=True) if any("bw_" in n for n in made([b]))
    ]
    assert recomputed and all(op.backward for op in recomputed)
    assert all(BACKWARD in source.bsyms[op.index].tags for op in recomputed)
    assert BACKWARD is BoundSymbolTag.BACKWARD


@with_traces
def test_a_trace_reads_the_same_with_its_dels_and_without(dense):
    released = 0
    for traced in dense[: len(WRITTEN) + 10]:
        trace = del_last_used(traced.trace)
        released += any(b.sym.id is PrimIDs.DEL for b in trace.bound_symbols)
        one, other = read_trace(traced.trace), read_trace(trace)
        assert one.graph == other.graph
        assert (one.storage_of, one.returned_names) == (other.storage_of, other.returned_names)
    assert released >= len(WRITTEN)


def test_unpacking_and_return_stay_outside():
    trace = thunder.jit(many_outputs, executors=[])
    trace(*arguments(many_outputs).values())
    backward = thunder.last_backward_traces(trace)[-1]
    source = read_trace(backward)
    assert source.result is backward.bound_symbols[-1] and source.result.sym.id is PrimIDs.RETURN
    assert all(b.sym.id in (*UNPACKING, PrimIDs.COMMENT) for b in source.prefix)
    assert not any(b.sym.id in (*UNPACKING, PrimIDs.RETURN, PrimIDs.DEL) for b in source.bsyms)


@with_traces
def test_ops_say_what_their_bound_symbols_do(dense):
    for traced in dense:
        source = read_trace(traced.trace)
        assert [op.payload for op in source.graph.ops] == list(source.bsyms)
        for op, b, effects in zip(source.graph.ops, source.bsyms, source.effects, strict=True):
            assert op.name == b.sym.name
            of = {p.name: source.storage_of[p.name] for p in (*b.flat_proxy_args, *b.flat_proxy_outs) if _stored(p)}
            assert set(op.touches) & set(source.storage_of.values()) == set(of.values())
            assert effects == effects_of(b)
            for p in b.flat_proxy_outs:
                if p.name not in {a.name for a in b.flat_proxy_args}:
                    assert source.producer_of[p.name] == op.index


def _stored(p: Proxy) -> bool:
    return isinstance(p, TensorProxy | FutureTensorProxy)


@with_traces
def test_reading_again_with_the_earlier_reading_gives_the_same(dense):
    for traced in dense:
        first = read_trace(traced.trace)
        again = read_trace(traced.trace, earlier=first)
        fresh = read_trace(traced.trace)
        assert again.graph == fresh.graph and again.storage_of == fresh.storage_of, traced.text
        assert again.effects == fresh.effects


# ---- errors ----


def test_a_trace_without_a_return_is_refused():
    trace = unfused(torch.sin, torch.ones(3))
    for bsyms in (body(trace), []):
        with pytest.raises(ValueError, match="does not end with a return"):
            read_trace(replaced(trace, bsyms))


def test_a_proxy_from_nowhere_is_refused_by_name():
    trace = unfused(lambda x: x.sin().cos(), torch.ones(3))
    (sin,) = (b for b in trace.bound_symbols if b.sym.name == "sin")
    with pytest.raises(ValueError, match=f"uses {sin.output.name}, which nothing produces"):
        read_trace(replaced(trace, [b for b in trace.bound_symbols if b is not sin]))


def test_an_einsum_lies_as_its_last_step_leaves_it():
    """Thunder permutes a product; in which order depends on the hash seed."""
    trace = unfused(lambda a: torch.einsum("...ij,...kj->...ik", a, a).contiguous() * 2, torch.randn(8, 1))
    (made,) = (b.output.name for b in trace.bound_symbols if b.sym.name == "einsum")
    ran = run(trace, {p.name: torch.randn(8, 1) for p in trace.args})
    assert read_trace(trace).layout[made].stride() == ran.tensors[made].stride()


def test_an_operation_has_the_scratch_of_its_kernel():
    source = read_trace(unfused(lambda x: (x @ x).sin(), torch.ones(64, 64, dtype=torch.float16)))
    assert [(op.name, op.scratch_bytes) for op in source.graph.ops] == [("matmul", 64 * 64 * 4), ("sin", 0)]
