"""Emitted traces that are broken on purpose, at random places: their order, operations and results."""

import torch
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from tests.checking.rewritten import effects_in, positions, with_bsyms
from tests.checking.traces import replaced
from thunder_mem.semantics.aliases import Aliases
from thunder_mem.trace.reading import BACKWARD


def swapped_effects(program, rng):
    """Two draws, two writes, or a draw and a write of what was drawn, in the other order."""
    at = positions(program.after, lambda b: any(e.channels or e.writes for e in effects_in(b)))
    if len(at) < 2:
        return None
    i = rng.randrange(len(at) - 1)
    a, b = at[i], at[i + 1]
    first, second = (effects_in(program.after.bound_symbols[k])[0] for k in (a, b))
    if not (set(first.channels) & set(second.channels) or (first.writes and first.writes == second.writes)):
        return None
    bsyms = list(program.after.bound_symbols)
    bsyms[a], bsyms[b] = bsyms[b], bsyms[a]
    return replaced(program.after, bsyms)


def lost_write(program, rng):
    at = positions(program.after, lambda b: any(e.writes for e in effects_in(b)))
    return with_bsyms(program, rng.choice(at)) if at else None


def late_reader(program, rng):
    """A read of memory that is moved behind the write to it."""
    bsyms = list(program.after.bound_symbols)
    aliases = Aliases(bsyms)
    found = []
    for i, write in enumerate(bsyms):
        written = {aliases(name) for e in effects_in(write) for name in e.writes}
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

    at = positions(program.after, lambda b: literal(b) is not None and not b.sym.is_fusion)
    if not at:
        return None
    i = rng.choice(at)
    b = program.after.bound_symbols[i]
    k = literal(b)
    return with_bsyms(program, i, b.from_bsym(args=(*b.args[:k], b.args[k] + 1, *b.args[k + 1 :])))


def exchanged_operands(program, rng):
    def differ(b):
        return len(b.args) > 1 and all(isinstance(a, TensorProxy) for a in b.args[:2]) and b.args[0] is not b.args[1]

    at = positions(program.after, lambda b: b.sym.name == "matmul" and differ(b) and b.args[0].name != b.args[1].name)
    if not at:
        return None
    i = rng.choice(at)
    b = program.after.bound_symbols[i]
    return with_bsyms(program, i, b.from_bsym(args=(b.args[1], b.args[0])))


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
    return with_bsyms(program, i, fusion.from_bsym(subsymbols=parts))


def _fusion(program, rng):
    at = positions(program.after, lambda b: b.sym.is_fusion)
    return (i := rng.choice(at), program.after.bound_symbols[i]) if at else None


def unnamed_input(program, rng):
    if (found := _fusion(program, rng)) is None:
        return None
    i, fusion = found
    read = {p.name for s in fusion.subsymbols for p in s.flat_proxy_args}
    kept = [a for a in fusion.args if a.name not in read]
    if len(kept) == len(fusion.args):  # it only hands something on
        return None
    return with_bsyms(program, i, fusion.from_bsym(args=tuple(kept)))


def empty_fusion_part(program, rng):
    if (found := _fusion(program, rng)) is None:
        return None
    i, fusion = found
    made = {p.name for p in fusion.flat_proxy_outs}
    k = rng.choice([k for k, s in enumerate(fusion.subsymbols) if made & {p.name for p in s.flat_proxy_outs}])
    return with_bsyms(program, i, fusion.from_bsym(subsymbols=[*fusion.subsymbols[:k], *fusion.subsymbols[k + 1 :]]))


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
    return with_bsyms(program, i, corrupted) if _matters(fusion, k) else None


def another_part(program, rng):
    """Another operation inside of a composite that a fusion runs, whose own arguments stay as they were."""
    if (found := _fusion(program, rng)) is None:
        return None
    i, fusion = found
    for k, composite in enumerate(fusion.subsymbols):
        if not composite.subsymbols or not _matters(fusion, k):
            continue
        *parts, last = composite.subsymbols
        others = [p for p in composite.flat_proxy_args if isinstance(p, TensorProxy)]
        if isinstance(last.args[0], TensorProxy) and (others := [p for p in others if p.name != last.args[0].name]):
            wrong = composite.from_bsym(subsymbols=[*parts, last.from_bsym(args=(others[0], *last.args[1:]))])
            parts = [*fusion.subsymbols[:k], wrong, *fusion.subsymbols[k + 1 :]]
            return with_bsyms(program, i, fusion.from_bsym(subsymbols=parts))
    return None


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
    at = positions(
        program.after, lambda b: isinstance(b.output, TensorProxy) and not b.sym.is_fusion and b.sym != prims.get_grad
    )
    at = [i for i in at if program.after.bound_symbols[i].sym.id is not PrimIDs.UNPACK_TRIVIAL]
    if len(at) < 2:
        return None
    a, b = sorted(rng.sample(at, 2))
    first, second = program.after.bound_symbols[a], program.after.bound_symbols[b]
    if first.sym == second.sym:  # which may well be the same value, computed again
        return None
    return with_bsyms(program, b, second, second.from_bsym(output=first.output))


def untagged(program, rng):
    at = positions(program.after, lambda b: b.sym.is_fusion and BACKWARD in b.tags)
    if not at:
        return None
    i = rng.choice(at)
    b = program.after.bound_symbols[i]
    return with_bsyms(program, i, b.from_bsym(tags=b.tags - {BACKWARD}))


def mistagged(program, rng):
    at = positions(program.after, lambda b: b.sym.is_fusion and BACKWARD not in b.tags)
    if not at or "fw_flat_out" not in program.after.bound_symbols[-1].args[0]:
        return None
    i = rng.choice(at)
    b = program.after.bound_symbols[i]
    return with_bsyms(program, i, b.from_bsym(tags=b.tags | {BACKWARD}))


def no_return(program, rng):
    return replaced(program.after, program.after.bound_symbols[:-1])
