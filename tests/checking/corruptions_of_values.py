"""Emitted traces in which something else is computed, written, drawn or handed on than the program says."""

from thunder.core.prims import PrimIDs, get_grad
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

from tests.checking.rewritten import Rewritten, effects_in, positions, with_bsyms
from tests.checking.traces import replaced
from thunder_mem.semantics.aliases import Aliases


def _renamed(bsyms: list[BoundSymbol], old: TensorProxy, new: TensorProxy) -> list[BoundSymbol]:
    """`bsyms` with `new` for `old` wherever it is read."""
    return [b.from_bsym_swap_proxies({variableify(old): new}, skip_output=True) for b in bsyms]


def _new_name(program: Rewritten, like: TensorProxy) -> TensorProxy:
    with tracectx(program.after):
        return like.replace(name=f"wrong_{len(program.after.names)}")


def _draws(program: Rewritten) -> list[int]:
    return positions(program.after, lambda b: any(c.startswith("rng") for e in effects_in(b) for c in e.channels))


def _writes(program: Rewritten) -> list[int]:
    return positions(program.after, lambda b: b.sym.name == "copy_")


def _first(p: TensorProxy) -> str:
    return p.name.removeprefix("bw_")


def another_operand(program, rng):
    """An operation of another tensor of the same shape."""
    bsyms = program.after.bound_symbols
    found = []
    known: dict[str, tuple[TensorProxy, object]] = {}  # what there is, and how it was made: twice may be the same
    for i, b in enumerate(bsyms):
        a = b.args[0] if b.args else None
        if isinstance(a, TensorProxy) and b.flat_proxy_outs and not b.sym.is_fusion:
            _, maker = known.get(a.name, (a, None))
            # What is computed again has the name of the first, after "bw_".
            others = [p for p, made in known.values() if _first(p) != _first(a) and made != maker]
            found += [(i, p) for p in others if p.shape == a.shape and p.dtype == a.dtype]
        if b.sym.name != "update_aliases" and b.sym.id is not PrimIDs.UNPACK_TRIVIAL:
            made = (b.sym.name, tuple(p.name for p in b.flat_proxy_args), i if b.sym.is_fusion else 0)
            known |= {p.name: (p, made) for p in b.flat_proxy_outs if isinstance(p, TensorProxy)}
    if not found:
        return None
    i, p = rng.choice(found)
    return with_bsyms(program, i, bsyms[i].from_bsym(args=(p, *bsyms[i].args[1:])))


def another_integer(program, rng):
    """Another dim, size or start: one whole number of one operation."""

    def places(b):
        tuples = [(k, j) for k, x in enumerate(b.args) if isinstance(x, tuple | list) for j, n in enumerate(x)]
        return [(k, j) for k, j in tuples if type(b.args[k][j]) is int]

    at = positions(program.after, lambda b: not b.sym.is_fusion and bool(places(b)))
    if not at:
        return None
    i = rng.choice(at)
    b = program.after.bound_symbols[i]
    k, j = rng.choice(places(b))
    wrong = (*b.args[k][:j], b.args[k][j] + 1, *b.args[k][j + 1 :])
    return with_bsyms(program, i, b.from_bsym(args=(*b.args[:k], wrong, *b.args[k + 1 :])))


def _in_fusion(program, rng, wanted):
    """A fusion and one of its members that `wanted` takes."""
    found = [
        (i, k)
        for i, b in enumerate(program.after.bound_symbols)
        if b.sym.is_fusion
        for k, s in enumerate(b.subsymbols)
        if wanted(s)
    ]
    if not found:
        return None
    i, k = rng.choice(found)
    return i, program.after.bound_symbols[i], k


def another_number_in_a_fusion(program, rng):
    def literal(b):
        return next((k for k, x in enumerate(b.args) if type(x) is float), None)

    if (found := _in_fusion(program, rng, lambda s: literal(s) is not None)) is None:
        return None
    i, fusion, k = found
    part, at = fusion.subsymbols[k], literal(fusion.subsymbols[k])
    wrong = part.from_bsym(args=(*part.args[:at], -part.args[at] - 1, *part.args[at + 1 :]))
    parts = [*fusion.subsymbols[:k], wrong, *fusion.subsymbols[k + 1 :]]
    return with_bsyms(program, i, fusion.from_bsym(subsymbols=parts))


def lost_operation_in_a_fusion(program, rng):
    """An operation that is left out, its readers given its operand: a lost cast, a lost sign."""

    def passes(s):
        operand = s.args[0] if s.args else None
        out = s.output
        alike = isinstance(operand, TensorProxy) and isinstance(out, TensorProxy) and operand.shape == out.shape
        # A copy that is only noted (`shallow_copy`) is still an operation of the program.
        return alike and operand.name != out.name

    if (found := _in_fusion(program, rng, passes)) is None:
        return None
    i, fusion, k = found
    part = fusion.subsymbols[k]
    if part.output.name in {p.name for p in fusion.flat_proxy_outs}:
        return None
    rest = _renamed(fusion.subsymbols[k + 1 :], part.output, part.args[0])
    return with_bsyms(program, i, fusion.from_bsym(subsymbols=[*fusion.subsymbols[:k], *rest]))


def write_elsewhere(program, rng):
    """A write that lands in other memory."""
    bsyms = program.after.bound_symbols
    aliases = Aliases(bsyms)
    found = []
    for i in _writes(program):
        _, to, *_ = bsyms[i].args
        before = [p for b in bsyms[:i] for p in b.flat_proxy_outs if isinstance(p, TensorProxy)]
        found += [(i, p) for p in before if p.shape == to.shape and aliases(p.name) != aliases(to.name)]
    if not found:
        return None
    i, p = rng.choice(found)
    b = bsyms[i]
    return with_bsyms(program, i, b.from_bsym(args=(b.args[0], p, *b.args[2:])))


def write_of_another_value(program, rng):
    bsyms = program.after.bound_symbols
    found = []
    for i in _writes(program):
        value = bsyms[i].args[0]
        before = [p for b in bsyms[:i] if b.args for p in b.flat_proxy_outs if isinstance(p, TensorProxy)]
        found += [(i, p) for p in before if p.name != value.name and p.shape == value.shape]
    if not found:
        return None
    i, p = rng.choice(found)
    b = bsyms[i]
    return with_bsyms(program, i, b.from_bsym(args=(p, *b.args[1:])))


def extra_write(program, rng):
    """A write that happens twice, the second time at the end."""
    at = _writes(program)
    if not at:
        return None
    b = program.after.bound_symbols[rng.choice(at)]
    again = b.from_bsym(output=_new_name(program, b.flat_proxy_outs[0]))
    result = program.after.bound_symbols[-1]
    return replaced(program.after, [*program.after.bound_symbols[:-1], again, result])


def extra_draw(program, rng):
    """A draw whose result nobody reads: all later ones differ."""
    at = _draws(program)
    if not at:
        return None
    i = rng.choice(at)
    b = program.after.bound_symbols[i]
    again = b.from_bsym(output=_new_name(program, b.flat_proxy_outs[0]))
    return with_bsyms(program, i, again, b)


def lost_draw(program, rng):
    """A draw that is left out, its readers given another."""
    at = _draws(program)
    bsyms = list(program.after.bound_symbols)
    outs = {i: bsyms[i].flat_proxy_outs[0] for i in at}
    pairs = [(i, k) for i in at for k in at if i < k and outs[i].shape == outs[k].shape]
    if not pairs:
        return None
    i, k = rng.choice(pairs)
    rest = _renamed(bsyms[k + 1 :], outs[k], outs[i])
    return replaced(program.after, [*bsyms[:k], *rest])


def _drawn_or_read_again(program: Rewritten, rng, at: list[int], after: int | None = None) -> TraceCtx | None:
    """One of the operations `at`, computed once more before its last reader, which is given the new result."""
    bsyms = list(program.after.bound_symbols)
    found = []
    for i in at:
        out = bsyms[i].flat_proxy_outs[0]
        readers = [k for k in range(i + 1, len(bsyms) - 1) if out.name in {p.name for p in bsyms[k].flat_proxy_args}]
        readers = [k for k in readers if bsyms[k].sym.name != "update_aliases"]
        if readers and (after is None or readers[-1] > after > i):
            found.append((i, readers[-1]))
    if not found:
        return None
    i, k = rng.choice(found)
    out = bsyms[i].flat_proxy_outs[0]
    new = _new_name(program, out)
    again = bsyms[i].from_bsym(output=new)
    return replaced(program.after, [*bsyms[:k], again, *_renamed(bsyms[k : k + 1], out, new), *bsyms[k + 1 :]])


def drawn_again(program, rng):
    """A draw that is repeated for the backward: another mask than in the forward."""
    return _drawn_or_read_again(program, rng, _draws(program))


def read_again_after_a_write(program, rng):
    """A value that is computed again from memory that was overwritten since."""
    bsyms = program.after.bound_symbols
    aliases = Aliases(bsyms)
    for i in rng.sample(writes := _writes(program), len(writes)):
        memory = aliases(bsyms[i].args[1].name)
        readers = [
            k
            for k in range(i)
            if memory in {aliases(p.name) for p in bsyms[k].flat_proxy_args}
            and bsyms[k].flat_proxy_outs
            and not bsyms[k].sym.is_fusion
            and memory not in {aliases(p.name) for p in bsyms[k].flat_proxy_outs}
        ]
        if wrong := _drawn_or_read_again(program, rng, readers, after=i):
            return wrong
    return None


def exchanged_gradients(program, rng):
    """The gradients of two results of the forward, exchanged."""
    at = positions(program.after, lambda b: b.sym == get_grad)
    bsyms = list(program.after.bound_symbols)
    pairs = [(a, b) for a in at for b in at if a < b and bsyms[a].args[0].name != bsyms[b].args[0].name]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    bsyms[a], bsyms[b] = (
        bsyms[a].from_bsym(args=bsyms[b].args),
        bsyms[b].from_bsym(args=bsyms[a].args),
    )
    return replaced(program.after, bsyms)


def _returning(program: Rewritten, **changed: object) -> TraceCtx:
    result = program.after.bound_symbols[-1]
    wrong = result.from_bsym(args=({**result.args[0], **changed},))
    return replaced(program.after, [*program.after.bound_symbols[:-1], wrong])


def lost_gradient(program, rng):
    """An argument whose gradient is missing."""
    returned = program.after.bound_symbols[-1].args[0]
    if not isinstance(returned, dict) or "fw_flat_out" not in returned:
        return None
    gradients = list(returned["output"])
    at = [k for k, g in enumerate(gradients) if isinstance(g, TensorProxy)]
    if not at:
        return None
    gradients[rng.choice(at)] = None
    return _returning(program, output=tuple(gradients))


def lost_result(program, rng):
    """One result of the forward fewer."""
    returned = program.after.bound_symbols[-1].args[0]
    if not isinstance(returned, dict) or len(returned.get("fw_flat_out", ())) < 2:
        return None
    results = list(returned["fw_flat_out"])
    del results[rng.randrange(len(results))]
    return _returning(program, fw_flat_out=tuple(results))


VALUES = (
    another_operand, another_integer, another_number_in_a_fusion, lost_operation_in_a_fusion, write_elsewhere,
    write_of_another_value, extra_write, extra_draw, lost_draw, drawn_again, read_again_after_a_write,
    exchanged_gradients, lost_gradient, lost_result,
)  # fmt: skip
