"""Questions about all borders at once, against the plain definitions for one set of operations at a time."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from thunder_mem.loop_body.borders import Borders, borders_between


def program(seed: int) -> SimpleNamespace:
    """Operations over random earlier values; some read arguments alone, and some results are returned."""
    rng = random.Random(seed)
    names, leaves = ["a0", "a1"], []
    for index in range(14):
        inputs = [SimpleNamespace(name=n) for n in rng.sample(names, k=rng.randint(1, 2))]
        outputs = [SimpleNamespace(name=f"t{index}_{j}") for j in range(rng.randint(1, 2))]
        leaves.append(SimpleNamespace(index=index, inputs=inputs, outputs=outputs))
        names += [o.name for o in outputs]
    readers: dict[str, list[SimpleNamespace]] = {}
    for leaf in leaves:
        for t in leaf.inputs:
            readers.setdefault(t.name, []).append(leaf)
    producer = {o.name: leaf for leaf in leaves for o in leaf.outputs}
    return SimpleNamespace(
        leaves=leaves, producer=producer, consumers=readers, returned=set(rng.sample(names, k=3)), names=names
    )


def borders(p: SimpleNamespace, seed: int) -> Borders:
    rng = random.Random(seed)
    free = rng.sample(range(14), k=10)
    core, more, other = frozenset(free[:2]), free[2:6], free[6:]
    above = [core | frozenset(more[:k]) for k in range(5)]
    below = [core | frozenset(other[:k]) for k in range(5)]
    return borders_between(p, above, below)


def comes_back(p: SimpleNamespace, inside: frozenset[int]) -> bool:
    """Whether a path leads from a member through at least one other operation to a member."""
    after = {leaf.index: {r.index for o in leaf.outputs for r in p.consumers.get(o.name, ())} for leaf in p.leaves}
    pending, seen = [r for i in inside for r in after[i] if r not in inside], set()
    while pending:
        index = pending.pop()
        if index in inside:
            return True
        if index not in seen:
            seen.add(index)
            pending += after[index]
    return False


@pytest.mark.parametrize("seed", range(12))
def test_each_border_is_judged_as_its_own_set(seed):
    p = program(seed)
    found = borders(p, seed)
    sets = [found.members(border) for border in range(len(found))]
    assert len(sets) == 25
    assert [bool(mask) for mask in found.comes_back()] == [comes_back(p, inside) for inside in sets]
    for name in p.names:
        maker = p.producer.get(name)
        readers = {leaf.index for leaf in p.consumers.get(name, ())}
        made = [maker is not None and maker.index in inside for inside in sets]
        read = [bool(readers & inside) for inside in sets]
        out = [m and (name in p.returned or not readers <= inside) for m, inside in zip(made, sets, strict=True)]
        assert found.makes(name).tolist() == made
        assert found.reads(name).tolist() == read
        assert found.lets_out(name).tolist() == out
        for at in (3, 9):
            waits = (maker is None or maker.index < at) and (name in p.returned or any(r > at for r in readers))
            whole = [o if m else r or waits for o, m, r in zip(out, made, read, strict=True)]
            assert found.exists_whole(name, at).tolist() == whole


def test_a_choice_keeps_what_each_set_is():
    found = borders(program(1), 1)
    which = found.holds(min(found.row_of))
    kept = found.only(which)
    sets = [found.members(border) for border in range(len(found)) if which[border]]
    assert [kept.members(border) for border in range(len(kept))] == sets
    assert kept.reach.tolist() == found.reach[:, which].tolist()
