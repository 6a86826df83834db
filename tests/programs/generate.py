"""Drawing random programs: each proposed statement is tried on real, tiny tensors and dropped if torch refuses.

`generate(rng, profile)` draws with any `random.Random`, also hypothesis' own, so that the same code
serves seeded campaigns and hypothesis. A `Profile` says which constructs may appear.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import torch

from tests.programs.program_effects import OVERWRITES
from tests.programs.program_inputs import KITS, LAYOUTS, draw_inputs, inputs_on, materialise, storage
from tests.programs.program_ops import FAMILIES, OPS
from tests.programs.program_table import Values, filled, shown_twice
from tests.programs.programs import SCOPE, Program, Region, Step, constructs, defined, free, walk

__all__ = ["Profile", "generate", "prune", "validate"]

# In place, with a derivative that needs the value that is overwritten.
NEEDS_OLD = ("mul_", "imul", "sin_", "clamp_")
WEIGHTS = {
    "elementwise": 8,
    "logic": 2,
    "cast": 2,
    "reduce": 4,
    "matmul": 3,
    "view": 5,
    "join": 2,
    "loss": 1,
    "head": 1,
    "norm": 1,
    "attention": 1,
    "in-place": 3,
    "random": 1,
    "function": 1,
    "split": 3,
}
DEFAULT = tuple(f for f in WEIGHTS if f != "split")
KIT_WEIGHT = 12  # of the family that the inputs were drawn for
REPEATS = 0.06  # of the statements are one that stands there already


@dataclass(frozen=True)
class Profile:
    """Which constructs a program may hold, and how large it may grow.

    Attributes:
        steps: most statements at the top level.
        families: the op families of `program_ops.FAMILIES` to draw from.
        ops_without: single ops to leave out.
        regions: region kinds to draw from.
        in_checkpoint: families that a checkpoint's body may use.
        in_no_grad: families that may be used under no_grad.
        overwrites_needed: statements in place may overwrite what their own derivative, or a view that is read later,
            needs; what they give may be returned under both of its names.
        scalars_meet_larger: a value without dims that has a gradient may be broadcast.
        input_writes: statements in place may overwrite inputs.
        aliases: an input may be a view of another, or be passed twice.
        layouts: inputs may be non-contiguous.
        kits: of `program_inputs.KITS`, those that inputs may be drawn from, to fit a loss head, attention, a norm or
            an embedding; one that is named twice is drawn twice as often.
        kit_share: of the programs whose inputs are drawn from one.
        nested: a checkpoint may hold another.
    """

    steps: int = 12
    families: tuple[str, ...] = DEFAULT
    ops_without: tuple[str, ...] = ()
    regions: tuple[str, ...] = ("checkpoint", "no_grad", "autocast")
    in_checkpoint: tuple[str, ...] = tuple(f for f in DEFAULT if f not in ("in-place", "random"))
    in_no_grad: tuple[str, ...] = tuple(f for f in DEFAULT if f not in ("in-place", "view", "cast", "random"))
    overwrites_needed: bool = False
    scalars_meet_larger: bool = False
    input_writes: bool = True
    aliases: bool = True
    layouts: tuple[str, ...] = LAYOUTS
    kits: tuple[str, ...] = ("loss head", *(name for name in KITS if name != "mlp"))
    kit_share: float = 0.4
    nested: bool = True


def _dims(t: torch.Tensor) -> zip[tuple[int, int]]:
    return zip(t.shape, t.stride(), strict=True)


@dataclass
class _Builder:
    """The values so far, and the statements of the block being written."""

    rng: Random
    profile: Profile
    tensors: dict[str, torch.Tensor]
    frozen: set[int]  # storages that no statement may overwrite
    input_storages: frozenset[int]
    inputs_writable: bool = True
    kit: str = ""  # the family that the inputs fit
    count: int = 0
    said: list[tuple[str, tuple[str, ...], tuple]] = field(default_factory=list)  # the statements so far
    random: bool = False  # a random value has been drawn
    first_names: dict[str, str] = field(default_factory=dict)  # of what a statement in place gave another name
    from_scalars: set[str] = field(default_factory=set)  # computed from scalars alone
    missed: set[str] = field(default_factory=set)  # shows a write that Thunder's autograd does not see there
    outside: frozenset[str] | None = None  # in a checkpoint's body: the names from before the outermost
    alive: list = field(default_factory=list)  # so that no storage's address is used twice
    scope: dict = field(default_factory=lambda: dict(SCOPE))

    def writable(self, name: str) -> bool:
        return storage(self.tensors[name]) not in self.frozen

    def writes_input(self, name: str) -> bool:
        return storage(self.tensors[name]) in self.input_storages

    def overlap_in_part(self, a: str, b: str) -> bool:
        """They share a storage, and do not look at it alike."""
        t, u = self.tensors[a], self.tensors[b]
        alike = (t.shape, t.stride(), t.data_ptr()) == (u.shape, u.stride(), u.data_ptr())
        return storage(t) == storage(u) and not alike

    def mixes_scalars(self, names: tuple[str, ...]) -> bool:
        """Floats of several dtypes, one of which may be a scalar that was broadcast, or come of such.

        Thunder's proxy of that still promotes like a number, so its traces tell another dtype than eager gives.
        """
        tensors = [self.tensors[name] for name in names]
        if len({t.dtype for t in tensors if t.is_floating_point()}) < 2:
            return False
        return any(t.dim() > 0 and self.like_scalar(name) for t, name in zip(tensors, names, strict=True))

    def like_scalar(self, name: str) -> bool:
        return name in self.from_scalars or all(n == 1 or not step for n, step in _dims(self.tensors[name]))

    def miss(self, written: str) -> None:
        """Read nothing more that shares the memory of what was just written and that Thunder takes for another value.

        Its gradient goes to what was there before, or to the view alone.
        """
        t = self.tensors[written]
        if t.requires_grad and not self.profile.overwrites_needed:
            first = self.first_name(written)
            shared = (name for name, u in self.tensors.items() if storage(u) == storage(t))
            self.missed |= {name for name in shared if self.first_name(name) != first}

    def first_name(self, name: str) -> str:
        return self.first_names.get(name, name)

    def once(self, outputs: list[str]) -> list[str]:
        """Each written value under one name: Thunder counts the gradient of two wrongly."""
        if self.profile.overwrites_needed:
            return outputs
        under: dict[str, str] = {}
        return [under.setdefault(self.first_name(name), name) for name in outputs]

    def loses_dims(self, name: str, dims: int) -> bool:
        t = self.tensors[name]
        if self.profile.scalars_meet_larger and not t.dim():
            return False
        return t.requires_grad and t.numel() == 1 and t.dim() < dims

    def step(self, families: tuple[str, ...]) -> Step | None:
        """One statement that torch accepts, already run; None after some refusals."""
        again = [s for s in self.said if OPS[s[0]].family in families and all(name in self.tensors for name in s[1])]
        if again and self.rng.random() < REPEATS and (step := self._run(*self.rng.choice(again))):
            return step
        for _ in range(4):
            family = self.rng.choices(families, [KIT_WEIGHT if f == self.kit else WEIGHTS[f] for f in families])[0]
            for _ in range(5):  # of the same family, or those whose arguments rarely fit would be rare
                op = self.rng.choice([o for o in FAMILIES[family] if o not in self.profile.ops_without])
                if op == "prod" and torch.is_autocast_enabled("cpu"):
                    continue
                if self.random and (op in OVERWRITES or op == "batch_norm_running"):
                    continue  # may overwrite a random value; see `prune`
                known = {name: t for name, t in self.tensors.items() if name not in self.missed}
                drawn = OPS[op].draw(self.rng, Values(known, self.writable))
                if drawn and (step := self._run(op, *drawn)):
                    return step
        return None

    def _run(self, op: str, args: tuple[str, ...], params: tuple) -> Step | None:
        spec = OPS[op]
        if not self.missed.isdisjoint(args):
            return None
        if spec.kind == "in-place" and self.tensors[args[-1]].requires_grad and self.writes_input(args[0]):
            return None  # Thunder: an input that is overwritten by a value with a gradient loses it
        if spec.kind == "in-place" and any(self.overlap_in_part(args[0], name) for name in args[1:]):
            return None  # eager reads what it has just written, or what it will write, as it comes
        if spec.kind == "in-place" and shown_twice(self.tensors[args[0]]):
            return None  # Thunder writes by copy_, which refuses what is expanded; eager's zero_ does not
        if op in NEEDS_OLD and self.tensors[args[-1]].requires_grad and not self.profile.overwrites_needed:
            return None  # Thunder: the backward reads what was overwritten
        if spec.writes and self.input_storages and not self.inputs_writable:
            return None
        if self.mixes_scalars(args):
            return None
        if op == "lerp" and self.tensors[args[0]].dim() < max(self.tensors[name].dim() for name in args):
            return None  # Thunder: its proxy has the shape of the first operand
        if op == "contiguous" and not torch.is_grad_enabled():
            return None  # Thunder: its gradient passes through
        if spec.kind == "random" and not self.tensors[args[0]].is_contiguous():
            return None  # eager draws in the order of memory, Thunder for some of these in that of the index
        if spec.kind == "in-place" and self.loses_dims(args[-1], self.tensors[args[0]].dim()):
            return None  # as below
        text = spec.text.format(*args, p=params)
        scope = {**self.scope, **self.tensors}
        try:
            if spec.kind == "in-place":
                exec(text, scope)
                self.miss(args[0])
                if text.startswith(f"{args[0]}.") and self.rng.random() < 0.5:
                    self.count += 1
                    target = f"v{self.count - 1}"
                    self.tensors[target] = self.tensors[args[0]]
                    self.first_names[target] = self.first_name(args[0])
                    if args[0] in self.from_scalars:
                        self.from_scalars.add(target)
                    return Step(op, (target,), args, params)
                return Step(op, (), args, params)
            result = eval(text, scope)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None
        self.random |= spec.kind == "random"
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if not results or any(t.dim() > 5 or t.numel() > 4096 for t in results):
            return None
        dims = max(t.dim() for t in (*results, *(self.tensors[name] for name in args)))
        if len(args) > 1 and any(self.loses_dims(name, dims) for name in args):
            return None  # Thunder: the gradient of one element that is broadcast keeps the dims it was broadcast to
        if op == "unbind" and self.outside is not None:
            return None  # Thunder: KeyError where the backward needs an unused piece
        of_input = (spec.kind == "view" or op == "take_rows") and self.writes_input(args[0])
        copied = of_input and storage(results[0]) not in self.input_storages
        if copied or spec.family == "cast" or op in ("detach", "diagonal"):
            self.frozen.add(storage(results[0]))  # Thunder loses what is written to these; see `defects.py`
        if op == "var_mean" and not self.profile.overwrites_needed:
            self.frozen.add(storage(results[1]))  # Thunder: the backward of the variance reads the mean
        targets = tuple(f"v{self.count + i}" for i in range(len(results)))
        self.count += len(results)
        # A result promotes like a number if all operands do; of a join it has the first one's dtype as it is.
        if args and all(map(self.like_scalar, args[:1] if op in ("cat", "stack") else args)):
            self.from_scalars.update(targets)
        self.tensors.update(zip(targets, results, strict=True))
        if spec.kind in ("fresh", "view") and not spec.writes:
            self.said.append((op, args, params))
        return Step(op, targets, args, params)

    def block(self, steps: int, families: tuple[str, ...], regions: tuple[str, ...]) -> tuple[Step | Region, ...]:
        body: list[Step | Region] = []
        for _ in range(steps):
            if regions and self.rng.random() < 0.12:
                item: Step | Region | None = self.region(self.rng.choice(regions), families, regions)
            else:
                item = self.step(families)
            if item is not None:
                body.append(item)
        return tuple(body)

    def region(self, kind: str, families: tuple[str, ...], regions: tuple[str, ...]) -> Region | None:
        before, frozen = dict(self.tensors), set(self.frozen)
        if kind == "checkpoint":
            # A recompute would see what was overwritten since: only what the region makes may be written.
            families = tuple(f for f in families if f in self.profile.in_checkpoint)
            self.frozen |= {storage(t) for t in before.values()}
        if kind == "no_grad":
            families = tuple(f for f in families if f in self.profile.in_no_grad)
        if kind == "autocast":
            families = tuple(
                f for f in families if f not in ("loss", "head")
            )  # as "prod", float32 in eager, which Thunder ignores
        context = {
            "checkpoint": torch.enable_grad,
            "no_grad": torch.no_grad,
            "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        }[kind]
        if kind == "checkpoint" and not torch.is_grad_enabled():
            context = torch.no_grad
        outside = self.outside
        if kind == "checkpoint":
            if outside is None:
                self.outside = frozenset(before)
            else:  # Thunder: a checkpoint in a checkpoint runs first, and must not take what the outer one has made
                families = tuple(f for f in families if f != "random")
                self.tensors = {name: t for name, t in before.items() if name in outside}
        with context():
            inner = tuple(r for r in regions if self.profile.nested or r != "checkpoint")
            body = self.block(self.rng.randint(1, 5), families, inner if kind == "checkpoint" else ())
        self.outside = outside
        made = [name for name in defined(body) if name not in before and name not in self.missed]
        inside = self.tensors
        lost = self.frozen - {storage(t) for t in before.values()}
        self.alive.append(inside)
        self.tensors, self.frozen = before, frozen | lost
        if not made or (kind == "checkpoint" and not free(body)):
            return None
        results = tuple(dict.fromkeys(self.rng.choice(made[-4:]) for _ in range(self.rng.randint(1, 2))))
        for name in results:
            self.tensors[name] = inside[name]
        if kind == "checkpoint":
            # Nor may what the region read be written afterwards.
            self.frozen |= {storage(inside[name]) for name in free(body)} | {storage(inside[name]) for name in results}
        return Region(kind, body, results)


def generate(rng: Random, profile: Profile = Profile()) -> Program:
    """Draw one program. It may still be refused by `validate`, or by eager's backward."""
    kit = rng.choice(profile.kits) if profile.kits and rng.random() < profile.kit_share else ""
    inputs = draw_inputs(rng, profile.aliases, profile.layouts, kit)
    # On the CPU: an index that is out of range ends a GPU's whole process.
    with torch.random.fork_rng(devices=()), inputs_on("cpu"):
        torch.manual_seed(0)
        tensors = materialise(inputs)
        storages = frozenset(storage(t) for t in tensors.values())
        families = profile.families
        aliases = sum(bool(i.alias) or 0 in i.shape for i in inputs) > any(0 in i.shape for i in inputs)
        plain = all(i.alias in ("", "x0", "x0.detach()") for i in inputs) and not any(i.grad for i in inputs)
        all_empty = all(0 in i.shape for i in inputs)
        writable = not aliases or (len(inputs) == 2 and plain and not all_empty)
        if not writable:
            # Thunder mixes up the arguments. It takes all empty ones for aliases, having no address.
            families = tuple(f for f in families if f != "in-place")
        frozen = set() if profile.input_writes else set(storages)
        builder = _Builder(rng, profile, tensors, frozen, storages, writable, KITS[kit][0] if kit else "")
        body = builder.block(rng.randint(1, profile.steps), families, profile.regions)
    made = [name for name in defined(body) if name not in builder.missed]
    used = {name for item in body for name in (item.args if isinstance(item, Step) else free(item.body))}
    ends = [name for name in made if name not in used]
    count = rng.randint(1, 4) if made else 0
    if len(ends) >= count and rng.random() < 0.8:
        outputs = rng.sample(ends, count)
    else:
        outputs = [rng.choice(made) for _ in range(count)]
    if not made or rng.random() < 0.12:
        outputs.append(rng.choice(inputs).name)
    fitting = [i.targets[0] for i in body if isinstance(i, Step) and kit and OPS[i.op].family == KITS[kit][0]]
    fitting = [name for name in fitting if name not in builder.missed]
    if fitting and rng.random() < 0.8:
        outputs.append(rng.choice(fitting))
    outputs = builder.once(outputs)
    ranked = [name for name in made if filled(builder.tensors[name]) and builder.tensors[name].dim()]
    if ranked and rng.random() < 0.15:  # an output that no gradient comes back through
        body += (Step("argmax", (f"v{builder.count}",), (rng.choice(ranked),), (-1,)),)
        outputs.append(f"v{builder.count}")
    return prune(Program(inputs, body, tuple(outputs)), keep_dead=rng.random() < 0.1)


def prune(program: Program, keep_dead: bool = False) -> Program:
    """Drop statements that no output, live write or later statement needs.

    A write is live when something that may share its memory is read later, or is an input. Beside
    random statements nothing dead is kept: a compiler may drop dead draws, and then later draws
    differ from eager's. Nor in nested checkpoints, where Thunder fails on dead values.
    """
    if keep_dead and not {"random", "checkpoint in checkpoint"} & set(constructs(program)):
        return program
    aliases = _alias_classes(program)

    def sweep(body: tuple[Step | Region, ...], live: set[str]) -> tuple[Step | Region, ...]:
        kept: list[Step | Region] = []
        for item in reversed(body):
            if isinstance(item, Region):
                item = Region(item.kind, *region(item, live))
                if not item.body:
                    continue
            else:
                written = [item.args[k] for k in OPS[item.op].written]
                seen = any(aliases[name] & (live | names) for name in written)
                if not (seen or (OPS[item.op].kind != "in-place" and live & set(item.targets))):
                    continue
                if OPS[item.op].kind == "in-place" and not live & set(item.targets):
                    item = Step(item.op, (), item.args, item.params)
                live.update(item.args)
            kept.append(item)
        return tuple(reversed(kept))

    def region(item: Region, live: set[str]) -> tuple[tuple[Step | Region, ...], tuple[str, ...]]:
        body = sweep(item.body, live)
        made = defined(body)
        return body, tuple(r for r in item.results if r in made and r in live) or made[-1:]

    names = {i.name for i in program.inputs}
    return Program(program.inputs, sweep(program.body, set(program.outputs)), program.outputs)


def _alias_classes(program: Program) -> dict[str, set[str]]:
    """For each name all names that may share its memory: views, and inputs that alias."""
    classes: dict[str, set[str]] = {}
    for i in program.inputs:
        base = i.alias.split(".")[0].split("[")[0] or i.name
        classes[i.name] = classes.get(base, set())
        classes[i.name].add(i.name)
    for item in walk(program.body):
        if isinstance(item, Step):
            for target in item.targets:
                classes[target] = classes[item.args[0]] if OPS[item.op].kind in ("view", "in-place") else set()
                classes[target].add(target)
    return classes


def validate(program: Program) -> None:
    """Raise `ValueError` unless every name is defined once, before its use, and every output exists."""
    known = {i.name for i in program.inputs}

    def visit(body: tuple[Step | Region, ...], known: set[str]) -> None:
        for item in body:
            if isinstance(item, Region):
                inner = set(known)
                visit(item.body, inner)
                missing = [r for r in item.results if r not in inner]
            else:
                missing = [a for a in item.args if a not in known]
            if missing:
                raise ValueError(f"{missing[0]!r} is used before it is defined")
            again = [name for name in defined((item,)) if name in known]
            if again:
                raise ValueError(f"{again[0]!r} is defined twice")
            known.update(defined((item,)))

    visit(program.body, known)
    missing = [name for name in program.outputs if name not in known]
    if missing or not program.outputs:
        raise ValueError(f"the output {missing[0]!r} is not defined" if missing else "a program without outputs")
