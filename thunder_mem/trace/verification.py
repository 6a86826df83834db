"""Verify that the planned trace is still the same program, independently of the planner.

The method is translation validation (Pnueli, Siegel and Singerman 1998): both traces run on symbols, see
`value_numbers.py`. Equal programs return equal values, leave the caller's memory in equal states, and draw, communicate
and print in the same order.

`verify_rewrite` compares the joint trace before planning with the emitted trace. `verify_final` checks the names of a
trace that is about to run: each is defined once, before its use, and never used after its `del`. The backward takes
exactly the values that the forward saves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import CollectionProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.trace import TraceCtx

from thunder_mem.trace.reading import BACKWARD, joint_results
from thunder_mem.trace.value_numbers import Numbers, VerificationError, outcome_of

__all__ = ["VerificationError", "is_verified", "verify_final", "verify_rewrite"]

ALWAYS_UP_TO_OPS = 2_000
"""Traces of at most so many bound symbols are always verified, of longer ones that share which has this size."""


def is_verified(trace: TraceCtx, fingerprint: str, asked: bool | None) -> bool:
    """Whether to verify this plan: as the user set it; else if it is small, or in the sample of long ones.

    Args:
        trace: the planned trace.
        fingerprint: of the plan, in hexadecimal; decides about long traces, so that all ranks decide alike
            for equal programs.
        asked: `MemEfficient(verify=...)`.
    """
    if asked is not None:
        return asked
    count = len(trace.bound_symbols)
    return count <= ALWAYS_UP_TO_OPS or int(fingerprint[:8] or "0", 16) / 16**8 < ALWAYS_UP_TO_OPS / count


# ---- two traces ----


def verify_rewrite(before: TraceCtx, after: TraceCtx, trusted: Collection[str] = ()) -> None:
    """Check that `after` is `before` in another order, in regions, and with parts recomputed.

    Args:
        before: a plain or joint trace, not fused.
        after: the trace emitted for it.
        trusted: names of values that are equal by assumption, although `after` may compute them differently.

    Raises:
        VerificationError: they are different programs, or Thunder could not split `after`.
    """
    numbers = Numbers()
    old = outcome_of(before, numbers)
    new = outcome_of(after, numbers, old, frozenset(trusted))
    for name in dict.fromkeys((*old.channels, *new.channels)):
        _same_events(name, old.channels.get(name, ()), new.channels.get(name, ()), numbers)
    for name in dict.fromkeys((*old.arguments, *new.arguments)):
        if old.arguments.get(name, 0) != new.arguments.get(name, 0):
            raise VerificationError(f"{name} is overwritten by other values, or in another order")
    if len(old.returned) != len(new.returned):
        raise VerificationError(f"{len(new.returned)} values are returned for {len(old.returned)}")
    for i, (one, other) in enumerate(zip(old.returned, new.returned, strict=True)):
        if one != other:
            named = f", {numbers.name_of[one[1]]}" if isinstance(one, tuple) and one[0] == "value" else ""
            raise VerificationError(f"returned value {i}{named} is computed from other values")
    _verify_halves(after)


def _same_events(channel: str, old: Sequence[int], new: Sequence[int], numbers: Numbers) -> None:
    for i, (one, other) in enumerate(zip(old, new, strict=False)):
        if one != other:
            was, now = numbers.name_of[one], numbers.name_of[other]
            raise VerificationError(f"{channel}: step {i} is {now} and not {was}, or of other values")
    if len(old) != len(new):
        raise VerificationError(f"{channel}: {len(new)} steps and not {len(old)}")


def _verify_halves(trace: TraceCtx) -> None:
    """Check that the forward's results need no gradient, and that all other ops are marked as backward."""
    result = trace.bound_symbols[-1]
    returned = joint_results(result)
    if returned is None:
        return
    needed = {p.name for p in tree_iter((returned["fw_flat_out"], returned["flat_args"])) if isinstance(p, Proxy)}
    for bsym in reversed(trace.bound_symbols[:-1]):
        made = {p.name for p in bsym.flat_proxy_outs}
        if bsym.sym == prims.get_grad:
            if early := sorted(made & needed):
                raise VerificationError(f"the forward needs {early[0]}, the gradient of one of its results")
        elif made & needed or any(bsym.sym.name == "copy_" and p.name in needed for p in bsym.flat_proxy_args[1:2]):
            needed.update(p.name for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs))
            if BACKWARD in bsym.tags and bsym.sym.is_fusion:
                raise VerificationError(f"the forward needs {sorted(made & needed)[0]} of {bsym.sym.name}, a backward")
        elif made and bsym.sym.is_fusion and BACKWARD not in bsym.tags:
            raise VerificationError(f"{bsym.sym.name} runs in the backward and does not say so")


# ---- one trace, as it will run ----


def verify_final(trace: TraceCtx, saved: Sequence[str] | None = None) -> tuple[str, ...]:
    """Check the names of a trace with its `del`s; return those that it saves for the backward.

    Args:
        trace: a final forward, or a final backward.
        saved: for a backward, the values that its forward saves.

    Raises:
        VerificationError: a tensor is used before it is defined or after its `del`, or is defined twice, or
            the backward takes other tensors than the saved ones.
    """
    alive: set[str] = set()
    gone: set[str] = set()
    taken: list[tuple[str, ...]] = []
    for bsym in trace.bound_symbols:
        args = {p.name for p in bsym.flat_proxy_args if isinstance(p, TensorProxy | CollectionProxy)}
        if missing := sorted(args - alive):
            why = "after its del" if missing[0] in gone else "before it is defined"
            raise VerificationError(f"{bsym.sym.name} uses {missing[0]} {why}")
        if bsym.sym.id is PrimIDs.DEL:
            alive -= args
            gone |= args
            continue
        if bsym.sym.id is PrimIDs.UNPACK_SEQUENCE:
            taken.append(tuple(p.name for p in bsym.flat_proxy_outs))
        made = {p.name for p in bsym.flat_proxy_outs}
        if bsym.sym.id is not PrimIDs.RETURN and (again := sorted(made & gone)):
            raise VerificationError(f"{bsym.sym.name} defines {again[0]} again")
        alive |= made
    # One that takes nothing reads nothing: without a way from the outputs to what asks for a gradient it is empty.
    if saved and taken and tuple(saved) not in taken:
        raise VerificationError(f"the forward saves {', '.join(saved)}, and the backward takes other values")
    return _saved(trace)


def _saved(trace: TraceCtx) -> tuple[str, ...]:
    returned = trace.bound_symbols[-1].args
    if len(returned) == 2 and isinstance(returned[0], dict) and isinstance(returned[1], tuple):
        tensors, _others = returned[1]
        return tuple(p.name for p in tensors)
    return ()
