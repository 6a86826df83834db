"""Random programs whose parameters the backward updates: each gradient is eager's, and nothing reads an update.

The optimizer records each gradient and fills the parameter with NaN, which spoils all that reads it afterwards. Of two
programs in three it has its states on the host, and its updates run beside the backward: of one as early as a device
may run them, so that late reads show, of the other as late, so that what overwrites a gradient shows. A GPU runs them
on its own streams.
"""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch import nn

from tests.checking.oracle import SEED, Expectation, Result, describe, differences, tangent
from tests.fuzzing.configs import Options, with_options
from tests.programs.program_inputs import materialise
from tests.programs.programs import Program
from thunder_mem import StepInBackward
from thunder_mem.optimizer import update
from thunder_mem.rewrites import update_scheduling
from thunder_mem.runtime import host_transfers

__all__ = ["Holds", "has_updates", "running_beside", "stepped"]


class _Spoils(torch.optim.Optimizer):
    """Keeps gradient and parameter in the state, and spoils the parameter."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].update(grad=p.grad.clone(), before=p.clone())
                    p.fill_(torch.nan)


class Holds(nn.Module):
    """A program that holds its leaves as parameters; the caller gives the other inputs."""

    def __init__(self, fn: Callable, inputs: dict[str, torch.Tensor], leaves: list[str]) -> None:
        super().__init__()
        self.fn = fn
        for name in leaves:
            self.register_parameter(name, inputs[name])

    @contextmanager
    def calling(self, fn: Callable) -> Iterator[None]:
        """Within, another function takes the program's place."""
        before, self.fn = self.fn, fn
        try:
            yield
        finally:
            self.fn = before


def _module(fn: Callable, inputs: dict[str, torch.Tensor], leaves: list[str]) -> Holds:
    """The module of a program, with a `forward` that names what it passes: Thunder's interpreter is slow at loops."""
    others = [name for name in inputs if name not in leaves]
    given = [f"self.{name}" if name in leaves else name for name in inputs]
    scope: dict[str, Callable] = {}
    exec(f"def forward({', '.join(['self', *others])}):\n    return self.fn({', '.join(given)})", scope)
    return type("Holds", (Holds,), {"forward": scope["forward"]})(fn, inputs, leaves)


def stepped(
    program: Program, options: Options, expected: tuple[Expectation, ...], fn: Callable, steps: int = 3
) -> list[str]:
    """How a program whose leaves are updated in its backward differs from eager, or what it raises, in words.

    Args:
        program: a valid one.
        options: of the compilation.
        expected: what the program gives.
        fn: the program as a function.
        steps: whole training steps, each from the same parameters.
    """
    leaves = _leaves(program)
    if not leaves:
        return []
    asks = expected[0].eager.asks_gradient
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            inputs = _with_parameters(program, leaves)
            module = _module(fn, inputs, leaves)
            way = _WAYS[len(program.body) % len(_WAYS)]
            optimizer = StepInBackward(_Spoils(list(module.parameters())), states="host" if way else "device")
            with nullcontext() if inputs[leaves[0]].is_cuda else running_beside(way):
                compiled = with_options(module, options, optimizer)
                for step in range(steps):
                    result = _step(compiled, optimizer, inputs, leaves, asks)
                    if found := min((differences(e, result) for e in expected), key=len):
                        warned = [f"warned that {w.message}: " for w in said if "misses the write" in str(w.message)]
                        return [f"{''.join(warned[:1])}step {step}, {d}" for d in found]
                    with torch.no_grad():
                        for name, t in materialise(program.inputs).items():
                            if not any(s == 0 for s in t.stride()):
                                inputs[name].copy_(t)
    except Exception as error:
        return [f"raises {describe(error)}"]
    return []


_WAYS = ("", "early", "late")


@contextmanager
def running_beside(way: str) -> Iterator[None]:
    """Within, updates run beside other work on a CPU, too: whole at their start ("early"), or at their end ("late")."""
    late = mock.patch.object(update, "run_beside", _run_late) if way == "late" else nullcontext()
    with mock.patch.object(update_scheduling, "runs_beside", lambda _: bool(way)), late:
        yield


class _Late:
    """Work that runs when it is waited for, with tensors that others have to keep alive."""

    def __init__(self, work: Callable[..., None], tensors: Sequence[torch.Tensor], kept: object) -> None:
        self.work, self.refs, self.kept = work, [weakref.ref(t) for t in tensors], kept

    def wait(self) -> None:
        self.work(*(ref() for ref in self.refs))


def _run_late(work: Callable[..., None], handle: torch.Tensor, *tensors: torch.Tensor, kept: Sequence[object]) -> None:
    setattr(handle, host_transfers._IN_FLIGHT, _Late(work, tensors, kept))


def has_updates(program: Program, eager: Result) -> bool:
    """Whether an input that can be a parameter gets a gradient; one that is returned gets it behind the backward."""
    used = (name for name in _leaves(program) if name not in program.outputs)
    return any(eager.tensors[f"gradient {name}"].any() for name in used)


def _leaves(program: Program) -> list[str]:
    """Inputs that can be parameters: no other input is a view of them, and each element has memory of its own."""
    viewed = [i.alias for i in program.inputs if i.alias]
    return [
        i.name
        for i in program.inputs
        if i.grad and not i.alias and i.layout != "expanded" and not any(re.search(rf"\b{i.name}\b", v) for v in viewed)
    ]


def _with_parameters(program: Program, leaves: list[str]) -> dict[str, torch.Tensor]:
    inputs = materialise(program.inputs)
    for name in leaves:
        inputs[name] = nn.Parameter(inputs[name].detach())
    return inputs


def _step(
    compiled: Callable,
    optimizer: torch.optim.Optimizer,
    inputs: dict[str, torch.Tensor],
    leaves: list[str],
    asks: tuple[bool, ...],
) -> Result:
    torch.default_generator.manual_seed(SEED)
    outputs = compiled(*(t for name, t in inputs.items() if name not in leaves))
    forward_rng = torch.get_rng_state()
    tensors = {f"output {i}": o.detach().clone() for i, o in enumerate(outputs)}
    asked = tuple(o.requires_grad for o in outputs)
    roots = [o for o, ask in zip(outputs, asks, strict=True) if ask and o.requires_grad]
    if roots:
        torch.autograd.backward(roots, [tangent(o) for o in roots])
        if any(inputs[name].grad is not None for name in leaves) or optimizer.state:
            optimizer.step()
        optimizer.zero_grad()
        if inputs[leaves[0]].is_cuda:
            torch.cuda.synchronize()  # states on the host may still arrive
    for name, t in inputs.items():
        if t.is_leaf and t.requires_grad and name not in leaves:
            tensors[f"gradient {name}"], t.grad = torch.zeros_like(t) if t.grad is None else t.grad, None
    for name in leaves:
        state = optimizer.state.pop(inputs[name], {})
        tensors[f"gradient {name}"] = state.get("grad", torch.zeros_like(inputs[name])).to(inputs[name].device)
        inputs[name].data.copy_(state.get("before", inputs[name].data))
    tensors.update({f"input {name}": t.detach().clone() for name, t in inputs.items()})
    return Result(tensors, asked, forward_rng, torch.get_rng_state())
