"""Drawing random programs: each proposed statement is tried on real, tiny tensors and dropped if torch refuses.

`generate(rng, profile)` draws with any `random.Random`, also hypothesis' own, so that the same code
serves seeded campaigns and hypothesis. A `Profile` says which constructs may appear.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import torch

from tests.program_ops import FAMILIES, OPS, OVERWRITES, Values
from tests.programs import Input, Program, Region, Step, constructs, defined, free, walk

__all__ = ["Profile", "generate", "materialise", "validate"]

# In place, with a derivative that needs the value that is overwritten.
NEEDS_OLD = ("mul_", "sin_")
LAYOUTS = ("transposed", "strided", "offset", "expanded")
WEIGHTS = {
    "elementwise": 8,
    "logic": 2,
    "cast": 2,
    "reduce": 4,
    "matmul": 3,
    "view": 5,
    "join": 2,
    "in-place": 3,
    "random": 1,
}


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
        overwrites_needed: statements in place may overwrite what their own derivative needs.
        input_writes: statements in place may overwrite inputs.
        aliases: an input may be a view of another, or be passed twice.
        layouts: inputs may be non-contiguous.
    """

    steps: int = 12
    families: tuple[str, ...] = tuple(WEIGHTS)
    ops_without: tuple[str, ...] = ()
    regions: tuple[str, ...] = ("checkpoint", "no_grad", "autocast")
    in_checkpoint: tuple[str, ...] = tuple(f for f in WEIGHTS if f not in ("in-place", "random"))
    in_no_grad: tuple[str, ...] = tuple(f for f in WEIGHTS if f not in ("in-place", "view"))
    overwrites_needed: bool = False
    input_writes: bool = True
    aliases: bool = True
    layouts: tuple[str, ...] = LAYOUTS


def materialise(inputs: tuple[Input, ...], double: bool = False) -> dict[str, torch.Tensor]:
    """The arguments, in order, the same at each call; `double` widens every float to float64.

    Values are multiples of 1/8 in [-2, 2], exact in every float dtype here.
    """
    generator = torch.Generator().manual_seed(len(inputs))
    tensors: dict[str, torch.Tensor] = {}
    for i in inputs:
        if i.alias:
            t = eval(i.alias, dict(tensors))
        else:
            t = _fresh(i, generator, double)
        tensors[i.name] = t if i.alias else t.requires_grad_(i.grad)
    return tensors


def _fresh(i: Input, generator: torch.Generator, double: bool) -> torch.Tensor:
    dtype = getattr(torch, i.dtype)
    shape = list(i.shape)
    if i.layout == "transposed":
        shape[-1], shape[-2] = shape[-2], shape[-1]
    elif i.layout == "strided":
        shape[-1] *= 2
    elif i.layout == "offset":
        shape[0] += 2
    elif i.layout == "expanded":
        shape[0] = 1
    if dtype == torch.bool:
        values = torch.randint(0, 2, shape, generator=generator)
    elif dtype.is_floating_point:
        values = torch.randint(-16, 17, shape, generator=generator) / 8
    else:
        values = torch.randint(0, 3, shape, generator=generator)
    t = values.to(torch.float64 if double and dtype.is_floating_point else dtype)
    if i.layout == "transposed":
        return t.transpose(-1, -2)
    if i.layout == "strided":
        return t[..., ::2]
    if i.layout == "offset":
        return t[1:-1]
    if i.layout == "expanded":
        return t.expand(i.shape)
    return t


def storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


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
    count: int = 0
    random: bool = False  # a random value has been drawn
    outside: frozenset[str] | None = None  # in a checkpoint's body: the names from before the outermost
    alive: list = field(default_factory=list)  # so that no storage's address is used twice
    scope: dict = field(default_factory=lambda: {"torch": torch, "F": torch.nn.functional})

    def writable(self, name: str) -> bool:
        return storage(self.tensors[name]) not in self.frozen

    def writes_input(self, name: str) -> bool:
        return storage(self.tensors[name]) in self.input_storages

    def loses_dims(self, name: str, result: torch.Tensor) -> bool:
        t = self.tensors[name]
        return t.requires_grad and t.numel() == 1 and t.dim() < result.dim()

    def step(self, families: tuple[str, ...]) -> Step | None:
        """One statement that torch accepts, already run; None after a few refusals."""
        for _ in range(8):
            family = self.rng.choices(families, [WEIGHTS[f] for f in families])[0]
            op = self.rng.choice([o for o in FAMILIES[family] if o not in self.profile.ops_without])
            if self.random and op in OVERWRITES:
                continue  # may overwrite a random value; see `prune`
            drawn = OPS[op].draw(self.rng, Values(self.tensors, self.writable))
            if drawn and (step := self._run(op, *drawn)):
                return step
        return None

    def _run(self, op: str, args: tuple[str, ...], params: tuple) -> Step | None:
        spec = OPS[op]
        if spec.kind == "in-place" and self.tensors[args[-1]].requires_grad and self.writes_input(args[0]):
            return None  # Thunder: an input that is overwritten by a value with a gradient loses it
        if spec.kind == "in-place" and any(n > 1 and not step for n, step in _dims(self.tensors[args[0]])):
            return None  # Thunder writes by copy_, which refuses what is expanded; eager's zero_ does not
        if op in NEEDS_OLD and self.tensors[args[-1]].requires_grad and not self.profile.overwrites_needed:
            return None  # Thunder: the backward reads what was overwritten
        text = spec.text.format(*args, p=params)
        scope = {**self.scope, **self.tensors}
        try:
            if spec.kind == "in-place":
                exec(text, scope)
                if text.startswith(f"{args[0]}.") and self.rng.random() < 0.5:
                    self.count += 1
                    self.tensors[f"v{self.count - 1}"] = self.tensors[args[0]]
                    return Step(op, (f"v{self.count - 1}",), args, params)
                return Step(op, (), args, params)
            result = eval(text, scope)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None
        self.random |= spec.kind == "random"
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if not results or any(t.dim() > 5 or t.numel() > 4096 for t in results):
            return None
        if len(args) > 1 and any(self.loses_dims(name, results[0]) for name in args):
            return None  # Thunder: the gradient of one element that is broadcast keeps the dims it was broadcast to
        if op == "unbind" and self.outside is not None:
            return None  # Thunder: KeyError where the backward needs an unused piece
        if op in ("detach", "to", "float"):
            self.frozen.add(storage(results[0]))  # Thunder loses what is written to these
        targets = tuple(f"v{self.count + i}" for i in range(len(results)))
        self.count += len(results)
        self.tensors.update(zip(targets, results, strict=True))
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
            else:  # Thunder: a checkpoint in a checkpoint must not take what the outer one has made
                self.tensors = {name: t for name, t in before.items() if name in outside}
        with context():
            body = self.block(self.rng.randint(1, 5), families, regions if kind == "checkpoint" else ())
        self.outside = outside
        made = [name for name in defined(body) if name not in before]
        inner = self.tensors
        lost = self.frozen - {storage(t) for t in before.values()}
        self.alive.append(inner)
        self.tensors, self.frozen = before, frozen | lost
        if not made or (kind == "checkpoint" and not free(body)):
            return None
        results = tuple(dict.fromkeys(self.rng.choice(made[-4:]) for _ in range(self.rng.randint(1, 2))))
        for name in results:
            self.tensors[name] = inner[name]
        if kind == "checkpoint":
            # Nor may what the region read be written afterwards.
            self.frozen |= {storage(inner[name]) for name in free(body)} | {storage(inner[name]) for name in results}
        return Region(kind, body, results)


def _draw_inputs(rng: Random, profile: Profile) -> tuple[Input, ...]:
    sizes = [rng.choice([1, 2, 3, 4, 4, 6, 8, 8]) for _ in range(3)]
    if rng.random() < 0.06:
        sizes[rng.randrange(3)] = 0
    main = rng.choices(["float32", "bfloat16", "float64", "float16"], [6, 3, 2, 1])[0]
    inputs: list[Input] = []
    for k in range(rng.randint(1, 4)):
        name = f"x{k}"
        earlier = [i for i in inputs if not i.alias]
        if profile.aliases and earlier and rng.random() < 0.12:
            inputs.append(_draw_alias(rng, name, rng.choice(earlier)))
            continue
        dtype = rng.choices([main, "float32", "int64", "bool"], [8, 2, 1, 1])[0]
        shape = tuple(rng.choice([*sizes, 1]) if rng.random() < 0.3 else sizes[d] for d in range(3))
        shape = shape[: rng.choice([0, 1, 2, 2, 2, 3, 3])] if rng.random() < 0.5 else shape[3 - rng.choice([1, 2, 3]) :]
        layout = rng.choice(profile.layouts) if profile.layouts and rng.random() < 0.2 else "contiguous"
        if len(shape) < (2 if layout == "transposed" else 1):
            layout = "contiguous"
        if layout == "expanded" and shape[0] == 0:
            layout = "contiguous"
        grad = dtype not in ("int64", "bool") and rng.random() < 0.6
        inputs.append(Input(name, shape, dtype, grad, layout))
    return tuple(inputs)


def _draw_alias(rng: Random, name: str, base: Input) -> Input:
    views = [base.name, f"{base.name}.detach()"]
    if base.shape and not base.grad:
        views += [f"{base.name}[..., ::2]", f"{base.name}[:1]", f"{base.name}.transpose(0, -1)"]
    alias = rng.choice(views)
    shape = tuple(materialise((base, Input(name, (), alias=alias)))[name].shape)
    return Input(name, shape, base.dtype, base.grad and alias == base.name, alias=alias)


def generate(rng: Random, profile: Profile = Profile()) -> Program:
    """Draw one program. It may still be refused by `validate`, or by eager's backward."""
    inputs = _draw_inputs(rng, profile)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        tensors = materialise(inputs)
        storages = frozenset(storage(t) for t in tensors.values())
        families = profile.families
        aliases = sum(bool(i.alias) or 0 in i.shape for i in inputs) > any(0 in i.shape for i in inputs)
        plain = all(i.alias in ("", "x0", "x0.detach()") for i in inputs) and not any(i.grad for i in inputs)
        if aliases and not (len(inputs) == 2 and plain):
            # Thunder mixes up the arguments. It takes all empty ones for aliases, having no address.
            families = tuple(f for f in families if f != "in-place")
        builder = _Builder(rng, profile, tensors, set() if profile.input_writes else set(storages), storages)
        body = builder.block(rng.randint(1, profile.steps), families, profile.regions)
    made = defined(body)
    used = {name for item in body for name in (item.args if isinstance(item, Step) else free(item.body))}
    ends = [name for name in made if name not in used]
    outputs = (
        [rng.choice(ends if ends and rng.random() < 0.7 else made) for _ in range(rng.randint(1, 3))] if made else []
    )
    if not made or rng.random() < 0.12:
        outputs.append(rng.choice(inputs).name)
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
                write = OPS[item.op].kind == "in-place"
                if not (aliases[item.args[0]] & (live | names) if write else live & set(item.targets)):
                    continue
                if write and not live & set(item.targets):
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
