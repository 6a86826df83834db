"""Run a trace on symbols: the values, writes, draws and communication of a program, as numbers.

The method is value numbering. The symbol of a value holds its operation, its operands, and the state of the memory,
random generator and process group that it used. A value that was moved or computed twice has the same number, unless it
moved across a write that it can see. A composite has the results of its operations, because an executor (nvFuser) may
run these instead. What a region or kernel writes its results over has no value afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

from thunder.core import devices, dtypes
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten_with_dataclass
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.core.trace import TraceCtx

from thunder_mem.semantics.aliases import Aliases
from thunder_mem.semantics.collectives import awaited_futures, is_gather
from thunder_mem.semantics.effects import Effects, effects_of
from thunder_mem.semantics.op_traits import traits_of
from thunder_mem.trace.reading import proxies_in

__all__ = ["Numbers", "Outcome", "VerificationError", "outcome_of"]

_NO_VALUES = {PrimIDs.COMMENT, PrimIDs.DEL, PrimIDs.UNPACK_TRIVIAL}


class VerificationError(RuntimeError):
    """The planned trace is not the original program; the message names the first difference."""


@dataclass
class Numbers:
    """Numbers of values, the same for the same content; one table for the traces that are compared."""

    number_of: dict[Hashable, int] = field(default_factory=dict)
    name_of: list[str] = field(default_factory=list)
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # per composite, its results as its parts make them
    effects: dict[int, tuple[Effects, BoundSymbol]] = field(default_factory=dict)  # by the bound symbol's identity

    def number(self, content: Hashable, name: str) -> int:
        number = self.number_of.setdefault(content, len(self.name_of))
        if number == len(self.name_of):
            self.name_of.append(name)
        return number

    def effects_of(self, bsym: BoundSymbol) -> Effects:
        # Most bound symbols stand in both traces.
        if (known := self.effects.get(id(bsym))) is None:
            known = self.effects[id(bsym)] = effects_of(bsym), bsym
        return known[0]


@dataclass(frozen=True)
class Outcome:
    """The visible results of a program, as numbers.

    Attributes:
        returned: per returned leaf, the value and the state of its memory.
        arguments: per argument that may have been overwritten, the state of its memory.
        channels: per hidden state, all of its events, in order.
        values: per name, its value, even if its memory has another content since.
    """

    returned: tuple[Hashable, ...]
    arguments: dict[str, int]
    channels: dict[str, tuple[int, ...]]
    values: dict[str, int]


def outcome_of(
    trace: TraceCtx, numbers: Numbers, planned: Outcome | None = None, trusted: frozenset[str] = frozenset()
) -> Outcome:
    """The outcome of a trace.

    Args:
        trace: a plain or joint trace.
        numbers: the table of all traces that are compared.
        planned: the outcome of the original program, which `trace` replaces.
        trusted: names whose values are the program's by assumption.

    Raises:
        VerificationError: the trace uses what it does not have, or computes from other values than `planned` did.
    """
    return _Run(trace, numbers, planned, trusted).outcome()


class _Run:
    """A trace, run on numbers."""

    def __init__(self, trace: TraceCtx, numbers: Numbers, planned: Outcome | None, trusted: frozenset[str]) -> None:
        self.trace = trace
        self.numbers = numbers
        self.trusted = trusted  # names whose values are the program's by assumption
        self.planned = planned  # the outcome of an earlier run, of the original program
        self.known = len(numbers.name_of) if planned else None
        self.values: dict[str, int] = {}
        self.aliases = Aliases(trace.bound_symbols)
        self.written = {self.aliases(name) for b in _flat(trace.bound_symbols) for name in numbers.effects_of(b).writes}
        self.memory: dict[str, int] = {}
        self.channels: dict[str, list[int]] = {}
        self.barriers = self.contexts = 0
        self.overwritten: dict[str, str] = {}  # names whose memory has another content, and what wrote it
        self.lost: dict[str, int] = {}  # their values
        self.noted: dict[int, tuple[Hashable, int]] = {}  # a generator's state: the draw from it, and its number
        self.away: dict[str, str] = {}  # names that only one transfer may use, and that transfer
        self.beside: dict[str, BoundSymbol] = {}  # handles of work that runs beside, and what it is

    def outcome(self) -> Outcome:
        arguments = proxies_in((self.trace.args, self.trace.kwargs))
        unpacked = (b.flat_proxy_outs for b in self.trace.bound_symbols if b.sym.id is PrimIDs.UNPACK_TRIVIAL)
        for p in chain(arguments, *unpacked):
            self.values[p.name] = self.numbers.number(("argument", p.name), p.name)
        *body, result = (b for b in self.trace.bound_symbols if b.sym.id not in _NO_VALUES)
        if result.sym.id is not PrimIDs.RETURN:
            raise VerificationError(f"the trace ends with {result.sym.name} and not with its return")
        for bsym in body:
            self._check_beside(bsym)
            self._take(bsym)
            self._forget_overwritten(bsym)
        if self.beside:
            raise VerificationError(f"{next(iter(self.beside))}, which runs beside other work, never ends")
        return Outcome(
            returned=tuple(self._content(x) for x in tree_flatten_with_dataclass((result.args, result.kwargs))[0]),
            arguments={p.name: self._state(p.name) for p in arguments if self.aliases(p.name) in self.written},
            channels={name: tuple(numbers) for name, numbers in self.channels.items()},
            values=self.values | self.lost,
        )

    def _take(self, bsym: BoundSymbol) -> None:
        if not bsym.sym.is_fusion:
            self._execute(bsym)
            return
        handed_in = {p.name for p in bsym.flat_proxy_args}
        for name in handed_in:
            self._value(name, bsym)
        if not bsym.subsymbols:  # an executor that does not tell what it fused
            self.values.update({p.name: self._trust(p.name, bsym) for p in bsym.flat_proxy_outs})
            return
        names = {p.name for part in bsym.subsymbols for p in (*part.flat_proxy_args, *part.flat_proxy_outs)}
        outer = {name for name in names if name in self.values}  # which does not look at all that there is
        for part in bsym.subsymbols:
            for p in part.flat_proxy_args:
                if p.name in outer and p.name not in handed_in:
                    raise VerificationError(f"{bsym.sym.name} uses {p.name}, which it is not given")
            self._execute(part)
            if self._is_taken_apart(part) and (other := self._otherwise(part)):
                raise VerificationError(f"{bsym.sym.name} makes {other} of other values than {part.sym.name} does")
        handed_out = {p.name for p in bsym.flat_proxy_outs}
        if missing := sorted(name for name in handed_out if name not in self.values):
            raise VerificationError(f"{bsym.sym.name} hands out {missing[0]}, which it does not make")
        for name in names - outer - handed_out:
            self.values.pop(name, None)

    def _forget_overwritten(self, bsym: BoundSymbol) -> None:
        """Forget the values whose memory `bsym` takes for its results; nothing may use them later."""
        if not (traits := traits_of(bsym)).in_place:
            return
        for p in traits.writes(bsym):
            for name in self._names_of_memory(p.name):
                if (value := self.values.pop(name, None)) is not None:
                    self.overwritten[name], self.lost[name] = bsym.sym.name, value

    @cached_property
    def _names_of_memory(self) -> Callable[[str], list[str]]:
        """By name, all names that may share its memory, apart from results that are written over it."""
        aliases = Aliases(self.trace.bound_symbols, in_place=False)
        names: dict[str, list[str]] = {}
        made = (p.name for b in _flat(self.trace.bound_symbols) for p in b.flat_proxy_outs)
        for name in dict.fromkeys(made):
            names.setdefault(aliases(name), []).append(name)
        return lambda name: names[aliases(name)]

    def _transfer(self, bsym: BoundSymbol) -> None:
        """Check a transfer: the fetched value is the offloaded one; in between only the next transfer may use it."""
        name, made = bsym.sym.name, bsym.flat_proxy_outs[0].name
        source, *kept = (p.name for p in bsym.flat_proxy_args)
        if (expected := self.away.get(source, "offload")) != name:
            raise VerificationError(f"{name} takes {source}, which is for {expected}")
        if name == "offload_wait" and self._value(kept[0], bsym) != self._value(source, bsym):
            raise VerificationError(f"offload_wait ends the copy of {kept[0]} in {source}, which is of another value")
        if self.aliases(source) in self.written:
            raise VerificationError(f"{name} moves {source}, which is overwritten")
        self._define(made, self._value(source, bsym), bsym)
        following = {"offload": "offload_wait", "offload_wait": "prefetch", "prefetch": "prefetch_wait"}
        if name in following:
            self.away[made] = following[name]

    def _execute(self, bsym: BoundSymbol) -> None:
        if bsym.sym.id in _NO_VALUES:
            return
        if traits_of(bsym).beside == "starts":
            self._start(bsym)
            return
        if traits_of(bsym).beside == "ends":
            self._end(bsym)
            return
        if traits_of(bsym).transfers:
            self._transfer(bsym)
            return
        if self.away and (away := next((p.name for p in bsym.flat_proxy_args if p.name in self.away), None)):
            raise VerificationError(f"{bsym.sym.name} uses {away}, which is on its way to the host or back")
        if traits_of(bsym).random == "replays":
            self._redraw(bsym)
            return
        if traits_of(bsym).random == "saves":
            self._note(bsym)
            return
        self._number(traits_of(bsym).runs(bsym) if traits_of(bsym).in_place else bsym)

    def _start(self, bsym: BoundSymbol) -> None:
        """An operation that runs beside the next ones, and a handle of it."""
        handle = bsym.output
        number = self._number(traits_of(bsym).runs(bsym))
        self._define(handle.name, self.numbers.number(("handle", number), handle.name), bsym)
        self.beside[handle.name] = bsym

    def _end(self, bsym: BoundSymbol) -> None:
        """The end of what runs beside; only then its memory may be released, and so the end takes all of it."""
        handle, *kept = bsym.flat_proxy_args
        start = self.beside.pop(handle.name, None)
        if start is None or [p.name for p in start.flat_proxy_args] != [p.name for p in kept]:
            raise VerificationError(f"{bsym.sym.name} of {handle.name} is not the end of what began it")

    def _check_beside(self, bsym: BoundSymbol) -> None:
        """Check that an operation leaves alone what other work reads or writes beside it."""
        ended = {p.name for p in bsym.flat_proxy_args} if traits_of(bsym).beside == "ends" else ()
        for handle, start in self.beside.items():
            if handle in ended:
                continue
            theirs = {self.aliases(p.name) for p in start.flat_proxy_args}
            changed = {self.aliases(name) for name in self.numbers.effects_of(start).writes}
            touched = {self.aliases(p.name) for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)}
            written = {self.aliases(name) for name in self.numbers.effects_of(bsym).writes}
            if touched & changed or written & theirs:
                raise VerificationError(f"{bsym.sym.name} uses what {handle} does beside it")

    def _note(self, bsym: BoundSymbol) -> None:
        """A draw that returns its generator's state: the draw, and a value for the state."""
        draw, (state, *outs) = traits_of(bsym).runs(bsym), bsym.flat_proxy_outs
        if (bsym.flat_proxy_args, tuple(outs)) != (draw.flat_proxy_args, draw.flat_proxy_outs):
            raise VerificationError(f"{bsym.sym.name} is not the {draw.sym.name} that it says it is")
        drawn = self._drawn(draw)
        number = self._number(draw)
        value = self.numbers.number(("state before", number), state.name)
        self.noted[value] = drawn, number
        self._define(state.name, value, bsym)

    def _redraw(self, bsym: BoundSymbol) -> None:
        """A draw from a state: the same numbers, if the same operation drew from that state."""
        draw, state = traits_of(bsym).runs(bsym), bsym.flat_proxy_args[0]
        drawn, number = self.noted.get(self._value(state.name, bsym), (None, -1))
        if drawn != self._drawn(draw) or bsym.flat_proxy_outs != draw.flat_proxy_outs:
            raise VerificationError(f"{bsym.sym.name} draws other numbers than were drawn from {state.name}")
        for i, p in enumerate(bsym.flat_proxy_outs):
            self._define(p.name, self.numbers.number((number, i), p.name), bsym)

    def _drawn(self, draw: BoundSymbol) -> Hashable:
        return _operation(draw), self._content(draw.args), self._content(draw.kwargs)

    def _number(self, bsym: BoundSymbol) -> int:
        """Number the results and effects of an operation; return the operation's own number."""
        effects = self.numbers.effects_of(bsym)
        order: list[Hashable] = [self.contexts]
        if effects.writes or effects.channels or effects.barrier:
            order.append(self.barriers)
        order += [(c, len(self.channels.get(c, ()))) for c in effects.channels]
        outs, taken = bsym.flat_proxy_outs, {p.name for p in bsym.flat_proxy_args}
        passed_on = tuple(i for i, p in enumerate(outs) if p.name in taken)
        content = (_operation(bsym), self._content(bsym.args), self._content(bsym.kwargs), passed_on, tuple(order))
        if self._is_added_copy(bsym, content):
            value = self._value(bsym.args[0].name)
            self._define(outs[0].name, value, bsym)
            return value
        number = self.numbers.number(content, outs[0].name if outs else bsym.sym.name)
        if outs and outs[0].name in self.trusted:
            self._define(outs[0].name, self._trust(outs[0].name, bsym), bsym)
            return number
        if self.known is not None and number >= self.known and not self._is_on_the_way(bsym, effects):
            what = outs[0].name if outs else "a step"
            raise VerificationError(f"{what} = {bsym.sym.name}(...) is computed from other values than in the program")
        for c in effects.channels:
            self.channels.setdefault(c, []).append(number)
        if effects.barrier:
            self.barriers = number + 1
            self.channels.setdefault("order of effects", []).append(number)
        if has_tags(bsym, {OpTags.CTX_MANAGER_ENTER_EXIT_OP}):
            self.contexts = number + 1
        for memory in {self.aliases(name) for name in effects.writes}:
            self.memory[memory] = number + 1
        # Gathering the same shards, and waiting, always gives the same value.
        again = is_gather(bsym) or any(True for _ in awaited_futures(bsym))
        made = self.numbers.number(("gathered", *content[:-1]), bsym.sym.name) if again else number
        if self.known is None and number not in self.numbers.parts and self._is_taken_apart(bsym):
            self.numbers.parts[number] = self._by_parts(bsym)
        names = [p.name for p in outs]  # the shape of a matrix of n rows and n columns is (n, n): one value twice
        values = self.numbers.parts.get(number) or [self.numbers.number((made, names.index(n)), n) for n in names]
        for i, (p, value) in enumerate(zip(outs, values, strict=True)):
            if i not in passed_on:
                self._define(p.name, value, bsym)
        return number

    def _is_taken_apart(self, bsym: BoundSymbol) -> bool:
        """Whether a fusion executor may run the operations of a composite in its place (nvFuser does)."""
        return _is_composite(bsym) and self.numbers.effects_of(bsym).pure

    def _by_parts(self, bsym: BoundSymbol) -> tuple[int, ...]:
        """The results of a composite, as its operations compute them from its arguments."""
        outer, self.values = self.values, {p.name: self._value(p.name, bsym) for p in bsym.flat_proxy_args}
        for part in bsym.subsymbols:
            self._execute(part)
        made = tuple(self._value(p.name, bsym) for p in bsym.flat_proxy_outs)
        self.values = outer
        return made

    def _otherwise(self, bsym: BoundSymbol) -> str | None:
        """The first result of a composite that its operations compute from other values than its name says."""
        pairs = zip(bsym.flat_proxy_outs, self._by_parts(bsym), strict=True)
        return next((p.name for p, made in pairs if made != self.values[p.name]), None)

    def _is_added_copy(self, bsym: BoundSymbol, content: Hashable) -> bool:
        """Whether it is an added copy of memory that nobody overwrites, which has the same value."""
        added = self.known is not None and bsym.sym.id is PrimIDs.CLONE and content not in self.numbers.number_of
        return added and self.aliases(bsym.args[0].name) not in self.written

    def _is_on_the_way(self, bsym: BoundSymbol, effects: Effects) -> bool:
        """Whether it is a new value from which a trusted one may be computed."""
        new = self.planned is not None and not any(p.name in self.planned.values for p in bsym.flat_proxy_outs)
        return bool(self.trusted) and new and effects.pure

    def _define(self, name: str, value: int, bsym: BoundSymbol) -> None:
        if self.values.setdefault(name, value) != value:
            raise VerificationError(f"{bsym.sym.name} defines {name}, which is another value already")

    def _value(self, name: str, bsym: BoundSymbol | None = None) -> int:
        if name not in self.values:
            user = bsym.sym.name if bsym else "an operation"
            if writer := self.overwritten.get(name):
                raise VerificationError(f"{user} uses {name}, which {writer} has overwritten")
            raise VerificationError(f"{user} uses {name} before it is defined")
        return self.values[name]

    def _trust(self, name: str, bsym: BoundSymbol) -> int:
        if self.planned is None or name not in self.planned.values:
            raise VerificationError(f"{bsym.sym.name} hands out {name}, which the program does not have")
        return self.planned.values[name]

    def _state(self, name: str) -> int:
        return self.memory.get(self.aliases(name), 0)

    def _content(self, x: Any) -> Hashable:
        """The meaning of an argument: the value of a proxy and the state of its memory; other data unchanged."""
        if isinstance(x, TensorProxy):
            value, state = self._value(x.name), self._state(x.name)
            return ("value", value, state) if state else ("value", value)  # memory may be overwritten later only
        if isinstance(x, Proxy):
            return ("value", self._value(x.name))
        if isinstance(x, tuple | list):
            return tuple(map(self._content, x))
        if isinstance(x, dict):
            return tuple((k, self._content(x[k])) for k in sorted(x, key=repr))
        if isinstance(x, int | float | complex | str | bytes | type(None) | dtypes.dtype | devices.Device | slice):
            # 1, 1.0 and True are equal but not the same program, and so are 0.0 and -0.0.
            return (type(x).__name__, str(x) if isinstance(x, dtypes.dtype | devices.Device) else repr(x))
        return ("object", id(x))


def _operation(bsym: BoundSymbol) -> Hashable:
    sym = bsym.sym
    return sym.id if sym.id is not None else (sym.name, str(sym.executor.name if sym.executor else None))


def _is_composite(bsym: BoundSymbol) -> bool:
    """Whether no executor has claimed it, and its operations need only its arguments."""
    if not bsym.subsymbols or bsym.sym.executor is not None:
        return False
    known = {p.name for p in bsym.flat_proxy_args}
    for part in bsym.subsymbols:
        read, made = ({p.name for p in ps} for ps in (part.flat_proxy_args, part.flat_proxy_outs))
        # A size that is an argument may be read off a tensor once more, where sizes are symbolic.
        if not read <= known or (made - read) & known:
            return False
        known |= made
    return known.issuperset(p.name for p in bsym.flat_proxy_outs)


def _flat(bsyms: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    for b in bsyms:
        if b.sym.is_fusion and b.subsymbols:
            yield from b.subsymbols
        else:
            yield traits_of(b).runs(b) if traits_of(b).in_place else b
