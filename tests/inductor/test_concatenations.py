"""Concatenations inside compiled regions move behind elementwise operations, and no number changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import thunder
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from thunder_mem import MemEfficient
from thunder_mem.regions.concatenations import concatenate_last


def _moved(fn: Callable[..., object], *inputs: Tensor) -> torch.fx.GraphModule:
    graph = make_fx(fn, tracing_mode="fake")(*inputs)
    concatenate_last(graph)
    return graph


def _names(graph: torch.fx.GraphModule) -> list[str]:
    return [n.target.__name__.split(".")[0] for n in graph.graph.nodes if n.op == "call_function"]


def _equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Values and layout are the same; the stride of a dim of size 1 says nothing."""
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
        assert [a.stride(d) for d in range(a.ndim) if a.shape[d] > 1] == [
            b.stride(d) for d in range(b.ndim) if b.shape[d] > 1
        ]


def _result(graph: torch.fx.GraphModule) -> torch.fx.Node:
    (node,) = graph.graph.output_node().args[0]  # type: ignore[misc]
    assert isinstance(node, torch.fx.Node)
    return node


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def _heads(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Heads (2, 3, 7, 32), whose tokens lie before the heads in memory, with cosines and sines (7, 32)."""
    torch.manual_seed(0)
    heads = torch.randn(2, 7, 96, dtype=dtype).view(2, 7, 3, 32).transpose(1, 2)
    return heads, torch.randn(7, 32, dtype=dtype), torch.randn(7, 32, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_embeddings_are_concatenated_once_and_last(dtype: torch.dtype) -> None:
    inputs = _heads(dtype)
    graph = _moved(lambda *a: (_rope(*a),), *inputs)
    names = _names(graph)
    assert names.count("cat") == 1 and set(names[names.index("cat") + 1 :]) <= {"permute"}
    _equal(graph(*inputs), [_rope(*inputs)])


def test_a_copy_of_what_is_concatenated_is_the_concatenation() -> None:
    inputs = _heads()
    graph = _moved(lambda *a: (_rope(*a).clone(memory_format=torch.contiguous_format),), *inputs)
    assert "clone" not in _names(graph)
    _equal(graph(*inputs), [_rope(*inputs).contiguous()])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (torch.cat([x, x], -1).exp(), torch.cat([x, x], -1).sum(-1)),
        lambda x: ((both := torch.cat([x, -x], -1)).exp(), both.sin()),
        lambda x: (torch.cat([x[..., :4], x], -1).exp(),),
        lambda x: (torch.cat([x[..., i : i + 8] for i in range(5)], -1).exp(),),
        lambda x: (torch.cat([x, x], -1).double(),),
        lambda x: (torch.cat([x, x], -1) > 0,),
        lambda x: (torch.cat([x, x], -1) + x.new_ones(2, 1, 1, 1),),
        lambda x: (torch.cat([x, x], -1).sum(-1),),
    ],
    ids=["another", "two readers", "narrow", "many pieces", "wider", "mask", "larger", "reduction"],
)
def test_others_stay(fn: Callable[..., tuple[Tensor, ...]]) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 32)
    before, graph = make_fx(fn, tracing_mode="fake")(x), _moved(fn, x)
    if len(fn(x)) == 1:
        assert _names(graph) == _names(before)
    _equal(graph(x), fn(x))


def test_no_concatenation_moves_behind_a_write() -> None:
    def write(x: Tensor) -> tuple[Tensor, ...]:
        both = torch.cat([x, x], -1)
        x.copy_(torch.zeros_like(x))
        return (both.exp(),)

    graph = _moved(write, torch.ones(2, 8))
    names = _names(graph)
    assert names.index("cat") < names.index("copy_") < names.index("exp")
    assert torch.equal(graph(torch.ones(2, 8))[0], torch.ones(2, 16).exp())


_STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "neg": lambda x, y: -x,
    "add": lambda x, y: x + y,
    "rsub": lambda x, y: 2 - x,
    "mul row": lambda x, y: y[:1] * x,
    "mul column": lambda x, y: x * y[..., :1],
    "where": lambda x, y: torch.where(y > 0, x, 0.0),
    "halves": lambda x, y: x.bfloat16().float(),
    "clone": lambda x, y: x.clone(),
    "contiguous": lambda x, y: x.clone(memory_format=torch.contiguous_format),
    "channels last": lambda x, y: x.clone(memory_format=torch.channels_last),
    "scalar": lambda x, y: x * y.flatten()[0],
    "again": lambda x, y: torch.cat([x, y], 1)[:, : x.shape[1]],
}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(_STEPS)), min_size=1, max_size=5),
    st.integers(0, 3),
    st.lists(st.integers(0, 9), min_size=2, max_size=4).filter(any),
    st.lists(st.sampled_from([1, 2, 8]), min_size=4, max_size=4),
    st.sampled_from([(0, 1, 2, 3), (0, 2, 3, 1), (0, 2, 1, 3), (3, 1, 0, 2)]),
)
def test_every_element_has_the_same_operations(
    steps: list[str], dim: int, sizes: list[int], others: list[int], order: tuple[int, ...]
) -> None:
    shapes = [[*others[:dim], size, *others[dim + 1 :]] for size in sizes]
    shape = [*others[:dim], sum(sizes), *others[dim + 1 :]]
    generator = torch.Generator().manual_seed(0)

    def laid(size: Sequence[int]) -> Tensor:
        """Numbers whose dims lie in memory in the given order."""
        memory = torch.randn([size[d] for d in order], generator=generator)
        return memory.permute([order.index(d) for d in range(4)])

    def chain(y: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        x = torch.cat(parts, dim)
        for step in steps:
            x = _STEPS[step](x, y)
        return (x,)

    inputs = [laid(shape), *map(laid, shapes)]
    graph, before = _moved(chain, *inputs), make_fx(chain, tracing_mode="fake")(*inputs)
    _equal(graph(*inputs), chain(*inputs))
    # Inductor is asked for these strides.
    assert _result(graph).meta["val"].stride() == _result(before).meta["val"].stride()


def test_a_copy_in_another_memory_format_has_the_strides_of_eager() -> None:
    x = torch.randn(2, 8, 4, 16).to(memory_format=torch.channels_last)

    def copied(x: Tensor) -> Tensor:
        return (torch.cat([x, x], 1) * 2).contiguous() * 1.5

    _equal([thunder.jit(copied, transforms=[MemEfficient(strict=True)])(x)], [copied(x)])


def test_a_compiled_step_with_rotary_embeddings_is_eager_s() -> None:
    torch.manual_seed(0)
    tokens, cos, sin = torch.randn(2, 7, 96), torch.randn(7, 32), torch.randn(7, 32)

    def heads(tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _rope(tokens.view(2, 7, 3, 32).transpose(1, 2), cos, sin).contiguous()

    compiled = thunder.jit(heads, transforms=[MemEfficient(strict=True)])
    given = tokens.clone().requires_grad_()
    found = compiled(given, cos, sin)
    assert "MemPointwise" in str(thunder.last_traces(compiled)[-1])
    wanted = tokens.clone().requires_grad_()
    torch.testing.assert_close(found, heads(wanted, cos, sin), rtol=0, atol=1e-6)
    assert found.is_contiguous()
    tangent = torch.randn_like(found)
    found.backward(tangent)
    heads(wanted, cos, sin).backward(tangent)
    torch.testing.assert_close(given.grad, wanted.grad, rtol=0, atol=1e-6)
