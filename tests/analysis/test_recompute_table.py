"""The table of what could be recomputed: what it lists, and that its figures are those of the plans that it names."""

import io
import json
import re

import pytest
import thunder
import torch
import torch.nn.functional as F
from rich.console import Console
from torch.utils.checkpoint import checkpoint

from thunder_mem import MemEfficient, last_plan, recompute_table
from thunder_mem.analysis.symbolic_sizes import Dims
from thunder_mem.prediction.simulate import simulate
from thunder_mem.trace.origins import layer_numbers, word

FEW = "it draws random numbers, fewer than its generator's state has bytes"


class Block(torch.nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


class Model(torch.nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.h = torch.nn.ModuleList(Block() for _ in range(layers))
        self.head = torch.nn.Linear(24, 5)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def table(model):
    return recompute_table(model, torch.zeros(3, 17, 24), dims={"B": 3, "T": 17}, executors=[])


def received(plan) -> int:
    return next(d for d in plan.decisions if d.what == "recompute").after_bytes


@pytest.mark.slow
def test_it_lists_what_the_backward_receives(table):
    gelu = table["Gelu+"]
    assert gelu.count == 2 and gelu.layers == (0, 1) and gelu.modules == ("h.#",)
    assert gelu.shapes == ("(B, T, 48)",) and gelu.symbolic_bytes == ("192*B*T",)
    assert gelu.now == "received" and gelu.values_bytes == gelu.count * gelu.each_bytes
    assert gelu.each_bytes % (4 * 3 * 17 * 48) == 0
    assert gelu.config == "Gelu+:recompute:-1"
    assert any("test_recompute_table.py" in source for source in gelu.sources)
    assert {"LayerNorm+", "Linear+"} <= {row.pattern for row in table.rows}
    assert [row.saved_bytes for row in table.rows] == sorted((row.saved_bytes for row in table.rows), reverse=True)


def test_random_numbers_are_listed_as_kept():
    def fn(x, w):
        return torch.rand_like(x) * (x @ w)

    found = recompute_table(fn, *(torch.ones(4, 4, requires_grad=True) for _ in range(2)), executors=[])
    assert [(k.pattern, k.nbytes, k.reason) for k in found.kept] == [("RandLike+", 64, FEW)]
    assert "not RandLike+ (1, 64 B): it draws random numbers" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_every_row_says_what_its_configuration_does(model, table, step):
    """Each configuration, compiled: bytes received and peak are the row's."""
    for row in table.rows[::step]:
        jitted = thunder.jit(model, executors=[], transforms=[MemEfficient(recompute=row.config, strict=True)])
        thunder.compile_data(jitted).get_computation_and_inputs(torch.zeros(3, 17, 24))
        plan = last_plan(jitted)
        assert received(plan) == table.received_bytes - row.saved_bytes, row.config
        assert plan.candidate.peak_bytes <= row.peak_bytes, row.config  # it may have compared more
        assert row.peak_change_bytes == row.peak_bytes - table.peak_bytes


def test_all_at_once(model, table):
    config = table.config()
    jitted = thunder.jit(model, executors=[], transforms=[MemEfficient(recompute=config, strict=True)])
    thunder.compile_data(jitted).get_computation_and_inputs(torch.zeros(3, 17, 24))
    assert received(last_plan(jitted)) < table.received_bytes - max(row.saved_bytes for row in table.rows)
    assert table.config("Gelu", "Linear+") == "Gelu+:recompute:-1,Linear+:recompute:-1"
    with pytest.raises(KeyError):
        table.config("Gello")


@pytest.mark.slow
def test_what_fused_code_rebuilds_is_marked(model):
    found = recompute_table(model, torch.zeros(3, 17, 24), executors=["mem_pointwise"], peaks=False)
    assert found["Gelu+"].now == "rebuilt" and found["Gelu+"].ms_per_gib is None
    assert found["Gelu+"].peak_bytes is None


def test_a_jitted_function_is_taken_as_it_is(model):
    jitted = thunder.jit(model, executors=[], transforms=[MemEfficient(recompute="Gelu+:1:-1")])
    found = recompute_table(jitted, torch.zeros(3, 17, 24), peaks=False)
    assert found["Gelu+"].now == "rebuilt"
    assert thunder.cache_misses(jitted) == 0  # it was not compiled itself


def test_what_a_checkpoint_recomputes_is_marked():
    def fn(x, w):
        return checkpoint(lambda x, w: F.gelu(x @ w).exp(), x, w, use_reentrant=False)

    found = recompute_table(fn, *(torch.ones(4, 4, requires_grad=True) for _ in range(2)), executors=[])
    assert found.rows and all(row.now == "rebuilt" for row in found.rows)


def test_casts_may_be_compromised():
    def fn(x, w):
        return (x @ w).float().sin()

    args = [torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    found = recompute_table(fn, *args, executors=[])
    both = {row.strategy: row for row in found.rows}
    assert both["compromised"].saved_bytes == 32 and both["recompute"].saved_bytes == 64
    assert both["compromised"].config.endswith(":compromised:-1") and both["compromised"].ms < both["recompute"].ms


@pytest.mark.slow
def test_times_are_those_of_the_device():
    with simulate("H100-80GB"):
        with torch.device("cuda"):
            model, x = Model(), torch.zeros(3, 17, 24)
        found = recompute_table(model, x)
    assert found.device == "H100-80GB"
    assert all(row.ms > 0 for row in found.rows if row.now == "received")


def test_it_prints_and_saves(table):
    text = str(table)
    assert text.splitlines()[0].startswith("Peak ") and "Gelu+:recompute:-1" in text
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    assert "LayerNorm+" in console.file.getvalue()
    page = table._repr_html_()
    assert page.count("<tr>") == 1 + len(table.rows) and "(B, T, 48)" in page
    data = json.loads(json.dumps(table.to_json()))
    assert len(data["rows"]) == len(table.rows) and data["rows"][0]["ms_per_gib"] == table.rows[0].ms_per_gib


def test_what_cannot_be_tabulated_is_said(model):
    with pytest.raises(ValueError, match="has no backward"):
        recompute_table(lambda x: x.sin(), torch.zeros(3))
    for given in (3, "model", torch.nn.Linear):
        with pytest.raises(TypeError, match=r"recompute_table takes a function, a module or what thunder.jit made of"):
            recompute_table(given, torch.zeros(3))
    with pytest.raises(ValueError, match=r"dim B is 7, and nothing in this program has that size; sizes are 3, .*24"):
        recompute_table(model, torch.zeros(3, 17, 24), dims={"B": 7}, executors=[])


def test_sizes_that_mean_two_things_are_warned_about(model):
    """A batch that equals a width by chance is still tabulated."""
    with pytest.warns(UserWarning, match=r"B has a size that t_h_0_\w+ \(24, 48\) has too: the table writes \(24, B\)"):
        recompute_table(model, torch.zeros(48, 3, 24), dims={"B": 48}, executors=[], peaks=False)
    with pytest.warns(UserWarning, match=r"B has a size that x \(4, 4\) has twice: the table writes \(B, B\)"):
        recompute_table(lambda x: (x @ x).exp().sin(), torch.ones(4, 4, requires_grad=True), dims={"B": 4})


@pytest.mark.parametrize(
    "sizes, reason",
    [
        ({"B": 1}, "at least 2"),
        ({"B": True}, "at least 2"),
        ({"B!": 3}, "a dim has a name"),
        ({"B": 3, "T": 3}, "are both 3"),
        ({"B": 2, "T": 3, "S": 6}, "are both 6"),
    ],
)
def test_dims_that_could_be_mistaken(sizes: dict, reason: str):
    with pytest.raises(ValueError, match=reason):
        Dims(sizes)


def test_the_words_of_patterns():
    names = ("gelu", "softmax", "layer_norm", "scaled_dot_product_attention", "type_as", "mul_", "true_divide")
    assert [word(n) for n in names] == ["Gelu", "Softmax", "LayerNorm", "Attention", "Cast", "Mul", "Div"]


def test_layers_by_names():
    names = [f"a.{i}.b.{j}.w" for i in range(4) for j in range(2)] + ["head.w"]
    assert layer_numbers(names) == {n: int(re.findall(r"\d+", n)[0]) for n in names[:-1]}
