"""Ways to call what `thunder.jit(fn, transforms=[MemEfficient()])` returns: each as with Thunder alone.

A scenario is a function of `jit`; it returns whatever it saw. It runs with Thunder alone and with
MemEfficient, and both must have seen the same, bit for bit.
"""

import threading
from dataclasses import dataclass

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core import prims
from torch import nn
from torch.utils._pytree import tree_flatten

from tests.checking.orders import latest_first
from tests.fuzzing.command import uncompiled_regions
from tests.programs.cases import randn
from thunder_mem import ChunkLossHead, MemEfficient, last_plan
from thunder_mem.attention.on_cpu import mem_attention_ex
from thunder_mem.regions.pointwise_executor import mem_pointwise_ex

SCENARIOS = {}


def scenario(fn):
    SCENARIOS[fn.__name__.strip("_").replace("_", " ")] = fn
    return fn


@dataclass(frozen=True)
class Jit:
    """`thunder.jit` with these transforms, behind those of the call."""

    transforms: tuple = ()

    def __call__(self, fn, **options):
        options = {"executors": [mem_attention_ex, mem_pointwise_ex]} | options
        return thunder.jit(fn, transforms=[*options.pop("transforms", []), *self.transforms], **options)


def product(x, w):
    y = x @ w
    return y.sin().exp() * 2, y.cos()


def inputs(rows: int = 4):
    return randn(rows, 4), randn(4, 4, seed=1)


@scenario
def _backward_twice(jit):
    x, w = inputs()
    a, b = jit(product)(x, w)
    loss = a.sum() + b.sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return x.grad, w.grad


@scenario
def _backward_once_too_often(jit):
    a, b = jit(product)(*inputs())
    loss = a.sum() + b.sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@scenario
def _gradient_of_one_output(jit):
    jitted, (x, w) = jit(product), inputs()
    return [torch.autograd.grad(jitted(x, w)[i].sum(), wanted) for i, wanted in ((0, [x, w]), (1, [x]), (1, [w]))]


@scenario
def _several_calls_before_their_backwards(jit):
    jitted, w = jit(product), inputs()[1]
    xs = [randn(4, 4, seed=k) for k in range(3)]
    for a, b in reversed([jitted(x, w) for x in xs]):
        (a.sum() + b.mean()).backward()
    return [x.grad for x in xs], w.grad


@scenario
def _several_shapes(jit):
    jitted, seen = jit(product), []
    for rows in (2, 5, 2, 1):
        x, w = inputs(rows)
        a, b = jitted(x, w)
        (a.sum() + b.sum()).backward()
        seen += [a, b, x.grad, w.grad]
    return seen, thunder.cache_misses(jitted), thunder.cache_hits(jitted)


@scenario
def _gradient_modes(jit):
    jitted, (x, w) = jit(product), inputs()
    seen = [jitted(x, w)]
    with torch.no_grad():
        seen.append(jitted(x, w))
    with torch.inference_mode():
        seen.append([t.clone() for t in jitted(x, w)])
    with torch.autocast("cpu", torch.bfloat16):
        seen.append(jitted(x, w))
    seen += [jitted(x.detach(), w), jitted(x, w)]
    return seen, [[t.requires_grad for t in outputs] for outputs in seen], thunder.cache_misses(jitted)


@scenario
def _dtypes_of_one_function(jit):
    jitted = jit(lambda x: (x * 2 + 1).sum(0))
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
    return [jitted(torch.arange(8).reshape(4, 2).to(dtype)) for dtype in dtypes], thunder.cache_misses(jitted)


@scenario
def _symbolic_values(jit):
    def program(x, n):
        return (x.sin() * n).exp().sum(0) + n

    jitted = jit(program, cache="symbolic values")
    seen = []
    for rows, n in ((2, 2), (5, 2), (2, 5), (3, 3)):
        x = randn(rows, 4)
        y = jitted(x, n)
        seen += [y, *torch.autograd.grad(y.sum(), [x])]
    return seen, thunder.cache_misses(jitted)


@scenario
def _no_caching(jit):
    jitted = jit(product, cache="no caching")
    return [jitted(*inputs()) for _ in range(2)], thunder.cache_misses(jitted)


@scenario
def _training_and_evaluation(jit):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    jitted, x, seen = jit(net), randn(6, 4), []
    for mode in (True, False, True):
        jitted.train(mode)
        torch.manual_seed(2)
        seen.append(jitted(x))
        seen[-1].sum().backward()
    return seen, x.grad, [p.grad for p in net.parameters()], list(net.buffers())


@scenario
def _training_loop(jit):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 2))
    jitted, losses = jit(net), []
    optimizer = torch.optim.AdamW(jitted.parameters(), lr=1e-2)
    for k in range(4):
        optimizer.zero_grad()
        loss = jitted(randn(6, 4, seed=k, grad=False)).pow(2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    assert losses[-1] < losses[0]
    return losses, list(net.parameters())


@scenario
def _saved_tensors_hooks(jit):
    x, w = inputs()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t.clone(), lambda t: t):
        a, b = jit(product)(x, w)
    assert packed
    return torch.autograd.grad(a.sum() + b.sum(), [x, w])


@scenario
def _varying_signatures(jit):
    jitted = jit(lambda x, *rest, k=1, **more: x * k + sum(rest) + more["z"])
    x, y, z = (randn(3, seed=s) for s in range(3))
    return jitted(x, y, k=3, z=z), jitted(x, z=z), jitted(x, y, z, z=x)


@scenario
def _threads(jit):
    jitted, (x, w) = jit(product), inputs()
    jitted(x, w)
    seen = [None] * 4

    def call(k):
        a, b = jitted(x, w)
        seen[k] = torch.autograd.grad(a.sum() + b.sum(), [x, w])

    threads = [threading.Thread(target=call, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return seen


@scenario
def _executors_by_name(jit):
    return jit(product, executors=["mem_attention", "mem_pointwise"])(*inputs())


@scenario
def _one_executor_twice(jit):
    x, w = inputs()
    a, b = jit(product, executors=[mem_pointwise_ex, mem_pointwise_ex])(x, w)
    return a, b, torch.autograd.grad(a.sum() + b.sum(), [x, w])


@scenario
def _the_torch_executor_claims_first(jit):
    x, w = inputs()
    a, b = jit(product, executors=["torch", mem_pointwise_ex])(x, w)
    return a, b, torch.autograd.grad(a.sum() + b.sum(), [x, w])


@scenario
def _beside_another_transform(jit):
    def loss(x, w, target):
        return F.cross_entropy(x @ w, target)

    x, w = randn(8, 4), randn(4, 9, seed=1)
    y = jit(loss, transforms=[ChunkLossHead(chunks=2)], executors=[])(x, w, torch.arange(8))
    return y, torch.autograd.grad(y, [x, w])


@scenario
def _options_of_thunder(jit):
    def program(x):
        return (x.sin().add_(1) * 2).cos()

    ways = {"fusion_type": "dataflow"}, {"skip_inplace_functionalization": True}, {"skip_inplace_alias_updates": True}
    return [jit(program, **way)(randn(4, grad=False)) for way in ways]


@scenario
def _state_dict_and_buffers(jit):
    torch.manual_seed(0)
    net = jit(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    net(randn(3, 4))
    return dict(net.state_dict())


@scenario
def _module_without_arguments(jit):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.ones(3))

        def forward(self):
            return self.p.sin()

    net = Constant()
    y = jit(net)()
    y.sum().backward()
    return y, net.p.grad


@scenario
def _caller_overwrites_what_was_saved(jit):
    """Loud: the backward rebuilds the sine from the argument, which eager would have saved."""
    x, mask = randn(4), randn(4, grad=False, seed=1)
    y = jit(lambda x, m: (x * (m * 2).sin()).exp())(x, mask)
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@scenario
def _meta_tensors(jit):
    return [tuple(t.shape) for t in jit(product)(*(torch.empty(4, 4, device="meta") for _ in range(2)))]


@scenario
def _thunderfx(jit):
    from thunder.dynamo import thunderfx

    def program(x):
        y = x.sin() * 2
        torch._dynamo.graph_break()
        return (y @ y).cos()

    x = randn(3, 3)
    y = thunderfx(program, executors=[mem_pointwise_ex], transforms=list(jit.transforms))(x)
    return y, torch.autograd.grad(y.sum(), [x])


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
    with uncompiled_regions():
        alone, structure = tree_flatten(SCENARIOS[name](Jit()))
        got, got_structure = tree_flatten(SCENARIOS[name](Jit((MemEfficient(strict=True),))))
    assert got_structure == structure
    assert all(map(same, got, alone))


# One instance, many functions.
def test_an_instance_serves_functions_and_compilations_apart():
    jit = Jit((MemEfficient(strict=True),))
    functions = [product, lambda x, w: (x * 2 + w).exp().sum(0), product]
    jitted, plans = [], []
    with uncompiled_regions():
        for fn in functions:
            jitted.append(jit(fn))
            x, w = inputs()
            for got, alone in zip(jitted[-1](x, w), Jit()(fn)(x, w), strict=True):
                assert torch.equal(got, alone)
            plans.append(last_plan(jitted[-1]).to_json())
        jitted[0](*inputs(7))
    assert plans[0] == plans[2] != plans[1]
    assert [last_plan(j).to_json() for j in jitted[1:]] == plans[1:]  # what others compiled since changed nothing
    assert last_plan(jitted[0]).to_json() != plans[0]


@pytest.mark.slow
def test_a_module_may_be_jitted_again_with_the_same_instance():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), randn(3, 4)
    jit = Jit((MemEfficient(strict=True),))
    seen = []
    with uncompiled_regions():
        for jitted in (jit(net), jit(net), Jit()(net)):
            y = jitted(x)
            seen.append([y, *torch.autograd.grad(y.sum(), [x, *net.parameters()])])
    assert all(map(torch.equal, seen[0], seen[2])) and all(map(torch.equal, seen[1], seen[2]))


def attend(q):
    return F.scaled_dot_product_attention(q, q, q).sin() * 2


def test_the_packages_executors_join_the_default_list_and_its_kernels_what_fuses_nothing():
    def text(**options):
        jitted = thunder.jit(attend, transforms=[MemEfficient(strict=True)], **options)
        with uncompiled_regions():
            jitted(randn(1, 2, 3, 4))
        return str(thunder.last_traces(jitted)[-1])

    default, none = text(), text(executors=[])
    assert "mem_attention_forward" in default and "MemPointwise" in default
    assert "mem_attention_forward" in none and "MemPointwise" not in none
    only = text(executors=[mem_pointwise_ex])
    assert "mem_attention_forward" not in only and "MemPointwise" in only


def test_prints_keep_their_order_at_every_call(capsys):
    def program(x):
        prims.python_print("one")
        y = x.sin()
        prims.python_print(y)
        y = y.cos()
        prims.python_print("three")
        return y.exp(), x * 2

    jitted = thunder.jit(program, executors=[], transforms=[MemEfficient(strict=True, sort=latest_first)])
    x = torch.zeros(2)
    for _ in range(2):
        jitted(x)
        assert capsys.readouterr().out.split() == ["one", "tensor([0.,", "0.])", "three"]
