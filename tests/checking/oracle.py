"""Is a compiled program right? Eager says what it returns, a float64 run says how far rounding may move it.

The tolerance of each tensor is a multiple of the larger of eager's own error against float64 and the
spread of the float64 result when every fresh value is perturbed by a few units in its last place
(stochastic arithmetic, as in CADNA). So ill-conditioned programs and ties at kinks loosen their own
tolerance, and everything else is held to the last digits. Eager's error is the largest of a few runs, whose inputs
differ in their last place: inside attention large scores round too, where nothing is perturbed, and one run may be
lucky.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from unittest.mock import patch

import torch
import torch.nn.functional as F

from tests.programs.program_inputs import materialise
from tests.programs.programs import Program, constructs, function, reference_source, source

__all__ = ["Expectation", "Invalid", "Result", "check", "describe", "differences", "expect", "run", "tangent"]

SEED = 20
PERTURBATIONS = 6
REPEATS = 2
FACTOR = 8.0
ULPS = 16.0

_torch_batch_norm = F.batch_norm


class Invalid(Exception):
    """The program proves nothing: eager refuses it, or its result is not finite or far from float64."""


@dataclass(frozen=True)
class Result:
    """What a caller sees of one run: `tensors` by name ("output 0", "gradient x1", "input x0"), RNG and grad mode."""

    tensors: Mapping[str, torch.Tensor]
    asks_gradient: tuple[bool, ...]
    forward_rng: torch.Tensor
    backward_rng: torch.Tensor
    grad_mode: bool = True


@dataclass(frozen=True)
class Expectation:
    """Eager's result and, by tensor name, the float64 values and the largest allowed distance from them.

    For booleans and integers `loose` marks the elements that rounding may change.
    """

    eager: Result
    reference: Mapping[str, torch.Tensor]
    tolerance: Mapping[str, float]
    loose: Mapping[str, torch.Tensor]


def tangent(t: torch.Tensor) -> torch.Tensor:
    """Multiples of 1/4 in [-3/4, 3/4], none of them symmetric."""
    return (((torch.arange(t.numel()) % 7) - 3) / 4 + 0.25).reshape(t.shape).to(t)


def run(
    program: Program,
    fn: Callable,
    inputs: dict[str, torch.Tensor],
    asks: tuple[bool, ...] | None = None,
    retain: bool = False,
) -> Result:
    """Call `fn`, go backward from the outputs that ask for it (`asks`: those of another run), collect all effects.

    With `retain` it goes backward twice, and `tensors` holds the first gradients as "first gradient x0" too.
    """
    torch.default_generator.manual_seed(SEED)  # that of the CPU alone, which takes no time
    with torch.enable_grad():  # whatever `fn` leaves is not for the next run
        outputs = fn(*inputs.values())
        grad_mode = torch.is_grad_enabled()
    forward_rng = torch.get_rng_state()
    asks_gradient = tuple(o.requires_grad for o in outputs)
    tensors = {f"output {i}": o.detach().clone() for i, o in enumerate(outputs)}
    roots = [o for o, ask in zip(outputs, asks or asks_gradient, strict=True) if ask and o.requires_grad]
    leaves = {i.name: inputs[i.name] for i in program.inputs if i.grad and not i.alias}
    grads: tuple[torch.Tensor | None, ...] = (None,) * len(leaves)
    for more in (True, False) if retain else (False,):
        if not (roots and leaves):
            break
        tangents = [tangent(o) for o in roots]
        grads = torch.autograd.grad(roots, list(leaves.values()), tangents, allow_unused=True, retain_graph=more)
        if more:
            named = zip(leaves, grads, strict=True)
            tensors.update((f"first gradient {name}", g.clone()) for name, g in named if g is not None)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        tensors[f"gradient {name}"] = torch.zeros_like(leaf) if grad is None else grad
    for name, t in inputs.items():
        tensors[f"input {name}"] = t.detach().clone()
    return Result(tensors, asks_gradient, forward_rng, torch.get_rng_state(), grad_mode)


@dataclass
class _Interpreter:
    """Runs the reference source: in the program's own dtypes while recording them, or in float64.

    Attributes:
        index_order: random ops draw as Thunder's decompositions do, a fresh contiguous uniform or normal
            in index order; otherwise as eager does, in memory order, and dropout by `bernoulli_`.
        dtypes: by name, recorded by the first run.
        casts: for each cast in order whether it changed nothing and so is a view; recorded likewise.
        generator: perturbs every fresh float value by some units in its own last place.
    """

    program: Program
    index_order: bool
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    casts: list[bool] = field(default_factory=list)
    double: bool = False
    generator: torch.Generator | None = None
    cast: int = 0

    def run(self, double: bool, generator: torch.Generator | None = None) -> Result:
        self.double, self.generator, self.cast = double, generator, 0
        inputs = materialise(self.program.inputs, double=double)
        if generator is not None:
            for i in self.program.inputs:
                if not i.alias and i.layout != "expanded" and inputs[i.name].is_floating_point():
                    with torch.no_grad():
                        units = 4 if double else 1
                        inputs[i.name].copy_(self.shake(inputs[i.name], getattr(torch, i.dtype), units))
        fn = function(
            reference_source(self.program), _r=self.fresh, _draw=self.draw, _dropout=self.dropout, _to=self.to
        )
        return run(self.program, fn, inputs)

    def shake(self, t: torch.Tensor, dtype: torch.dtype, units: int = 4) -> torch.Tensor:
        if self.generator is None or not t.is_floating_point():
            return t
        noise = torch.rand(t.shape, generator=self.generator, dtype=torch.float64) * 2 - 1
        return t + units * torch.finfo(dtype).eps * noise.to(t.device) * (t.abs() + 0.01)

    def fresh(self, value, names):
        values = [value] if isinstance(value, torch.Tensor) else list(value)
        if not self.double:
            self.dtypes.update((n, v.dtype) for n, v in zip(names, values, strict=True) if v.is_floating_point())
            return value
        shaken = [self.shake(v, self.dtypes[n]) if n in self.dtypes else v for n, v in zip(names, values, strict=True)]
        return shaken[0] if isinstance(value, torch.Tensor) else shaken

    def to(self, t, name):
        dtype = getattr(torch, name)
        if not self.double:
            self.casts.append(t.dtype == dtype)
            return t.to(dtype)
        self.cast += 1
        return t if self.casts[self.cast - 1] else self.shake(t.to(torch.float64, copy=True), dtype)

    def own(self, t: torch.Tensor, name: str) -> torch.Tensor:
        """`t` in the program's own dtype, with its strides."""
        if not self.double:
            self.dtypes[f"{name} drawn"] = t.dtype
        return t.detach().to(self.dtypes[f"{name} drawn"])

    def draw(self, kind, t, name):
        own = self.own(t, name)
        sample = {
            "rand": torch.rand_like,
            "randn": torch.randn_like,
        }[kind](own, memory_format=torch.contiguous_format if self.index_order else torch.preserve_format)
        return sample.double() if self.double else sample

    def dropout(self, t, p, name):
        own = self.own(t, name)
        if self.index_order:
            mask = torch.rand(own.shape, dtype=own.dtype) < 1 - p
        else:
            mask = torch.nn.functional.dropout(torch.ones_like(own), p) != 0
        return t * mask * (1 / (1 - p))


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def _batch_norm(x: torch.Tensor, mean: torch.Tensor | None, var: torch.Tensor | None, *args, **kwargs) -> torch.Tensor:
    """`F.batch_norm`, whose writes autograd sees.

    PyTorch's own does not say that it changed the running statistics, so a backward that saved them for
    another operation reads the new ones and is wrong without a word; with this it raises.
    """
    out = _torch_batch_norm(x, mean, var, *args, **kwargs)
    if kwargs.get("training", False):
        torch.autograd.graph.increment_version([t for t in (mean, var) if t is not None])
    return out


def expect(program: Program) -> tuple[Expectation, ...]:
    """What a correct compilation of `program` must give: one of these; several only if it draws random values.

    Raises:
        Invalid: eager refuses the program, or gives what proves nothing.
    """
    random = any(c == "random" for c in constructs(program))
    try:
        with warnings.catch_warnings(), patch.object(F, "batch_norm", _batch_norm):
            warnings.simplefilter("ignore")
            eager = run(program, function(source(program)), materialise(program.inputs))
            return tuple(
                _expectation(program, eager, index_order) for index_order in ((False, True) if random else (False,))
            )
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError) as error:
        raise Invalid(f"eager: {type(error).__name__}: {str(error).splitlines()[0][:100]}") from error


def _expectation(program: Program, eager: Result, index_order: bool) -> Expectation:
    interpreter = _Interpreter(program, index_order)
    recorded = interpreter.run(double=False)
    if index_order:
        eager = recorded
    exact = interpreter.run(double=True)
    shaken = [interpreter.run(True, torch.Generator().manual_seed(k + 1)) for k in range(PERTURBATIONS)]
    repeated = [interpreter.run(False, torch.Generator().manual_seed(k + 1)) for k in range(REPEATS)]
    if any(r.asks_gradient != eager.asks_gradient for r in (exact, *shaken)):
        raise Invalid("the float64 run has other outputs with a gradient")
    tolerance: dict[str, float] = {}
    loose: dict[str, torch.Tensor] = {}
    for name, value in eager.tensors.items():
        ref = exact.tensors[name]
        others = [r.tensors[name] for r in shaken]
        if not value.is_floating_point():
            loose[name] = torch.zeros_like(value, dtype=torch.bool)
            for other in (value, *others):
                loose[name] |= other != ref
            continue
        if not (value.isfinite().all() and ref.isfinite().all()):
            raise Invalid("not finite")
        scale = ref.abs().max().item() if ref.numel() else 0.0
        spread = max(_distance(o, ref) for o in others)
        error = _distance(value, ref)
        errors = [d for r in repeated if isfinite(d := _distance(r.tensors[name], ref))]
        if error > 0.02 * scale + 100 * spread + 1e-6:
            raise Invalid("eager is far from float64")
        # The last term is for values that cancel to nearly nothing, out of others of about 1.
        finest = torch.finfo(torch.float64 if value.dtype == torch.float64 else torch.float32).eps
        tolerance[name] = (
            FACTOR * max(error, spread, *errors) + ULPS * torch.finfo(value.dtype).eps * scale + 4 * ULPS * finest
        )
    return Expectation(eager, exact.tensors, tolerance, loose)


def differences(expected: Expectation, got: Result) -> list[str]:
    """Every way in which a result differs from what is expected, in words; empty when it is right.

    Which outputs ask for a gradient is not compared: all outputs of Thunder's one autograd function do,
    and one whose gradient is zero need not. A gradient that is lost shows in the gradients.
    """
    found: list[str] = []
    compared = [(name, name) for name in expected.eager.tensors]
    compared += [(name, name.removeprefix("first ")) for name in got.tensors if name.startswith("first ")]
    for name, wanted in compared:
        eager, value = expected.eager.tensors[wanted], got.tensors.get(name)
        if value is None:
            found.append(f"{name}: missing")
        elif (value.shape, value.dtype) != (eager.shape, eager.dtype):
            found.append(f"{name}: {value.dtype}{list(value.shape)}, not {eager.dtype}{list(eager.shape)}")
        elif not eager.is_floating_point():
            wrong = (value != eager) & ~expected.loose[wanted]
            if wrong.any():
                found.append(f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ")
        else:
            distance = _distance(value, expected.reference[wanted])
            if not distance <= expected.tolerance[wanted]:
                found.append(f"{name}: off by {distance:.3g}, allowed {expected.tolerance[wanted]:.3g}")
    if got.grad_mode != expected.eager.grad_mode:
        found.append(f"gradients are {'enabled' if got.grad_mode else 'disabled'} after the forward")
    if not torch.equal(got.forward_rng, expected.eager.forward_rng):
        found.append("random state after the forward")
    elif not torch.equal(got.backward_rng, expected.eager.backward_rng):
        found.append("random state after the backward")
    return found


def check(
    program: Program,
    compile_with: Callable[[Callable], Callable],
    expected: tuple[Expectation, ...] | None = None,
    fn: Callable | None = None,
    retain: bool = False,
) -> list[str]:
    """Compile the program and compare: its differences from eager, or the exception it raises, in words.

    What was compiled runs twice, on equal arguments.

    Args:
        program: what to run.
        compile_with: from a function to a compiled one.
        expected: what `expect` gives.
        fn: the program as a function, where it is at hand.
        retain: go backward twice in the first run.
    """
    expected = expected or expect(program)
    asks = expected[0].eager.asks_gradient
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            compiled = compile_with(fn or function(source(program)))
            first = run(program, compiled, materialise(program.inputs), asks, retain)
            found = min((differences(e, first) for e in expected), key=len)
            if found:
                warned = [str(w.message) for w in said if "misses the write" in str(w.message)]
                return [f"warned that {message}: {d}" for message in warned[:1] for d in found] or found
            second = run(program, compiled, materialise(program.inputs), asks)
    except Exception as error:
        return [f"raises {describe(error)}"]
    return [f"second run, {d}" for d in min((differences(e, second) for e in expected), key=len)]


def describe(error: Exception) -> str:
    """An exception in one line: type, message, and the innermost place outside torch where it came from."""
    error = getattr(error, "inner_exception", error)  # of Dynamo, whose backend raised
    lines = str(error).splitlines() or [""]
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename.replace("thunder/torch", "")
    ]
    place = f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].name}" if frames else "?"
    return f"{type(error).__name__} in {place}: {lines[0][:200]}"
