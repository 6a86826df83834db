"""Plans that are broken on purpose, at random places: their regions."""

from dataclasses import replace

from tests.checking.rewritten import Rewritten


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


def _reads(program: Rewritten, op: int) -> set[str]:
    return {p.name for p in program.planned.source.bsyms[op].flat_proxy_args}


def _data(program: Rewritten, a: int, ops: tuple[int, ...]) -> bool:
    """Whether one of `ops` reads what step `a` makes: a plan also has edges that only say when something runs."""
    region = program.planned.plan.regions[a]
    bsyms = program.planned.source.bsyms
    made = {p.name for op in region.ops if op not in region.copies for p in bsyms[op].flat_proxy_outs}
    return any(made & _reads(program, op) for op in ops)


def _data_edges(program: Rewritten) -> list[tuple[int, int]]:
    regions = program.planned.plan.regions
    return [(a, b) for a, b in _edges(program) if _data(program, a, regions[b].ops)]


def swapped_regions(program, rng):
    a, b = rng.choice(_data_edges(program))
    regions = list(program.planned.plan.regions)
    regions[a], regions[b] = regions[b], regions[a]
    return program.emit(regions)


def late_region(program, rng):
    a, b = rng.choice(_data_edges(program))
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
    # What is a copy may well be there under its own name too.
    ops = [o for o in regions[i].ops[:-1] if o not in regions[i].copies]
    if not ops:
        return None
    op = rng.choice(ops)
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


def moved_op(program, rng):
    """An op that runs with a region before the one that makes what it reads."""
    regions = list(program.planned.plan.regions)
    found = [
        (a, b, op)
        for a, b in _edges(program)
        for op in regions[b].ops
        if a > 0 and len(regions[b].ops) > 1 and _data(program, a, (op,))
    ]
    if not found:
        return None
    a, b, op = rng.choice(found)
    rest = tuple(o for o in regions[b].ops if o != op)
    regions[b] = replace(regions[b], ops=rest, copies=tuple(c for c in regions[b].copies if c != op))
    to = rng.randrange(a)
    regions[to] = replace(regions[to], ops=(*regions[to].ops, op))
    return program.emit(regions)


def merged_across(program, rng):
    """Two regions that become one although a third runs between them: a cycle."""
    regions = list(program.planned.plan.regions)
    edges = _data_edges(program)
    found = [(a, c) for a, b in edges for d, c in edges if b == d and regions[a].executor and regions[c].executor]
    if not found:
        return None
    a, c = rng.choice(sorted(found))
    ops = tuple(sorted({*regions[a].ops, *regions[c].ops}))
    regions[a] = replace(regions[a], ops=ops, copies=tuple(sorted({*regions[a].copies, *regions[c].copies})))
    del regions[c]
    return program.emit(regions)
