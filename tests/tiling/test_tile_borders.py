"""The narrow inputs of stretches that the forward keeps, and stretches that run once more, beside attention."""

import copy
from types import SimpleNamespace

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.attention.test_head_groups import Layers, assert_right, compiled, few_blocks  # noqa: F401 - a fixture
from tests.tiling.test_tiles import made
from thunder_mem import Tiles, last_plan
from thunder_mem.decisions import partition_choice, refine, tile_borders
from thunder_mem.decisions import program as programs
from thunder_mem.decisions.options import PlanningOptions
from thunder_mem.decisions.program import Program, _only_offered
from thunder_mem.partition.constraints import Constraints


class Layer(nn.Module):
    """Attention behind one product, whose stretch reads the same rows as the residual sum."""

    def __init__(self, heads=8, size=8):
        super().__init__()
        width = heads * size
        self.shape = (1, -1, heads, size)
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, False), nn.Linear(width, width, False)
        self.up, self.down = nn.Linear(width, 4 * width, False), nn.Linear(4 * width, width, False)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).split(x.shape[-1], -1)
        query, key, value = (t.reshape(self.shape).transpose(1, 2) * 1.5 for t in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Tokens(nn.Module):
    """An embedding, and such layers under checkpoints."""

    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(30, 64), nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


def compiled_tokens(**options):
    """The compiled model after one step, whose gradients are right, and the names of its backward's operations."""
    module, _ = made(Tokens(), (1,))
    tokens = torch.arange(512)[None] % 30
    exact, jitted = copy.deepcopy(module).double(), compiled(module, Tiles(rows=100), **options)
    jitted(tokens).backward()
    exact(tokens).backward()
    for ours, right in zip(module.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), right.grad, rtol=1e-4, atol=1e-6)
    return jitted, [b.sym.name for b in thunder.last_backward_traces(jitted)[-1].bound_symbols]


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 9])
def test_choices_are_the_ends_of_the_backward_or_all(layers):
    borders = [frozenset({i}) for i in range(layers)]
    choices = tile_borders._choices(borders)
    assert choices[-1] == borders
    assert all(part in (borders[: len(part)], borders[-len(part) :]) for part in choices)
    assert sorted({len(part) for part in choices}) == sorted({*(k for k in (1, 2, 4) if k < layers), layers})


def test_a_choice_that_was_compared_is_not_made_again(monkeypatch):
    made_of = []
    source = SimpleNamespace(graph=SimpleNamespace(allocator=()), bsyms=())
    monkeypatch.setattr(programs, "with_partition", lambda *args: made_of.append(args[2]) or ("trace", source))
    program = Program("given", "trace", source, (), PlanningOptions(), "fuse", Constraints(), frozenset(), ())
    chosen = frozenset({1})
    program.partitioned(chosen)
    assert program.recomputing(chosen) == ("trace", source, "fuse")
    assert made_of == [chosen]


@pytest.mark.slow
def test_gradients_are_right_if_the_forward_keeps_the_inputs_of_stretches(few_blocks, monkeypatch):  # noqa: F811
    kept = []

    def with_borders_alone(program):
        offered = _only_offered(program.source, program.fuse, program.constraints)
        found = tile_borders.keeping_borders(
            program.partitioned, program.source, program.fuse, program.constraints, offered, program.gathered
        )
        kept.append((offered, found, program.gathered))
        return [found or offered]

    monkeypatch.setattr(tile_borders, "_peak_bytes", lambda partitioned, rebuilt: len(rebuilt))
    monkeypatch.setattr(partition_choice, "free_partitions", with_borders_alone)
    _, backward = compiled_tokens()
    ((offered, found, gathered),) = kept
    assert found is not None and found < offered
    assert gathered and gathered <= found and "embedding" in backward  # which costs as good as nothing


@pytest.mark.slow
def test_a_policy_may_recompute_the_inputs_of_stretches(few_blocks):  # noqa: F811
    jitted, _ = compiled_tokens(recompute=lambda op, graph: "recompute" if op.word == "Add" else "auto")
    assert [d for d in last_plan(jitted).decisions if d.what == "recompute"]


@pytest.mark.slow
def test_gradients_are_right_if_stretches_run_once_more(few_blocks, monkeypatch):  # noqa: F811
    monkeypatch.setattr(refine, "_MOST_TIME", 1.0)
    chosen = []

    class Noted(refine._Repetition):
        def __call__(self, planned):
            trace, count = super().__call__(planned)
            chosen.append(count)
            return trace, count

    monkeypatch.setattr(refine, "_Repetition", Noted)
    module, x = made(Layers(is_causal=True, keys=8), (1, 512, 64))
    jitted = assert_right(module, x, Tiles(rows=100), 2 * ["8 groups"])
    assert any(chosen) and last_plan(jitted) is not None


@pytest.mark.slow
def test_rows_of_a_table_are_gathered_for_each_loop_that_reads_them(few_blocks, monkeypatch):  # noqa: F811
    """What stretches that run once more read need not wait for them, nor for the loop that overwrites it."""
    monkeypatch.setattr(refine, "_MOST_TIME", 1.0)
    remakes, rewrites = refine._with_remakes, []

    class Noted(refine._Repetition):
        def __call__(self, planned):
            rewrites.append("again")
            return super().__call__(planned)

    monkeypatch.setattr(refine, "_Repetition", Noted)
    monkeypatch.setattr(refine, "_with_remakes", lambda planned: (rewrites.append("remakes"), remakes(planned))[1])
    jitted, backward = compiled_tokens()
    assert [d.what for d in last_plan(jitted).decisions if d.what in (refine.TILES_AGAIN, "rematerialized")]
    assert "again, remakes" in ", ".join(rewrites)
    assert backward.count("embedding") == 3
    assert backward.count("chunk_loop_backward_over") == 4 and "chunk_loop_backward" not in backward
